"""Garbage of failed tests: it fails no other test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import garbage_of_failures

REPOSITORY = Path(garbage_of_failures.__file__).parents[1]
TESTS = """
import gc
import socket
import subprocess
import sys

def garbage():
    found = [socket.socket(), subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)]
    found.append(found)
    return found

def test_that_fails():
    left = garbage()
    assert not left

def test_that_follows():
    gc.collect()

def test_that_passes():
    garbage()

def test_that_is_told_of_the_garbage_of_one_that_passed():
    gc.collect()
"""


def test_garbage_of_a_failed_test_fails_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_four.py").write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    options = ["-q", "-rA", "--tb=no", "-W", "error", "-p", "no:cacheprovider", "-p", garbage_of_failures.__name__]
    command = [sys.executable, "-m", "pytest", *options, "test_four.py"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    outcomes = [line.split(" - ")[0] for line in ended.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))]
    assert outcomes == [
        "PASSED test_four.py::test_that_follows",
        "PASSED test_four.py::test_that_passes",
        "FAILED test_four.py::test_that_fails",
        "FAILED test_four.py::test_that_is_told_of_the_garbage_of_one_that_passed",
    ], ended.stdout
