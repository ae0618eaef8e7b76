"""Connections to Redis, and what its failures mean to a request.

Calls share a bounded pool; the mailbox reader blocks, so it has a connection of its own. Nothing is retried here: the
scripts may be repeated, but a reply that got lost would be lost twice as late.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from common.errors import Reason, RequestError
from router.store.settings import StoreSettings

T = TypeVar("T")


def connect(url: str, settings: StoreSettings) -> Redis:
    """A client for `redis://`, `rediss://` or `unix://`; connects at the first call. Close it with `aclose`."""
    timeout_s = settings.call_timeout_ms / 1000
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=settings.max_connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        decode_responses=True,
        protocol=2,
        retry=Retry(NoBackoff(), 0),
    )
    return Redis.from_pool(pool)


def connect_reader(redis: Redis, settings: StoreSettings) -> Redis:
    """A client of one connection to the same Redis, that waits for blocking reads."""
    calls = redis.connection_pool
    options = dict(calls.connection_kwargs)
    options["socket_timeout"] = (settings.mailbox_block_ms + settings.call_timeout_ms) / 1000
    return Redis.from_pool(ConnectionPool(calls.connection_class, max_connections=1, **options))


async def answered(call: Awaitable[T], settings: StoreSettings) -> T:
    """The reply to a call, or a refusal that says the store does not answer."""
    try:
        return await call
    except (RedisError, OSError, TimeoutError) as error:
        raise unavailable(settings, f"{type(error).__name__}: {error}") from error


def unavailable(settings: StoreSettings, cause: str) -> RequestError:
    """The refusal while the store does not answer."""
    return RequestError(
        Reason.STORE_UNAVAILABLE,
        f"the admission store does not answer ({cause})",
        retry_after_ms=settings.retry_after_ms,
    )
