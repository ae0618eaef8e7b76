"""What functions keep between calls, when something else changes the ledger in Redis meanwhile."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from router.store.codec import settle_args
from router.store.types import Attempt, Demand, LedgerState
from tests.store_pool import RouterSide, StorePool, steered_scripts

pytestmark = pytest.mark.parametrize("redis_server", ["FCALL"], indirect=True, scope="session")


@pytest.fixture
async def a(store_pool: StorePool) -> RouterSide:
    """A router that calls functions. One of two blocks is taken by `running`; `waiting`, which needs two, was examined and
    did not fit. The functions keep it and the executor."""
    router = store_pool.router("a")
    await router.store.report(store_pool.next_report(blocks=2, sequences=2))
    await router.place("running")
    await router.queue(Demand("waiting", 2, blocks=2))
    await router.store.report(store_pool.next_report(blocks=2, sequences=3))
    return router


@pytest.mark.parametrize("way", ["EVALSHA", "FCALL"])
async def test_records_are_read_again_after_a_call_that_failed_half_way(
    a: RouterSide, store_pool: StorePool, way: str
) -> None:
    assert await store_pool.reserved_blocks() == {"x": 1}
    # The placement of `waiting` is written when the call finds that its owner's mailbox is no stream.
    await store_pool.redis.set(store_pool.keys.mailbox("a"), "no stream")
    keys, args = store_pool.keys.for_script(("a",)), ["b", *settle_args([Attempt("running", 1)])]
    settle = steered_scripts()["settle"]
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        if way == "EVALSHA":
            await settle.run(store_pool.redis, keys, args)
        else:
            await store_pool.redis.execute_command("FCALL", settle.function, len(keys), *keys, *args)  # type: ignore[no-untyped-call]
    await store_pool.redis.delete(store_pool.keys.mailbox("a"))

    assert await store_pool.reserved_blocks() == {"x": 2}
    explanation = await a.store.explain("waiting")
    assert explanation is not None
    assert explanation.state is LedgerState.PLACED
