"""A connection to Redis that sends without waiting: RESP3 by hand, replies read when their time has come.

The simulation makes millions of calls, most of them reports whose reply is always the same. So a call is one write into
a buffer, Redis works while the simulation goes on, and a reply whose bytes are those of the last reply of its kind is
not parsed again. Everything is in order: calls take effect as they were sent, replies come as they were asked for, and
what Redis publishes between them comes between them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote, urlsplit

from router.store.lua import Argument

RECEIVE_BYTES = 1 << 16
# What collects before it is sent although nobody waits: enough for Redis to have something to do.
SEND_BYTES = 1 << 14
TIMEOUT_S = 60.0


class RedisReplyError(Exception):
    """Redis answered with an error."""


class _Incomplete(Exception):
    """A reply has not come whole."""


def encode(args: Iterable[Argument]) -> bytes:
    """Arguments as bulk strings."""
    parts = []
    for arg in args:
        text = arg if isinstance(arg, bytes) else str(arg).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(text), text))
    return b"".join(parts)


def command(*args: Argument) -> bytes:
    """One command, ready to be sent."""
    return b"*%d\r\n%b" % (len(args), encode(args))


class RedisWire:
    """One connection. `on_push` gets what Redis publishes: its kind, then its fields."""

    def __init__(self, connection: socket.socket, on_push: Callable[[list[Any]], None]) -> None:
        self._socket = connection
        self._on_push = on_push
        self._outbox = bytearray()
        self._inbox = b""
        self._position = 0
        # The newest reply of each kind: its bytes, and what they mean.
        self._newest: dict[str, tuple[bytes, Any]] = {}

    @classmethod
    def connect(cls, url: str, on_push: Callable[[list[Any]], None]) -> RedisWire:
        """Connects to a Redis on this machine: `redis://:password@host:port/0` or `unix://path`."""
        parts = urlsplit(url)
        if parts.scheme == "unix":
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(TIMEOUT_S)
            connection.connect(unquote(parts.path))
        else:
            connection = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = cls(connection, on_push)
        if parts.password:
            wire.call(command("AUTH", unquote(parts.password)))
        wire.call(command("HELLO", 3))
        return wire

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def send(self, payload: bytes) -> None:
        """Sends a command soon. Its reply must be read in its turn."""
        self._outbox += payload
        if len(self._outbox) >= SEND_BYTES:
            self.flush()

    def flush(self) -> None:
        """Sends what has collected."""
        if self._outbox:
            self._socket.sendall(self._outbox)
            self._outbox.clear()

    def call(self, payload: bytes) -> Any:
        """Sends a command and reads its reply. No other may be under way."""
        self.send(payload)
        return self.read()

    def read(self, kind: str = "") -> Any:
        """The next reply. Equal replies of one `kind` are one object: change none."""
        while True:
            newest = self._newest.get(kind)
            if newest is not None and self._inbox.startswith(newest[0], self._position):
                self._position += len(newest[0])
                return newest[1]
            try:
                start = self._position
                is_push = self._inbox.startswith(b">", start)
                value, self._position = self._parse(start)
            except _Incomplete:
                self._receive()
                continue
            if is_push:
                self._on_push(value)
                continue
            if isinstance(value, RedisReplyError):
                raise value
            if kind:
                self._newest[kind] = (self._inbox[start : self._position], value)
            return value

    def _receive(self) -> None:
        self.flush()
        received = self._socket.recv(RECEIVE_BYTES)
        if not received:
            raise ConnectionError("Redis closed the connection")
        self._inbox = self._inbox[self._position :] + received
        self._position = 0

    def _parse(self, at: int) -> tuple[Any, int]:
        """The value that begins there, and where the next one does."""
        end = self._inbox.find(b"\r\n", at)
        if end < 0:
            raise _Incomplete
        kind, line, at = self._inbox[at : at + 1], self._inbox[at + 1 : end], end + 2
        match kind:
            case b"$" | b"=":
                size = int(line)
                if len(self._inbox) < at + size + 2:
                    raise _Incomplete
                return (self._inbox[at : at + size].decode(), at + size + 2) if size >= 0 else (None, at)
            case b"*" | b">" | b"~":
                return self._parse_many(int(line), at)
            case b"%":
                return self._parse_many(2 * int(line), at)
            case b":":
                return int(line), at
            case b"+":
                return line.decode(), at
            case b"-":
                return RedisReplyError(line.decode()), at
            case b",":
                return float(line), at
            case b"_":
                return None, at
        raise RedisReplyError(f"a reply of kind {kind!r} is not expected")

    def _parse_many(self, count: int, at: int) -> tuple[list[Any] | None, int]:
        if count < 0:
            return None, at
        values = []
        for _ in range(count):
            value, at = self._parse(at)
            values.append(value)
        return values, at
