"""Since when requests are this router's, and what time Redis has: for what comes late, or out of order.

A mailbox is read on a connection of its own. So the word that another router has a request may come after that router
has given it back, and before this one knows that it has it again. As may the word that one was cancelled, when a repeat
has begun anew under its id. Times are milliseconds of the ledger's clock. That goes back only where Redis has lost the
ledger, or some of it; then what is known of earlier times says nothing.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.store.types import Cancelled, StoreEvent, TakenOver

# Longer than any word is on its way: routers that do not read their mailboxes for so long are dead.
KEPT_MS = 60_000
# Longer than replies overtake each other: a time further back is one of a ledger that has lost some.
OVERTAKEN_MS = 5_000


class OwnershipFilter:
    """Hands events on to `on_event`, but for words that a request is gone from before it was (again) this router's."""

    def __init__(self, on_event: Callable[[StoreEvent], None]) -> None:
        self._on_event = on_event
        # In the order of their times.
        self._since_ms: OrderedDict[str, int] = OrderedDict()
        self._asked: Counter[str] = Counter()
        self._held: defaultdict[str, list[TakenOver | Cancelled]] = defaultdict(list)

    @contextmanager
    def asked(self, request_id: str) -> Iterator[None]:
        """While the ledger is asked for the request; what is told of it meanwhile is judged by the answer."""
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
        """The request is this router's."""
        if self._since_ms and now_ms < next(reversed(self._since_ms.values())) - OVERTAKEN_MS:
            self._since_ms.clear()
        self._since_ms[request_id] = now_ms
        self._since_ms.move_to_end(request_id)
        while now_ms - next(iter(self._since_ms.values())) > KEPT_MS:
            self._since_ms.popitem(last=False)

    def tell(self, event: StoreEvent) -> None:
        """Something has come from the mailbox."""
        if not isinstance(event, TakenOver | Cancelled):
            self._on_event(event)
        elif event.request_id in self._asked:
            self._held[event.request_id].append(event)
        elif event.at_ms is None or event.at_ms >= self._since_ms.get(event.request_id, 0):
            self._on_event(event)


class StoreClock:
    """The ledger's clock, as far as its replies show it."""

    def __init__(self) -> None:
        self._ahead_ms: float | None = None

    def observe(self, now_ms: int) -> None:
        """A reply that has come now says so."""
        self._ahead_ms = now_ms - time.monotonic() * 1000

    def in_ms(self, duration_ms: int) -> int | None:
        """The time after so long; never too late where the clock goes as ours does. None before the first reply."""
        return None if self._ahead_ms is None else int(time.monotonic() * 1000 + self._ahead_ms) + duration_ms
