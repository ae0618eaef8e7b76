"""The `inflight` command with executors whose steps a test permits.

    python -m tests.support.stack.braked PIPE 20 executor …

A test that kills a process after a stream's first tokens races with the tokens that follow: on a busy machine the
stream may be over before the test has seen its beginning. While a test holds the brake, an engine waits for its
permission before each step of a sequence that has so many output tokens. The process stays alive meanwhile, and its
output so far reaches the clients.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import select
import struct
import sys
import termios
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inflight.cli.main import main as run_inflight

if TYPE_CHECKING:  # a router, too, is started this way, and needs none of this
    from inflight.executor.engine.runner import PendingStep, StepRunner
    from inflight.executor.loader import Loaded
    from inflight.executor.scheduler.sequence import StepPlan
    from inflight.executor.settings import ExecutorSettings


class ProcessBrake:
    """The test's end of a named pipe: each byte permits one step of one executor, and without a writer all go on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pipe: int | None = None
        os.mkfifo(path)

    def program(self, num_tokens: int) -> tuple[str, ...]:
        """Returns the program of a stack whose executors stop at sequences with so many output tokens."""
        return (sys.executable, "-P", "-m", "tests.support.stack.braked", str(self.path), str(num_tokens))

    def hold(self) -> None:
        assert self._pipe is None
        self._pipe = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)  # to write alone it would need a reader

    def permit_next(self) -> None:
        """Permits a step, unless a permission is left. Permissions that a slow executor has not taken would let streams
        go on to their end."""
        if not self._has_permission():
            assert self._pipe is not None
            os.write(self._pipe, b"\0")

    async def until_waited_for(self) -> None:
        """Permits a step, and returns when an executor has taken the permission. It waits for the next one then."""
        self.permit_next()
        while self._has_permission():
            await asyncio.sleep(0.01)

    def _has_permission(self) -> bool:
        assert self._pipe is not None
        (num_left,) = struct.unpack("i", fcntl.ioctl(self._pipe, termios.FIONREAD, bytes(4)))
        return bool(num_left)

    def release(self) -> None:
        """Lets all go on; does nothing if the brake is not held."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


class BrakedRunner:
    """A runner that waits for the test's permission."""

    def __init__(self, runner: StepRunner, path: str, num_tokens: int) -> None:
        self._runner = runner
        self._pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._num_tokens = num_tokens

    def launch(self, plan: StepPlan) -> PendingStep:
        if any(sequence.num_output_tokens >= self._num_tokens for sequence in plan.sequences):
            self._wait()
        return self._runner.launch(plan)

    def close(self) -> None:
        self._runner.close()
        os.close(self._pipe)

    def _wait(self) -> None:
        """Returns with a permission, or if no test holds the brake: without a writer a read ends at once."""
        while True:
            try:
                os.read(self._pipe, 1)
            except BlockingIOError:
                select.select([self._pipe], [], [])
            else:
                return


def main(argv: Sequence[str]) -> int:
    """Runs the command line behind the brake and returns the exit code."""
    path, num_tokens, role, *rest = argv
    if role == "executor":
        brake(path, int(num_tokens))
    return run_inflight([role, *rest])


def brake(path: str, num_tokens: int) -> None:
    """Puts the brake into each runner that this process starts."""
    import inflight.executor.main

    start_runner = inflight.executor.main.start_runner

    def start_braked(settings: ExecutorSettings, loaded: Loaded) -> StepRunner:
        return BrakedRunner(start_runner(settings, loaded), path, num_tokens)

    inflight.executor.main.start_runner = start_braked


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
