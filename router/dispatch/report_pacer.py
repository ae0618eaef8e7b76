"""The pacing of executors' reports to the ledger.

Pure: the clock's readings are arguments. An executor reports up to 20 times a second to every router. The ledger needs
to know at once what it can promise; otherwise it only needs to know that the executor lives and what it holds. A report
therefore goes at once if it changes what may be promised or if the ledger waits for it, and else half a second after
the one before. Of several that wait only the newest counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.store.types import ExecutorReport

# An executor counts as live for 2 s after a report.
INTERVAL_S = 0.5


@dataclass(slots=True)
class _Pace:
    """One executor: the report that waits, and what was relayed last."""

    waiting: ExecutorReport | None = None
    relayed: ExecutorReport | None = None
    relayed_at: float = 0.0
    is_expected: bool = False

    def due_at(self) -> float | None:
        """When the waiting report is to go; None without one."""
        if self.waiting is None:
            return None
        if self.relayed is None or self.is_expected or _promise(self.waiting) != _promise(self.relayed):
            return self.relayed_at
        return self.relayed_at + INTERVAL_S


class ReportPacer:
    """The reports of one pool's executors."""

    def __init__(self) -> None:
        self._paces: dict[str, _Pace] = {}

    def offer(self, report: ExecutorReport) -> None:
        """Takes a report of an executor."""
        self._paces.setdefault(report.executor_id, _Pace()).waiting = report

    def expect(self, executor_id: str) -> None:
        """Lets the executor's next report go at once: the ledger places nothing there before it."""
        if executor_id in self._paces:
            self._paces[executor_id].is_expected = True

    def fail(self, executor_id: str) -> None:
        """Lets the next report go at once: the last one did not reach the ledger."""
        if executor_id in self._paces:
            self._paces[executor_id].relayed = None

    def forget(self, executor_id: str) -> None:
        """Drops an executor that is gone."""
        self._paces.pop(executor_id, None)

    def take_due(self, now: float) -> list[ExecutorReport]:
        """Returns the reports to relay now, which then count as relayed."""
        due: list[ExecutorReport] = []
        for pace in self._paces.values():
            due_at = pace.due_at()
            if due_at is not None and due_at <= now and pace.waiting is not None:
                due.append(pace.waiting)
                pace.relayed, pace.relayed_at = pace.waiting, now
                pace.waiting, pace.is_expected = None, False
        return due

    def next_due(self) -> float | None:
        """Returns when the next report is to go; None if none waits."""
        return min((at for pace in self._paces.values() if (at := pace.due_at()) is not None), default=None)


def _promise(report: ExecutorReport) -> tuple[object, ...]:
    """Returns the part of a report that decides what the ledger may promise."""
    return (
        report.generation,
        report.budget_blocks,
        report.total_blocks,
        report.budget_sequences,
        report.accepting,
        report.reserve_quantile,
    )
