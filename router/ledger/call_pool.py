"""The connection pool for calls.

It distinguishes a call that was not sent from a call that got no reply. After it is closed no connection stays open,
even if calls were in progress.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import BlockingConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError


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
