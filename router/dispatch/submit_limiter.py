"""The limit on concurrent submits to the ledger: a few at a time, in order of arrival, each with a bounded wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.errors import Reason, RequestError
from router.request.errors import RETRY_AFTER_MS

Outcome = TypeVar("Outcome")

# As many as have a turn at the store (`router.store.turns`). A new request without a turn after `SUBMIT_TURN_S` is
# refused: its client can ask another router, or later.
MAX_CONCURRENT_SUBMITS = 8
SUBMIT_TURN_S = 2.0


class SubmitTurns:
    """The turns of one pool."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MAX_CONCURRENT_SUBMITS)

    async def take(self, submit: Callable[[], Awaitable[Outcome]]) -> Outcome | RequestError:
        """Submits when it is its turn. Returns a refusal if that takes too long."""
        try:
            async with asyncio.timeout(SUBMIT_TURN_S):
                await self._turns.acquire()
        except TimeoutError:
            text = "too many requests come in at once"
            return RequestError(Reason.STORE_UNAVAILABLE, text, retry_after_ms=RETRY_AFTER_MS)
        try:
            return await submit()
        finally:
            self._turns.release()
