"""Explanations of what a request waits for."""

from __future__ import annotations

from inflight.router.ledger.types import Demand, Explanation, WaitReason
from tests.support.ledger.store_pool import RouterSide, StorePool


async def explained(a: RouterSide, request_id: str) -> Explanation:
    explanation = await a.store.explain(request_id)
    assert explanation
    return explanation


async def reason(a: RouterSide, request_id: str) -> WaitReason | None:
    return (await explained(a, request_id)).wait_reason


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
