"""What functions keep between calls, when something else changes the ledger in Redis meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from redis.exceptions import ResponseError

from inflight.router.ledger.codec import settle_args
from inflight.router.ledger.types import Attempt, Demand, Ending, LedgerState, Queued, TenantLimits
from tests.support.ledger.store_pool import RouterSide, StorePool, steered_scripts


@pytest.fixture
async def a(store_pool: StorePool) -> RouterSide:
    """A router that calls functions. One of two blocks is taken by `running`; `waiting`, which needs two, was examined
    and did not fit. The functions keep it and the executor."""
    router = store_pool.router("a")
    await router.store.report(store_pool.next_report(blocks=2, sequences=2))
    await router.place("running")
    await router.queue(Demand("waiting", 2, blocks=2))
    await router.store.report(store_pool.next_report(blocks=2, sequences=3))
    return router


async def test_records_are_read_again_after_a_call_that_failed_half_way(a: RouterSide, store_pool: StorePool) -> None:
    assert await store_pool.reserved_blocks() == {"x": 1}
    # The placement of `waiting` is written when the call finds that its owner's mailbox is no stream.
    await store_pool.redis.set(store_pool.keys.mailbox("a"), "no stream")
    keys, args = store_pool.keys.for_script(("a",)), ["b", *settle_args([Attempt("running", 1)])]
    settle = ("FCALL", steered_scripts().function("settle"), len(keys))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await store_pool.redis.execute_command(*settle, *keys, *args)  # type: ignore[no-untyped-call]
    await store_pool.redis.delete(store_pool.keys.mailbox("a"))

    assert await store_pool.reserved_blocks() == {"x": 2}
    explanation = await a.store.explain("waiting")
    assert explanation is not None
    assert explanation.state is LedgerState.PLACED


async def test_tenants_that_are_kept_outlive_the_loss_of_their_key(store_pool: StorePool) -> None:
    router = store_pool.router("a")
    limits = TenantLimits(max_running=1)
    await router.store.report(store_pool.next_report())
    await router.place_demand(Demand("first", 2, blocks=1, limits=limits))
    await store_pool.redis.delete(store_pool.keys.key("tenants"))

    assert await router.store.submit(Demand("second", 2, blocks=1, limits=limits)) == Queued(0)
    assert await store_pool.redis.hlen(store_pool.keys.key("tenants")) == 1
    await router.store.settle([Attempt("first", 1)])
    assert await router.placed() == ["second"]


async def test_lengths_that_are_kept_outlive_the_loss_of_their_key(store_pool: StorePool) -> None:
    router, long = store_pool.router("a"), Demand("r", 2, blocks=65, prompt_tokens=16, max_tokens=1024)
    await router.store.report(store_pool.next_report(blocks=1000, sequences=1000, reserve_quantile=0.5))
    for number in range(33):
        await router.place_demand(replace(long, request_id=f"{number}"))
        await router.store.settle([Ending(f"{number}", 1, 16, 128, by_itself=True)])
    await store_pool.redis.delete(store_pool.keys.key("lengths"))

    assert (await router.place_demand(long)).blocks == 1 + 8 + 1  # prompt, 128 tokens, one in hand
    await router.store.settle([Ending("r", 1, 16, 128, by_itself=True)])
    assert await store_pool.redis.hlen(store_pool.keys.key("lengths")) == 2


@pytest.mark.parametrize("num_behind", [1, 12], ids=["whole-queue", "more-than-is-kept"])
async def test_requests_that_come_after_a_queue_was_read_get_seats_in_order(
    store_pool: StorePool, num_behind: int
) -> None:
    router = store_pool.router("a")
    await router.store.report(store_pool.next_report(sequences=1))
    await router.place("running")
    behind = [f"{number:02}" for number in range(num_behind)]
    for one in ("first", *behind):
        await router.store.submit(Demand(one, 2, blocks=1))
    await router.store.settle([Attempt("running", 1)])  # reads the queue
    assert await router.placed() == ["first"]

    for late in (
        Demand("last", 2, blocks=1),
        Demand("due", 2, blocks=1, deadline_ms=50_000),
        Demand("of a higher class", 1, blocks=1),
    ):
        await router.store.submit(late)
    order = ["of a higher class", "due", *behind, "last"]
    for before, after in zip(["first", *order], order, strict=False):
        await router.store.settle([Attempt(before, 1)])
        assert await router.placed() == [after]
