"""A router asks which of its waiting requests the ledger has lost, as when Redis lost its newest writes."""

from __future__ import annotations

import pytest

from inflight.router.ledger.types import Attempt, Demand, HeldSequence, Placement, Queued
from tests.support.ledger.store_pool import RouterSide, StorePool


@pytest.fixture
async def a(store_pool: StorePool) -> RouterSide:
    """A router of a pool whose only seat is taken by the request `running`."""
    router = store_pool.router("a")
    await router.store.report(store_pool.next_report(sequences=1))
    await router.place("running")
    return router


async def forgotten(pool: StorePool, *waiting: tuple[str, int], router_id: str = "a") -> set[str]:
    store = pool.router(router_id).store
    return set(await store.find_forgotten([Attempt(*one) for one in waiting]))


async def test_request_that_was_submitted_in_the_lost_interval_is_forgotten_and_keeps_no_one_waiting(
    a: RouterSide,
    store_pool: StorePool,
) -> None:
    await a.queue(Demand("before", 2, blocks=1))
    await store_pool.remember()
    await a.queue(Demand("lost", 2, blocks=1))
    await store_pool.roll_back()

    assert await forgotten(store_pool, ("before", 0), ("lost", 0)) == {"lost"}
    assert await a.store.submit(Demand("lost", 2, blocks=1, is_served=True)) == Queued(1)
    assert await forgotten(store_pool, ("before", 0), ("lost", 0)) == set()


async def test_request_that_was_handed_back_in_the_lost_interval_is_forgotten(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await a.place("r", 2)
    await store_pool.remember()
    assert await a.store.hand_back("r", 1, max_attempts=3, rejected=True) == Queued(0)
    assert await forgotten(store_pool, ("r", 1)) == set()
    await store_pool.roll_back()

    assert await forgotten(store_pool, ("r", 1)) == {"r"}
    # The ledger says how the request stands: placed as before, which the router hands back.
    assert await a.store.submit(Demand("r", 2, blocks=2, last_attempt=1, is_served=True)) == Placement("r", 1, "x", 1)
    assert await a.store.hand_back("r", 1, max_attempts=3, rejected=True) == Queued(0)


async def test_request_placed_in_the_lost_interval_is_found_by_the_report_of_its_executor(
    a: RouterSide,
    store_pool: StorePool,
) -> None:
    await a.queue(Demand("r", 2, blocks=3))
    await store_pool.remember()
    await a.store.settle([Attempt("running", 1)])
    assert await a.told() == [Placement("r", 1, "x", 1)]
    await store_pool.roll_back()

    # The executor holds what the ledger has in line, and no longer what the ledger has placed there.
    for _ in range(3):
        await store_pool.wait(1000)
        await a.store.report(store_pool.next_report(sequences=1, held=(HeldSequence("r", 1, 3),)))

    assert await store_pool.num_waiting() == 0
    assert await store_pool.reserved_blocks() == {"x": 3}
    assert await a.store.settle([Attempt("r", 1)]) == 1
    assert await store_pool.reserved_blocks() == {"x": 0}
