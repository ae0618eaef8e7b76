"""An engine over a device that computes nothing and takes as long as a formula says, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.engine.prefill_budget import PrefillBudget
from inflight.executor.engine.runner import PendingStep
from inflight.executor.engine.step_time import StepLoad
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler, SchedulerLimits
from inflight.executor.scheduler.sequence import NO_LOGPROBS, Sequence, StepPlan, TokenLogprobs

BLOCK_SIZE = 16


def step_seconds(load: StepLoad) -> float:
    """Like a small model on two cores: 10 ms for its weights, then so much for each token, key and value."""
    return 0.010 + 150e-6 * load.num_tokens + 0.2e-6 * load.decode_context + 0.1e-6 * load.prefill_work


@dataclass(frozen=True, slots=True)
class ModelledStep:
    """A step with its place in virtual time."""

    allows_next = True
    device: ModelledDevice
    began_s: float
    ended_s: float
    num_sampled: int
    copied_s: float = 0.0

    def result(self) -> tuple[int, ...]:
        """Waits for its end."""
        self.device.now_s = max(self.device.now_s, self.ended_s)
        return (1,) * self.num_sampled

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Returns None: no test asks for them here."""
        return NO_LOGPROBS


@dataclass(slots=True)
class ModelledDevice:
    """Steps vary by up to `jitter` of their time. A block that is copied takes `copy_s`. A step takes `slowness` times
    what the formula `seconds` says, and begins when the one before has ended. The host takes no time: it is `now_s`
    when the newest step that was read has ended."""

    jitter: float
    seconds: Callable[[StepLoad], float] = step_seconds
    now_s: float = 0.0
    free_s: float = 0.0
    copy_s: float = 80e-6
    slowness: float = 1.0
    durations_s: list[float] = field(default_factory=list)
    random: random.Random = field(default_factory=lambda: random.Random(7))

    def launch(self, plan: StepPlan) -> PendingStep:
        began_s = max(self.now_s, self.free_s)
        copied_s = self.copy_s * (len(plan.swaps_out) + len(plan.swaps_in))
        computed_s = self.slowness * self.seconds(StepLoad.of(plan)) * (1 + self.jitter * self.random.uniform(-1, 1))
        self.free_s = began_s + copied_s + computed_s
        self.durations_s.append(copied_s + computed_s)
        return ModelledStep(self, began_s, self.free_s, sum(plan.samples), copied_s)

    def close(self) -> None:
        """See `StepRunner`."""


class Ride:
    """An engine on a modelled device, driven turn by turn, when each sequence's tokens came, and which have ended."""

    def __init__(
        self,
        limits: SchedulerLimits,
        max_inter_token_ms: float = 0.0,
        jitter: float = 0.03,
        seconds: Callable[[StepLoad], float] = step_seconds,
    ) -> None:
        self.device = ModelledDevice(jitter, seconds)
        self.token_times: dict[Sequence, list[float]] = {}
        self.ended: set[Sequence] = set()
        num_blocks = 4 * limits.max_num_sequences * limits.context_length // BLOCK_SIZE
        self.engine = Engine(
            Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE)),
            self.device,
            self._publish,
            lambda error: None,
            prefill_budget=PrefillBudget(max_inter_token_ms),
            clock=lambda: self.device.now_s,
        )

    def submit(self, sequence: Sequence) -> None:
        """Arrives now."""
        self.token_times[sequence] = []
        self.engine.submit(sequence)

    def run_until(self, now_s: float) -> None:
        """Turns of the loop until this virtual time."""
        while self.device.now_s < now_s:
            self.engine.step()

    def _publish(self, output: EngineOutput) -> None:
        for sequence, _, _ in output.tokens:
            self.token_times[sequence].append(self.device.now_s)
        self.ended.update(event.sequence for event in output.finished)
