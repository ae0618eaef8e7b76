"""A request under which an executor was lost is a suspect: seated alone of its kind, and cleared by a token."""

from __future__ import annotations

from inflight.router.ledger.types import Explanation, Placement, Queued, WaitReason
from tests.support.ledger.store_pool import RouterSide, StorePool


async def suspects(store_pool: StorePool, router: RouterSide, *names: str, reporting: tuple[str, ...] = ("x",)) -> None:
    """Places these, has their engine stand still, and executors report again that could take all of them."""
    for name in names:
        await router.place(name)
    for name in names:
        assert isinstance(await router.store.hand_back(name, 1, max_attempts=2, stood_still=True), Queued)
    for executor_id in reporting:
        await router.store.report(store_pool.next_report(executor_id))


async def test_executor_seats_one_suspect_at_a_time(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await suspects(store_pool, a, "r1", "r2", "r3")

    (placement,) = await a.told()
    assert isinstance(placement, Placement)
    assert placement == Placement("r1", 2, "x", 1)
    assert placement.suspect
    explanation = await a.store.explain("r2")
    assert isinstance(explanation, Explanation)
    assert explanation.wait_reason is WaitReason.SEAT
    assert await a.place("innocent", priority_class=1) == Placement("innocent", 1, "x", 1)


async def test_token_clears_the_suspect_and_lets_the_next_suspect_board(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await suspects(store_pool, a, "r1", "r2")
    await a.told()

    await a.store.clear_suspect("r1", 1)  # not this placement
    assert await a.told() == []
    await a.store.clear_suspect("r1", 2)
    await a.store.clear_suspect("r1", 2)
    assert await a.placed() == ["r2"]
    assert isinstance(await a.store.hand_back("r1", 2, max_attempts=2), Queued)  # losses count from zero


async def test_suspect_goes_where_no_other_is(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report("x", blocks=90))
    await suspects(store_pool, a, "r1", "r2", reporting=())
    await a.store.report(store_pool.next_report("x", blocks=90))
    await a.store.report(store_pool.next_report("y", blocks=10))

    assert await a.told() == [Placement("r1", 2, "x", 1), Placement("r2", 2, "y", 1)]
