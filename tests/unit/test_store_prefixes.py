"""Placement by cached prefixes, within a bound on how much fuller the chosen executor may be."""

from __future__ import annotations

from router.store.types import Demand
from tests.store_pool import RouterSide, StorePool


async def place(a: RouterSide, request_id: str, prefixes: tuple[str, ...] = (), blocks: int = 1) -> str:
    """The executor that gets it."""
    return (await a.place_demand(Demand(request_id, 2, blocks, prefix_hashes=prefixes))).executor_id


async def two_executors(pool: StorePool) -> RouterSide:
    """x, which is a little larger and so the first choice, and y."""
    a = pool.router("a")
    await a.store.report(pool.next_report("x", blocks=21))
    await a.store.report(pool.next_report("y", blocks=20))
    return a


async def test_prompt_goes_where_its_beginning_is_held(store_pool: StorePool) -> None:
    a = await two_executors(store_pool)
    assert await place(a, "first turn", ("p",), blocks=3) == "x"

    assert await place(a, "other") == "y"
    assert await place(a, "second turn", ("p", "pq")) == "x"


async def test_longest_beginning_counts(store_pool: StorePool) -> None:
    a = await two_executors(store_pool)
    assert await place(a, "short", ("p",), blocks=2) == "x"
    assert await place(a, "long", ("q", "pq"), blocks=1) == "y"
    assert await place(a, "in between", ("q",), blocks=1) == "y"

    assert await place(a, "both", ("p", "pq")) == "y"


async def test_holder_that_is_much_fuller_is_passed_over_and_the_other_becomes_the_holder(
    store_pool: StorePool,
) -> None:
    a = await two_executors(store_pool)
    assert await place(a, "first turn", ("p",), blocks=6) == "x"

    assert await place(a, "second turn", ("p",)) == "y"
    assert await place(a, "third turn", ("p",)) == "y"


async def test_holder_without_room_or_without_reports_is_passed_over(store_pool: StorePool) -> None:
    a = await two_executors(store_pool)
    assert await place(a, "first turn", ("p",), blocks=2) == "x"

    await a.store.report(store_pool.next_report("x", blocks=21, sequences=1))
    assert await place(a, "second turn", ("p",)) == "y"
    await a.store.report(store_pool.next_report("x", blocks=21))
    await store_pool.wait(2001)
    await a.store.report(store_pool.next_report("x", blocks=21))
    assert await place(a, "third turn", ("p",)) == "x"


async def test_beginnings_outlast_the_requests_that_brought_them(store_pool: StorePool) -> None:
    a = await two_executors(store_pool)
    assert await place(a, "first turn", ("p",), blocks=4) == "x"
    await a.store.cancel("first turn")
    assert await place(a, "other", blocks=2) == "y"

    assert await place(a, "second turn", ("p",)) == "x"
