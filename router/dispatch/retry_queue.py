"""Work that is retried until the ledger answers, with a bounded number of concurrent attempts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

# The number of items that fit into the concurrent calls of a batched script (`inflight.router.ledger.calls`).
MAX_CONCURRENT_ATTEMPTS = 32
LEDGER_RETRY_S = 0.5


class RetryQueue(Generic[Item]):
    """Distinct items in order of arrival.

    `attempt(item)` returns whether the item is done. An item that is not done goes to the end of the queue, and its
    worker pauses before the next attempt. `spawn` starts a worker in a task.
    """

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
        self._num_workers = 0

    def add(self, item: Item) -> None:
        """Queues the item. No effect if it already waits."""
        self._items.setdefault(item)
        if self._num_workers < min(MAX_CONCURRENT_ATTEMPTS, len(self._items)):
            self._num_workers += 1
            self._spawn(self._work())

    async def _work(self) -> None:
        try:
            while self._items:
                item = next(iter(self._items))
                del self._items[item]
                if not await self._attempt(item):
                    self._items.setdefault(item)
                    await self._pause(LEDGER_RETRY_S)
        finally:
            self._num_workers -= 1
