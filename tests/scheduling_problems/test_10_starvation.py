"""Problem 10: while there is work of a higher class, work of a lower class is never served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.executor.scheduler.sequence import MAX_YIELDING_ATTEMPTS
from inflight.router.ledger.types import Attempt, Demand
from tests.scheduling_problems.served_line import Asked, open_line
from tests.support.ledger.store_pool import SETTINGS, RouterSide, StorePool
from tests.support.scheduler.scheduling import LIMITS, make_scheduler

AGE_MS = 1000
AGEING = replace(SETTINGS, age_ms=AGE_MS)


async def turns_until_served(pool: StorePool, a: RouterSide, request_id: str, arrive: int, most: int) -> int:
    """One seat, each turn takes 100 ms; so many requests of the first class arrive in each."""
    running = "at first"
    await a.place(running, priority_class=1)
    await a.queue(Demand(request_id, 3, blocks=1))
    for turn in range(most):
        for i in range(arrive):
            await a.queue(Demand(f"urgent {turn} {i}", 1, blocks=1))
        await pool.wait(100)
        await a.store.report(pool.next_report(sequences=1))
        await a.store.settle([Attempt(running, 1)])
        [running] = await a.placed()
        if running == request_id:
            return turn
    raise AssertionError(f"{request_id} was not served in {most} turns")


@pytest.mark.parametrize("arrive", [1, 2])
async def test_low_class_is_served_however_many_of_a_higher_one_arrive(store_pool: StorePool, arrive: int) -> None:
    """Two ages bring it into the first class; from then on only those stand before it who came earlier."""
    a = store_pool.router("a", AGEING)
    await a.store.report(store_pool.next_report(sequences=1))

    num_turns = await turns_until_served(store_pool, a, "batch", arrive, most=60)
    num_before_it = 2 * AGE_MS // 100 * arrive
    assert num_turns <= max(num_before_it, 2 * AGE_MS // 100) + 2


@pytest.mark.parametrize("num_standby", [0, 1], ids=["the ledger asks", "the executor asks"])
async def test_batch_request_ends_however_many_others_take_its_seat(store_pool: StorePool, num_standby: int) -> None:
    """Others come whenever it has its only seat. It gives way as often as it must and no more, and what is computed
    again is bounded by that."""
    limits = replace(LIMITS, max_num_sequences=1, num_standby_sequences=num_standby, enable_prefix_cache=False)
    line = await open_line(store_pool, make_scheduler(limits))
    await line.submit(Asked("batch", 4, 40, 40, priority_class=3))
    num_computed = number = 0
    while "batch" not in line.ended:
        if any(one.request_id == "batch" and one.seat is not None for one in line.scheduler.held()):
            number += 1
            await line.submit(Asked(f"urgent {number}", 4, 1, 1, priority_class=1))
        plan = await line.turn()
        num_computed += sum(row.num_tokens for row in plan.rows if row.sequence.request_id == "batch")
        assert number < 100

    assert line.paused.count("batch") == MAX_YIELDING_ATTEMPTS
    assert len(line.output["batch"]) == 40
    assert num_computed <= (1 + MAX_YIELDING_ATTEMPTS) * (4 + 40)


async def test_who_moved_up_is_not_preempted_by_what_was_once_higher(store_pool: StorePool) -> None:
    a = store_pool.router("a", replace(AGEING, preempt_for_priority=True))
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("at first", priority_class=1)
    await a.queue(Demand("batch", 3, blocks=1))
    for _ in range(2):
        await store_pool.wait(AGE_MS + 1)
        await a.store.report(store_pool.next_report(sequences=1))
    await a.store.settle([Attempt("at first", 1)])
    assert await a.placed() == ["batch"]

    await a.queue(Demand("urgent", 1, blocks=1))
    assert await a.told() == []
