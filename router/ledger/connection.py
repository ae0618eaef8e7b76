"""Connections to Redis, turns of calls on them, and the mapping of Redis failures to request errors.

Calls share a bounded connection pool and take `Turns` in it. The mailbox reader blocks, so it has its own connection.
Nothing is retried here. Scripts are safe to repeat, but a retry would double the time until a lost reply is noticed. A
call that failed before it was sent (`NotSent`) has changed nothing in Redis, and its reply cannot be lost.

With Sentinels, every new connection asks them for the master. A failover breaks the connections to the old master.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from inflight.common.cancellation import task_is_cancelled
from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.clients import CallPool, ClusterClient, Node, NotSentError
from inflight.router.ledger.redis_url import RedisAddress, RedisKind, parse_redis_url
from inflight.router.ledger.settings import LedgerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class NotSent(RequestError):
    """The error of a call that was not sent to Redis."""


class Closable(Protocol):
    """A client or a pool."""

    async def aclose(self) -> None:
        """Closes its connections."""


def connect(url: str, settings: LedgerSettings) -> Redis:
    """Returns a client for a URL that `parse_redis_url` accepts. The client connects at the first call. The caller
    closes it with `close`."""
    address = parse_redis_url(url)
    options = dict(address.options) | _call_options(settings.call_timeout_ms)
    if address.kind is RedisKind.SENTINEL:
        options["connection_class"] = SentinelManagedSSLConnection if address.has_tls else SentinelManagedConnection
        options["connection_pool"] = SentinelMaster(address, settings)
    if address.kind is RedisKind.CLUSTER:
        return _as_redis(ClusterClient(address.nodes, lambda node: _connect_node(node, options, settings)))
    return _pooled(options, settings)


def connect_reader(redis: Redis, settings: LedgerSettings) -> Redis:
    """Returns a client with one connection to the same Redis, for blocking reads."""
    cluster: object = redis  # may be a `ClusterClient`, cast by `_as_redis`
    if isinstance(cluster, ClusterClient):
        open_node = cluster.open_node
        return _as_redis(ClusterClient(cluster.nodes, lambda node: connect_reader(open_node(node), settings)))
    calls = redis.connection_pool
    options = dict(calls.connection_kwargs)
    options["socket_timeout"] = (settings.mailbox_block_ms + settings.call_timeout_ms) / 1000
    return Redis.from_pool(ConnectionPool(calls.connection_class, max_connections=1, **options))


class SentinelMaster:
    """The address of the master, for new connections. redis-py's own Sentinel pool is not used: it does not wait for a
    free connection."""

    is_master = True
    check_connection = False

    def __init__(self, address: RedisAddress, settings: LedgerSettings) -> None:
        assert address.sentinel_options is not None
        self._address = address
        self._options = {**address.sentinel_options, **_call_options(settings.call_timeout_ms), "ssl": address.has_tls}

    async def get_master_address(self) -> Node:
        """Returns the master's host and port. Raises redis-py's `ConnectionError` while no Sentinel knows a master."""
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


async def answered(call: Awaitable[T], settings: LedgerSettings) -> T:
    """Returns the reply to a call. Raises `RequestError` if Redis does not answer, `NotSent` if the call was not
    sent.

    Also raises `CancelledError` if redis-py has swallowed it. redis-py sends with `asyncio.wait_for`, which in Python
    3.11 drops a cancel that arrives just after the command was written. Without this check, a task that calls in a loop
    would never end.
    """
    try:
        return await call
    except NotSentError as error:
        raise unavailable(settings, str(error), NotSent) from error
    except (RedisError, OSError, TimeoutError, UnicodeDecodeError) as error:
        raise unavailable(settings, f"{type(error).__name__}: {error}") from error
    finally:
        if task_is_cancelled():
            raise asyncio.CancelledError


def unavailable(settings: LedgerSettings, cause: str, kind: type[RequestError] = RequestError) -> RequestError:
    """Returns the error for a store that does not answer. `cause` may contain an address, so it is not sent to
    clients."""
    return kind(
        Reason.STORE_UNAVAILABLE,
        "the admission store does not answer",
        retry_after_ms=settings.retry_after_ms,
        cause=cause,
    )


@dataclass(frozen=True, slots=True)
class _Waiter:
    turn: asyncio.Future[None]
    since_s: float


class Turns:
    """Turns of the calls that requests cause: submits, cancels, hand-backs, queries. All pools of a Redis client share
    them.

    These calls use at most half of the connections. The other half stays free for leases, reports and settles. Kinds of
    calls alternate, and calls of one kind are served in order of arrival, so a thousand cancels delay a submit by one
    cancel. A turn has no deadline while Redis answers. If Redis has answered no call for the timeout of a call, the
    calls that have waited at least that long are refused.
    """

    def __init__(self, settings: LedgerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._num_free = max(1, settings.max_connections // 2)
        # Waiters by kind. The first kind gets the next turn. A cancelled waiter stays until its turn comes.
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._heard_s = clock()

    @asynccontextmanager
    async def turn(self, kind: str) -> AsyncIterator[None]:
        """Waits for a turn and holds it. Raises `NotSent` if Redis does not answer."""
        await self._take(kind)
        try:
            yield
        finally:
            self._pass_on()

    def heard(self) -> None:
        """Records that Redis has answered a call."""
        self._heard_s = self._clock()

    def missed(self) -> None:
        """Records a failed call. If Redis has answered no call for the timeout of a call, refuses the calls that have
        waited at least that long."""
        silent_since_s = self._clock() - self._settings.call_timeout_ms / 1000
        if self._heard_s > silent_since_s:
            return
        for kind, waiting in tuple(self._waiting.items()):
            while waiting and waiting[0].since_s <= silent_since_s:
                turn = waiting.popleft().turn
                if not turn.done():
                    turn.set_exception(unavailable(self._settings, "no turn: earlier calls have no answer", NotSent))
            if not waiting:
                del self._waiting[kind]

    async def _take(self, kind: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), self._clock())
        self._waiting.setdefault(kind, deque()).append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._pass_on()  # the turn was granted before the cancel arrived
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            kind, waiting = next(iter(self._waiting.items()))
            del self._waiting[kind]
            turn = waiting.popleft().turn
            if waiting:
                self._waiting[kind] = waiting  # behind the other kinds
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


def _call_options(timeout_ms: int) -> dict[str, Any]:
    """Returns the options of every connection."""
    return {
        "socket_timeout": timeout_ms / 1000,
        "socket_connect_timeout": timeout_ms / 1000,
        "decode_responses": True,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }


def _connect_node(node: Node, options: dict[str, Any], settings: LedgerSettings) -> Redis:
    return _pooled({**options, "host": node[0], "port": node[1]}, settings)


def _pooled(options: dict[str, Any], settings: LedgerSettings) -> Redis:
    timeout_s = settings.call_timeout_ms / 1000
    return Redis.from_pool(CallPool(settings.max_connections, timeout_s, **options))


def _as_redis(client: ClusterClient) -> Redis:
    """Casts a cluster client to `Redis`. redis-py has no common type for the methods that the ledger calls on both."""
    return cast(Redis, client)
