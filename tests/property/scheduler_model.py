"""Inputs for the scheduler, and a plain model of its guarantees."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from inflight.common.kv_size import WindowSize, num_slots
from inflight.executor.scheduler.limits import KvWindow, Overcommit, PreemptionCost, StateLimits
from inflight.executor.scheduler.scheduler import Batching, Refusal, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.sequence import Constraint, FinishEvent, FinishReason, Sampling, Sequence, Stopping
from tests.support.device.fake_device import MAX_DRAFTS, VOCABULARY_SIZE

# Prompts start like one of these, so that prefixes meet.
COMMON_STARTS = ([0] * 12, [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 0] * 6)
# Static batching is guaranteed whatever the policy.
BATCHINGS = {
    SchedulerPolicy.GUARANTEED_NO_EVICT: (Batching.INFLIGHT, Batching.STATIC),
    SchedulerPolicy.MAX_UTILIZATION: (Batching.INFLIGHT,) * 9 + (Batching.STATIC,),
}
STOPS = (frozenset[int](), frozenset({0}), frozenset({1, 2}))
# A sequence must have made progress before it is preempted.
RARE_STOPS = (frozenset[int](),) * 4 + STOPS
SALTS = (b"", b"", b"", b"other", None)


@dataclass(slots=True)
class Expectation:
    """What an accepted sequence must bring, and what it has brought."""

    sequence: Sequence
    output: list[int]
    reason: FinishReason
    received: list[int]
    finished: FinishEvent | None = None
    cancel_reason: FinishReason | None = None

    @property
    def is_over(self) -> bool:
        """Whether its end is certain: handed out, or asked for."""
        return self.finished is not None or self.cancel_reason is not None


@dataclass(slots=True)
class Promises:
    """A model of the gate: what the scheduler must answer to an offer."""

    num_blocks: int
    block_size: int
    max_held: int
    context_length: int
    is_draining: bool = False
    newest_attempt: dict[str, int] = field(default_factory=dict)
    # Held and not cancelled, in order of arrival.
    held: list[Sequence] = field(default_factory=list)
    # The most blocks that sharing has saved at any time.
    most_saved: int = 0

    def find(self, request_id: str) -> Sequence | None:
        return next((sequence for sequence in self.held if sequence.request_id == request_id), None)

    def answers(self, sequence: Sequence, num_saved: int) -> set[Refusal | None]:
        """What it may answer if sharing saves `num_saved` blocks now. What it saved a while ago may count or not."""
        return {self._answer(sequence, num_saved), self._answer(sequence, max(num_saved, self.most_saved))}

    def _answer(self, sequence: Sequence, num_saved: int) -> Refusal | None:
        others = [held for held in self.held if held.request_id != sequence.request_id]
        num_prompt, num_prior = sequence.num_prompt_tokens, sequence.num_output_tokens
        most_tokens = min(num_prompt + sequence.stopping.max_tokens, self.context_length)
        if sequence.attempt <= self.newest_attempt.get(sequence.request_id, 0):
            return Refusal.STALE_ATTEMPT
        if self.is_draining:
            return Refusal.DRAINING
        if num_prompt + num_prior >= most_tokens:
            return Refusal.INVALID
        if sequence.num_reserved_blocks < math.ceil((sequence.num_tokens + 1) / self.block_size):
            return Refusal.INVALID
        num_blocks = sum(held.num_reserved_blocks + self.overrun(held) for held in others)
        if num_blocks + sequence.num_reserved_blocks > self.num_blocks + num_saved:
            return Refusal.NO_CAPACITY
        if max(math.ceil(most_tokens / self.block_size), sequence.num_reserved_blocks) > self.num_blocks:
            return Refusal.NO_CAPACITY
        return Refusal.NO_CAPACITY if len(others) == self.max_held else None

    def overrun(self, sequence: Sequence) -> int:
        """Blocks that it uses, or needs to come back, beyond those reserved for it."""
        num_blocks = len(sequence.block_table)
        if sequence.seat is None and sequence.num_preemptions:
            num_blocks = math.ceil((sequence.num_tokens + 1) / self.block_size)
        return max(0, num_blocks - sequence.num_reserved_blocks)


def num_saved_by(sequences: Iterable[Sequence]) -> int:
    """Blocks that sharing saves: those in all their tables, less the different ones."""
    blocks = [block for sequence in sequences for block in sequence.block_table]
    return len(blocks) - len(set(blocks))


@st.composite
def limits_strategy(draw: st.DrawFn) -> SchedulerLimits:
    policy = draw(st.sampled_from(SchedulerPolicy))
    num_seats = draw(st.integers(1, 5) if policy is SchedulerPolicy.GUARANTEED_NO_EVICT else st.integers(3, 8))
    cost = PreemptionCost(swap_token=draw(st.sampled_from((0.0, 0.1, 0.1, 10.0))))
    return SchedulerLimits(
        max_num_sequences=num_seats,
        num_standby_sequences=draw(st.integers(0, 3)),
        max_num_tokens=num_seats + draw(st.integers(0, 8)),
        context_length=draw(st.sampled_from((40, 64) if policy is SchedulerPolicy.MAX_UTILIZATION else (16, 40, 40))),
        enable_chunked_context=draw(st.booleans()),
        batching=draw(st.sampled_from(BATCHINGS[policy])),
        enable_prefix_cache=draw(st.integers(0, 2)) > 0,
        policy=policy,
        num_host_blocks=draw(st.sampled_from((0, 1, 6, 40))),
        overcommit=Overcommit(
            cost=cost,
            watermark=draw(st.sampled_from((0.0, 0.02, 0.2))),
            margin=draw(st.sampled_from((0.0, 0.05))),
            max_steps_away=draw(st.sampled_from((4, 400))),
        ),
        max_prefix_wait_steps=draw(st.sampled_from((0, 3))),
    )


# Tokens of the window of layers that have a pool of their own; None: there is one pool.
WINDOWS = st.sampled_from((None, None, 1, 3, 4, 9, 30))


def with_window(limits: SchedulerLimits, num_tokens: int | None, block_size: int) -> SchedulerLimits:
    """The same limits with a window pool that is as small as it may be."""
    if num_tokens is None:
        return limits
    is_chunked, context_length = limits.enable_chunked_context, limits.context_length
    step_tokens = limits.max_num_tokens if is_chunked else max(limits.max_num_tokens, context_length)
    size = WindowSize(num_tokens, step_tokens, context_length, MAX_DRAFTS, block_size)
    num_seats = limits.max_num_sequences
    window = KvWindow(num_tokens, size.num_blocks(num_seats), size.num_sequences(num_seats))
    return replace(limits, kv_window=window, num_host_blocks=0)


# Checkpoints of recurrent state, the blocks between two of their places, and slots in host memory; None: no layer is
# recurrent.
STATES = st.sampled_from((None, None, (0, 1, 0), (1, 1, 1), (3, 2, 4), (40, 1, 0), (40, 1, 9), (40, 3, 9)))


def with_states(limits: SchedulerLimits, states: tuple[int, int, int] | None, block_size: int) -> SchedulerLimits:
    """The same limits with as few slots of recurrent state as there may be."""
    if states is None:
        return limits
    num_checkpoints, num_blocks, num_host_slots = states
    slots = StateLimits(
        num_slots(limits.max_num_sequences),
        num_checkpoints,
        num_blocks * block_size,
        frozenset({1}),
        num_host_slots if limits.num_host_blocks else 0,
    )
    return replace(limits, states=slots, num_host_blocks=limits.num_host_blocks if num_host_slots else 0)


def unready_constraint() -> Constraint:
    """A constraint whose grammar is not compiled. The fake device ignores it."""
    return Constraint("{}", b"hash", frozenset())


@st.composite
def sequence_strategy(
    draw: st.DrawFn,
    block_size: int,
    request_id: str,
    attempt: int,
    is_overcommitted: bool = False,
    may_be_unready: bool = False,
) -> Sequence:
    start = draw(st.sampled_from(COMMON_STARTS))[: draw(st.sampled_from((0, 4, 8, 12)))]
    prompt = [*start, *draw(st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=3))]
    prior_output = draw(st.sampled_from(([], [], [0], [1, 2], [3, 4, 0])))
    # Now and then the prior output is all there may be, or the reservation one block short.
    max_tokens = max(1, len(prior_output) + draw(st.integers(8, 24) if is_overcommitted else st.integers(0, 12)))
    num_extra_blocks = draw(st.sampled_from((0,) * 18 + (1, -1)))
    num_blocks = math.ceil((len(prompt) + max_tokens) / block_size)
    if draw(st.integers(0, 4)) if is_overcommitted else draw(st.integers(0, 2)) == 0:
        num_blocks = math.ceil((len(prompt) + len(prior_output) + 1) / block_size)
    return Sequence(
        request_id=request_id,
        attempt=attempt,
        token_ids=[*prompt, *prior_output],
        num_prompt_tokens=len(prompt),
        sampling=Sampling(0.0, 0, 1.0, 0),
        stopping=Stopping(
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, 3)),
            stop_token_ids=draw(st.sampled_from(RARE_STOPS if is_overcommitted else STOPS)),
        ),
        num_reserved_blocks=num_blocks + num_extra_blocks,
        cache_salt=draw(st.sampled_from(SALTS)),
        priority=draw(st.sampled_from((0, 0, 1, 2, -1))),
        inter_token_target_ms=draw(st.sampled_from((None, 20.0, 50.0))),
        deadline_ms=draw(st.sampled_from((None, None, 10, 20))),
        num_prompt_logprobs=draw(st.sampled_from((None, None, None, 0, 2))),
        max_drafts=draw(st.sampled_from((0, 1, 3, 7))),
        constraint=unready_constraint() if may_be_unready and draw(st.integers(0, 4)) == 0 else None,
    )
