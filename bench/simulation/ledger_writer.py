"""Writes of a modelled router to the ledger that nothing waits for: as `router.dispatch.ledger_writer.LedgerWriter`.

While one call is under way more collects and leaves in the next one; of an executor's reports only the newest counts.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.simulation.ledger import Ledger
from bench.timeline.timeline import US_PER_MS, Process, Timeline
from router.store.types import Ending, ExecutorReport, ReportOutcome

RETRY_US = 500 * US_PER_MS
# As `AdmissionStore`'s.
MAX_SETTLED_PER_CALL = 256


class LedgerWriter:
    """Writes for one router. `on_superseded(executor, request, attempt)` drops what the ledger placed again."""

    def __init__(
        self, ledger: Ledger, timeline: Timeline, process: Process, on_superseded: Callable[[str, str, int], None]
    ) -> None:
        self._ledger = ledger
        self._timeline = timeline
        self._process = process
        self._on_superseded = on_superseded
        self._ended: list[Ending] = []
        self._is_settling = False

    def settle(self, ending: Ending) -> None:
        """A placement ended."""
        self._ended.append(ending)
        if not self._is_settling:
            self._is_settling = True
            # What ends at the same moment leaves together.
            self._timeline.after(0, self._process.run, self._settle)

    def report(self, report: ExecutorReport) -> None:
        """An executor says how it stands."""
        self._ledger.report(report, lambda outcome: self._reported(report.executor_id, outcome))

    def _reported(self, executor_id: str, outcome: ReportOutcome) -> None:
        for attempt in outcome.superseded:
            self._on_superseded(executor_id, attempt.request_id, attempt.attempt)

    def _settle(self) -> None:
        chunk, self._ended = self._ended[:MAX_SETTLED_PER_CALL], self._ended[MAX_SETTLED_PER_CALL:]
        if not chunk:
            self._is_settling = False
            return

        def failed() -> None:
            self._ended = chunk + self._ended
            self._timeline.after(RETRY_US, self._process.run, self._settle)

        self._ledger.settle(chunk, lambda num_settled: self._settle(), failed)
