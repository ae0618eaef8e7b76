"""`inflight` with executors that die of a certain prompt: `python -m tests.chaos.poisoned PIPE 20 12 executor …`.

A sequence whose prompt begins with `POISON` kills the process that boards it, as a bug of a kernel would. Otherwise as
`tests.support.stack.braked` and `inflight.bench.fleet.paced`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from inflight.bench.fleet.paced import main as run_paced
from tests.support.stack.braked import brake

if TYPE_CHECKING:
    from inflight.executor.engine.runner import PendingStep, StepRunner
    from inflight.executor.loader import Loaded
    from inflight.executor.scheduler.sequence import StepPlan
    from inflight.executor.settings import ExecutorSettings

POISON = (13, 66, 6)


class PoisonedRunner:
    """A runner that does not survive the poison."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> PendingStep:
        if any(tuple(sequence.token_ids[: len(POISON)]) == POISON for sequence in plan.boarded):
            os.kill(os.getpid(), signal.SIGKILL)
        return self._runner.launch(plan)

    def close(self) -> None:
        self._runner.close()


def main(argv: Sequence[str]) -> int:
    """Runs the command line and returns the exit code."""
    pipe, num_tokens, *paced = argv
    if paced[1] == "executor":
        _poison()
        brake(pipe, int(num_tokens))
    return run_paced(paced)


def _poison() -> None:
    import inflight.executor.main

    start_runner = inflight.executor.main.start_runner

    def start_poisoned(settings: ExecutorSettings, loaded: Loaded) -> StepRunner:
        return PoisonedRunner(start_runner(settings, loaded))

    inflight.executor.main.start_runner = start_poisoned


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
