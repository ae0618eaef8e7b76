"""Events of a router's requests: a reader of the router's mailbox, and a filter of events that arrive too late.

The mailbox is a Redis stream. Calls of other routers add entries to it. Each router has one reader, on its own
connection. The reader resumes after the last entry that it delivered, so it delivers each entry once, also across
reconnects. If the stream was created again with older ids, the reader starts from its beginning. Redis derives entry
ids from its clock, which may have been set back while there was no mailbox.

A mailbox keeps about 10,000 entries. If a router is stopped for too long, the oldest entries are removed before it
reads them. The reader then adds a `LeaseLapsed` that is not certain, so that the router asks the ledger for the state
of its waiting requests.

The mailbox has its own connection, so its events are not ordered with the replies to calls. The event that another
router has adopted a request may arrive when this router already owns the request again. The event of a cancel may
arrive when a repeat has already started under the same id. `OwnershipFilter` drops both. Times are milliseconds of the
ledger's clock. That clock goes back only if Redis has lost the ledger or its newest part; earlier times are then
meaningless.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from inflight.common.errors import RequestError
from inflight.router.ledger.codec import parse_event
from inflight.router.ledger.connection import RedisClient, answered
from inflight.router.ledger.functions import ScriptCalls, is_unreadable, load_scripts
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import Cancelled, LeaseLapsed, LedgerEvent, TakenOver

logger = logging.getLogger(__name__)

START = "0-0"
MAX_ENTRIES = 256
# Longer than any event is in transit: a router that does not read its mailbox for this long is dead.
KEPT_MS = 60_000
# Replies can overtake each other by less than this. A time that is older by more than this comes from a ledger that has
# lost its newest part.
OVERTAKEN_MS = 5_000


class Mailbox:
    """Reads one mailbox from its beginning."""

    def __init__(self, redis: RedisClient, key: str, settings: LedgerSettings) -> None:
        self._redis = redis
        self._key = key
        self._settings = settings
        self._cursor = START

    async def run(self, on_event: Callable[[LedgerEvent], None], on_failure: Callable[[str], None]) -> None:
        """Delivers events until cancelled. Waits while Redis is unavailable and passes the cause to `on_failure`."""
        num_failures, events = 0, list[LedgerEvent]()
        while True:
            try:
                if not events:
                    await self.rewind_if_reset()
                events = await self.read(self._settings.mailbox_block_ms)
            except RequestError as error:
                num_failures, events = num_failures + 1, []
                on_failure(f"mailbox: {error.cause}")
                if is_unreadable(error.__cause__):
                    with suppress(RequestError):
                        await self._drop()
                    on_event(LeaseLapsed(is_certain=False))
                await asyncio.sleep(self._backoff_s(num_failures))
                continue
            num_failures = 0
            for event in events:
                self._deliver(event, on_event)

    def _deliver(self, event: LedgerEvent, on_event: Callable[[LedgerEvent], None]) -> None:
        """Delivers an event. One that the router cannot apply is skipped, because anything can stand in Redis."""
        try:
            on_event(event)
        except Exception:
            logger.exception("event %r of %s cannot be applied and is skipped", event, self._key)
            if not isinstance(event, LeaseLapsed):
                on_event(LeaseLapsed(is_certain=False))

    async def _drop(self) -> None:
        """Drops a key of another type in the mailbox's place, so that the next script can write there."""
        await answered(ScriptCalls(self._redis, load_scripts()).forget([self._key]), self._settings)

    async def read(self, block_ms: int | None = None) -> list[LedgerEvent]:
        """Returns the events since the last read. If there are none, waits up to `block_ms` for the first one. If
        entries before them may have been lost, the last event is an uncertain `LeaseLapsed`."""
        call = self._redis.xread({self._key: self._cursor}, count=MAX_ENTRIES, block=block_ms)
        streams: Any = await answered(call, self._settings)
        entries = [entry for _, entries in streams for entry in entries]
        events = [event for entry_id, fields in entries for event in self._parse(entry_id, fields)]
        if len(entries) == MAX_ENTRIES and not await self._has_read_entry():  # a full mailbox fills every read
            events.append(LeaseLapsed(is_certain=False))
        if entries:
            self._cursor = entries[-1][0]
        return events

    def _parse(self, entry_id: str, fields: Mapping[str, str]) -> tuple[LedgerEvent, ...]:
        """Returns the event of an entry. An entry that no script writes is skipped. It may stand in the place of an
        event, so the router asks the ledger for the state of its waiting requests."""
        try:
            return (parse_event(fields),)
        except (KeyError, ValueError) as error:
            logger.error("entry %s of %s is no event and is skipped: %r", entry_id, self._key, error)
            return (LeaseLapsed(is_certain=False),)

    async def _has_read_entry(self) -> bool:
        """Returns whether the entry at the cursor is still in the stream. If so, no later entry has been removed."""
        if self._cursor == START:
            return True
        call = self._redis.xrevrange(self._key, max=self._cursor, min=self._cursor, count=1)
        return bool(await answered(call, self._settings))

    async def rewind_if_reset(self) -> None:
        """Restarts from the beginning if the stream is a new one. Redis may have lost the previous stream, or its clock
        may have been set back."""
        newest: Any = await answered(self._redis.xrevrange(self._key, count=1), self._settings)
        if not newest or _order(newest[0][0]) < _order(self._cursor):
            self._cursor = START

    def _backoff_s(self, num_failures: int) -> float:
        doubled_ms = self._settings.min_backoff_ms << min(num_failures, 16)
        return random.uniform(0.5, 1.0) * min(doubled_ms, self._settings.max_backoff_ms) / 1000


