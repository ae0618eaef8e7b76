"""What a pool's ledger says, for all who look on: however many they are, it is asked no more often than one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from common.errors import RequestError
from router.store.snapshot import Snapshot

MIN_AGE_S = 0.25
MAX_LINES = 100


class LedgerLook:
    """One pool's. `ask` is given the number of lines of tenants that are wanted."""

    def __init__(self, ask: Callable[[int], Awaitable[Snapshot]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._asked_s: float | None = None
        self._asking: asyncio.Task[None] | None = None

    async def newest(self, max_age_s: float) -> Snapshot | None:
        """What it said within so long, a quarter of a second at least. Where the answer takes longer than that, what it
        said before; None where it does not answer."""
        max_age_s = max(max_age_s, MIN_AGE_S)
        is_old = self._asked_s is None or self._clock() - self._asked_s >= max_age_s
        if self._asking is None and is_old:
            self._asked_s = self._clock()
            self._asking = asyncio.create_task(self._look(), name="look at the ledger")
        if self._asking is not None:
            await asyncio.wait((self._asking,), timeout=max_age_s)
        return self._snapshot

    async def _look(self) -> None:
        try:
            self._snapshot = await self._ask(MAX_LINES)
        except RequestError:
            self._snapshot = None  # the ledger is away; the store's log says so
        finally:
            self._asking = None
