"""Redis' wire protocol (RESP2 and RESP3) for load generators: encoded commands out, whole replies in.

Replies are cut out of the stream as bytes. The ledger benchmark only searches them for ids; the simulation parses those
that differ from the last reply of their kind. Measured on recorded replies of both, in turn, by processor time, 9
rounds: hiredis takes 0.1 times as long as this module. Parsing after the cut takes 1.4 times as long as a parser that
compares with the last reply first, but the simulation spends 1 % of its time here. hiredis is no dependency, because
redis-py uses it wherever it is installed: it would replace the parser of the routers that are tested and measured.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

CONNECT_TIMEOUT_S = 5.0
BULK, VERBATIM, ARRAY, SET, MAP, PUSH = b"$=*~%>"
ERROR = ord("-")
SCALARS: Mapping[int, Callable[[bytes], Any]] = {
    ord(":"): int,
    ord("+"): bytes.decode,
    ERROR: bytes.decode,
    ord(","): float,
    ord("_"): lambda line: None,
}


class WireError(Exception):
    """Redis cannot be reached or refused a command; the text says which and why."""


def encode(args: Iterable[object]) -> bytes:
    """Arguments as bulk strings."""
    parts = [arg if isinstance(arg, bytes) else str(arg).encode() for arg in args]
    return b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def command(*args: object) -> bytes:
    """One command, ready to be sent."""
    return b"*%d\r\n%b" % (len(args), encode(args))


class Framing:
    """Finds the ends of replies in `received`. Keeps its place, so that a reply in many pieces is scanned once."""

    def __init__(self) -> None:
        self.received = bytearray()
        self._position = 0
        self._num_open = 1

    def take(self) -> bytes | None:
        """Returns the next reply; None while there is no whole one. Raises `WireError` if it is an error."""
        received, position, num_open = self.received, self._position, self._num_open
        while num_open:
            end = received.find(b"\r\n", position)
            if end < 0:
                break
            kind = received[position]
            if kind in (BULK, VERBATIM):
                length = int(received[position + 1 : end])
                end += length + 2 if length >= 0 else 0  # -1 is no string
                if end + 2 > len(received):
                    break
            elif kind in (ARRAY, SET, MAP, PUSH):
                num_open += max(0, int(received[position + 1 : end])) * (2 if kind == MAP else 1)
            num_open -= 1
            position = end + 2
        if num_open:
            self._position, self._num_open = position, num_open
            return None
        reply = bytes(received[:position])
        del received[:position]
        self._position, self._num_open = 0, 1
        if reply[0] == ERROR:
            raise WireError(f"Redis refused a command: {reply.decode(errors='replace').strip()}")
        return reply


def parse(reply: bytes) -> Any:
    """Returns the value of a whole reply: lists, texts, numbers and None. A map is a list of keys and values in
    turn."""
    return _parse(reply, 0)[0]


def connect(url: str) -> tuple[socket.socket, list[str], str]:
    """Returns a socket, credentials for AUTH and the number of the database, from `redis://` or `unix://`."""
    parts = urlsplit(url)
    credentials = [unquote(part) for part in (parts.username, parts.password) if part]
    try:
        if parts.scheme == "unix":
            connected = socket.socket(socket.AF_UNIX)
            connected.connect(unquote(parts.path))
            return connected, credentials, parse_qs(parts.query).get("db", [""])[0]
        if parts.scheme != "redis":
            raise WireError(f"{url.partition(':')[0]}:// is not supported here; use redis:// or unix://")
        connected = socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 6379), CONNECT_TIMEOUT_S)
    except OSError as error:
        raise WireError(f"Redis cannot be reached: {error}") from error
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected, credentials, parts.path.strip("/")


def _parse(reply: bytes, at: int) -> tuple[Any, int]:
    """Returns the value that begins there, and where the next one does."""
    end = reply.index(b"\r\n", at)
    kind, line, at = reply[at], reply[at + 1 : end], end + 2
    if kind in (BULK, VERBATIM):
        size = int(line)
        return (reply[at : at + size].decode(), at + size + 2) if size >= 0 else (None, at)
    if kind in (ARRAY, SET, MAP, PUSH):
        return _parse_many(reply, int(line) * (2 if kind == MAP else 1), at)
    if kind in SCALARS:
        return SCALARS[kind](line), at
    raise WireError(f"a reply of kind {chr(kind)!r} is not expected")


def _parse_many(reply: bytes, count: int, at: int) -> tuple[list[Any] | None, int]:
    if count < 0:
        return None, at
    values = []
    for _ in range(count):
        value, at = _parse(reply, at)
        values.append(value)
    return values, at
