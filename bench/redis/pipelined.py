"""A connection to Redis that sends without waiting: replies are read when their time has come.

The simulation makes millions of calls, most of them reports whose reply is always the same. So a call is one write into
a buffer, Redis works while the simulation goes on, and a reply whose bytes are those of the last reply of its kind is
not parsed again. Everything is in order: calls take effect as they were sent, replies come as they were asked for, and
what Redis publishes between them comes between them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from inflight.bench.redis.wire import PUSH, Framing, command, connect, parse

RECEIVE_BYTES = 1 << 16
# What collects before it is sent although no call waits: enough for Redis to have something to do.
SEND_BYTES = 1 << 14
TIMEOUT_S = 60.0


class RedisWire:
    """One connection. `on_push` gets what Redis publishes: its kind, then its fields."""

    def __init__(self, connection: socket.socket, on_push: Callable[[list[Any]], None]) -> None:
        self._socket = connection
        self._on_push = on_push
        self._outbox = bytearray()
        self._framing = Framing()
        # The newest reply of each kind: its bytes, and what they mean.
        self._newest: dict[str, tuple[bytes, Any]] = {}

    @classmethod
    def connect(cls, url: str, on_push: Callable[[list[Any]], None]) -> RedisWire:
        """Connects to a Redis on this machine: `redis://:password@host:port/0` or `unix://path`."""
        connection, credentials, _ = connect(url)
        connection.settimeout(TIMEOUT_S)
        wire = cls(connection, on_push)
        if credentials:
            wire.call(command("AUTH", *credentials))
        wire.call(command("HELLO", 3))
        return wire

    def close(self) -> None:
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
        """Returns the next reply. Equal replies of one `kind` are one object: change none."""
        while True:
            reply = self._framing.take()
            if reply is None:
                self._receive()
            elif reply[0] == PUSH:
                self._on_push(parse(reply))
            else:
                newest = self._newest.get(kind)
                if newest is None or newest[0] != reply:
                    newest = (reply, parse(reply))
                    if kind:
                        self._newest[kind] = newest
                return newest[1]

    def _receive(self) -> None:
        self.flush()
        received = self._socket.recv(RECEIVE_BYTES)
        if not received:
            raise ConnectionError("Redis closed the connection")
        self._framing.received += received
