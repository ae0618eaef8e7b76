"""Tells requests that asked for it how they move up in line.

One task and one read of the ledger at a time for a whole pool, whoever asks: with many watched requests each is told
less often, and the ledger has no more to do. Requests that did not ask cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from common.errors import RequestError
from router.store.types import Explanation, Queued, RequestState
from router.stream.request_stream import RequestStream

Explain = Callable[[str], Awaitable[Explanation | None]]


class QueueWatch:
    """The watched requests of one pool. Each is told at most every `interval_s` seconds, and only of a change."""

    def __init__(self, explain: Explain, interval_s: float) -> None:
        self._explain = explain
        self._interval_s = interval_s
        self._told: dict[RequestStream, Queued] = {}
        self._wake = asyncio.Event()

    def watch(self, stream: RequestStream, told: Queued) -> None:
        """From now on the request is told of changes, until it is placed; it knows `told` already."""
        self._told[stream] = told
        self._wake.set()

    def unwatch(self, stream: RequestStream) -> None:
        """It wants no more. Safe to repeat."""
        self._told.pop(stream, None)

    async def run(self) -> None:
        """Looks until cancelled."""
        while True:
            if not self._told:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(self._interval_s)
            await self.look()

    async def look(self) -> None:
        """Asks the ledger once for each watched request."""
        for stream in tuple(self._told):
            if stream.life.attempt:  # it has been placed, or is on its way back from there
                self.unwatch(stream)
            if stream not in self._told:  # since the round began
                continue
            try:
                explanation = await self._explain(stream.request_id)
            except RequestError:
                return  # the ledger is away; its absence is told by those who need it
            if explanation is not None and explanation.state is RequestState.WAITING:
                self._tell(stream, Queued(explanation.position, explanation.estimated_wait_ms))

    def _tell(self, stream: RequestStream, queued: Queued) -> None:
        if self._told.get(stream, queued) != queued:
            self._told[stream] = queued
            stream.move(queued)
