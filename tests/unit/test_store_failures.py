"""Failures against a request: executors that died or stalled while running it, not links that broke."""

from __future__ import annotations

import pytest

from inflight.router.ledger.types import (
    CancelOutcome,
    Demand,
    HandBackRefusal,
    LedgerState,
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


async def test_report_from_before_the_death_does_not_excuse_it(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report("x", blocks=10))
    await a.place("r")
    assert await lose(a, 1) == Queued(0)
    await a.store.report(store_pool.next_report("y", blocks=20))

    await store_pool.wait(RELAY_MS)
    await b.store.report(store_pool.next_report("x", blocks=5))  # held back by its router
    await b.store.report(store_pool.next_report("y", generation=2))
    assert await lose(a, 2) is HandBackRefusal.UNDECIDED
    await store_pool.wait(1)
    await b.store.report(store_pool.next_report("x", blocks=5))  # it lives after all
    assert isinstance(await lose(a, 2), Placement)


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


async def test_executors_never_seen_again_have_died(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report("x"))
    await a.place("r")
    assert await lose(a, 1) == Queued(0)

    await a.store.report(store_pool.next_report("y"))
    assert await lose(a, 2) is HandBackRefusal.UNDECIDED
    for _ in range(6):
        await store_pool.wait(1000)
        await a.store.reap()
        assert await lose(a, 2) is HandBackRefusal.UNDECIDED
    await store_pool.wait(1000)
    await a.store.reap()
    assert await lose(a, 2) is HandBackRefusal.EXHAUSTED


async def stall(store_pool: StorePool, a: RouterSide, attempt: int, executor_id: str) -> object:
    """The engine of the executor stalls, which it reports from then on."""
    outcome = await lose(a, attempt, stood_still=True)
    await store_pool.wait(RELAY_MS + 1)
    await a.store.report(store_pool.next_report(executor_id, accepting=False))
    return outcome


async def test_engines_that_stall_and_go_on_are_no_failures(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report("x"))
    await a.place("r")
    for attempt, (stalled, other) in enumerate([("x", "y"), ("y", "x"), ("x", "y"), ("y", "x")], 1):
        assert not isinstance(await stall(store_pool, a, attempt, stalled), HandBackRefusal)
        await a.store.report(store_pool.next_report(other))
        await a.store.report(store_pool.next_report(stalled))


async def test_engines_that_stall_until_the_next_one_does_end_the_request(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report("x"))
    await a.place("r")
    assert await stall(store_pool, a, 1, "x") == Queued(0)
    await a.store.report(store_pool.next_report("y"))
    assert await stall(store_pool, a, 2, "y") is HandBackRefusal.STALLED


@pytest.mark.parametrize("num_deaths", [1, 2])
async def test_confirmed_deaths_add_up_past_a_broken_link(store_pool: StorePool, num_deaths: int) -> None:
    a = store_pool.router("a")
    generation, attempt = 1, 1
    await a.store.report(store_pool.next_report(generation=generation))
    await a.place("r")
    for _ in range(num_deaths):
        assert await lose(a, attempt, max_attempts=num_deaths + 1) == Queued(0)
        generation, attempt = generation + 1, attempt + 1
        await a.store.report(store_pool.next_report(generation=generation))

    assert await lose(a, attempt, max_attempts=num_deaths + 2) == Queued(0)  # a link only
    await store_pool.wait(RELAY_MS + 1)
    await a.store.report(store_pool.next_report(generation=generation))
    assert await lose(a, attempt + 1, max_attempts=num_deaths + 1) is HandBackRefusal.UNDECIDED
    await a.store.report(store_pool.next_report(generation=generation + 1))
    assert await lose(a, attempt + 1, max_attempts=num_deaths + 1) is HandBackRefusal.EXHAUSTED


async def test_adopted_request_keeps_what_counts_against_it(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    asked = Demand("r", 2, blocks=1, digest="as asked")
    await a.store.report(store_pool.next_report(generation=1))
    await a.place_demand(asked)
    await b.store.report(store_pool.next_report(generation=2))
    assert await b.store.submit(asked) == Placement("r", 2, "x", 2)

    assert await lose(b, 2) is HandBackRefusal.UNDECIDED
    await b.store.report(store_pool.next_report(generation=3))
    assert await lose(b, 2) is HandBackRefusal.EXHAUSTED


async def test_undecided_request_can_be_cancelled(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await a.place("r")
    assert await lose(a, 1, max_attempts=1) is HandBackRefusal.UNDECIDED
    assert await a.store.withdraw("r") == CancelOutcome(LedgerState.LOST, owner_id="a")
    assert await lose(a, 1, max_attempts=1) is HandBackRefusal.STALE


async def test_undecided_request_goes_on_for_a_router_that_is_asked_for_it(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    asked = Demand("r", 2, blocks=1, digest="as asked")
    await a.store.report(store_pool.next_report())
    await a.place_demand(asked)
    assert await lose(a, 1, max_attempts=1) is HandBackRefusal.UNDECIDED

    assert await b.store.submit(asked) == Queued(0)
    assert await lose(a, 1, max_attempts=1) is HandBackRefusal.STALE
    await b.store.report(store_pool.next_report(generation=2))
    assert await b.told() == [Placement("r", 2, "x", 2)]


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


async def test_owner_that_asks_for_a_place_again_was_not_told_of_the_lost_one(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(generation=1))
    await a.place("r")  # and the reply is lost
    await b.store.report(store_pool.next_report(generation=2))

    placement = await a.store.submit(Demand("r", 2, blocks=1, is_served=True))
    assert isinstance(placement, Placement)
    assert (placement.attempt, placement.suspect) == (2, False)
