"""Connections to Redis, and the mapping of its failures to errors of requests.

Calls share a bounded pool; the mailbox reader blocks, so it has its own connection. Nothing is retried here: the
scripts may be repeated, but a retry would double the time until a lost reply is noticed. A call that failed before it
was sent (`NotSent`) has changed nothing in Redis, and its reply cannot be lost.

With Sentinels every new connection asks them for the master; a failover breaks the connections to the old master.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar, cast

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from common.cancellation import task_is_cancelled
from common.errors import Reason, RequestError
from router.store.call_pool import CallPool, NotSentError
from router.store.cluster import ClusterClient, Node
from router.store.redis_url import RedisAddress, RedisKind, parse_redis_url
from router.store.settings import StoreSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class NotSent(RequestError):
    """The error of a call that was not sent to Redis."""


class Closable(Protocol):
    """A client or a pool."""

    async def aclose(self) -> None:
        """Closes its connections."""


def connect(url: str, settings: StoreSettings) -> Redis:
    """Returns a client for a URL that `parse_redis_url` accepts. It connects at the first call. Close it with
    `close`."""
    address = parse_redis_url(url)
    options = dict(address.options) | _call_options(settings.call_timeout_ms)
    if address.kind is RedisKind.SENTINEL:
        options["connection_class"] = SentinelManagedSSLConnection if address.has_tls else SentinelManagedConnection
        options["connection_pool"] = SentinelMaster(address, settings)
    if address.kind is RedisKind.CLUSTER:
        return _as_redis(ClusterClient(address.nodes, lambda node: _connect_node(node, options, settings)))
    return _pooled(options, settings)


def connect_reader(redis: Redis, settings: StoreSettings) -> Redis:
    """Returns a client with one connection to the same Redis, for blocking reads."""
    cluster: object = redis  # which it may be, whatever `_as_redis` says
    if isinstance(cluster, ClusterClient):
        open_node = cluster.open_node
        return _as_redis(ClusterClient(cluster.nodes, lambda node: connect_reader(open_node(node), settings)))
    calls = redis.connection_pool
    options = dict(calls.connection_kwargs)
    options["socket_timeout"] = (settings.mailbox_block_ms + settings.call_timeout_ms) / 1000
    return Redis.from_pool(ConnectionPool(calls.connection_class, max_connections=1, **options))


class SentinelMaster:
    """The address of the master, for new connections. redis-py's own pool does this, too, but does not wait."""

    is_master = True
    check_connection = False

    def __init__(self, address: RedisAddress, settings: StoreSettings) -> None:
        assert address.sentinel_options is not None
        self._address = address
        self._options = {**address.sentinel_options, **_call_options(settings.call_timeout_ms), "ssl": address.has_tls}

    async def get_master_address(self) -> Node:
        """Returns host and port. Raises redis-py's `ConnectionError` while no Sentinel knows a master."""
        sentinel = Sentinel(self._address.nodes, sentinel_kwargs=self._options)  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinel.discover_master(self._address.master)
        finally:
            await close(*sentinel.sentinels)
        return host, port


async def close(*clients: Closable) -> None:
    """Closes all clients. A connection whose peer does not respond is dropped after a timeout."""
    await asyncio.gather(*(_close(client) for client in clients))


async def _close(client: Closable) -> None:
    try:
        await client.aclose()
    except (RedisError, OSError, TimeoutError) as error:
        logger.debug("a connection to Redis did not close: %s", error)


async def answered(call: Awaitable[T], settings: StoreSettings) -> T:
    """Returns the reply to a call. Raises `RequestError` if the store does not answer, `NotSent` if it was not asked.

    Raises `CancelledError` also where redis-py has swallowed it: the `asyncio.wait_for` of Python 3.11, by which it
    sends, drops a cancel that comes when the command has just been written. Without this a task that calls in a loop
    would never end.
    """
    try:
        return await call
    except NotSentError as error:
        raise unavailable(settings, str(error), NotSent) from error
    except (RedisError, OSError, TimeoutError) as error:
        raise unavailable(settings, f"{type(error).__name__}: {error}") from error
    finally:
        if task_is_cancelled():
            raise asyncio.CancelledError


def unavailable(settings: StoreSettings, cause: str, kind: type[RequestError] = RequestError) -> RequestError:
    """Returns the error for a store that does not answer. The cause may contain an address, so clients do not get
    it."""
    return kind(
        Reason.STORE_UNAVAILABLE,
        "the admission store does not answer",
        retry_after_ms=settings.retry_after_ms,
        cause=cause,
    )


def _call_options(timeout_ms: int) -> dict[str, Any]:
    """Returns the options of every connection."""
    return {
        "socket_timeout": timeout_ms / 1000,
        "socket_connect_timeout": timeout_ms / 1000,
        "decode_responses": True,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }


def _connect_node(node: Node, options: dict[str, Any], settings: StoreSettings) -> Redis:
    return _pooled({**options, "host": node[0], "port": node[1]}, settings)


def _pooled(options: dict[str, Any], settings: StoreSettings) -> Redis:
    timeout_s = settings.call_timeout_ms / 1000
    return Redis.from_pool(CallPool(settings.max_connections, timeout_s, **options))


def _as_redis(client: ClusterClient) -> Redis:
    """Casts the type: redis-py has none for the four calls that the store makes of both clients."""
    return cast(Redis, client)
