"""The border between the loop and a device: a step is launched, and its tokens are read when the loop wants them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as ReadOnlyList
from typing import Protocol

from executor.scheduler.sequence import NO_LOGPROBS, StepPlan, TokenLogprobs

# What a device returns for a row whose logits hold no number. Where it is carried into the next step it counts as 0.
NO_TOKEN = -1


def token_ids_of(sampled: ReadOnlyList[int]) -> tuple[int | None, ...]:
    """Sampled ids as the host has them, None for `NO_TOKEN`."""
    if min(sampled, default=0) >= 0:
        return tuple(sampled)
    return tuple(None if token_id == NO_TOKEN else token_id for token_id in sampled)


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

    def result(self) -> tuple[int | None, ...]:
        """Waits, and returns the sampled token ids of the rows that sample, in the order of the plan's rows; None for a
        row whose logits hold no number.

        Raises when the step failed, whatever the reason.
        """
        ...

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Log probabilities of the rows that report them, by number of the row that samples; behind `result`."""
        ...


class FailedStep:
    """A step that could not be launched."""

    def __init__(self, error: Exception) -> None:
        self.began_s = self.ended_s = time.perf_counter()
        self._error = error

    def result(self) -> tuple[int | None, ...]:
        """Raises."""
        raise self._error

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """None: nothing was computed."""
        return NO_LOGPROBS


class StepRunner(Protocol):
    """Runs steps on a device, one after the other, in the order of their launch."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Returns at once. The plan is packed by then; sequences in it may be planned on. May raise, which counts as a
        failure of the step."""
        ...

    def close(self) -> None:
        """Ends when the steps launched are through."""
        ...
