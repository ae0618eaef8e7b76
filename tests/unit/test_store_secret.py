"""The secret that routers share by way of Redis."""

from __future__ import annotations

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.ledgers import KEY, SECRET_BYTES, learn_secret
from tests.support.ledger.store_pool import SETTINGS, StorePool


async def test_routers_share_the_secret_that_the_first_one_made(store_pool: StorePool) -> None:
    await store_pool.redis.delete(KEY)

    secret = await learn_secret(store_pool.redis, SETTINGS)

    assert len(secret) == SECRET_BYTES
    assert await learn_secret(store_pool.redis, SETTINGS) == secret


async def test_secret_that_redis_lost_is_put_back_unless_there_is_a_new_one(store_pool: StorePool) -> None:
    old = await learn_secret(store_pool.redis, SETTINGS)
    await store_pool.redis.delete(KEY)
    assert await learn_secret(store_pool.redis, SETTINGS, old) == old
    assert await learn_secret(store_pool.redis, SETTINGS) == old

    await store_pool.redis.delete(KEY)
    new = await learn_secret(store_pool.redis, SETTINGS)
    assert await learn_secret(store_pool.redis, SETTINGS, old) == new


@pytest.mark.parametrize("kind", ["text", "list"])
async def test_anything_else_in_its_place_is_replaced(store_pool: StorePool, kind: str) -> None:
    secret = await learn_secret(store_pool.redis, SETTINGS)
    await store_pool.redis.delete(KEY)
    if kind == "text":
        await store_pool.redis.set(KEY, "no secret")
    else:
        await store_pool.redis.rpush(KEY, "no secret")
    assert await learn_secret(store_pool.routers_redis, SETTINGS, secret) == secret
    assert await learn_secret(store_pool.routers_redis, SETTINGS) == secret


async def test_absent_redis_is_a_refusal() -> None:
    redis = connect_node("redis://127.0.0.1:1", SETTINGS)
    try:
        with pytest.raises(RequestError) as refusal:
            await learn_secret(redis, SETTINGS)
    finally:
        await redis.aclose()
    assert refusal.value.reason is Reason.STORE_UNAVAILABLE
