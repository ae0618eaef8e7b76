"""Processes of vLLM end with a killed executor, whichever way vLLM starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.common.guard import HAS_KERNEL_GUARD
from tests.contract.test_imports import REPOSITORY

# A parent that starts a child, as vLLM does, which says its pid and waits.
PROGRAM = """
import multiprocessing, os, sys, time
from inflight.executor.vllm.children import ending_with_this_process


def wait(said):
    said.send(os.getpid())
    time.sleep(600)


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    heard, said = context.Pipe(duplex=False)
    with ending_with_this_process():
        child = context.Process(target=wait, args=(said,))
        child.start()
        pid = heard.recv()
    print(pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not HAS_KERNEL_GUARD, reason="only Linux ends children with their parent")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_ends_when_its_parent_is_killed(tmp_path: Path, method: str) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, str(program), method], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        try:
            # The child has this pipe too, which ends with the last of them.
            assert parent.communicate(timeout=60)[0] == b""
        except subprocess.TimeoutExpired:
            os.kill(child, signal.SIGKILL)
            raise
