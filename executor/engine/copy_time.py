"""Time that copying a block between device and host memory takes, learned from the steps that copied. Pure: times in
seconds."""

from __future__ import annotations

from inflight.executor.engine.step_time import LARGEST_SURPRISE
from inflight.executor.scheduler.sequence import StepPlan

# About the last 50 steps with copies count.
FORGETTING = 0.98


class CopyTime:
    """Seconds per block, by the mean over the blocks. Both directions count alike, as they differ little."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._num_blocks = 0.0

    @property
    def block_s(self) -> float:
        """The seconds that copying a block takes; 0 before the first copy."""
        return self._seconds / self._num_blocks if self._num_blocks else 0.0

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Adds the copies of a step. A single long one counts little: it reflects the machine, not the copies."""
        num_blocks = len(plan.swaps_out) + len(plan.swaps_in)
        if not num_blocks or seconds <= 0:
            return
        if self._num_blocks:
            seconds = min(seconds, LARGEST_SURPRISE * self.block_s * num_blocks)
        self._seconds = FORGETTING * self._seconds + seconds
        self._num_blocks = FORGETTING * self._num_blocks + num_blocks
