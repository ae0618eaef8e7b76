"""What a router writes to the ledger without anybody waiting for it: ends and reports.

While one call is under way more collects and leaves in the next one. While Redis is away ends wait here until it is
back; of an executor's reports only the newest counts, and not each of them goes (`router.dispatch.report_pacer`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from common.errors import RequestError
from inflight.v1 import executor_pb2
from router.dispatch.report_pacer import ReportPacer
from router.dispatch.retry_queue import STORE_RETRY_S
from router.executors.link import ExecutorLink
from router.store.store import AdmissionStore
from router.store.types import Attempt, Ending, ExecutorReport, HeldSequence

log = logging.getLogger(__name__)


class LedgerWriter:
    """Writes for one pool. `on_superseded(executor_id, attempt)` has an executor drop what the ledger placed anew."""

    def __init__(self, store: AdmissionStore, on_superseded: Callable[[str, Attempt], None]) -> None:
        self._store = store
        self._on_superseded = on_superseded
        self._ended: list[Ending] = []
        self._reports = ReportPacer()
        self._ended_wake = asyncio.Event()
        self._report_wake = asyncio.Event()

    def settle(self, ending: Ending) -> None:
        """A placement ended: its reservation is free."""
        self._ended.append(ending)
        self._ended_wake.set()

    def report(self, report: ExecutorReport) -> None:
        """An executor says how it stands."""
        self._reports.offer(report)
        self._report_wake.set()

    def expect_report(self, executor_id: str) -> None:
        """The ledger waits for the executor's next report."""
        self._reports.expect(executor_id)
        self._report_wake.set()

    def forget(self, executor_id: str) -> None:
        """The executor is gone, and so is what it reported."""
        self._reports.forget(executor_id)

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
            log.debug("%d ends cannot be settled yet: %s", len(ended), error)  # the store logs its outage
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
            for report in self._reports.take_due(time.monotonic()):
                await self._relay(report)
            due = self._reports.next_due()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                    await self._report_wake.wait()
            self._report_wake.clear()

    async def _relay(self, report: ExecutorReport) -> None:
        try:
            outcome = await self._store.report(report)
        except RequestError as error:
            log.debug("the report of %s cannot be relayed: %s", report.executor_id, error)
            self._reports.fail(report.executor_id)
            return
        for attempt in outcome.superseded:
            self._on_superseded(report.executor_id, attempt)


def ledger_report(link: ExecutorLink, report: executor_pb2.Report) -> ExecutorReport:
    """What the ledger is told of a report."""
    return ExecutorReport(
        executor_id=link.executor_id,
        generation=link.description.generation,
        seq=report.seq,
        budget_blocks=report.budget_blocks,
        total_blocks=report.total_blocks,
        budget_sequences=report.budget_sequences,
        accepting=not report.draining,
        held=tuple(HeldSequence(h.request_id, h.attempt, h.reserved_blocks) for h in report.held),
        reserve_quantile=report.reserve_quantile if report.HasField("reserve_quantile") else 1.0,
        step_ms=report.step_ms,
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        seats=link.description.max_num_sequences,
    )
