"""One connection of an HTTP port, and what it may take: uvicorn bounds neither their number nor how long a client may
take over a request's head, or over what it is sent.
"""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# What a site of IPv6 has for itself; counted by address it would have no limit.
IPV6_SITE_BITS = 64


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """`max_connections` at once, and `max_per_address` of them from one address (None: all). `request_s` is from a
    connection's begin, or the answer before, to the end of a request's head; `write_s` how long what is sent may lie
    unread."""

    max_connections: int = 1000
    max_per_address: int | None = 100
    request_s: float = 30.0
    write_s: float = 60.0


class OpenConnections:
    """The connections of a port, by address. Where there are too many, one that waits for a request makes room.

    Of those that wait, one that has never been answered goes before one that has, and an older one before a newer one.
    A connection that is being answered stays.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._addresses: dict[str, _OfAddress] = {}
        self._num_open = 0

    def add(self, connection: Connection, address: str) -> Connection | None:
        """Takes a connection, which waits. Returns the one that has to be closed for it, perhaps itself."""
        same = self._addresses.setdefault(address, _OfAddress())
        victim = self._victim(same)
        same.num_open += 1
        self._num_open += 1
        same.silent[connection] = None
        return victim if victim is not None or not self._is_over(same) else connection

    def remove(self, connection: Connection, address: str) -> None:
        """Forgets a connection, once."""
        same = self._addresses[address]
        same.drop(connection)
        same.num_open -= 1
        self._num_open -= 1
        if not same.num_open:
            del self._addresses[address]

    def answer(self, connection: Connection, address: str) -> None:
        """A request has come; the connection stays until it is answered."""
        self._addresses[address].drop(connection)

    def answered(self, connection: Connection, address: str) -> None:
        """The connection waits for its next request."""
        self._addresses[address].served[connection] = None

    def _is_over(self, same: _OfAddress) -> bool:
        most = self._limits.max_per_address
        return self._num_open > self._limits.max_connections or (most is not None and same.num_open > most)

    def _victim(self, same: _OfAddress) -> Connection | None:
        most = self._limits.max_per_address
        if most is not None and same.num_open >= most:
            return same.oldest()
        if self._num_open >= self._limits.max_connections:
            # Who holds most idle connections loses one.
            return max(self._addresses.values(), key=_OfAddress.num_waiting).oldest()
        return None


class _OfAddress:
    """The connections of one address: how many, and those that wait, the oldest first."""

    def __init__(self) -> None:
        self.num_open = 0
        self.silent: dict[Connection, None] = {}
        self.served: dict[Connection, None] = {}

    def num_waiting(self) -> int:
        return len(self.silent) + len(self.served)

    def oldest(self) -> Connection | None:
        return next(iter(self.silent), None) or next(iter(self.served), None)

    def drop(self, connection: Connection) -> None:
        self.silent.pop(connection, None)
        self.served.pop(connection, None)


class Connection(H11Protocol):
    """Ends itself where it goes beyond its limits. Without a word: who says nothing or reads nothing misses none."""

    def __init__(self, limits: HttpLimits, open_connections: OpenConnections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._open = open_connections
        self._address = ""
        self._is_counted = False
        self._request_due: asyncio.TimerHandle | None = None
        self._write_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._address = address_of(self.client)
        self._is_counted = True
        victim = self._open.add(self, self._address)
        if victim is not None:
            victim.close_at_once()
        if victim is not self:
            self._await_request()

    def close_at_once(self) -> None:
        """Makes room for another one, before the loop has told that this one is lost."""
        self._leave()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._leave()
        _stop(self._request_due)
        _stop(self._write_due)
        super().connection_lost(exc)

    def data_received(self, received: bytes) -> None:
        """See `asyncio.Protocol`."""
        super().data_received(received)
        if self._is_answering:
            _stop(self._request_due)
            if self._is_counted:
                self._open.answer(self, self._address)

    def on_response_complete(self) -> None:
        """See `H11Protocol`. It may begin the next request at once."""
        super().on_response_complete()
        if not self._is_answering:
            self._await_request()
            if self._is_counted:
                self._open.answered(self, self._address)

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

    def _leave(self) -> None:
        if self._is_counted:
            self._is_counted = False
            self._open.remove(self, self._address)

    def _await_request(self) -> None:
        _stop(self._request_due)
        self._request_due = self.loop.call_later(self._limits.request_s, self.transport.abort)


def address_of(client: tuple[str, int] | None) -> str:
    """What connections are counted by: an IPv4 address, or the network of an IPv6 address."""
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
