"""The ledger's behaviour when the clock of its Redis is set back or forward, as by NTP or by a failover.

The scripts' clock is the test's; what passes in the ledger must not depend on what the machine's clock says it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from inflight.router.ledger.types import Demand, Dropped, DropReason, HeldSequence, Lost, Placement, Queued
from tests.support.ledger.store_pool import START_MS, RouterSide, StorePool

STEPS_BACK_MS = [10_000, 60_000, 3_600_000]
SILENT_MS = 2_000
LEASE_MS = 5_000
BETWEEN_CALLS_MS = 500  # between two calls that a step falls between no time passes; and bounds hold to the next call
AUDIT_BOUND_MS = 3_000  # a grace of 2 s, and reports once a second

step_back = pytest.mark.parametrize("step_ms", STEPS_BACK_MS, ids=["10 s", "60 s", "1 h"])


async def attend(
    pool: StorePool,
    duration_ms: int,
    *,
    reporting: Sequence[str] = (),
    held: tuple[HeldSequence, ...] = (),
    routers: Sequence[str] = ("a",),
) -> None:
    """Lets time pass in tenths of a second: routers renew and reap four times a second, executors report twice."""
    for tick in range(1, duration_ms // 100 + 1):
        await pool.wait(100)
        for name in routers:
            if tick % 3 == 0:
                await pool.router(name).store.renew()
                await pool.router(name).store.reap()
        if tick % 5 == 0:
            for executor_id in reporting:
                await pool.router(routers[0]).store.report(pool.next_report(executor_id, held=held))


@pytest.fixture
async def a(store_pool: StorePool) -> RouterSide:
    """A router of a pool at a time of day from which every step back is a time of day, too, and that routers have
    attended to for longer than a lease."""
    await store_pool.set_clock(START_MS + 10 * 3_600_000)
    await attend(store_pool, LEASE_MS + 1000, reporting=["x"])
    return store_pool.router("a")


@step_back
async def test_executor_dead_at_a_step_back_gets_no_new_work_after_the_silence_limit(
    a: RouterSide, store_pool: StorePool, step_ms: int
) -> None:
    await store_pool.wait(-step_ms)

    await attend(store_pool, SILENT_MS + BETWEEN_CALLS_MS)

    assert await a.store.submit(Demand("r", 2, blocks=1)) == Queued(0)


@step_back
async def test_executor_dead_at_a_step_back_is_reaped_within_its_lease(
    a: RouterSide, store_pool: StorePool, step_ms: int
) -> None:
    await a.place("r", 2)
    await store_pool.wait(-step_ms)

    await attend(store_pool, LEASE_MS + BETWEEN_CALLS_MS)

    assert await a.told() == [Lost("r", 1, "x", 1)]
    assert await store_pool.reserved_blocks() == {}


@step_back
async def test_requests_of_a_router_dead_at_a_step_back_leave_the_line_within_its_lease(
    a: RouterSide, store_pool: StorePool, step_ms: int
) -> None:
    b = store_pool.router("b")
    await a.place("running", 10)
    await b.queue(Demand("of the dead", 2, blocks=10))
    await a.queue(Demand("of the living", 2, blocks=10))
    await store_pool.wait(-step_ms)

    held = (HeldSequence("running", 1, 10),)
    await attend(store_pool, LEASE_MS + BETWEEN_CALLS_MS, reporting=["x"], held=held)

    assert await store_pool.num_waiting() == 1
    assert await a.store.explain("of the dead") is None


@step_back
async def test_reservation_leaked_at_a_step_back_is_audited_back(
    a: RouterSide, store_pool: StorePool, step_ms: int
) -> None:
    await a.place("never told", 4)
    await store_pool.wait(-step_ms)

    await attend(store_pool, AUDIT_BOUND_MS, reporting=["x"])

    assert await store_pool.reserved_blocks() == {"x": 0}
    assert await a.told() == [Lost("never told", 1, "x", 1)]


@pytest.mark.parametrize("step_ms", [*STEPS_BACK_MS, -3_600_000], ids=["10 s", "60 s", "1 h", "forward"])
async def test_living_executors_and_routers_keep_all_they_have_across_a_step(
    a: RouterSide, store_pool: StorePool, step_ms: int
) -> None:
    b = store_pool.router("b")
    await a.place("running", 10)
    await b.queue(Demand("waiting", 2, blocks=10))
    await store_pool.wait(-step_ms)

    held = (HeldSequence("running", 1, 10),)
    await attend(store_pool, 3 * LEASE_MS, reporting=["x"], held=held, routers=["a", "b"])

    assert await a.told() == await b.told() == []
    assert await store_pool.num_waiting() == 1


@step_back
async def test_deadline_passes_as_if_the_clock_had_not_been_set_back(
    a: RouterSide, store_pool: StorePool, step_ms: int
) -> None:
    await a.place("running", 10)
    await a.queue(Demand("urgent", 2, blocks=10, deadline_ms=3_000))
    await store_pool.wait(-step_ms)

    held = (HeldSequence("running", 1, 10),)
    await attend(store_pool, 2_500, reporting=["x"], held=held)
    assert await store_pool.num_waiting() == 1
    await attend(store_pool, 1_000, reporting=["x"], held=held)
    await a.store.submit(Demand("behind", 2, blocks=10))
    await a.store.report(store_pool.next_report("y"))

    assert await a.told() == [Dropped("urgent", DropReason.EXPIRED), Placement("behind", 1, "y", 1)]


async def test_clock_that_was_forward_for_a_while_leaves_nothing_standing_still(
    a: RouterSide, store_pool: StorePool
) -> None:
    await store_pool.wait(3_600_000)  # leases begin again, as after any gap
    await attend(store_pool, LEASE_MS + 1000, reporting=["x"])
    await a.place("r", 2)
    await store_pool.wait(-3_600_000)

    await attend(store_pool, LEASE_MS + BETWEEN_CALLS_MS)

    assert await a.told() == [Lost("r", 1, "x", 1)]
