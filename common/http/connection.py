"""HTTP connections with what uvicorn lacks: limits of their number, of the time for a request's head and for reading a
response, and a drain that loses no request of a client that keeps its connections."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

# Size of an IPv6 site. A client in it has so many addresses that a limit per address would have no effect.
IPV6_SITE_BITS = 64

# Time for the request of a connection that has sent none or only a part of one when its port begins to drain.
DRAIN_REQUEST_S = 1.0
# Key in the state of a request's scope: its connection was opened while the port drained.
OPENED_IN_DRAIN = "opened_in_drain"


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of a port's connections. At most `max_connections` at once, and `max_per_address` of them from one address
    (None: no limit). `request_s` is the time for a request's head, `idle_s` the time that a connection may be silent
    after a response, and `write_s` the time that sent data may stay unread."""

    max_connections: int = 1000
    max_per_address: int | None = 100
    request_s: float = 30.0
    idle_s: float = 5.0
    write_s: float = 60.0


class OpenConnections:
    """The connections of a port, by address. If there are too many, an idle one is closed.

    Idle connections that have never served a request are closed before others, and older ones before newer ones. A
    connection with a request in progress stays.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._addresses: dict[str, _OfAddress] = {}
        self._open: set[HttpConnection] = set()
        self.is_draining = False
        # Connections that were open when the drain began, and still are.
        self._drained: set[HttpConnection] = set()
        self._has_drained = asyncio.Event()

    async def drain(self, timeout_s: float) -> int:
        """Closes every open connection as `HttpConnection.drain` does. Waits for that, and returns how many are still
        open after `timeout_s` seconds."""
        self.is_draining = True
        self._drained = set(self._open)
        self._has_drained.clear()  # a connection that was closed earlier has set it
        for connection in tuple(self._drained):
            connection.drain()
        if self._drained:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._has_drained.wait()
        return len(self._drained)

    def add(self, connection: HttpConnection, address: str) -> HttpConnection | None:
        """Adds a connection, which is idle. Returns the connection to close for it, perhaps itself."""
        same = self._addresses.setdefault(address, _OfAddress())
        victim = self._victim(same)
        same.num_open += 1
        self._open.add(connection)
        same.silent[connection] = None
        return victim if victim is not None or not self._is_over(same) else connection

    def remove(self, connection: HttpConnection, address: str) -> None:
        """Removes a connection. Call it once."""
        same = self._addresses[address]
        same.drop(connection)
        same.num_open -= 1
        self._open.remove(connection)
        if not same.num_open:
            del self._addresses[address]
        self._drained.discard(connection)
        if not self._drained:
            self._has_drained.set()

    def answer(self, connection: HttpConnection, address: str) -> None:
        """Marks the connection as busy: a request has arrived."""
        self._addresses[address].drop(connection)

    def answered(self, connection: HttpConnection, address: str) -> None:
        """Marks the connection as idle after a response."""
        self._addresses[address].served[connection] = None

    def close_idle(self) -> bool:
        """Closes an idle connection, of the address with the most of them. Returns False if there is none."""
        most = max(self._addresses.values(), key=_OfAddress.num_waiting, default=None)
        victim = None if most is None else most.oldest()
        if victim is not None:
            victim.close_at_once()
        return victim is not None

    def _is_over(self, same: _OfAddress) -> bool:
        most = self._limits.max_per_address
        return len(self._open) > self._limits.max_connections or (most is not None and same.num_open > most)

    def _victim(self, same: _OfAddress) -> HttpConnection | None:
        most = self._limits.max_per_address
        if most is not None and same.num_open >= most:
            return same.oldest()
        if len(self._open) >= self._limits.max_connections:
            # The address with the most idle connections loses one.
            return max(self._addresses.values(), key=_OfAddress.num_waiting).oldest()
        return None


class _OfAddress:
    """The connections of one address: their number, and the idle ones, the oldest first."""

    def __init__(self) -> None:
        self.num_open = 0
        self.silent: dict[HttpConnection, None] = {}
        self.served: dict[HttpConnection, None] = {}

    def num_waiting(self) -> int:
        return len(self.silent) + len(self.served)

    def oldest(self) -> HttpConnection | None:
        return next(iter(self.silent), None) or next(iter(self.served), None)

    def drop(self, connection: HttpConnection) -> None:
        self.silent.pop(connection, None)
        self.served.pop(connection, None)


class HttpConnection(H11Protocol):
    """A connection that closes itself when it exceeds its limits. It sends no response: a client that sends or reads
    nothing would not see one."""

    def __init__(self, limits: HttpLimits, open_connections: OpenConnections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.timeout_keep_alive = limits.idle_s  # type: ignore[assignment]  # only a timer gets it
        self._limits = limits
        self._open = open_connections
        self._address = ""
        self._is_counted = False
        self._request_due: asyncio.TimerHandle | None = None
        self._write_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = address_of(self.client)
        self._is_counted = True
        if self._open.is_draining:
            self.app_state = {**self.app_state, OPENED_IN_DRAIN: True}
        victim = self._open.add(self, self._address)
        if victim is not None:
            victim.close_at_once()
        if victim is not self:
            self._await_request(self._limits.request_s)

    def drain(self) -> None:
        """Closes the connection without loss of a request: at once if it is idle after a response, otherwise after its
        next response, whose header announces that."""
        if self._is_answering:
            self._close_after_response()
        elif self.cycle is None or self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0]:
            self._await_request(DRAIN_REQUEST_S)
        else:
            self.shutdown()

    def close_at_once(self) -> None:
        """Closes the connection before the event loop reports that it is lost, to admit another one."""
        self._leave()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        _stop(self._request_due)
        _stop(self._write_due)
        super().connection_lost(exc)

    def data_received(self, received: bytes) -> None:
        super().data_received(received)
        if self._is_answering:
            _stop(self._request_due)
            if self._is_counted:
                self._open.answer(self, self._address)
            if self._open.is_draining:
                self._close_after_response()

    def on_response_complete(self) -> None:
        """Marks the connection as idle, unless uvicorn began the next request immediately."""
        super().on_response_complete()
        if not self._is_answering:
            self._await_request(self._limits.idle_s + self._limits.request_s)
            if self._is_counted:
                self._open.answered(self, self._address)

    def timeout_keep_alive_handler(self) -> None:
        """Aborts the connection if data is unread, since that would keep it open after closing."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def pause_writing(self) -> None:
        """Starts the timeout for unread data."""
        super().pause_writing()
        self._write_due = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """Cancels the timeout for unread data."""
        _stop(self._write_due)
        super().resume_writing()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _leave(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._open.remove(self, self._address)

    def _close_after_response(self) -> None:
        self.cycle.keep_alive = False
        if not self.cycle.response_started and CLOSE_HEADER not in self.cycle.default_headers:
            self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]

    def _await_request(self, request_s: float) -> None:
        _stop(self._request_due)
        self._request_due = self.loop.call_later(request_s, self.transport.abort)


def address_of(client: tuple[str, int] | None) -> str:
    """Returns the key that connections are counted by: an IPv4 address, or the network of an IPv6 address."""
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address), IPV6_SITE_BITS), strict=False))


def _stop(due: asyncio.TimerHandle | None) -> None:
    if due is not None:
        due.cancel()
