"""Time that prompts get in a step. Pure.

A step with prefill may take as long as the smallest inter-token target of the sequences that decode in it, at most
`max_inter_token_ms`, and in any case at most `LONGEST_STEP_S`, because cancels and new sequences wait for its end. If
less than `LEAST_SHARE` of the time of the decodes would be left, prompts get this share, and always at least one block
of tokens. So while sequences decode, prompts get at least a third of the device's time, or a block of tokens per step
if that takes longer. Until the cost of prompts is known, they get `FIRST_TOKENS` per step, and more after the first
step if nothing asks for short ones.
"""

from __future__ import annotations

from dataclasses import replace

from inflight.executor.engine.step_time import LARGEST_SURPRISE, StepLoad, StepTime
from inflight.executor.scheduler.sequence import StepPlan
from inflight.executor.scheduler.step_constraint import (
    CopyCost,
    DecodeLoad,
    DraftTerms,
    PrefillAllowance,
    PrefillCost,
    StepCost,
)

# Factor on the target, so that variance between steps does not exceed it.
MARGIN = 0.95
# Weight of the newest wait in its mean, and a wait that is not surprisingly long in any case.
NEWEST = 1 / 32
SHORT_S = 0.001
# A step with prefill, where decodes do not ask for a shorter one. Slow devices reach it: a chunk of 1024 tokens of a
# model of 8 billion parameters takes 40 s on a few cores.
LONGEST_STEP_S = 5.0
# Tokens of prompts while the cost of prompts is unknown: a short step, and enough to learn from. Steps are planned
# ahead, so the second step of a burst is planned when none has been observed.
FIRST_TOKENS = 128
# Time of prompts that are late against the time of the decodes alone.
LEAST_SHARE = 0.5
# About the last 50 steps with copies count for the time of a copy.
FORGETTING = 0.98


class MeanWait:
    """Smoothed time that the device waits for the host. A single long one counts little."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_observed = 0

    def observe(self, seconds: float) -> None:
        """Adds a wait."""
        self._num_observed += 1
        longest_s = LARGEST_SURPRISE * self.seconds + SHORT_S
        self.seconds += max(NEWEST, 1 / self._num_observed) * (min(seconds, longest_s) - self.seconds)


class CopyTime:
    """Seconds that copying a block between device and host memory takes, by the mean over the blocks of steps that
    copied. Both directions count alike, as they differ little."""

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


class PrefillBudget:
    """Limits the prompt tokens of the next step by the durations of the steps before. `max_inter_token_ms` 0 is no
    limit."""

    def __init__(self, max_inter_token_ms: float = 0.0) -> None:
        self.step_time = StepTime()
        self.copy_time = CopyTime()
        self._max_inter_token_ms = max_inter_token_ms
        self._waits = [MeanWait(), MeanWait()]

    def allowance(self, decodes: DecodeLoad, block_size: int) -> PrefillAllowance:
        """Returns what prompts may take of a step, at least a block of tokens."""
        decode_s = self.step_time.predict(StepLoad(decodes.num_decodes, decodes.context))
        longest_s = LONGEST_STEP_S
        if decodes.num_decodes:
            longest_s = min(longest_s, self.longest_step_s(decodes, decode_s) or longest_s)
        if not self.step_time.knows_prefill:
            return self._first_allowance(longest_s, block_size)
        seconds = max(longest_s * MARGIN - decode_s, LEAST_SHARE * decode_s)
        cost, copy_s = self.step_time.prefill_cost(), self.copy_time.block_s
        # A prompt takes blocks whose content has to be copied to host memory first.
        cost = replace(cost, token_s=cost.token_s + copy_s / block_size)
        return PrefillAllowance(block_size, seconds, cost, copy_s)

    def _first_allowance(self, longest_s: float, block_size: int) -> PrefillAllowance:
        """Returns what prompts may take while their cost is unknown. Without a target, the time per token of a first
        step is enough to know how many tokens do not take too long."""
        num_tokens, token_s = max(FIRST_TOKENS, block_size), self.step_time.longest_token_s
        if longest_s < LONGEST_STEP_S or token_s is None:
            return PrefillAllowance(num_tokens)
        return PrefillAllowance(num_tokens, LONGEST_STEP_S * MARGIN, PrefillCost(token_s))

    def copy_cost(self) -> CopyCost | None:
        """Returns what copying a block costs against computing its tokens; None while that is not known."""
        if not self.step_time.knows_prefill:
            return None
        return CopyCost(self.copy_time.block_s, self.step_time.prefill_cost())

    def step_cost(self) -> StepCost | None:
        """Returns what steps cost; None while that is not known."""
        if not self.step_time.knows_prefill:
            return None
        return StepCost(self.step_time.predict(StepLoad(0, 0)), self.step_time.prefill_cost())

    def draft_terms(self, decodes: DecodeLoad) -> DraftTerms:
        """Returns what drafts may cost in a step with these decodes."""
        time_of_step = self.step_time.by_tokens(decodes.context)
        longest_s = self.longest_step_s(decodes, time_of_step(decodes.num_decodes))
        ahead, behind = self._waits
        longest_s = None if longest_s is None else longest_s * MARGIN
        return DraftTerms(time_of_step, longest_s, ahead.seconds, max(0.0, behind.seconds - ahead.seconds))

    def observe_wait(self, plan: StepPlan, exposed_s: float) -> None:
        """Adds how long the device waited for a step that decodes."""
        if plan.samples and plan.samples[0] and plan.lengths[0] <= 1 + len(plan.drafts.get(0, ())):
            self._waits[not plan.carries[0]].observe(exposed_s)

    def longest_step_s(self, decodes: DecodeLoad, decode_s: float) -> float | None:
        """Returns the target of a step whose decodes alone take `decode_s`; None is none."""
        targets_ms = [ms for ms in (decodes.target_ms, self._max_inter_token_ms) if ms]
        return min(targets_ms) / 1000 if targets_ms else None
