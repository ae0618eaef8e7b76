"""A device that computes nothing: a step takes as long as a formula says, and yields the tokens that are to come.

With recurrent layers it yields others where the state that a sequence goes on from is not its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inflight.bench.simulation.recurrent_states import ModelledStates
from inflight.bench.timeline.timeline import US_PER_S
from inflight.executor.engine.runner import PendingStep
from inflight.executor.engine.step_time import StepLoad
from inflight.executor.scheduler.sequence import NO_LOGPROBS, Sequence, StepPlan, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: for itself, for each token, key and value of a decode, unit of prefill work, and each block
    that is copied between device and host."""

    step_s: float
    token_s: float
    context_s: float
    prefill_s: float
    block_copy_s: float

    def of(self, plan: StepPlan) -> float:
        """Returns the duration of a plan."""
        load = StepLoad.of(plan)
        return (
            self.step_s
            + self.token_s * load.num_tokens
            + self.context_s * load.decode_context
            + self.prefill_s * load.prefill_work
            + self.copies_of(plan)
        )

    def copies_of(self, plan: StepPlan) -> float:
        """Returns the seconds of a plan's copies."""
        return self.block_copy_s * (len(plan.swaps_out) + len(plan.swaps_in))


# The fit of docs/cpu.md's steps: a 135M model in bfloat16 on two cores.
TWO_CORES = StepCost(0.010, 150e-6, 0.2e-6, 0.1e-6, 80e-6)
# An 8B model in bfloat16 on an H200, from its bandwidth (4 TB/s) and 60 % of its matrix products: 16 GB of weights,
# 128 KiB of KV a token, copied at 50 GB/s.
H200 = StepCost(0.0045, 16e-6, 0.033e-6, 0.3e-9, 42e-6)
# A large model on a small machine: few steps a second, so that an hour of a thousand executors can be simulated.
SLOW = StepCost(0.200, 2e-3, 2e-6, 1e-6, 1e-3)


@dataclass(frozen=True, slots=True)
class _Step:
    """A step under way. Implements `PendingStep`."""

    allows_next = True
    began_s: float
    ended_s: float
    copied_s: float
    sampled_ids: tuple[int, ...]
    device: ModelledDevice

    def result(self) -> tuple[int, ...]:
        self.device.read_us = round(self.ended_s * US_PER_S)
        return self.sampled_ids

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        """Returns None: no simulated request asks for them."""
        return NO_LOGPROBS


class ModelledDevice:
    """Runs steps one after the other. `next_token(request_id, offset)` says what a row yields."""

    def __init__(
        self, cost: StepCost, next_token: Callable[[str, int], int], *, has_recurrent_layers: bool = False
    ) -> None:
        self._cost = cost
        self.next_token = next_token
        self.states = ModelledStates(self._token_of) if has_recurrent_layers else None
        self.free_s = 0.0
        """When the steps that were launched have ended."""
        # The turn of the loop that is being made: nothing begins before it.
        self.now_s = 0.0
        # When the step ended that was read last.
        self.read_us = 0
        self.num_launched = 0

    def launch(self, plan: StepPlan) -> PendingStep:
        self.num_launched += 1
        began_s = max(self.now_s, self.free_s)
        self.free_s = began_s + self._cost.of(plan)
        are_right = [True] * plan.num_rows if self.states is None else self.states.run(plan)
        sampled = tuple(
            self._token_of(sequence, start + length) + (not is_right)
            for sequence, start, length, samples, is_right in zip(
                plan.sequences, plan.starts, plan.lengths, plan.samples, are_right, strict=True
            )
            if samples
        )
        return _Step(began_s, self.free_s, self._cost.copies_of(plan), sampled, self)

    def _token_of(self, sequence: Sequence, position: int) -> int:
        offset = position - sequence.num_prompt_tokens
        return sequence.token_ids[position] if offset < 0 else self.next_token(sequence.request_id, offset)

    def close(self) -> None:
        """Does nothing: the device holds no resources."""
