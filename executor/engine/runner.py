"""Interface between the loop and a device. A step is launched, and its tokens are read later."""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.sequence import NO_LOGPROBS, StepPlan, TokenLogprobs

# Returned by a device for a row without a usable logit. If it, or `ALL_EXCLUDED`, is carried into the next step, it
# counts as 0.
NO_TOKEN = -1


class DeviceLostError(Exception):
    """Every further step would fail; the process has to be replaced."""


def token_ids_of(sampled: ReadOnlyList[int]) -> tuple[int | None, ...]:
    """Converts sampled ids for the host: `NO_TOKEN` becomes None."""
    if min(sampled, default=0) >= 0:
        return tuple(sampled)
    return tuple(None if token_id == NO_TOKEN else token_id for token_id in sampled)


class PendingStep(Protocol):
    """A launched step. Once `result` has returned or raised, the device worked on it in `[began_s, ended_s)`."""

    @property
    def began_s(self) -> float:
        """Start by the engine's clock. It may be too early: a step that had to wait began when the previous one
        ended."""
        ...

    @property
    def ended_s(self) -> float:
        """End by the engine's clock."""
        ...

    @property
    def copied_s(self) -> float:
        """Seconds of that time in which blocks were copied between device and host memory."""
        ...

    @property
    def allows_next(self) -> bool:
        """Whether the next step may be launched before this one was read."""
        ...

    def result(self) -> tuple[int | None, ...]:
        """Waits, and returns the sampled token ids of the rows that sample, in the order of the plan's rows; for a row
        without a token what `StepResult` has in its place.

        Raises when the step failed, whatever the reason.
        """
        ...

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Returns the log probabilities by index among the rows that sample, for rows that report them, and behind them
        those of the positions that score a prompt (`StepResult`). Call it after `result`."""
        ...


@runtime_checkable
class PoolingStep(PendingStep, Protocol):
    """A launched step of a runner whose model pools."""

    def pooled(self) -> tuple[array[float], ...]:
        """Returns the sums of hidden states of the plan's `pooled` rows. Call it after `result`."""
        ...


class FailedStep:
    """A step that could not be launched. `result` raises the error. It yields no tokens for the next step to carry."""

    allows_next = False
    copied_s = 0.0

    def __init__(self, error: Exception) -> None:
        self.began_s = self.ended_s = time.perf_counter()
        self._error = error

    def result(self) -> tuple[int | None, ...]:
        raise self._error

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        return NO_LOGPROBS


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a runner has to make room for, and which of its steps on a GPU have CUDA graphs: all of decodes alone, and
    others up to `max_graph_tokens`."""

    limits: SchedulerLimits
    block_size: int
    uses_graphs: bool
    max_graph_tokens: int


class StepRunner(Protocol):
    """Runs steps on a device in the order of their launch."""

    def launch(self, plan: StepPlan) -> PendingStep:
        """Launches a step without waiting for it. The plan is packed before this returns, so its sequences may be
        planned again. An exception counts as a failure of the step."""
        ...

    def close(self) -> None:
        """Returns when the launched steps have ended."""
        ...
