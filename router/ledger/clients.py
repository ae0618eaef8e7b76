"""Clients of Redis for calls: the connection pool of one node, and the client of a Redis Cluster.

The connection pool distinguishes a call that was not sent from a call that got no reply. After it is closed no
connection stays open, even if calls were in progress.

Every call concerns one pool, and all keys of a pool are in one hash slot, on one node. So the client of a cluster
keeps no map of the cluster. A call goes to the node that answered the last call for the same slot. The first call goes
to a seed node. A node that does not have the slot redirects to the node that has it (MOVED). redis-py's own cluster
client is not used: it sends more commands, refuses calls beyond its connection limit instead of queueing them, and
leaves connections open when nodes leave the cluster.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

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


class ClusterClient:
    """The methods of a client that the ledger calls. `open_node` returns a client of one node.
    `nodes` are the seed nodes."""

    def __init__(self, nodes: Sequence[Node], open_node: Callable[[Node], Redis]) -> None:
        self.nodes = tuple(nodes)
        self.open_node = open_node
        self._clients: dict[Node, Redis] = {}
        self._homes: dict[int, Node] = {}

    async def execute_command(self, *args: Any) -> Any:
        """Runs a script. `args` begins with the command, the script, the number of keys and the keys."""
        return await self._call(str(args[3]), lambda node: node.execute_command(*args))  # type: ignore[no-untyped-call]

    async def execute_at(self, key: str, *args: Any) -> Any:
        """Runs a command without keys on the node that is believed to have the key."""
        return await self._call(key, lambda node: node.execute_command(*args))  # type: ignore[no-untyped-call]

    async def xread(self, streams: Mapping[str, str], **options: Any) -> Any:
        """Calls redis-py's `xread` for one stream."""
        (key,) = streams
        return await self._call(key, lambda node: node.xread({key: streams[key]}, **options))

    async def xrevrange(self, name: str, **options: Any) -> Any:
        """Calls redis-py's `xrevrange`."""
        return await self._call(name, lambda node: node.xrevrange(name, **options))

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
        to_ask = deque(self.nodes if home is None else (home,))
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
            self._clients[node] = self.open_node(node)
        return self._clients[node]
