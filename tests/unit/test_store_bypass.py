"""Requests that do not fit: which may overtake them, what is kept for them, and what is preempted for them."""

from __future__ import annotations

import dataclasses

from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    Attempt,
    Demand,
    Placement,
    PreemptRequested,
    Queued,
)
from tests.support.ledger.store_pool import SETTINGS, RouterSide, StorePool

TWO_PASS = dataclasses.replace(SETTINGS, max_bypass=2)
PREEMPTING = dataclasses.replace(SETTINGS, preempt_for_priority=True)


async def pass_twice(pool: StorePool, settings: LedgerSettings = TWO_PASS, class_: int = 2) -> RouterSide:
    """`large` finds 10 blocks of 16 free of the executor x, is passed as often as it may be, and `third` no more."""
    a = pool.router("a", settings)
    await a.store.report(pool.next_report("x", blocks=16))
    await a.place("running", 6)
    await a.queue(Demand("large", class_, blocks=12))
    for request_id in ("small", "small too"):
        await a.place(request_id, 1, class_)
    assert await a.store.submit(Demand("third", class_, blocks=3)) == Queued(1)
    assert await a.told() == []
    return a


async def test_executor_is_kept_for_who_was_passed_as_often_as_may_be(store_pool: StorePool) -> None:
    a = await pass_twice(store_pool)

    await a.store.settle([Attempt("running", 1)])
    await a.store.settle([Attempt("small", 1)])

    assert await a.placed() == ["large", "third"]


async def test_no_more_than_four_are_passed_at_a_time(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("running", 6)
    for number in range(5):
        await a.queue(Demand(f"large{number}", 2, blocks=5))

    await a.queue(Demand("small", 2, blocks=1))
    await a.store.cancel("large0")

    assert await a.placed() == ["small"]


async def test_lower_classes_are_asked_to_give_way_the_newest_first(store_pool: StorePool) -> None:
    store_pool.settings = PREEMPTING
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("batch", 3, priority_class=3)
    await store_pool.wait(1)
    await b.place("newer", 3, priority_class=3)
    await a.place("standard", 4)
    await a.queue(Demand("urgent", 1, blocks=2))

    await a.store.reap()

    assert await b.told() == [PreemptRequested("newer", 1)]
    assert await a.told() == []
    assert await b.store.hand_back("newer", 1, max_attempts=1, preempted=True) == Queued(0)
    assert await a.told() == [Placement("urgent", 1, "x", 1)]
