"""One connection of an HTTP port, and what it may take: uvicorn bounds neither their number nor how long a client may
take over a request's head, or over what it is sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """`max_connections` at once, more are closed. `request_s` is from a connection's begin, or the answer before, to
    the end of a request's head; `write_s` how long what is sent may lie unread."""

    max_connections: int = 1000
    request_s: float = 30.0
    write_s: float = 60.0


class Connection(H11Protocol):
    """Ends itself where it goes beyond its limits. Without a word: who says nothing or reads nothing misses none."""

    def __init__(self, limits: HttpLimits, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._request_due: asyncio.TimerHandle | None = None
        self._write_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            transport.abort()
            return
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        _stop(self._request_due)
        _stop(self._write_due)
        super().connection_lost(exc)

    def data_received(self, received: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(received)
        if self._is_answering:
            _stop(self._request_due)

    def on_response_complete(self) -> None:
        """See `H11Protocol`. It may begin the next request at once."""
        super().on_response_complete()
        if not self._is_answering:
            self._await_request()

    def timeout_keep_alive_handler(self) -> None:
        """See `H11Protocol`. What still lies unread would keep a connection that is closed."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        super().pause_writing()
        self._write_due = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        _stop(self._write_due)
        super().resume_writing()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        _stop(self._request_due)
        self._request_due = self.loop.call_later(self._limits.request_s, self.transport.abort)


def _stop(due: asyncio.TimerHandle | None) -> None:
    if due is not None:
        due.cancel()
