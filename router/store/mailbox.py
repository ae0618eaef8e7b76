"""Events of a router's requests: reading them from its mailbox, and dropping late ones.

The mailbox is a stream into which other routers' calls write. It has one reader per router, on its own connection. The
reader resumes after the last entry that it delivered, so each entry is delivered once while the reader lives, across
reconnects too. If the stream was created again with older ids, the reader starts from its beginning: Redis names
entries by its clock, which may have been set back while there was no mailbox.

A mailbox keeps about 10,000 entries. A router that was stopped for longer than these take finds the oldest gone. It is
told so by a `LeaseLapsed`, which is not certain: the ledger is asked how the waiting requests stand.

As the mailbox has its own connection, the event that another router has adopted a request may arrive after that router
has returned it, and before this one knows that it owns it again. The same holds for the event of a cancel after a
repeat has started under the same id. `OwnershipFilter` drops both. Times are milliseconds of the ledger's clock. It
goes back only if Redis has lost the ledger or its newest part; then earlier times are worthless.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from redis.asyncio import Redis

from common.errors import RequestError
from router.store.codec import parse_event
from router.store.connection import answered
from router.store.settings import StoreSettings
from router.store.types import Cancelled, LeaseLapsed, StoreEvent, TakenOver

START = "0-0"
MAX_ENTRIES = 256
# Longer than any event is in transit: a router that does not read its mailbox for so long is dead.
KEPT_MS = 60_000
# Longer than replies can overtake each other: an older time belongs to a ledger that has lost its newest part.
OVERTAKEN_MS = 5_000


class Mailbox:
    """Reads one mailbox from its beginning."""

    def __init__(self, redis: Redis, key: str, settings: StoreSettings) -> None:
        self._redis = redis
        self._key = key
        self._settings = settings
        self._cursor = START

    async def run(self, on_event: Callable[[StoreEvent], None], on_failure: Callable[[str], None]) -> None:
        """Delivers events until cancelled. Waits while Redis is unavailable and passes the cause to `on_failure`."""
        num_failures, events = 0, list[StoreEvent]()
        while True:
            try:
                if not events:
                    await self.rewind_if_reset()
                events = await self.read(self._settings.mailbox_block_ms)
            except RequestError as error:
                num_failures, events = num_failures + 1, []
                on_failure(f"mailbox: {error.cause}")
                await asyncio.sleep(self._backoff_s(num_failures))
                continue
            num_failures = 0
            for event in events:
                on_event(event)

    async def read(self, block_ms: int | None = None) -> list[StoreEvent]:
        """Returns the entries since the last read; if there are none, waits up to `block_ms` for the first. If entries
        before them may have been lost, the last event says so."""
        call = self._redis.xread({self._key: self._cursor}, count=MAX_ENTRIES, block=block_ms)
        streams: Any = await answered(call, self._settings)
        entries = [entry for _, entries in streams for entry in entries]
        events = [parse_event(fields) for _, fields in entries]
        if len(entries) == MAX_ENTRIES and not await self._has_read_entry():  # else too few for a mailbox that is full
            events.append(LeaseLapsed(is_certain=False))
        if entries:
            self._cursor = entries[-1][0]
        return events

    async def _has_read_entry(self) -> bool:
        """Returns whether the last entry that was read is still there. Then none behind it has been removed."""
        if self._cursor == START:
            return True
        call = self._redis.xrevrange(self._key, max=self._cursor, min=self._cursor, count=1)
        return bool(await answered(call, self._settings))

    async def rewind_if_reset(self) -> None:
        """Starts from the beginning if the stream is a new one: Redis lost the previous one, or its clock was set
        back."""
        newest: Any = await answered(self._redis.xrevrange(self._key, count=1), self._settings)
        if not newest or _order(newest[0][0]) < _order(self._cursor):
            self._cursor = START

    def _backoff_s(self, num_failures: int) -> float:
        doubled_ms = self._settings.min_backoff_ms << min(num_failures, 16)
        return random.uniform(0.5, 1.0) * min(doubled_ms, self._settings.max_backoff_ms) / 1000


class OwnershipFilter:
    """Passes events to `on_event`, except those that a request is gone from before this router owned it (again)."""

    def __init__(self, on_event: Callable[[StoreEvent], None]) -> None:
        self._on_event = on_event
        # Ordered by time.
        self._since_ms: OrderedDict[str, int] = OrderedDict()
        self._open_calls: Counter[str] = Counter()
        self._held: defaultdict[str, list[TakenOver | Cancelled]] = defaultdict(list)

    @contextmanager
    def during_call(self, request_id: str) -> Iterator[None]:
        """Covers a call for the request: events that arrive meanwhile are judged by its result."""
        self._open_calls[request_id] += 1
        try:
            yield
        finally:
            self._open_calls[request_id] -= 1
            if not self._open_calls[request_id]:
                del self._open_calls[request_id]
                for event in self._held.pop(request_id, ()):
                    self.receive(event)

    def take(self, request_id: str, now_ms: int) -> None:
        """Records that this router owns the request."""
        if self._since_ms and now_ms < next(reversed(self._since_ms.values())) - OVERTAKEN_MS:
            self._since_ms.clear()
        self._since_ms[request_id] = now_ms
        self._since_ms.move_to_end(request_id)
        while now_ms - next(iter(self._since_ms.values())) > KEPT_MS:
            self._since_ms.popitem(last=False)

    def receive(self, event: StoreEvent) -> None:
        """Takes an event from the mailbox."""
        if not isinstance(event, TakenOver | Cancelled):
            self._on_event(event)
        elif event.request_id in self._open_calls:
            self._held[event.request_id].append(event)
        elif event.at_ms is None or event.at_ms >= self._since_ms.get(event.request_id, 0):
            self._on_event(event)


class StoreClock:
    """The ledger's clock, estimated from its replies."""

    def __init__(self) -> None:
        self._ahead_ms: float | None = None

    def observe(self, now_ms: int) -> None:
        """Takes the time of a reply that has just arrived."""
        self._ahead_ms = now_ms - time.monotonic() * 1000

    def in_ms(self, duration_ms: int) -> int | None:
        """Returns the time after so long; never too late if both clocks run at the same rate. None before the first
        reply."""
        return None if self._ahead_ms is None else int(time.monotonic() * 1000 + self._ahead_ms) + duration_ms


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, count = entry_id.partition("-")
    return int(milliseconds), int(count)
