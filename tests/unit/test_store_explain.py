"""Explanations of what a request waits for."""

from __future__ import annotations

import dataclasses

from inflight.router.ledger.types import Attempt, Demand, Explanation, LedgerState, TenantLimits, WaitReason
from tests.support.ledger.store_pool import SETTINGS, RouterSide, StorePool


async def explained(a: RouterSide, request_id: str) -> Explanation:
    explanation = await a.store.explain(request_id)
    assert explanation
    return explanation


async def reason(a: RouterSide, request_id: str) -> WaitReason | None:
    return (await explained(a, request_id)).wait_reason


async def test_blocks_seat_and_executor_are_waited_for(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("running", 6)
    await a.queue(Demand("r", 2, blocks=5))

    assert await reason(a, "r") is WaitReason.BLOCKS
    await a.store.report(store_pool.next_report(blocks=10, sequences=1))
    assert await reason(a, "r") is WaitReason.SEAT
    await store_pool.wait(2001)
    assert await reason(a, "r") is WaitReason.EXECUTOR


async def test_order_fairness_and_class_are_waited_for(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place_demand(Demand("running", 2, 1, tenant="served", prompt_tokens=10))
    await a.queue(Demand("first", 2, 1, tenant="new"))
    await a.queue(Demand("behind", 2, 1, tenant="new"))
    await a.queue(Demand("of the served", 2, 1, tenant="served"))
    await a.queue(Demand("batch", 3, 1, tenant="new"))

    assert await reason(a, "first") is WaitReason.SEAT
    assert await reason(a, "behind") is WaitReason.ORDER
    assert await reason(a, "of the served") is WaitReason.FAIRNESS
    assert await reason(a, "batch") is WaitReason.CLASS
    positions = [(await explained(a, name)).position for name in ("first", "behind", "of the served", "batch")]
    assert positions == [1, 2, 1, 3]  # those ahead in its line and its class, and a turn each of the other tenant


async def test_limit_of_the_tenant_is_waited_for(store_pool: StorePool) -> None:
    a, one = store_pool.router("a"), TenantLimits(max_running=1)
    await a.store.report(store_pool.next_report())
    await a.place_demand(Demand("running", 2, 1, tenant="t", limits=one))
    await a.queue(Demand("r", 1, 1, tenant="t", limits=one))

    assert await reason(a, "r") is WaitReason.TENANT_LIMIT
    await a.queue(Demand("other of it", 2, 1, tenant="t", limits=one))
    assert await reason(a, "other of it") is WaitReason.TENANT_LIMIT


async def test_room_kept_for_another_is_waited_for(store_pool: StorePool) -> None:
    a = store_pool.router("a", dataclasses.replace(SETTINGS, max_bypass=1))
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place_demand(Demand("running", 2, 4, tenant="t", prompt_tokens=10))
    await a.queue(Demand("large", 2, blocks=8, tenant="t"))
    await a.place_demand(Demand("passing", 2, 1, tenant="t"))
    await a.queue(Demand("small", 2, blocks=1, tenant="v"))

    assert await reason(a, "small") is WaitReason.HELD_LINE
    assert (await explained(a, "large")).times_passed == 1


async def test_figures_of_who_waits_and_who_runs(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("running", 6)
    await a.queue(Demand("r", 3, blocks=5))

    assert await a.store.explain("running") == Explanation(
        LedgerState.PLACED, 1, 2, "default", "x", needed_blocks=6, available_blocks=4
    )
    assert await a.store.explain("r") == Explanation(
        LedgerState.WAITING,
        priority_class=3,
        tenant="default",
        wait_reason=WaitReason.BLOCKS,
        needed_blocks=5,
        available_blocks=4,
    )


async def test_budget_that_shrank_below_what_is_reserved_leaves_nothing_available(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("running", 6)

    await a.store.report(store_pool.next_report(blocks=5))

    assert (await explained(a, "running")).available_blocks == 0


async def test_lost_request_is_on_no_executor(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(generation=1))
    await a.place("r")
    await a.store.report(store_pool.next_report(generation=2))

    explanation = await explained(a, "r")

    assert (explanation.state, explanation.executor_id) == (LedgerState.LOST, None)


async def test_request_that_ended_and_one_never_heard_of(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await a.place("r")
    await a.store.settle([Attempt("r", 1)])

    assert await a.store.explain("r") == Explanation(LedgerState.ENDED)
    assert await a.store.explain("never seen") is None
