"""Filters for late events: since when this router owns a request, and the time of Redis.

A mailbox is read on its own connection. So the event that another router has adopted a request may arrive after that
router has returned it, and before this one knows that it owns it again. The same holds for the event of a cancel after
a repeat has started under the same id. Times are milliseconds of the ledger's clock. It goes back only if Redis has
lost the ledger or its newest part; then earlier times are worthless.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.store.types import Cancelled, StoreEvent, TakenOver

# Longer than any event is in transit: a router that does not read its mailbox for so long is dead.
KEPT_MS = 60_000
# Longer than replies can overtake each other: an older time belongs to a ledger that has lost its newest part.
OVERTAKEN_MS = 5_000


class OwnershipFilter:
    """Passes events to `on_event`, except those that a request is gone from before this router owned it (again)."""

    def __init__(self, on_event: Callable[[StoreEvent], None]) -> None:
        self._on_event = on_event
        # Ordered by time.
        self._since_ms: OrderedDict[str, int] = OrderedDict()
        self._asked: Counter[str] = Counter()
        self._held: defaultdict[str, list[TakenOver | Cancelled]] = defaultdict(list)

    @contextmanager
    def asked(self, request_id: str) -> Iterator[None]:
        """Covers a call for the request: events that arrive meanwhile are judged by its result."""
        self._asked[request_id] += 1
        try:
            yield
        finally:
            self._asked[request_id] -= 1
            if not self._asked[request_id]:
                del self._asked[request_id]
                for event in self._held.pop(request_id, ()):
                    self.tell(event)

    def begin(self, request_id: str, now_ms: int) -> None:
        """Records that this router owns the request."""
        if self._since_ms and now_ms < next(reversed(self._since_ms.values())) - OVERTAKEN_MS:
            self._since_ms.clear()
        self._since_ms[request_id] = now_ms
        self._since_ms.move_to_end(request_id)
        while now_ms - next(iter(self._since_ms.values())) > KEPT_MS:
            self._since_ms.popitem(last=False)

    def tell(self, event: StoreEvent) -> None:
        """Takes an event from the mailbox."""
        if not isinstance(event, TakenOver | Cancelled):
            self._on_event(event)
        elif event.request_id in self._asked:
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
