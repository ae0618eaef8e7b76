"""The load generator's loop: a traffic's calls over many connections, on one thread.

One call at a time on each connection, as a router's are; beside them one connection for each mailbox, which blocks in
its read as a router's reader does. Upkeep goes first when it is due.
"""

from __future__ import annotations

import re
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from inflight.bench.ledger.commands import Call
from inflight.bench.ledger.traffic import Traffic, TrafficError
from inflight.bench.ledger.wire import Connection
from inflight.bench.redis.wire import command

MAX_ENTRIES = 256
BLOCK_MS = 2000
LAST_ENTRY = re.compile(rb"\r\n(\d{10,}-\d+)\r\n")
PIPELINED = 256
MAX_MAIL_S = 5.0

Source = Callable[[float], Call | None]
"""The next call to send at a time, or None while there is nothing to send."""


class MailReader:
    """Reads one mailbox, always waiting for more."""

    def __init__(self, connection: Connection, key: str) -> None:
        self.connection = connection
        self._key = key
        self._cursor = b"0-0"
        self._ask()

    def receive(self) -> bytes | None:
        """Entries, where some are there; asks for the next ones."""
        reply = self.connection.receive()
        if reply is None:
            return None
        entries = LAST_ENTRY.findall(reply)
        if entries:
            self._cursor = entries[-1]
        self._ask()
        return reply

    def _ask(self) -> None:
        self.connection.send(
            command("XREAD", "COUNT", MAX_ENTRIES, "BLOCK", BLOCK_MS, "STREAMS", self._key, self._cursor)
        )


class Loop:
    """The connections of all routers. `now_s` is the clock that everything here is timed by."""

    def __init__(self, url: str, mailboxes: Sequence[str], num_connections: int, traffic: Traffic) -> None:
        self._traffic = traffic
        self._connections = [Connection(url) for _ in range(num_connections)]
        self._readers = [MailReader(Connection(url), key) for key in mailboxes]
        self._selector = selectors.SelectSelector()  # waits to the microsecond; epoll counts milliseconds
        for connection in self._connections:
            self._selector.register(connection, selectors.EVENT_READ)
        for reader in self._readers:
            self._selector.register(reader.connection, selectors.EVENT_READ, reader)
        self._idle = deque(self._connections)
        self._sent: dict[int, Call] = {}
        self._free_since_s = self.now_s()
        self.late_s: list[float] = []

    now_s = staticmethod(time.perf_counter)

    def run(self, source: Source, until_s: float | None = None, due_s: Callable[[], float] | None = None) -> None:
        """Sends what `source` has until the time, or until it has no more; returns when every reply is there.

        `due_s` says when the source has something next, where that is a matter of time.
        """
        while until_s is None or self.now_s() < until_s:
            self._send_all(source, with_upkeep=until_s is not None)
            if until_s is None and not self._sent:
                break
            self._wait(self._timeout_s(until_s, due_s))
        while self._sent:
            self._wait(None)

    def counts_from_s(self, due_s: float, now_s: float) -> float:
        """When a call that was due then and is sent now would have gone out if the load were never late itself.

        A call that found all connections waiting for Redis counts from when it was due.
        """
        return due_s if due_s < self._free_since_s else now_s

    def pipeline(self, calls: Iterable[Call]) -> None:
        """Sends the calls in bulk over one connection, where only their effect matters.

        The next batch is on its way before the replies to the last one are read, so that Redis does not wait for us.
        """
        remaining = iter(calls)
        sent: list[Call] = []
        while batch := list(islice(remaining, PIPELINED)):
            self._idle[0].send(b"".join(call.encoded for call in batch))
            self._take_replies(sent)
            sent = batch
        self._take_replies(sent)
        if self._traffic.repeats:
            repeats = list(self._traffic.repeats)
            self._traffic.repeats.clear()
            self.pipeline(repeats)
        self.read_mail()

    def read_mail(self) -> None:
        """Takes what is in the mailboxes now."""
        self._wait(0.0)

    def read_mail_until(self, arrived: Callable[[], bool]) -> None:
        """Takes mail until what it should say is there."""
        until_s = self.now_s() + MAX_MAIL_S
        while not arrived():
            self._wait(max(0.0, until_s - self.now_s()))
            if self.now_s() > until_s:
                raise TrafficError("the mailboxes do not say that the seats were taken")

    def close(self) -> None:
        self._selector.close()
        for connection in (*self._connections, *(reader.connection for reader in self._readers)):
            connection.close()

    def _send_all(self, source: Source, with_upkeep: bool) -> None:
        now_s = self.now_s()
        while self._idle:
            if self._traffic.repeats:
                call: Call | None = self._traffic.repeats.popleft()
            elif with_upkeep and self._traffic.upkeep_due_s <= now_s:
                call = self._traffic.upkeep(now_s)
            else:
                call = source(now_s)
            if call is None:
                return
            connection = self._idle.popleft()
            self._sent[connection.fileno()] = call
            self.late_s.append(max(0.0, self.now_s() - call.due_s))
            connection.send(call.encoded)

    def _timeout_s(self, until_s: float | None, due_s: Callable[[], float] | None) -> float | None:
        if until_s is None or not self._idle:
            return None
        next_s = min(until_s, self._traffic.upkeep_due_s, due_s() if due_s else until_s)
        return max(0.0, next_s - self.now_s())

    def _wait(self, timeout_s: float | None) -> None:
        ready = self._selector.select(timeout_s)
        now_s = self.now_s()  # what is ready was there by now, however long it takes to read all of it
        for key, _ in ready:
            if key.data is not None:
                mail = key.data.receive()
                if mail is not None:
                    self._traffic.take_events(mail, now_s)
                continue
            connection = key.fileobj
            assert isinstance(connection, Connection)
            reply = connection.receive()
            if reply is not None:
                if not self._idle:
                    self._free_since_s = now_s
                self._idle.append(connection)
                self._traffic.take(self._sent.pop(connection.fileno()), reply, now_s)

    def _take_replies(self, calls: Iterable[Call]) -> None:
        for call in calls:
            self._traffic.take(call, self._idle[0].next_reply(), self.now_s())
