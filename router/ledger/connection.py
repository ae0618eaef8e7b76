"""Connections to Redis, and the mapping of its failures to request errors.

Calls share a bounded connection pool. The mailbox reader blocks, so it has its own connection. Nothing is retried here.
Scripts are safe to repeat, but a retry would double the time until a lost reply is noticed. A call that failed before
it was sent (`NotSent`) has changed nothing in Redis, and its reply cannot be lost. After a pool is closed no connection
stays open, even if calls were in progress.

With Sentinels, every new connection asks them for the master. A failover breaks the connections to the old master.

Every call concerns one pool, and all keys of a pool are in one hash slot, on one node. So the client of a cluster
keeps no map of the cluster. A call goes to the node that answered the last call for the same slot. The first call goes
to a seed node. A node that does not have the slot redirects to the node that has it (MOVED). redis-py's own cluster
client is not used: it sends more commands, refuses calls beyond its connection limit instead of queueing them, and
leaves connections open when nodes leave the cluster.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelManagedConnection, SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from inflight.common.cancellation import task_is_cancelled
from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.redis_url import RedisAddress, RedisKind, parse_redis_url
from inflight.router.ledger.settings import LedgerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

Node = tuple[str, int]

MAX_HOPS = 16


class NotSentError(RedisConnectionError):
    """Raised if there is no connection for a command: none was free in time, or none could be opened. The text contains
    the cause."""


class CallPool(BlockingConnectionPool):
    """redis-py's blocking pool. It raises `NotSentError` instead of redis-py's errors, and closing it ends calls in
    progress."""

    _is_closed = False

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        """Returns a connection that is ready for a command. Raises `NotSentError`."""
        self._check_open()
        try:
            connection = await super().get_connection()  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            raise NotSentError(f"{type(error).__name__}: {error}") from error
        try:
            self._check_open()  # the pool may have been closed while the connection was opened
        except NotSentError:
            await self.release(connection)
            raise
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotSentError("the connections are closed")

    async def release(self, connection: Any) -> None:
        """Puts a connection back into the pool. Disconnects it if the pool is closed."""
        if self._is_closed:
            await connection.disconnect(nowait=True)
        await super().release(connection)

    async def aclose(self) -> None:
        """Closes all connections. Calls in progress fail."""
        self._is_closed = True
        await super().aclose()


class CommandClient(Protocol):
    """The part of a client that sends commands."""

    async def execute_command(self, *args: Any, keys: Sequence[str]) -> Any:
        """Sends one command to the node that has the keys, and returns its reply. A command without keys goes to the
        node of `keys`, too."""


class RedisClient(CommandClient, Protocol):
    """A client of the Redis with the ledger: redis-py's of one node, or a `ClusterClient`."""

    def xread(self, streams: Any, count: int | None = None, block: int | None = None) -> Awaitable[Any]:
        """Reads a stream."""

    def xrevrange(self, name: Any, max: Any = "+", min: Any = "-", count: int | None = None) -> Awaitable[Any]:
        """Reads a stream from its end."""

    async def aclose(self) -> None:
        """Closes its connections."""


