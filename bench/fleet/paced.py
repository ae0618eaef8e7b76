"""The `inflight` command with executors whose steps take a set time: `python -m inflight.bench.fleet.paced 12 executor
--listen …`.

The tiny model computes a step in half a millisecond; its streams would be over before anything can go wrong with them.
The first argument is how many milliseconds the engine waits before each step, the rest is `inflight`'s command line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inflight.cli.main import main as run_inflight

if TYPE_CHECKING:  # a router, too, is started this way, and needs none of this
    from inflight.executor.engine.runner import PendingStep, StepRunner
    from inflight.executor.loader import Loaded
    from inflight.executor.scheduler.sequence import StepPlan
    from inflight.executor.settings import ExecutorSettings


class PacedRunner:
    """A runner that takes its time before each step."""

    def __init__(self, runner: StepRunner, pause_s: float) -> None:
        self._runner = runner
        self._pause_s = pause_s

    def launch(self, plan: StepPlan) -> PendingStep:
        time.sleep(self._pause_s)
        return self._runner.launch(plan)

    def close(self) -> None:
        self._runner.close()


def main(argv: Sequence[str]) -> int:
    """Runs the command line behind the pause and returns the exit code."""
    pause_ms, role, *rest = argv
    if role == "executor":
        _pace(float(pause_ms) / 1000)
    return run_inflight([role, *rest])


def _pace(pause_s: float) -> None:
    import inflight.executor.main

    start_runner = inflight.executor.main.start_runner

    def start_paced(settings: ExecutorSettings, loaded: Loaded) -> StepRunner:
        return PacedRunner(start_runner(settings, loaded), pause_s)

    inflight.executor.main.start_runner = start_paced


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
