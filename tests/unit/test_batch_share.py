"""What class batch gets of the steps that it shares with another class."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from inflight.executor.scheduler.queues import BATCH_SHARE
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import BATCH_PRIORITY, Sequence
from inflight.executor.scheduler.step_constraint import PrefillCost, StepConstraint, StepCost
from tests.support.scheduler.scheduling import LIMITS, make_scheduler, make_sequence, retire

MANY = replace(LIMITS, max_num_sequences=8, num_standby_sequences=8, max_num_tokens=64, context_length=2000)


def offer(scheduler: Scheduler, request_id: str, num_prompt_tokens: int, priority: int = BATCH_PRIORITY) -> Sequence:
    sequence = make_sequence(request_id, range(num_prompt_tokens), max_tokens=1000, salt=None)
    sequence.priority = priority
    assert scheduler.offer(sequence) is None
    return sequence


def rows(scheduler: Scheduler, cost: StepCost, num_steps: int) -> list[dict[str, int]]:
    """Runs steps. Returns the tokens of each sequence in each."""
    seen = []
    for _ in range(num_steps):
        plan = scheduler.schedule(step_cost=cost)
        seen.append({row.sequence.request_id: row.num_tokens for row in plan.rows})
        retire(scheduler, plan)
    return seen


def with_decodes(num_batch: int, *, with_other: bool) -> Scheduler:
    scheduler = make_scheduler(MANY, num_blocks=4000)
    for number in range(num_batch):
        offer(scheduler, f"b{number}", 4)
    rows(scheduler, StepCost(0.0, PrefillCost()), 1)
    if with_other:
        offer(scheduler, "other", 4, priority=0)
        rows(scheduler, StepCost(0.0, PrefillCost()), 1)
    return scheduler


@pytest.mark.parametrize("token_s", [1.0, 3.0, 0.4])
def test_decodes_of_class_batch_take_turns_and_add_a_tenth_to_the_time_of_steps(token_s: float) -> None:
    scheduler = with_decodes(4, with_other=True)
    seen = rows(scheduler, StepCost(10.0 - token_s, PrefillCost(token_s)), 240)
    assert all("other" in step for step in seen)
    counts = Counter(name for step in seen for name in step if name != "other")
    assert sum(counts.values()) * token_s == pytest.approx(240 * 10.0 * BATCH_SHARE, abs=2 * token_s)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_all_decodes_are_in_steps_where_they_cost_nothing_and_in_steps_of_their_own() -> None:
    for scheduler, cost in (
        (with_decodes(4, with_other=True), StepCost(10.0, PrefillCost(0.01))),
        (with_decodes(4, with_other=False), StepCost(10.0, PrefillCost(5.0))),
    ):
        assert all(len(step) >= 4 for step in rows(scheduler, cost, 3))


def test_prompt_of_class_batch_is_passed_by_others_and_goes_on_in_small_chunks() -> None:
    cost = StepCost(9.0, PrefillCost(1.0))
    scheduler = make_scheduler(MANY, num_blocks=4000)
    batch = offer(scheduler, "batch", 400)
    assert rows(scheduler, cost, 1) == [{"batch": 64}]
    offer(scheduler, "other", 80, priority=0)
    first, second = rows(scheduler, cost, 2)
    assert first["other"] == 64 - first.get("batch", 0)
    assert first["other"] + second["other"] >= 80
    before = batch.num_computed
    seen = rows(scheduler, cost, 200)
    assert batch.num_computed - before == pytest.approx(200 * 10.0 * BATCH_SHARE, abs=2 * scheduler.pool.block_size)
    assert all(step["other"] == 1 for step in seen[1:])


def test_batch_boards_beside_others_only_where_it_gets_tokens() -> None:
    cost = StepCost(9.0, PrefillCost(1.0))
    scheduler = with_decodes(2, with_other=True)
    rows(scheduler, cost, 1)
    waiting = offer(scheduler, "waiting", 8)
    plan = scheduler.schedule(step_cost=StepCost(0.5, PrefillCost(1.0)))
    assert waiting.seat is None
    assert plan.constraint is StepConstraint.PACE
