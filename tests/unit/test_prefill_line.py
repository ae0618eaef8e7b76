"""Order of prompts in a step: the shortest remaining first, passing a longer one by fewer tokens than that one has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Batching, Scheduler
from inflight.executor.scheduler.sequence import Sequence
from inflight.executor.scheduler.step_constraint import PrefillAllowance, PrefillCost, StepConstraint
from tests.support.examples import examples
from tests.support.scheduler.scheduling import BLOCK_SIZE, LIMITS, make_scheduler, make_sequence, retire, rows_of, step

SEATS = replace(LIMITS, max_num_sequences=8, num_standby_sequences=8)


def prompt(request_id: str, num_tokens: int, *, priority: int = 0) -> Sequence:
    """A prompt that shares no block with others, for one token."""
    return make_sequence(request_id, range(num_tokens), max_tokens=1, salt=None, priority=priority)


def with_long_prompt(*, priority: int = 0) -> Scheduler:
    """A scheduler that has computed 8 of a prompt's 24 tokens."""
    scheduler = make_scheduler(SEATS, num_blocks=64)
    scheduler.offer(prompt("long", 24, priority=priority))
    step(scheduler)
    return scheduler


def test_short_prompt_boards_and_is_computed_ahead_of_a_long_one_in_progress() -> None:
    scheduler = with_long_prompt()
    scheduler.offer(prompt("short", 3))
    assert rows_of(scheduler.schedule()) == [("short", 0, 3, True), ("long", 8, 5, False)]


def test_prompt_that_would_get_no_token_keeps_waiting() -> None:
    scheduler = with_long_prompt()
    for request_id in ("a", "b", "c"):
        scheduler.offer(prompt(request_id, 5))
    plan = scheduler.schedule()
    assert rows_of(plan) == [("a", 0, 5, True), ("b", 0, 3, False)]
    assert [sequence.request_id for sequence in plan.boarded] == ["a", "b"]


def test_time_of_a_chunk_depends_on_its_position() -> None:
    """The short prompt's first 5 tokens take as long as the long one's ninth and tenth."""
    scheduler = with_long_prompt()
    scheduler.offer(prompt("short", 5))
    cost = PrefillCost(work_s=1.0)
    plan = scheduler.schedule(PrefillAllowance(0, cost.of(5, 0) + cost.of(2, 8), cost))
    assert rows_of(plan) == [("short", 0, 5, True), ("long", 8, 2, False)]


def test_prompt_that_would_get_no_time_keeps_waiting() -> None:
    """The long prompt's chunk leaves tokens of the budget, and no time."""
    scheduler = with_long_prompt()
    scheduler.offer(prompt("after", 30))
    cost = PrefillCost(work_s=1.0)
    plan = scheduler.schedule(PrefillAllowance(0, cost.of(3, 8), cost))
    assert rows_of(plan) == [("long", 8, 3, False)]
    assert not plan.boarded
    assert plan.constraint is StepConstraint.PACE


def test_longer_prompt_does_not_pass() -> None:
    scheduler = with_long_prompt()
    scheduler.offer(prompt("as-long", 16))
    assert rows_of(scheduler.schedule()) == [("long", 8, 8, False)]


def test_less_important_prompt_does_not_pass() -> None:
    scheduler = with_long_prompt(priority=1)
    scheduler.offer(prompt("short", 3))
    assert rows_of(scheduler.schedule()) == [("long", 8, 8, False)]


def test_prompt_that_is_scored_does_not_pass() -> None:
    scheduler = with_long_prompt()
    scored = prompt("scored", 3)
    scored.num_prompt_logprobs = 0
    scheduler.offer(scored)
    assert rows_of(scheduler.schedule()) == [("long", 8, 8, False)]


@pytest.mark.parametrize(
    "change", [{"enable_chunked_context": False, "max_num_tokens": 30}, {"batching": Batching.STATIC}]
)
def test_without_chunks_or_in_a_static_batch_prompts_keep_their_order(change: dict[str, object]) -> None:
    scheduler = make_scheduler(replace(SEATS, **change), num_blocks=64)  # type: ignore[arg-type]
    for request_id, length in (("a", 14), ("b", 12), ("c", 2)):
        scheduler.offer(prompt(request_id, length))
    order: list[str] = []
    while len(set(order)) < 3:
        plan = scheduler.schedule()
        order += [row.sequence.request_id for row in plan.rows if row.start + row.num_tokens <= 14 and row.samples]
        retire(scheduler, plan)
    assert list(dict.fromkeys(order)) == ["a", "b", "c"]


def test_long_prompt_is_computed_although_short_ones_never_end() -> None:
    """It has 16 tokens left and a step has 8: two steps alone, and less than two more that others take."""
    scheduler = with_long_prompt()
    for number in range(4):
        scheduler.offer(prompt(f"s{number}", 7))
        finished = [event.sequence.request_id for event in step(scheduler).finished]
        assert ("long" in finished) == (number == 3)


def test_tokens_that_complete_a_prompt_count_as_passing() -> None:
    """Each step has seven prompts of one token ahead of the long one, until they would be as many as it has left."""
    scheduler = make_scheduler(replace(SEATS, num_standby_sequences=64), num_blocks=64)
    scheduler.offer(long := prompt("long", 24))
    step(scheduler)
    num_computed = []
    for number in range(24):
        scheduler.offer(prompt(f"s{number}", 1))
    for _ in range(3):
        step(scheduler)
        num_computed.append(long.num_computed)

    assert num_computed == [9, 10, 18]
    assert long.num_passed_tokens == 14


def is_behind(sequence: Sequence) -> bool:
    """Whether a part of the prompt is still to be computed. A released sequence has nothing computed any more."""
    return not sequence.num_output_tokens and sequence.num_computed < sequence.num_prompt_tokens


@settings(max_examples=examples(200), deadline=None)
@given(
    arrivals=st.lists(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), max_size=3), max_size=12),
    num_tokens=st.integers(16, 24),
    max_prefill_tokens=st.sampled_from((None, 1, 4, 9)),
)
def test_prompt_waits_for_those_ahead_of_it_and_for_less_than_its_own_length_besides(
    arrivals: list[list[tuple[int, int]]], num_tokens: int, max_prefill_tokens: int | None
) -> None:
    """The bound of docs/failures.md: no prompt starves."""
    limits = replace(LIMITS, max_num_sequences=8, num_standby_sequences=100, max_num_tokens=num_tokens)
    scheduler = Scheduler(limits, BlockPool(2000, BLOCK_SIZE))
    # Tokens that may be computed between a boarding and the end of the prompt.
    bound: dict[Sequence, int] = {}
    num_offered, queue = 0, list(arrivals)
    while queue or not scheduler.is_idle:
        for length, priority in queue.pop(0) if queue else ():
            num_offered += 1
            scheduler.offer(prompt(f"r{num_offered}", length, priority=priority))
        seated = [s for s in bound if is_behind(s)]
        num_ahead = sum(s.num_prompt_tokens - s.num_computed for s in seated)
        plan = scheduler.schedule(None if max_prefill_tokens is None else PrefillAllowance(max_prefill_tokens))
        for sequence in plan.boarded:
            num_ahead += sequence.num_prompt_tokens
            bound[sequence] = num_ahead + sequence.num_prompt_tokens
        # A step in which the prompt is done may hold more.
        num_prefill = sum(row.num_tokens for row in plan.rows if row.start < row.sequence.num_prompt_tokens)
        for sequence in [s for s in bound if is_behind(s)]:
            bound[sequence] -= num_prefill
            assert bound[sequence] > 0
        if plan.rows:
            retire(scheduler, plan)
