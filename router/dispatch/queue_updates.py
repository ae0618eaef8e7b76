"""Updates of requests' positions in the queue, for clients that ask for them.

A pool has one task, which makes one read of the ledger at a time. With many watched requests each one is updated less
often, and the load on the ledger stays the same. Requests that are not watched cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from inflight.common.errors import RequestError
from inflight.router.ledger.types import Explanation, LedgerState, Queued
from inflight.router.stream.request_stream import RequestStream

Explain = Callable[[str], Awaitable[Explanation | None]]


class QueueWatch:
    """The watched requests of one pool. Each is updated at most every `interval_s` seconds, and only after a change."""

    def __init__(self, explain: Explain, interval_s: float) -> None:
        self._explain = explain
        self._interval_s = interval_s
        self._told: dict[RequestStream, Queued] = {}
        self._wake = asyncio.Event()

    def watch(self, stream: RequestStream, told: Queued) -> None:
        """Watches the request until it is placed. Its client already knows `told`."""
        self._told[stream] = told
        self._wake.set()

    def unwatch(self, stream: RequestStream) -> None:
        """Stops watching. Safe to repeat."""
        self._told.pop(stream, None)

    async def run(self) -> None:
        """Reads the ledger until cancelled."""
        while True:
            if not self._told:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(self._interval_s)
            await self.look()

    async def look(self) -> None:
        """Asks the ledger once for each watched request."""
        for stream in tuple(self._told):
            if stream.life.attempt:  # it has been placed at least once
                self.unwatch(stream)
            if stream not in self._told:  # may have been removed since the round began
                continue
            try:
                explanation = await self._explain(stream.request_id)
            except RequestError:
                return  # the ledger does not answer; it logs the outage
            if explanation is not None and explanation.state is LedgerState.WAITING:
                self._update(stream, Queued(explanation.position, explanation.estimated_wait_ms))

    def _update(self, stream: RequestStream, queued: Queued) -> None:
        if self._told.get(stream, queued) != queued:
            self._told[stream] = queued
            stream.move(queued)
