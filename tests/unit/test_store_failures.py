"""Failures against a request: executors that died or stalled while running it, not links that broke."""

from __future__ import annotations

from inflight.router.ledger.types import (
    HandBackRefusal,
    Lost,
    Placement,
    Queued,
)
from tests.support.ledger.store_pool import RouterSide, StorePool

RELAY_MS = 600  # a report may come so late


async def lose(a: RouterSide, attempt: int, *, stood_still: bool = False, max_attempts: int = 2) -> object:
    """A placement comes to nothing before its first token; no other executor has room then."""
    return await a.store.hand_back("r", attempt, max_attempts, stood_still=stood_still)


async def test_links_that_break_again_and_again_do_not_count(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await a.place("r")
    for attempt in range(1, 8):
        assert await lose(a, attempt) == Queued(0)
        await a.store.report(store_pool.next_report())


async def test_executors_that_start_anew_have_died(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(generation=1))
    await a.place("r")
    assert await lose(a, 1) == Queued(0)

    await a.store.report(store_pool.next_report(generation=2))
    assert await a.told() == [Placement("r", 2, "x", 2)]
    assert await lose(a, 2) is HandBackRefusal.UNDECIDED
    await a.store.report(store_pool.next_report(generation=3))
    assert await lose(a, 2) is HandBackRefusal.EXHAUSTED


async def stall(store_pool: StorePool, a: RouterSide, attempt: int, executor_id: str) -> object:
    """The engine of the executor stalls, which it reports from then on."""
    outcome = await lose(a, attempt, stood_still=True)
    await store_pool.wait(RELAY_MS + 1)
    await a.store.report(store_pool.next_report(executor_id, accepting=False))
    return outcome


async def test_engines_that_stall_until_the_next_one_does_end_the_request(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report("x"))
    await a.place("r")
    assert await stall(store_pool, a, 1, "x") == Queued(0)
    await a.store.report(store_pool.next_report("y"))
    assert await stall(store_pool, a, 2, "y") is HandBackRefusal.STALLED


async def test_placement_that_its_executor_was_never_told_of_is_no_failure(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report())
    await a.place("r")  # and the reply is lost
    for _ in range(3):
        await store_pool.wait(1000)
        await b.store.report(store_pool.next_report())

    assert await a.told() == [Lost("r", 1, "x", 1)]
    placement = await lose(a, 1, max_attempts=1)
    assert isinstance(placement, Placement)
    assert not placement.suspect
