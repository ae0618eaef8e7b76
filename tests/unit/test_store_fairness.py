"""Fair order: shares by virtual token counters, weights, limits of what runs, ageing between classes."""

from __future__ import annotations

import dataclasses

from inflight.router.ledger.types import NO_LIMITS, Attempt, Demand, Ending, Placement, TenantLimits
from tests.support.ledger.store_pool import SETTINGS, RouterSide, StorePool

QUICK_AGEING = dataclasses.replace(SETTINGS, age_ms=1000)


def asked(request_id: str, tenant: str, limits: TenantLimits = NO_LIMITS, class_: int = 2, tokens: int = 8) -> Demand:
    """A request that costs its tenant ten of its tokens: an output is at least one, and counts twice."""
    return Demand(request_id, class_, blocks=1, tenant=tenant, limits=limits, prompt_tokens=tokens)


async def serve(a: RouterSide, tenant: str, tokens: int, limits: TenantLimits = NO_LIMITS) -> None:
    """A request that comes, runs and goes while the queue is empty."""
    placement = await a.place_demand(asked(f"of {tenant} {tokens}", tenant, limits))
    await a.store.settle([Ending(placement.request_id, placement.attempt, tokens, 0)])


async def board_one_by_one(pool: StorePool, count: int) -> list[str]:
    """Who boards, when one seat is freed again and again."""
    a = pool.router("a")
    await a.store.report(pool.next_report(sequences=1))
    order = []
    for _ in range(count):
        [placement] = [event for event in await a.told() if isinstance(event, Placement)]
        order.append(placement.request_id)
        await a.store.settle([Attempt(placement.request_id, placement.attempt)])
    return order


async def fill_line(pool: StorePool, tenants: dict[str, TenantLimits], each: int) -> None:
    """Queues so many of each tenant, one tenant behind the other."""
    a = pool.router("a")
    await a.store.report(pool.next_report(sequences=8, accepting=False))
    for tenant, limits in tenants.items():
        for number in range(each):
            await a.queue(asked(f"{tenant}{number}", tenant, limits))


async def test_tenants_take_turns_however_many_one_has_in_line(store_pool: StorePool) -> None:
    await fill_line(store_pool, {"t": NO_LIMITS, "u": NO_LIMITS}, each=3)

    assert await board_one_by_one(store_pool, 6) == ["t0", "u0", "t1", "u1", "t2", "u2"]


async def test_tenant_of_twice_the_weight_gets_twice_the_turns(store_pool: StorePool) -> None:
    await fill_line(store_pool, {"t": NO_LIMITS, "u": TenantLimits(weight=2)}, each=4)

    assert await board_one_by_one(store_pool, 6) == ["t0", "u0", "u1", "t1", "u2", "u3"]


async def test_turns_are_not_saved_up_by_being_away(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    for _ in range(5):
        await store_pool.wait(75_001)
        await a.store.report(store_pool.next_report())
        await serve(a, "t", 10)

    await fill_line(store_pool, {"t": NO_LIMITS, "late": NO_LIMITS}, each=3)

    assert await board_one_by_one(store_pool, 5) == ["late0", "late1", "t0", "late2", "t1"]


async def test_tenant_runs_no_more_than_it_may(store_pool: StorePool) -> None:
    a, two = store_pool.router("a"), TenantLimits(max_running=2)
    await a.store.report(store_pool.next_report())
    await a.place_demand(asked("t0", "t", two))
    await a.place_demand(asked("t1", "t", two))

    await a.queue(asked("t2", "t", two))
    assert await a.store.submit(asked("u0", "u")) == Placement("u0", 1, "x", 1)
    await a.store.settle([Attempt("t0", 1)])

    assert await a.placed() == ["t2"]


async def test_request_that_waited_long_moves_up_a_class(store_pool: StorePool) -> None:
    store_pool.settings = QUICK_AGEING
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(accepting=False))
    await a.queue(asked("batch", "t", class_=3))
    await store_pool.wait(1000)
    await a.store.report(store_pool.next_report(accepting=False))
    await store_pool.wait(1000)
    await a.queue(asked("interactive", "t", class_=1))

    assert await board_one_by_one(store_pool, 2) == ["batch", "interactive"]
