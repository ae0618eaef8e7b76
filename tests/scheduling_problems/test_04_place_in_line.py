"""Problem 4: a preempted request goes to the end of the queue, behind requests that arrived later."""

from __future__ import annotations

from dataclasses import replace

from inflight.executor.scheduler.limits import Overcommit, SchedulerPolicy
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.router.ledger.types import Demand, Placement, Queued
from tests.scheduling_problems.served_line import Asked, open_line
from tests.support.ledger.store_pool import StorePool
from tests.support.scheduler.scheduling import LIMITS, make_scheduler, make_sequence, retire

TIGHT = replace(
    LIMITS,
    max_num_sequences=3,
    num_standby_sequences=4,
    max_num_tokens=64,
    policy=SchedulerPolicy.MAX_UTILIZATION,
    overcommit=Overcommit(watermark=0.0, margin=0.0),
)


def grow_out_of(scheduler: Scheduler, names: str) -> None:
    """Sequences with little reserved run until one of them is preempted."""
    for name in names:
        sequence = make_sequence(name, range(6), max_tokens=24, salt=None)
        sequence.num_reserved_blocks = 2
        assert scheduler.offer(sequence) is None
    while not scheduler.num_preempted:
        retire(scheduler, scheduler.schedule())


def test_preempted_one_boards_before_everyone_who_has_not_run_yet() -> None:
    scheduler = make_scheduler(TIGHT, num_blocks=16)
    grow_out_of(scheduler, "abcde")  # d and e wait for a seat
    boarded = []
    while not scheduler.is_idle:
        plan = scheduler.schedule()
        boarded += [sequence.request_id for sequence in plan.boarded]
        retire(scheduler, plan)

    assert boarded.index("d") > max(i for i, name in enumerate(boarded) if name in "abc")
    assert set("de") <= set(boarded)


def test_of_several_who_were_preempted_the_more_important_and_then_the_earlier_comes_back_first() -> None:
    scheduler = make_scheduler(replace(TIGHT, max_num_sequences=4), num_blocks=14)
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 1)):
        sequence = make_sequence(name, range(6), max_tokens=24, salt=None)
        sequence.num_reserved_blocks, sequence.priority = 2, priority
        assert scheduler.offer(sequence) is None
    back = []
    while not scheduler.is_idle:
        away = [s for s in scheduler.held() if s.num_preemptions and s.seat is None]
        plan = scheduler.schedule()
        for sequence in plan.boarded:
            if sequence in away:
                back.append(sequence.request_id)
                assert (sequence.priority, -sequence.arrival) == max((s.priority, -s.arrival) for s in away)
                away.remove(sequence)
        retire(scheduler, plan)
    assert "low" in back


async def test_request_that_is_handed_back_stands_where_it_stood(store_pool: StorePool) -> None:
    # Given one that runs, and two that came later
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("early")
    await store_pool.wait(1000)
    for i, request_id in enumerate(("late", "later")):
        assert await a.store.submit(Demand(request_id, 2, blocks=1)) == Queued(i)
    await store_pool.wait(1000)

    # When its executor gives it back while it can take no request
    await a.store.report(store_pool.next_report(sequences=0))
    assert await a.store.hand_back("early", 1, 3, preempted=True, output_tokens=5) == Queued(0)
    await a.store.report(store_pool.next_report(sequences=1))

    # Then it is the first to board again
    assert await a.told() == [Placement("early", 2, "x", 1)]


async def test_being_preempted_costs_no_attempt_and_no_turn_of_its_tenant(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place_demand(Demand("r", 2, blocks=1, tenant="t", prompt_tokens=100))
    await a.queue(Demand("next of t", 2, blocks=1, tenant="t", prompt_tokens=100))
    for attempt in range(1, 6):
        result = await a.store.hand_back("r", attempt, 3, preempted=True, output_tokens=attempt)
        assert result == Placement("r", attempt + 1, "x", 1)
    assert await a.told() == []


async def test_output_of_who_was_handed_back_counts_as_output_elsewhere(store_pool: StorePool) -> None:
    """Through ledger and scheduler: three whose answers become longer than usual, on an executor of little patience."""
    limits = replace(TIGHT, overcommit=Overcommit(watermark=0.0, margin=0.0, max_steps_away=2))
    line = await open_line(store_pool, make_scheduler(limits, num_blocks=12))
    await line.learn(Asked("short", prompt_tokens=6, output_tokens=3, max_tokens=24))
    for i in range(3):
        await line.submit(Asked(f"r{i}", prompt_tokens=6, output_tokens=24, max_tokens=24))
    await line.run(3, max_turns=200)

    assert line.num_handed_back > 0
    assert [len(line.output[f"r{i}"]) for i in range(3)] == [24, 24, 24]
