"""Reservations for likely output: learned from the lengths of earlier outputs."""

from __future__ import annotations

from inflight.router.ledger.types import Demand, Ending
from tests.support.ledger.store_pool import RouterSide, StorePool

MEDIAN = 0.5


def asked(request_id: str, tenant: str = "t", output: int = 0) -> Demand:
    """A prompt of one block, and up to 64 more."""
    return Demand(request_id, 2, blocks=65, tenant=tenant, prompt_tokens=16, max_tokens=1024, output_tokens=output)


async def overcommitting(pool: StorePool, quantile: float = MEDIAN) -> RouterSide:
    a = pool.router("a")
    await a.store.report(pool.next_report(blocks=1000, sequences=1000, reserve_quantile=quantile))
    return a


async def complete(
    a: RouterSide, name: str, output: int, count: int, tenant: str = "t", by_itself: bool = True
) -> None:
    """So many requests of the tenant end with as much output."""
    for number in range(count):
        request_id = f"{name} {number}"
        await a.place_demand(asked(request_id, tenant))
        await a.store.settle([Ending(request_id, 1, 16, output, by_itself)])


async def test_everything_is_reserved_until_enough_is_known(store_pool: StorePool) -> None:
    a = await overcommitting(store_pool)
    await complete(a, "short", 128, 31)

    assert (await a.place_demand(asked("r31"))).blocks == 65
    await a.store.settle([Ending("r31", 1, 16, 128, by_itself=True)])
    assert (await a.place_demand(asked("r32"))).blocks == 1 + 8 + 1  # prompt, 128 tokens, one in hand


async def test_quantile_of_the_outputs_is_reserved(store_pool: StorePool) -> None:
    a = await overcommitting(store_pool, quantile=0.5)
    await complete(a, "short", 128, 24)
    await complete(a, "long", 512, 16)

    assert (await a.place_demand(asked("half"))).blocks == 1 + 8 + 1
    await a.store.report(store_pool.next_report(blocks=1000, sequences=1000, reserve_quantile=0.9))
    assert (await a.place_demand(asked("most"))).blocks == 1 + 32 + 1
    await a.store.report(store_pool.next_report(blocks=1000, sequences=1000, reserve_quantile=1))
    assert (await a.place_demand(asked("all"))).blocks == 65
