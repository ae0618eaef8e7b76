"""The pool of connections for calls.

It distinguishes a call that was not sent from one without a reply. Once closed it leaves no connection open, even if
calls are in progress.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import BlockingConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError


class NotSentError(RedisConnectionError):
    """No connection for a command: none was free in time, or none could be made. The text has the cause."""


class CallPool(BlockingConnectionPool):
    """redis-py's pool, with other exceptions, and with an end for calls in progress when it is closed."""

    _is_closed = False

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        """Returns a connection that is ready for a command. Raises `NotSentError`."""
        self._check_open()
        try:
            connection = await super().get_connection()  # type: ignore[no-untyped-call]
        except (RedisError, OSError, TimeoutError) as error:
            raise NotSentError(f"{type(error).__name__}: {error}") from error
        try:
            self._check_open()  # it was closed while the connection was made
        except NotSentError:
            await self.release(connection)
            raise
        return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise NotSentError("the connections are closed")

    async def release(self, connection: Any) -> None:
        """Takes a connection back."""
        if self._is_closed:
            await connection.disconnect(nowait=True)
        await super().release(connection)

    async def aclose(self) -> None:
        """Closes every connection; those in use end their calls."""
        self._is_closed = True
        await super().aclose()
