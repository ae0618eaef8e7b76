"""The simulation's command."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from inflight.bench.simulation.__main__ import main


def test_command_says_in_one_line_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--hours", "0.002", "--executors", "2", "--routers", "2", "--rate", "3", "--faults", "none"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("simulation: held seed=0 executors=2 routers=2 simulated_s=7.2")


def test_command_does_the_same_in_another_process(capsys: pytest.CaptureFixture[str]) -> None:
    """A set of texts has another order there."""
    options = ["--hours", "0.001", "--executors", "3", "--routers", "3", "--faults-per-minute", "20", "--seed", "3"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-m", "inflight.bench.simulation", *options]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert main(options) == 0
    here, there = (re.sub(r"took_s=\S+ ", "", text.splitlines()[-1]) for text in (capsys.readouterr().out, other))
    assert here == there
