"""Work that is done once the ledger answers, however much of it there is: a bounded number of attempts at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

# An attempt mostly waits for Redis; the store bounds its calls by itself.
MAX_CONCURRENT_ATTEMPTS = 8
STORE_RETRY_S = 0.5


class RetryQueue(Generic[Item]):
    """Items in order of arrival, each once. `attempt(item)` returns whether the item is done with; what is not goes to
    the end of the queue, and after a pause the next attempt begins. `spawn` runs the attempts."""

    def __init__(
        self,
        attempt: Callable[[Item], Awaitable[bool]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._attempt = attempt
        self._spawn = spawn
        self._pause = pause
        self._items: dict[Item, None] = {}
        self._attempted: set[Item] = set()
        self._num_workers = 0

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: Item) -> bool:
        """Whether the item waits for an attempt or is being attempted."""
        return item in self._items or item in self._attempted

    def __iter__(self) -> Iterator[Item]:
        return iter(tuple(self._items))

    def add(self, item: Item) -> None:
        """Has the item attempted, in its turn. Nothing where it waits already."""
        self._items.setdefault(item)
        if self._num_workers < min(MAX_CONCURRENT_ATTEMPTS, len(self._items)):
            self._num_workers += 1
            self._spawn(self._work())

    def remove(self, item: Item) -> None:
        """The item is not to be attempted any more."""
        self._items.pop(item, None)

    async def _work(self) -> None:
        try:
            while self._items:
                item = next(iter(self._items))
                del self._items[item]
                if not await self._try(item):
                    self._items.setdefault(item)
                    await self._pause(STORE_RETRY_S)
        finally:
            self._num_workers -= 1

    async def _try(self, item: Item) -> bool:
        self._attempted.add(item)
        try:
            return await self._attempt(item)
        finally:
            self._attempted.discard(item)
