"""What a router writes to the ledger without anybody waiting for it: ends and reports.

While one call is under way more collects and leaves in the next one. While Redis is away ends wait here until it is
back; of an executor's reports only the newest counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from common.errors import RequestError
from router.store.store import AdmissionStore
from router.store.types import Attempt, ExecutorReport

log = logging.getLogger(__name__)

STORE_RETRY_S = 0.5


class LedgerWriter:
    """Writes for one pool. `on_superseded(executor_id, attempt)` has an executor drop what the ledger placed anew."""

    def __init__(self, store: AdmissionStore, on_superseded: Callable[[str, Attempt], None]) -> None:
        self._store = store
        self._on_superseded = on_superseded
        self._ended: list[Attempt] = []
        self._reports: dict[str, ExecutorReport] = {}
        self._ended_wake = asyncio.Event()
        self._report_wake = asyncio.Event()

    def settle(self, request_id: str, attempt: int) -> None:
        """A placement ended: its reservation is free."""
        self._ended.append(Attempt(request_id, attempt))
        self._ended_wake.set()

    def report(self, report: ExecutorReport) -> None:
        """An executor says how it stands."""
        self._reports[report.executor_id] = report
        self._report_wake.set()

    async def run(self) -> None:
        """Writes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._settle_ends(), name="settle")
            tasks.create_task(self._relay_reports(), name="reports")

    async def settle_now(self) -> bool:
        """Settles all ends that have collected, in one call; returns False where they must wait for the store."""
        ended, self._ended = self._ended, []
        try:
            await self._store.settle(ended)
        except RequestError as error:
            log.warning("%d ends cannot be settled yet: %s", len(ended), error)
            self._ended = ended + self._ended
            return False
        return True

    async def _settle_ends(self) -> None:
        while True:
            await self._ended_wake.wait()
            self._ended_wake.clear()
            if not await self.settle_now():
                self._ended_wake.set()
                await asyncio.sleep(STORE_RETRY_S)

    async def _relay_reports(self) -> None:
        while True:
            await self._report_wake.wait()
            self._report_wake.clear()
            reports, self._reports = self._reports, {}
            for report in reports.values():
                await self._relay(report)

    async def _relay(self, report: ExecutorReport) -> None:
        try:
            outcome = await self._store.report(report)
        except RequestError as error:
            log.warning("the report of %s cannot be relayed: %s", report.executor_id, error)
            return
        for attempt in outcome.superseded:
            self._on_superseded(report.executor_id, attempt)
