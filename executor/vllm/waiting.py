"""vLLM's engine process on a CPU: waits for its workers without using a core.

vLLM imports this module in its engine process. That process watches shared memory without a pause while its workers
compute a step, and so takes processor time from their threads. On a CPU it now sleeps until they notify it, as vLLM
itself does after a second of silence.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

# Bounds of the time after which a reader looks without a notification. One may be lost, as vLLM's own limit of 5 s for
# idle readers allows for.
SHORTEST_WAIT_MS, LONGEST_WAIT_MS = 2, 16


class WaitingExecutor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's executor with worker processes."""

    def _init_executor(self) -> None:
        super()._init_executor()
        for queue in self.response_mqs:
            # None where the workers are on another machine.
            if (condition := getattr(queue, "_spin_condition", None)) is not None:
                _sleep(condition)


def _sleep(condition: Any) -> None:
    """Makes a reader sleep until it is notified, or for a quarter of the time since its last message within the bounds:
    so it wakes up seldom in a long step, and a lost notification costs a small part of it."""
    wait = condition.wait
    condition.busy_loop_s = 0.0

    def sleep(timeout_ms: int | None = None) -> None:
        since_ms = int(1000 * (time.monotonic() - condition.last_read))
        longest_ms = min(LONGEST_WAIT_MS, max(SHORTEST_WAIT_MS, since_ms // 4))
        wait(timeout_ms=min(timeout_ms or longest_ms, longest_ms))

    condition.wait = sleep
