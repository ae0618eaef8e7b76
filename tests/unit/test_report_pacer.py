"""The reports that reach the ledger, and their times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.dispatch.report_pacer import INTERVAL_S, ReportPacer
from router.store.types import ExecutorReport, HeldSequence

REPORT = ExecutorReport("x", 1, 1, 100, 100, 8, accepting=True)


def test_first_report_goes_at_once() -> None:
    pacer = ReportPacer()
    pacer.offer(REPORT)
    assert pacer.take_due(5.0) == [REPORT]
    assert pacer.next_due() is None


def test_twenty_reports_a_second_that_promise_the_same_become_two() -> None:
    pacer = ReportPacer()
    relayed = []
    for i in range(200):  # ten seconds
        now = i / 20
        pacer.offer(replace(REPORT, seq=i + 1, held=(HeldSequence("r", 1, i),), step_ms=float(i)))
        relayed += pacer.take_due(now)
    assert len(relayed) == 20
    assert [report.seq for report in relayed] == sorted(report.seq for report in relayed)


@pytest.mark.parametrize(
    "change",
    [
        {"budget_blocks": 99},
        {"total_blocks": 101},
        {"budget_sequences": 7},
        {"accepting": False},
        {"reserve_quantile": 0.9},
        {"generation": 2},
    ],
)
def test_report_that_promises_something_else_goes_at_once(change: dict[str, object]) -> None:
    pacer = ReportPacer()
    pacer.offer(REPORT)
    pacer.take_due(1.0)
    changed = replace(REPORT, seq=2, **change)  # type: ignore[arg-type]
    pacer.offer(changed)
    assert pacer.take_due(1.0) == [changed]


def test_newest_report_goes_when_the_interval_is_over() -> None:
    pacer = ReportPacer()
    pacer.offer(REPORT)
    pacer.take_due(1.0)
    for seq in (2, 3):
        pacer.offer(replace(REPORT, seq=seq))
    assert pacer.take_due(1.0 + 0.9 * INTERVAL_S) == []
    assert pacer.next_due() == 1.0 + INTERVAL_S
    assert [report.seq for report in pacer.take_due(1.0 + INTERVAL_S)] == [3]


def test_report_that_the_ledger_waits_for_goes_at_once() -> None:
    pacer = ReportPacer()
    pacer.offer(REPORT)
    pacer.take_due(1.0)
    pacer.expect("x")
    pacer.offer(replace(REPORT, seq=2))
    assert [report.seq for report in pacer.take_due(1.01)] == [2]
    pacer.offer(replace(REPORT, seq=3))
    assert pacer.take_due(1.02) == []


def test_after_a_failure_the_next_report_goes_at_once() -> None:
    pacer = ReportPacer()
    pacer.offer(REPORT)
    pacer.take_due(1.0)
    pacer.fail("x")
    pacer.offer(replace(REPORT, seq=2))
    assert [report.seq for report in pacer.take_due(1.01)] == [2]


def test_executors_are_paced_each_for_itself_and_forgotten_when_gone() -> None:
    pacer = ReportPacer()
    pacer.offer(REPORT)
    pacer.take_due(1.0)
    other = replace(REPORT, executor_id="y")
    pacer.offer(other)
    pacer.offer(replace(REPORT, seq=2))
    assert pacer.take_due(1.1) == [other]
    pacer.forget("x")
    assert pacer.next_due() is None
    pacer.expect("x")
    pacer.fail("x")
    assert pacer.next_due() is None
