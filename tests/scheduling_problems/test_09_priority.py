"""Problem 9: priority orders the queue, but has no effect when all seats are taken."""

from __future__ import annotations

from dataclasses import replace

from inflight.executor.scheduler.limits import SchedulerPolicy
from inflight.router.ledger.types import Attempt, Demand, Placement, PreemptRequested, Queued
from tests.scheduling_problems.served_line import Asked, open_line
from tests.support.ledger.store_pool import SETTINGS, StorePool
from tests.support.scheduler.scheduling import LIMITS, make_scheduler, make_sequence, retire

PREEMPTING = replace(SETTINGS, preempt_for_priority=True)
TWO_SEATS = replace(LIMITS, num_standby_sequences=0)


async def test_next_seat_goes_to_the_highest_class_in_any_order_of_arrival(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running", priority_class=3)
    for priority_class in (3, 2, 1):
        await a.queue(Demand(f"class {priority_class}", priority_class, blocks=1))
        await store_pool.wait(10)

    for running in ("running", "class 1", "class 2"):
        await a.store.settle([Attempt(running, 1)])
    assert await a.placed() == ["class 1", "class 2", "class 3"]


async def test_taken_seats_are_given_up_for_a_higher_class(store_pool: StorePool) -> None:
    """Through ledger and scheduler: two that would run for long, and one that cannot wait."""
    line = await open_line(store_pool, make_scheduler(TWO_SEATS), store_pool.router("a", PREEMPTING))
    for i in range(2):
        await line.submit(Asked(f"batch {i}", 4, 40, 40, priority_class=3))
    for _ in range(3):
        await line.turn()
    await line.submit(Asked("urgent", 4, 2, 2, priority_class=1))
    await line.run(1, max_turns=6)

    assert line.ended == ["urgent"]
    assert line.paused == ["batch 1"]  # the one that came last, and only it
    await line.run(3, max_turns=60)
    assert [len(line.output[f"batch {i}"]) for i in range(2)] == [40, 40]


async def test_no_request_gives_way_to_its_own_class(store_pool: StorePool) -> None:
    a = store_pool.router("a", PREEMPTING)
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running", priority_class=2)
    await a.queue(Demand("equal", 2, blocks=1))
    assert await a.told() == []

    assert await a.store.submit(Demand("higher", 1, blocks=1)) == Queued(0)
    await a.store.reap()
    assert await a.told() == [PreemptRequested("running", 1)]
    # The seat is the higher one's, not its who came before
    await a.store.hand_back("running", 1, 3, preempted=True, output_tokens=2)
    assert await a.told() == [Placement("higher", 1, "x", 1)]


def test_least_important_gives_its_blocks_up_first_on_the_executor() -> None:
    """Whatever was computed for it, and in any order of arrival."""
    limits = replace(TWO_SEATS, max_num_sequences=3, policy=SchedulerPolicy.MAX_UTILIZATION)
    scheduler = make_scheduler(limits, num_blocks=8)
    for name, priority in (("batch", -1), ("standard", 0), ("interactive", 1)):
        sequence = make_sequence(name, range(4), max_tokens=20, salt=None)
        sequence.num_reserved_blocks, sequence.priority = 2, priority
        assert scheduler.offer(sequence) is None
    while not scheduler.num_preempted:
        plan = scheduler.schedule()
        retire(scheduler, plan)

    assert [sequence.request_id for sequence in plan.preempted] == ["batch"]
