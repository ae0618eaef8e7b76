"""The waiting requests of each tenant in a snapshot."""

from __future__ import annotations

from inflight.router.ledger.types import Demand, TenantLimits, TenantQueue
from tests.support.ledger.store_pool import StorePool


def demand(request_id: str, tenant: str, priority_class: int = 2, prompt_tokens: int = 3) -> Demand:
    return Demand(
        request_id,
        priority_class,
        10,
        tenant=tenant,
        prompt_tokens=prompt_tokens,
        max_tokens=5,
        limits=TenantLimits(max_running=1),
    )


async def test_a_snapshot_tells_what_each_tenant_has_waiting_by_class(store_pool: StorePool) -> None:
    router = store_pool.router("a")
    await router.store.report(store_pool.next_report(blocks=10))
    await router.place_demand(demand("runs", "ann"))
    await router.queue(demand("one", "ann"))
    await store_pool.wait(400)
    for one in (demand("two", "ann"), demand("urgent", "ann", 1, 7), demand("other", "bob"), demand("late", "bob", 3)):
        await router.queue(one)
    await store_pool.wait(100)

    snapshot = await router.store.snapshot(10)

    # Of ann, who runs all that it may, too.
    assert snapshot.tenant_queues == (
        TenantQueue(1, "ann", 1, 12, 100),
        TenantQueue(2, "ann", 2, 16, 500),
        TenantQueue(2, "bob", 1, 8, 100),
        TenantQueue(3, "bob", 1, 8, 100),
    )
    for number, queue in enumerate(snapshot.queues, start=1):
        of_class = [one for one in snapshot.tenant_queues if one.priority_class == number]
        assert queue.num_requests == sum(one.num_requests for one in of_class)
        assert queue.num_tokens == sum(one.num_tokens for one in of_class)


async def test_a_snapshot_tells_of_no_more_queues_of_tenants_than_asked_for(store_pool: StorePool) -> None:
    router = store_pool.router("a")
    await router.store.report(store_pool.next_report(blocks=10))
    await router.place_demand(demand("runs", "someone"))
    for number in range(5):
        await router.queue(demand(f"r{number}", f"tenant-{number}"))

    assert [one.tenant for one in (await router.store.snapshot(3)).tenant_queues] == [
        "tenant-0",
        "tenant-1",
        "tenant-2",
    ]
    assert (await router.store.snapshot()).tenant_queues == ()
