"""Waiting for changes of stored responses: one reader of the store's news wakes all that wait in this gateway."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from inflight.gateway.errors import ApiError
from inflight.gateway.store.store import ResponseStore

BACKOFF_S = 0.5


class News:
    """Wakes who watches a response when it has changed, or may have."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._watching: dict[str, set[asyncio.Event]] = defaultdict(set)

    @contextmanager
    def watching(self, response_id: str) -> Iterator[asyncio.Event]:
        """Yields an event that is set after each change. It must be cleared before the response is read."""
        changed = asyncio.Event()
        self._watching[response_id].add(changed)
        try:
            yield changed
        finally:
            self._watching[response_id].discard(changed)
            if not self._watching[response_id]:
                del self._watching[response_id]

    async def run(self) -> None:
        """Reads the news until it is cancelled."""
        place: str | None = None
        while True:
            try:
                if place is None:
                    place = await self._store.newest()
                    self._wake(list(self._watching))
                place, changed = await self._store.news(place)
            except ApiError:
                place = None
                await asyncio.sleep(BACKOFF_S)
            else:
                self._wake(changed)

    def _wake(self, response_ids: list[str]) -> None:
        for response_id in response_ids:
            for changed in self._watching.get(response_id, ()):
                changed.set()
