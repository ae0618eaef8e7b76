"""vLLM's engine process on a CPU: waits for its workers without using a core.

vLLM imports this module in its engine process. That process watches shared memory without a pause while its workers
compute a step, and so takes processor time from their threads. On a CPU it now sleeps until they notify it, as vLLM
itself does after a second of silence.
"""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class WaitingExecutor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM's executor with worker processes."""

    def _init_executor(self) -> None:
        super()._init_executor()
        for queue in self.response_mqs:
            # None where the workers are on another machine.
            if (waiting := getattr(queue, "_spin_condition", None)) is not None:
                waiting.busy_loop_s = 0.0
