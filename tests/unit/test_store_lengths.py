"""Reservations for likely output: learned from the lengths of earlier outputs."""

from __future__ import annotations

from inflight.router.ledger.types import Demand, Ending, HeldSequence
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


async def test_tenant_of_which_little_is_known_is_taken_for_an_average_one(store_pool: StorePool) -> None:
    a = await overcommitting(store_pool)
    await complete(a, "short", 128, 40, tenant="t")
    await complete(a, "long", 512, 31, tenant="u")

    assert (await a.place_demand(asked("of u", "u"))).blocks == 1 + 8 + 1
    await a.store.settle([Ending("of u", 1, 16, 512, by_itself=True)])
    assert (await a.place_demand(asked("of u again", "u"))).blocks == 1 + 32 + 1


async def test_output_so_far_counts_in_what_is_still_likely(store_pool: StorePool) -> None:
    a = await overcommitting(store_pool)
    await complete(a, "short", 128, 30)
    await complete(a, "long", 512, 10)

    assert (await a.place_demand(asked("begun", output=200))).blocks == 1 + 32 + 1
    assert (await a.place_demand(asked("beyond all", output=900))).blocks == 65


async def test_endings_by_cancel_or_of_unknown_usage_teach_nothing(store_pool: StorePool) -> None:
    a = await overcommitting(store_pool)
    await complete(a, "cut", 1, 40, by_itself=False)

    assert (await a.place_demand(asked("r"))).blocks == 65


async def test_what_only_an_executor_knew_of_teaches_nothing(store_pool: StorePool) -> None:
    a = await overcommitting(store_pool)
    held = (HeldSequence("found", 1, 4),)
    await store_pool.wait(1000)
    await a.store.report(store_pool.next_report(blocks=99, sequences=9, reserve_quantile=MEDIAN, held=held))

    assert await a.store.settle([Ending("found", 1, 0, 700, by_itself=True)]) == 1

    assert await store_pool.redis.hlen(store_pool.keys.key("lengths")) == 0


async def test_nothing_is_learned_where_everything_is_reserved(store_pool: StorePool) -> None:
    a = await overcommitting(store_pool, quantile=1.0)
    await complete(a, "short", 128, 3)

    assert await store_pool.redis.hlen(store_pool.keys.key("lengths")) == 0


async def test_old_lengths_count_less_and_less(store_pool: StorePool) -> None:
    a = await overcommitting(store_pool)
    await complete(a, "old", 128, 40)
    await complete(a, "new", 512, 60)

    assert (await a.place_demand(asked("r"))).blocks == 1 + 32 + 1
