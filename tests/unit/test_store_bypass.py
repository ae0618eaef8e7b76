"""Requests that do not fit: which may overtake them, what is kept for them, and what is preempted for them."""

from __future__ import annotations

import dataclasses

from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    Attempt,
    Demand,
    Dropped,
    DropReason,
    Placement,
    PreemptRequested,
    Queued,
)
from tests.support.ledger.store_pool import SETTINGS, RouterSide, StorePool

TWO_PASS = dataclasses.replace(SETTINGS, max_bypass=2)
NO_BYPASS = dataclasses.replace(SETTINGS, max_bypass=0)
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


async def test_higher_class_uses_an_executor_that_is_kept_only_where_no_other_has_room(store_pool: StorePool) -> None:
    a = await pass_twice(store_pool)
    await a.store.report(store_pool.next_report("y", blocks=7))
    assert await a.told() == [Placement("third", 1, "y", 1)]

    assert (await a.place("urgent", 2, priority_class=1)).executor_id == "y"
    assert (await a.place("more urgent", 3, priority_class=1)).executor_id == "x"


async def test_no_more_than_four_are_passed_at_a_time(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("running", 6)
    for number in range(5):
        await a.queue(Demand(f"large{number}", 2, blocks=5))

    await a.queue(Demand("small", 2, blocks=1))
    await a.store.cancel("large0")

    assert await a.placed() == ["small"]


async def test_claim_moves_up_with_its_request(store_pool: StorePool) -> None:
    a = await pass_twice(store_pool, dataclasses.replace(TWO_PASS, age_ms=1000), class_=3)
    await store_pool.wait(1000)
    await a.store.report(store_pool.next_report("x", blocks=16))

    assert await a.store.submit(Demand("of its class by now", 2, blocks=1)) == Queued(2)


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


async def test_no_request_gives_way_to_its_own_class_or_in_vain_or_unless_it_is_on(store_pool: StorePool) -> None:
    store_pool.settings = PREEMPTING
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("batch", 3, priority_class=3)
    await a.place("interactive", 5, priority_class=1)
    await a.queue(Demand("peer", 3, blocks=3))
    await a.queue(Demand("too large", 1, blocks=6))

    await a.store.reap()

    assert await a.told() == []


async def test_no_request_gives_way_where_the_room_is_kept_for_another(store_pool: StorePool) -> None:
    a = await pass_twice(store_pool, dataclasses.replace(TWO_PASS, preempt_for_priority=True), class_=3)

    await a.queue(Demand("urgent", 1, blocks=12))
    await a.store.reap()

    assert await a.told() == []


async def test_who_asked_and_was_dropped_asks_no_more(store_pool: StorePool) -> None:
    store_pool.settings = PREEMPTING
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running")
    await a.queue(Demand("urgent", 1, blocks=1, deadline_ms=100))
    await store_pool.wait(101)

    await a.store.reap()

    assert await a.told() == [Dropped("urgent", DropReason.EXPIRED)]


async def test_those_that_come_back_to_the_line_do_not_hold_up_whom_room_is_kept_for(store_pool: StorePool) -> None:
    """They stand ahead of it, and there is no executor but the one that is kept."""
    a = store_pool.router("a", NO_BYPASS)
    await a.store.report(store_pool.next_report())
    for number in range(5):
        await a.place(f"r{number}", 2, priority_class=1)
    await a.queue(Demand("large", 1, blocks=9))
    await a.store.reap()
    for number in range(5):
        await a.store.hand_back(f"r{number}", 1, max_attempts=2, rejected=True)
    await a.store.report(store_pool.next_report())

    assert await a.placed() == ["large"]
    await a.store.settle([Attempt("large", 1)])
    assert len(await a.placed()) == 5