class OwnershipFilter:
    """Passes events to `on_event`. Drops `TakenOver` and `Cancelled` events that are older than this router's current
    ownership of the request."""

    def __init__(self, on_event: Callable[[LedgerEvent], None]) -> None:
        self._on_event = on_event
        # The time since when this router owns each request, in order of time.
        self._since_ms: OrderedDict[str, int] = OrderedDict()
        self._open_calls: Counter[str] = Counter()
        self._held: defaultdict[str, list[TakenOver | Cancelled]] = defaultdict(list)

    @contextmanager
    def during_call(self, request_id: str) -> Iterator[None]:
        """Holds back `TakenOver` and `Cancelled` events of the request during a call. They are filtered after the call,
        when its result is known."""
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
        """Records that this router owns the request. The reply to an earlier call of it may come later."""
        if self._since_ms and now_ms < next(reversed(self._since_ms.values())) - OVERTAKEN_MS:
            self._since_ms.clear()
        self._since_ms[request_id] = max(now_ms, self._since_ms.get(request_id, 0))
        self._since_ms.move_to_end(request_id)
        while now_ms - next(iter(self._since_ms.values())) > KEPT_MS:
            self._since_ms.popitem(last=False)

    def receive(self, event: LedgerEvent) -> None:
        """Passes on, holds back or drops an event from the mailbox."""
        if not isinstance(event, TakenOver | Cancelled):
            self._on_event(event)
        elif event.request_id in self._open_calls:
            self._held[event.request_id].append(event)
        elif event.at_ms is None or event.at_ms > (since_ms := self._since_ms.get(event.request_id, 0)):
            self._on_event(event)
        elif event.at_ms == since_ms:
            self._on_event(replace(event, is_certain=False) if isinstance(event, TakenOver) else event)


class LedgerClock:
    """The ledger's clock, estimated from its replies."""

    def __init__(self) -> None:
        self._ahead_ms: float | None = None

    def observe(self, now_ms: int) -> None:
        """Records the time of a reply that has just arrived."""
        self._ahead_ms = now_ms - _local_ms()

    def in_ms(self, duration_ms: int) -> int | None:
        """Returns the ledger's time in `duration_ms`. The estimate is never too late if both clocks run at the same
        rate. None before the first reply."""
        return None if self._ahead_ms is None else int(_local_ms() + self._ahead_ms) + duration_ms


def _local_ms() -> float:
    return asyncio.get_running_loop().time() * 1000


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, count = entry_id.partition("-")
    return int(milliseconds), int(count)
