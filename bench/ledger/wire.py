"""Redis' wire protocol as far as a load generator needs it: ready-made commands out, replies back whole but unparsed.

A client library spends more on a call than Redis does, and would be what is measured. Here a command is a template that
was encoded once, and a reply is only searched for what the load needs of it.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import parse_qs, unquote, urlsplit

RECEIVE_BYTES = 1 << 18
CONNECT_TIMEOUT_S = 5.0
ARRAY, BULK, ERROR = b"*$-"


class WireError(Exception):
    """Redis cannot be reached or refused a command; the text says which and why."""


def encode(command: Sequence[object]) -> bytes:
    """A command as Redis reads it."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


class Template:
    """A command with blanks: `markers` stand for values of their own length."""

    def __init__(self, command: Sequence[object], markers: Iterable[bytes]) -> None:
        marked = re.compile(b"(" + b"|".join(re.escape(marker) for marker in markers) + b")")
        pieces = marked.split(encode(command))
        # split() with one group: text and markers take turns.
        self._format = b"".join(
            b"%%(%b)b" % piece if index % 2 else piece.replace(b"%", b"%%") for index, piece in enumerate(pieces)
        )

    def fill(self, values: Mapping[bytes, bytes]) -> bytes:
        """The command with a value, by marker, in place of each."""
        return self._format % values


class Framing:
    """Finds where replies end. Keeps its place, so that a reply in many pieces is read once."""

    def __init__(self) -> None:
        self.received = bytearray()
        self._position = 0
        self._num_open = 1

    def take(self) -> bytes | None:
        """The next reply; None while there is no whole one."""
        received, position, num_open = self.received, self._position, self._num_open
        while num_open:
            end = received.find(b"\r\n", position)
            if end < 0:
                break
            kind = received[position]
            if kind == BULK:
                length = int(received[position + 1 : end])
                end += length + 2 if length >= 0 else 0  # -1 is no string
                if end + 2 > len(received):
                    break
            elif kind == ARRAY:
                num_open += max(0, int(received[position + 1 : end]))
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


class Connection:
    """One connection, for one command at a time or for many in a row."""

    def __init__(self, url: str) -> None:
        self._socket, credentials, database = _connect(url)
        self._framing = Framing()
        if credentials:
            self.ask("AUTH", *credentials)
        if database:
            self.ask("SELECT", database)

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, encoded: bytes) -> None:
        """Sends a command, or many."""
        self._socket.sendall(encoded)

    def receive(self) -> bytes | None:
        """What has come, where that is a whole reply. Waits for something to come, unless a reply is there."""
        reply = self._framing.take() if self._framing.received else None
        if reply is None:
            piece = self._socket.recv(RECEIVE_BYTES)
            if not piece:
                raise WireError("Redis closed the connection")
            self._framing.received += piece
            reply = self._framing.take()
        return reply

    def next_reply(self) -> bytes:
        """The next reply."""
        while True:
            reply = self.receive()
            if reply is not None:
                return reply

    def ask(self, *command: object) -> bytes:
        """Sends one command and waits for its reply."""
        self.send(encode(command))
        return self.next_reply()

    def close(self) -> None:
        """Closes it."""
        self._socket.close()


def bulk_text(reply: bytes) -> str:
    """The text of a reply that is one string."""
    return reply.partition(b"\r\n")[2].decode()


def _connect(url: str) -> tuple[socket.socket, list[str], str]:
    """A socket, credentials for AUTH and the number of the database, from `redis://` or `unix://`."""
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
