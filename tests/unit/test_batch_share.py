"""What class batch gets of steps, and how long others wait beside it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from statistics import mean, median

import pytest

from inflight.executor.engine.step_time import StepLoad
from inflight.executor.scheduler.queues import BATCH_SHARE, LONGEST_ALONE, QUIET_S
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import BATCH_PRIORITY, FinishReason, Sequence
from inflight.executor.scheduler.step_constraint import PrefillCost, StepConstraint, StepCost
from tests.support.device.modelled_device import Ride
from tests.support.scheduler.scheduling import LIMITS, make_scheduler, make_sequence, retire

MANY = replace(LIMITS, max_num_sequences=8, num_standby_sequences=8, max_num_tokens=64, context_length=2000)


def offer(
    scheduler: Scheduler,
    request_id: str,
    num_prompt_tokens: int,
    priority: int = BATCH_PRIORITY,
    max_tokens: int = 1000,
    salt: bytes | None = None,
) -> Sequence:
    sequence = make_sequence(request_id, range(num_prompt_tokens), max_tokens=max_tokens, salt=salt)
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
def test_decodes_of_class_batch_take_turns_and_add_their_share_to_the_time_of_steps(token_s: float) -> None:
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


def test_class_batch_goes_on_while_another_that_has_come_waits_for_its_prefix() -> None:
    cost = StepCost(1.0, PrefillCost(1.0))
    scheduler = make_scheduler(replace(MANY, max_prefix_wait_steps=100), num_blocks=4000)
    # Given class batch, whose chunk took more than its share beside another, which then ended
    offer(scheduler, "other", 4, priority=0, max_tokens=1)
    batch = offer(scheduler, "batch", 60, salt=b"")
    rows(scheduler, cost, 1)
    assert scheduler.num_held == 1
    assert 0 < batch.num_computed < 60
    # When one comes that waits for the prefix that class batch computes
    offer(scheduler, "same", 60, priority=0, salt=b"")
    # Then class batch is in the next step
    assert [set(step) for step in rows(scheduler, cost, 2)] == [{"batch"}] * 2


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


def leave(scheduler: Scheduler, request_id: str) -> None:
    scheduler.cancel(request_id, 1, FinishReason.CANCELLED)


@pytest.mark.parametrize("token_s", [0.045, 0.08])
def test_steps_of_class_batch_alone_are_short_while_others_come_and_full_when_they_stay_away(token_s: float) -> None:
    cost = StepCost(0.1 - token_s, PrefillCost(token_s))
    scheduler = with_decodes(7, with_other=True)
    rows(scheduler, cost, 1)
    scheduler.cancel("other", 1, FinishReason.CANCELLED)

    short: list[dict[str, int]] = []
    while not scheduler.may_run_ahead:
        short += rows(scheduler, cost, 1)
        assert len(short) < 1000
    # The last row may end behind the bound.
    most = 1 + int((LONGEST_ALONE * 0.1 - cost.fixed_s) / token_s)
    assert {len(step) for step in short} == {most}
    assert sum(cost.fixed_s + len(step) * token_s for step in short) == pytest.approx(QUIET_S, abs=0.5)
    counts = Counter(name for step in short for name in step)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert [len(step) for step in rows(scheduler, cost, 3)] == [7, 7, 7]


def test_newcomer_boards_in_a_step_without_the_lines_of_a_batch() -> None:
    cost = StepCost(7.0, PrefillCost(3.0))
    scheduler = with_decodes(4, with_other=False)
    assert len(rows(scheduler, cost, 1)[0]) == 4
    offer(scheduler, "other", 4, priority=0)
    [step] = rows(scheduler, cost, 1)
    assert step["other"] == 4
    assert len(step) <= 2


def small_cpu(load: StepLoad) -> float:
    """SmolLM2-135M on two cores of a Zen 4: 36 ms for 60 decodes."""
    return 0.0065 + 500e-6 * load.num_tokens + 0.1e-6 * load.decode_context + 0.1e-6 * load.prefill_work


def chats(num_lines: int, num_chats: int = 30) -> tuple[list[float], list[float]]:
    """Chats arrive at random, 0.6 a second, beside so many lines of a batch. Returns the seconds to the first token of
    each, and those between tokens."""
    limits = replace(MANY, max_num_sequences=64, num_standby_sequences=8, max_num_tokens=1024)
    ride = Ride(limits, jitter=0.0, seconds=small_cpu)
    chance = random.Random(3)
    arrivals = [chance.expovariate(0.6)]
    while len(arrivals) < num_chats:
        arrivals.append(arrivals[-1] + chance.expovariate(0.6))
    seen: list[Sequence] = []
    lines, number = set[Sequence](), 0
    while len(seen) < num_chats or not ride.ended.issuperset(seen):
        now_s = ride.device.now_s
        while len(seen) < num_chats and arrivals[len(seen)] <= now_s:
            chat = make_sequence(f"chat {len(seen)}", [1] * 300, max_tokens=120, salt=None, priority=1)
            chat.inter_token_target_ms = 50.0
            seen.append(chat)
            ride.submit(chat)
        lines -= ride.ended
        while len(lines) < num_lines:
            number += 1
            line = make_sequence(f"line {number}", [1] * 20, max_tokens=128, salt=None, priority=BATCH_PRIORITY)
            lines.add(line)
            ride.submit(line)
        if not lines and ride.ended.issuperset(seen):
            ride.device.now_s = arrivals[len(seen)]
        else:
            ride.engine.step()
    times = [ride.token_times[chat] for chat in seen]
    waits = [own[0] - arrived_s for own, arrived_s in zip(times, arrivals, strict=True)]
    return waits[5:], [after - before for own in times[5:] for before, after in pairwise(own)]


def test_chats_beside_a_batch_wait_and_decode_about_as_without_it() -> None:
    waits, gaps = chats(0)
    waits_beside, gaps_beside = chats(64)
    assert median(waits_beside) < 1.12 * median(waits)
    assert mean(waits_beside) < 1.12 * mean(waits)
    assert median(gaps_beside) < 1.1 * median(gaps)
    assert mean(gaps_beside) < (1 + 1.2 * BATCH_SHARE) * mean(gaps)
