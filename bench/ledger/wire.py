"""Connections of the ledger's load generator: ready-made commands out, replies back whole but unparsed.

A client library spends more on a call than Redis does, and would be what is measured. Here a command is a template that
was encoded once, and a reply is only searched for what the load needs of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from inflight.bench.redis.wire import Framing, WireError, command, connect, encode

RECEIVE_BYTES = 1 << 18


class Template:
    """A command, or the end of one, with blanks: `markers` stand for values of their own length."""

    def __init__(self, words: Sequence[object], markers: Iterable[bytes], *, is_whole: bool = True) -> None:
        self.num_words = len(words)
        marked = re.compile(b"(" + b"|".join(re.escape(marker) for marker in markers) + b")")
        pieces = marked.split(command(*words) if is_whole else encode(words))
        # split() with one group: text and markers take turns.
        self._format = b"".join(
            b"%%(%b)b" % piece if index % 2 else piece.replace(b"%", b"%%") for index, piece in enumerate(pieces)
        )

    def fill(self, values: Mapping[bytes, bytes]) -> bytes:
        """Returns the command with a value, by marker, in place of each."""
        return self._format % values


class Connection:
    """One connection, for one command at a time or for many in a row."""

    def __init__(self, url: str) -> None:
        self._socket, credentials, database = connect(url)
        self._framing = Framing()
        if credentials:
            self.ask("AUTH", *credentials)
        if database:
            self.ask("SELECT", database)

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def send(self, encoded: bytes) -> None:
        self._socket.sendall(encoded)

    def receive(self) -> bytes | None:
        """Returns the received bytes if they are a whole reply. Waits for something to come, unless a reply is
        there."""
        reply = self._framing.take() if self._framing.received else None
        if reply is None:
            piece = self._socket.recv(RECEIVE_BYTES)
            if not piece:
                raise WireError("Redis closed the connection")
            self._framing.received += piece
            reply = self._framing.take()
        return reply

    def next_reply(self) -> bytes:
        while True:
            reply = self.receive()
            if reply is not None:
                return reply

    def ask(self, *words: object) -> bytes:
        """Sends one command and waits for its reply."""
        self.send(command(*words))
        return self.next_reply()

    def close(self) -> None:
        self._socket.close()


def bulk_text(reply: bytes) -> str:
    """Returns the text of a reply that is one string."""
    return reply.partition(b"\r\n")[2].decode()
