"""When reports are due: on change, at most 20 per second, and at least once a second.

Owns the clock of reporting and the report number, not what a report says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from executor.engine_output import EngineStatus

MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 1.0


class Reporter:
    """Calls `send(seq, status)` with the newest status whenever a report is due."""

    def __init__(self, send: Callable[[int, EngineStatus], None]) -> None:
        self._send = send
        self._status: EngineStatus | None = None
        self._seq = 0
        self._changed = asyncio.Event()

    def update(self, status: EngineStatus) -> None:
        """Takes in the newest status."""
        if status != self._status:
            self._status = status
            self._changed.set()

    def send_now(self) -> None:
        """Makes a report due although nothing changed: somebody new listens."""
        self._changed.set()

    def send_first(self) -> None:
        """Sends a report before anything else that comes of the same change."""
        if self._status is not None:
            self._report(self._status)

    async def run(self) -> None:
        """Sends reports until cancelled."""
        while True:
            # When nothing changes for a second the lease must be renewed all the same.
            # `asyncio.wait_for` would lose a cancellation that comes together with a change (Python 3.11).
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAX_INTERVAL_S):
                    await self._changed.wait()
            self._changed.clear()
            if self._status is not None:
                self._report(self._status)
            await asyncio.sleep(MIN_INTERVAL_S)

    def _report(self, status: EngineStatus) -> None:
        self._seq += 1
        self._send(self._seq, status)
