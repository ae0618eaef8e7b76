"""The border between the loop and a device: a step is launched, and its tokens are read when the loop wants them."""

from __future__ import annotations

from typing import Protocol

from executor.sequence import StepPlan


class PendingStep(Protocol):
    """A launched step. When `result` has returned or raised, the device worked on it in `[began_s, ended_s)`."""

    @property
    def began_s(self) -> float:
        """By the clock of the engine, at most too early: a step that had to wait began when the one before ended."""
        ...

    @property
    def ended_s(self) -> float:
        """By the clock of the engine."""
        ...

    def result(self) -> tuple[int, ...]:
        """Waits, and returns the sampled token ids of the rows that sample, in the order of the plan's rows.

        Raises `RuntimeError` when the step failed on the device.
        """
        ...


class StepRunner(Protocol):
    """Runs steps on a device, one after the other, in the order of their launch."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Returns at once. The plan is packed by then; sequences in it may be planned on."""
        ...

    def close(self) -> None:
        """Ends when the steps launched are through."""
        ...