class ClusterClient:
    """The client of a cluster. `open_node` returns a client of one node. `nodes` are the seed nodes."""

    def __init__(self, nodes: Sequence[Node], open_node: Callable[[Node], Redis]) -> None:
        self._nodes = tuple(nodes)
        self._open_node = open_node
        self._clients: dict[Node, Redis] = {}
        self._homes: dict[int, Node] = {}

    async def execute_command(self, *args: Any, keys: Sequence[str]) -> Any:
        """Sends one command to the node that is believed to have the keys."""
        return await self._call(keys[0], lambda node: node.execute_command(*args))  # type: ignore[no-untyped-call]

    async def xread(self, streams: Mapping[str, str], count: int | None = None, block: int | None = None) -> Any:
        """Calls redis-py's `xread` for one stream."""
        (key,) = streams
        return await self._call(key, lambda node: node.xread({key: streams[key]}, count, block))

    async def xrevrange(self, name: str, max: str = "+", min: str = "-", count: int | None = None) -> Any:
        """Calls redis-py's `xrevrange`."""
        return await self._call(name, lambda node: node.xrevrange(name, max, min, count))

    async def aclose(self) -> None:
        """Closes all connections. If some fail to close, raises the first failure after the others are closed."""
        closings = [client.aclose() for client in self._clients.values()]
        failures = [one for one in await asyncio.gather(*closings, return_exceptions=True) if one is not None]
        if failures:
            raise failures[0]

    async def _call(self, key: str, call: Callable[[Redis], Awaitable[T]]) -> T:
        """Calls the node that has the key.

        If a node has answered for this slot before, only that node and the nodes to which it redirects are called. If
        this fails, the next call starts with the seed nodes. Otherwise the seed nodes are called in turn until one
        answers. If all fail, raises the error of a node that was sent the call, if there is one, because that node may
        have run it.
        """
        slot = key_slot(key.encode())
        home = self._homes.pop(slot, None)
        to_ask = deque(self._nodes if home is None else (home,))
        no_reply: Exception | None = None
        for _ in range(MAX_HOPS):
            node = to_ask.popleft()
            try:
                reply = await call(self._client(node))
            except MovedError as moved:
                to_ask.appendleft((moved.host or node[0], moved.port))
            except ResponseError as error:
                if type(error) is ResponseError:  # subclasses (CLUSTERDOWN, …) do not show which node has the keys
                    self._homes[slot] = node
                raise
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                no_reply = no_reply if isinstance(error, NotSentError) else error
                if not to_ask:
                    raise no_reply or error from None
            else:
                self._homes[slot] = node
                return reply
        raise RedisConnectionError("the nodes of the cluster do not agree who has the pool")

    def _client(self, node: Node) -> Redis:
        if node not in self._clients:
            self._clients[node] = self._open_node(node)
        return self._clients[node]


class NotSent(RequestError):
    """The error of a call that was not sent to Redis."""


class Closable(Protocol):
    """A client or a pool."""

    async def aclose(self) -> None:
        """Closes its connections."""


def connect(url: str, settings: LedgerSettings) -> RedisClient:
    """Returns a client for calls, of a URL that `parse_redis_url` accepts. The client connects at the first call. The
    caller closes it with `close`."""
    return _open(parse_redis_url(url), settings, _pooled)


def connect_node(url: str, settings: LedgerSettings) -> Redis:
    """Like `connect`, for a URL that is not of a cluster."""
    address = parse_redis_url(url)
    return _pooled(_options(address, settings), settings)


def connect_reader(url: str, settings: LedgerSettings) -> RedisClient:
    """Returns a client with one connection, for blocking reads of the Redis of this URL."""
    return _open(parse_redis_url(url), settings, _single)


def _open(
    address: RedisAddress,
    settings: LedgerSettings,
    open_client: Callable[[dict[str, Any], LedgerSettings], Redis],
) -> RedisClient:
    options = _options(address, settings)
    if address.kind is not RedisKind.CLUSTER:
        return open_client(options, settings)

    def open_node(node: Node) -> Redis:
        return open_client({**options, "host": node[0], "port": node[1]}, settings)

    return ClusterClient(address.nodes, open_node)


def _options(address: RedisAddress, settings: LedgerSettings) -> dict[str, Any]:
    """Returns the options of every connection to an address."""
    options = dict(address.options) | _call_options(settings.call_timeout_ms)
    if address.kind is RedisKind.SENTINEL:
        options["connection_class"] = SentinelManagedSSLConnection if address.has_tls else SentinelManagedConnection
        options["connection_pool"] = SentinelMaster(address, settings)
    return options


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
    """Returns the error for a Redis that does not answer. `cause` may contain an address, so it is not sent to
    clients."""
    return kind(
        Reason.STORE_UNAVAILABLE,
        "the ledger does not answer",
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


def _pooled(options: dict[str, Any], settings: LedgerSettings) -> Redis:
    timeout_s = settings.call_timeout_ms / 1000
    return Redis.from_pool(CallPool(settings.max_connections, timeout_s, **options))


def _single(options: dict[str, Any], settings: LedgerSettings) -> Redis:
    options = {**options, "socket_timeout": (settings.mailbox_block_ms + settings.call_timeout_ms) / 1000}
    return Redis.from_pool(ConnectionPool(max_connections=1, **options))
