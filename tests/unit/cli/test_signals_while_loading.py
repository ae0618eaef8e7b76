"""SIGTERM to a server that is the first process of its container, before it handles signals itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Stands for a long load: the command's own handlers are not there yet.
LOADING = """
import signal, sys
import inflight.cli.main as cli
import inflight.router.main

def load(argv):
    print("loading", flush=True)
    signal.pause()

inflight.router.main.main = load
sys.exit(cli.main(["router"]))
"""
UNSHARE = ("unshare", "--fork", "--pid")


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run((*UNSHARE, "true"), capture_output=True).returncode != 0,
    reason="this machine does not let the test make a PID namespace",
)
def test_first_process_of_a_container_ends_on_sigterm_while_it_loads() -> None:
    command = (*UNSHARE, sys.executable, "-c", LOADING)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        try:
            os.kill(int(child), signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            if process.poll() is None:
                os.kill(int(child), signal.SIGKILL)
