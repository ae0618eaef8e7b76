"""Writes of a modelled router to the ledger that nothing waits for: as
`inflight.router.dispatch.ledger_writer.LedgerWriter`.

While one call is under way more collects and leaves in the next one; of an executor's reports only the newest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inflight.bench.simulation.ledger import Ledger
from inflight.bench.timeline.timeline import US_PER_MS, US_PER_S, Process, Timeline
from inflight.router.dispatch.report_pacer import ReportPacer
from inflight.router.store.types import Ending, ExecutorReport, ReportOutcome

RETRY_US = 500 * US_PER_MS
# As `AdmissionStore`'s.
MAX_SETTLED_PER_CALL = 16


class LedgerWriter:
    """Writes for one router. `on_superseded(executor, request, attempt)` drops what the ledger placed again. Implements
    `inflight.router.store.types.PoolListener`."""

    def __init__(
        self,
        ledger: Ledger,
        timeline: Timeline,
        process: Process,
        on_superseded: Callable[[str, str, int], None],
    ) -> None:
        self._ledger = ledger
        self._timeline = timeline
        self._process = process
        self._on_superseded = on_superseded
        self._ended: list[Ending] = []
        self._is_settling = False
        self._reports = ReportPacer(ledger.router_id)
        self._is_relaying = False
        self._looks_us: int | None = None
        ledger.listen(self)

    def settle(self, ending: Ending) -> None:
        """A placement ended."""
        self._ended.append(ending)
        if not self._is_settling:
            self._is_settling = True
            # What ends at the same moment leaves together.
            self._timeline.after(0, self._process.run, self._settle)

    def report(self, report: ExecutorReport) -> None:
        """An executor says how it stands."""
        self._reports.offer(report, self._now_s)
        self._relay_if_due()

    def expect_report(self, executor_id: str) -> None:
        """The ledger waits for the executor's next report."""
        self._reports.expect(executor_id)
        self._relay_if_due()

    def start_over(self) -> None:
        """As `inflight.router.dispatch.ledger_writer`."""
        self._reports.start_over(self._now_s)
        self._relay_if_due()

    def forget(self, executor_id: str) -> None:
        """The executor is gone."""
        self._reports.forget(executor_id)

    def on_routers(self, peers: frozenset[str]) -> None:
        self._reports.follow(peers, self._now_s)
        self._relay_if_due()

    def on_report_overdue(self, executor_id: str, silent_s: float) -> None:
        self._reports.report_overdue(executor_id, silent_s, self._now_s)
        self._relay_if_due()

    def has_use_of_report(self, executor_id: str) -> bool:
        """Whether this router could relay the executor's next report. A message that it would drop need not be sent."""
        return self._reports.wants(executor_id, self._now_s)

    @property
    def _now_s(self) -> float:
        return self._timeline.now_us / US_PER_S

    def _relay_if_due(self) -> None:
        """Relays what is due now, one call at a time, and looks again when the next report is due."""
        due = self._reports.next_due()
        if self._is_relaying or due is None:
            return
        due_us = -int(-due * US_PER_S // 1)
        if due_us > self._timeline.now_us:
            if self._looks_us is None or due_us < self._looks_us or self._looks_us < self._timeline.now_us:
                self._looks_us = due_us
                self._timeline.at(due_us, self._process.run, self._relay_if_due)
            return
        reports = self._reports.take_due(self._now_s)
        if not reports:
            return
        self._is_relaying = True

        def answered(outcomes: Sequence[ReportOutcome]) -> None:
            for report, outcome in zip(reports, outcomes, strict=True):
                for attempt in outcome.superseded:
                    self._on_superseded(report.executor_id, attempt.request_id, attempt.attempt)
            self._relayed()

        def failed() -> None:
            for report in reports:
                self._reports.fail(report.executor_id)
            self._relayed()

        self._ledger.report_all(reports, answered, failed)

    def _relayed(self) -> None:
        self._is_relaying = False
        self._relay_if_due()

    def _settle(self) -> None:
        chunk, self._ended = self._ended[:MAX_SETTLED_PER_CALL], self._ended[MAX_SETTLED_PER_CALL:]
        if not chunk:
            self._is_settling = False
            return

        def failed() -> None:
            self._ended = chunk + self._ended
            self._timeline.after(RETRY_US, self._process.run, self._settle)

        self._ledger.settle(chunk, lambda num_settled: self._settle(), failed)
