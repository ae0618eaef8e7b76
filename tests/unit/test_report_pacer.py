"""The reports that reach the ledger, and their times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from inflight.router.dispatch.report_pacer import (
    EARLY_S,
    INTERVAL_S,
    LAST_RANK,
    MAX_PER_CALL,
    SILENCE_S,
    STAND_IN_S,
    ReportPacer,
)
from inflight.router.ledger.types import ExecutorReport, HeldSequence

REPORT = ExecutorReport("x", 1, 1, 100, 100, 8, accepting=True)


def test_first_report_goes_at_once() -> None:
    pacer = ReportPacer()
    pacer.offer(REPORT, 5.0)
    assert pacer.take_due(5.0) == [REPORT]
    assert pacer.next_due() is None


def test_twenty_reports_a_second_that_promise_the_same_become_two() -> None:
    pacer = ReportPacer()
    relayed = []
    for i in range(200):  # ten seconds
        now = i / 20
        pacer.offer(replace(REPORT, seq=i + 1, held=(HeldSequence("r", 1, i),), step_ms=float(i)), now)
        relayed += pacer.take_due(now)
    assert len(relayed) == 1 + 20  # the first, which came before the executor's first turn
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
    pacer.offer(REPORT, 1.0)
    pacer.take_due(1.0)
    changed = replace(REPORT, seq=2, **change)  # type: ignore[arg-type]
    pacer.offer(changed, 1.0)
    assert pacer.take_due(1.0) == [changed]


def test_newest_report_goes_when_the_interval_is_over() -> None:
    pacer = ReportPacer()
    pacer.offer(REPORT, 1.0)
    pacer.take_due(1.0)
    for seq in (2, 3):
        pacer.offer(replace(REPORT, seq=seq), 1.05)
    due = pacer.next_due()
    assert due is not None
    assert 1.05 < due <= 1.0 + INTERVAL_S
    assert pacer.take_due(due - 0.01) == []
    (report,) = pacer.take_due(due)
    assert (report.seq, report.age_ms) == (3, int(1000 * (due - 1.05)))
    pacer.offer(replace(REPORT, seq=4), due)
    assert pacer.next_due() == due + INTERVAL_S


def test_reports_that_were_held_up_together_are_not_due_together_afterwards() -> None:
    pacer, held_up = ReportPacer(), 3.2
    executors = [f"e{number}" for number in range(100)]

    def offer_all(seq: int, now: float) -> None:
        for executor_id in executors:
            pacer.offer(replace(REPORT, executor_id=executor_id, seq=seq), now)

    for seq, begun in ((1, 0.0), (2, held_up)):  # a router's start, and a pause of Redis
        offer_all(seq, begun)
        while pacer.take_due(begun):
            pass
        offer_all(seq + 10, begun)
        calls = []
        while (due := pacer.next_due()) is not None:
            assert begun < due <= begun + INTERVAL_S
            calls.append((due, len(pacer.take_due(due))))
        assert sum(count for _, count in calls) == len(executors)
        gaps = [later - earlier for (earlier, _), (later, _) in pairwise(calls)]
        assert min(gaps) > 0.005
        assert len(calls) <= 1.5 * len(executors) / MAX_PER_CALL


def test_report_that_the_ledger_waits_for_goes_at_once() -> None:
    pacer = ReportPacer()
    pacer.offer(REPORT, 1.0)
    pacer.take_due(1.0)
    pacer.expect("x")
    pacer.offer(replace(REPORT, seq=2), 1.01)
    assert [report.seq for report in pacer.take_due(1.01)] == [2]
    pacer.offer(replace(REPORT, seq=3), 1.02)
    assert pacer.take_due(1.02) == []


def test_after_a_failure_the_next_report_goes_at_once() -> None:
    pacer = ReportPacer()
    pacer.offer(REPORT, 1.0)
    pacer.take_due(1.0)
    pacer.fail("x")
    pacer.offer(replace(REPORT, seq=2), 1.01)
    assert [report.seq for report in pacer.take_due(1.01)] == [2]


def test_executors_are_paced_each_for_itself_and_forgotten_when_gone() -> None:
    pacer = ReportPacer()
    pacer.offer(REPORT, 1.0)
    pacer.take_due(1.0)
    other = replace(REPORT, executor_id="y")
    pacer.offer(replace(REPORT, seq=2), 1.01)
    pacer.offer(other, 1.02)
    assert pacer.take_due(1.02) == [other]
    pacer.forget("x")
    assert pacer.next_due() is None
    pacer.expect("x")
    pacer.fail("x")
    assert pacer.next_due() is None


ROUTERS = tuple(f"router-{number}" for number in range(5))


def pacers(routers: Sequence[str] = ROUTERS) -> list[ReportPacer]:
    """One for each of the routers, which all know each other, in the order in which they relay for executor x. Each has
    relayed its first report."""
    made = [ReportPacer(router) for router in routers]
    for router, pacer in zip(routers, made, strict=True):
        pacer.follow(set(routers) - {router}, 0.0)
        pacer.offer(replace(REPORT, seq=0, budget_blocks=1), 0.0)
        assert len(pacer.take_due(0.0)) == 1
    return sorted(made, key=lambda pacer: pacer.rank("x"))


def test_one_router_relays_the_reports_of_an_executor() -> None:
    first, *others = pacers()
    for i in range(60):
        now = i / 20
        for pacer in (first, *others):
            pacer.offer(replace(REPORT, seq=i + 1, budget_blocks=100 - i), now)
        assert [report.seq for report in first.take_due(now)] == [i + 1]
        assert all(pacer.next_due() is None for pacer in others)


def test_executors_are_spread_over_the_routers_and_a_router_that_goes_moves_only_its_own() -> None:
    made = {router: ReportPacer(router) for router in ROUTERS}
    executors = [f"executor-{number}" for number in range(1000)]

    def relaying(routers: set[str]) -> dict[str, str]:
        for router in routers:
            made[router].follow(routers - {router}, 0.0)
        found = {one: [router for router in routers if made[router].rank(one) == 0] for one in executors}
        assert all(len(one) == 1 for one in found.values())
        return {executor: one[0] for executor, one in found.items()}

    before, after = relaying(set(ROUTERS)), relaying(set(ROUTERS[1:]))
    assert all(150 < list(before.values()).count(router) < 250 for router in ROUTERS)
    assert all(after[one] == router for one, router in before.items() if router != ROUTERS[0])


def test_next_router_relays_after_a_second_of_silence_and_for_a_while() -> None:
    _, second, third, *_ = pacers()
    for pacer in (second, third):
        pacer.offer(REPORT, 1.0)
        pacer.report_overdue("x", 0.9, 2.5)
        assert pacer.next_due() is None
        pacer.report_overdue("x", 1.2, 2.5)
    assert third.next_due() is None
    (report,) = second.take_due(2.5)
    assert report.age_ms == 1500
    second.offer(replace(REPORT, seq=2), 2.6)
    due = second.next_due()
    assert due is not None
    assert 2.5 < due <= 2.5 + INTERVAL_S
    second.offer(replace(REPORT, seq=3), 2.5 + STAND_IN_S)
    assert second.next_due() is None


def test_each_router_in_turn_relays_in_the_silence_of_those_before_it() -> None:
    for number, pacer in enumerate(pacers()):
        pacer.offer(REPORT, 1.0)
        rank = min(number, LAST_RANK)
        if rank:
            pacer.report_overdue("x", SILENCE_S * rank - 0.01, 5.0)
            assert pacer.take_due(5.0) == []
        pacer.report_overdue("x", SILENCE_S * rank, 5.0)
        assert len(pacer.take_due(5.0)) == 1


def test_router_relays_what_it_has_when_the_first_in_the_order_is_gone() -> None:
    first, second, *_ = pacers()
    second.offer(REPORT, 1.0)
    second.follow(second.peers - {first.router_id}, 6.0)
    (report,) = second.take_due(6.0)
    assert report.age_ms == 5000


def test_report_that_the_ledger_waits_for_goes_at_once_from_any_router() -> None:
    *_, last = pacers()
    last.offer(REPORT, 1.0)
    last.expect("x")
    assert last.next_due() is None  # what has come already may be from before
    last.offer(replace(REPORT, seq=2), 1.1)
    assert [report.seq for report in last.take_due(1.1)] == [2]
    last.offer(replace(REPORT, seq=3), 1.2)
    assert last.next_due() is None


def test_every_router_relays_one_report_after_the_ledger_was_lost() -> None:
    first, *others = pacers()
    for pacer in others:
        pacer.offer(REPORT, 1.0)
        assert not pacer.take_due(1.0)
        pacer.start_over(1.5)
        (report,) = pacer.take_due(1.5)
        assert report.age_ms == 500
        pacer.offer(replace(REPORT, seq=2), 1.6)
        assert pacer.next_due() is None
    first.start_over(1.5)  # nothing waits
    assert first.next_due() is None
    first.offer(REPORT, 1.6)
    assert len(first.take_due(1.6)) == 1


def test_no_more_reports_go_in_a_call_than_it_can_apply_quickly() -> None:
    pacer = ReportPacer()
    for number in range(MAX_PER_CALL + 1):
        pacer.offer(replace(REPORT, executor_id=f"e{number}"), 1.0)
    assert [len(pacer.take_due(1.0)) for _ in range(3)] == [MAX_PER_CALL, 1, 0]


def test_report_that_is_due_soon_goes_along_and_is_due_together_with_the_other_from_then_on() -> None:
    executors = [f"e{number}" for number in range(12)]

    def relayed_once(*executor_ids: str) -> ReportPacer:
        pacer = ReportPacer()
        for seq in (1, 2):
            for executor_id in executor_ids:
                pacer.offer(replace(REPORT, executor_id=executor_id, seq=seq), 0.0)
            while pacer.take_due(0.0):
                pass
        return pacer

    pacer = relayed_once(*executors)
    due_by_id = {one: relayed_once(one).next_due() or 0.0 for one in executors}
    first = min(due_by_id.values())
    together = {one for one, due in due_by_id.items() if due <= first + EARLY_S}
    assert 1 < len(together) < MAX_PER_CALL
    assert pacer.take_due(first - 0.001) == []  # none is due yet
    assert {report.executor_id for report in pacer.take_due(first)} == together
    for executor_id in executors:
        if executor_id in together:
            pacer.offer(replace(REPORT, executor_id=executor_id, seq=3), first)
        else:
            pacer.forget(executor_id)
    assert pacer.next_due() == first + INTERVAL_S
    assert len(pacer.take_due(first + INTERVAL_S)) == len(together)


def test_work_for_a_report_does_not_grow_with_the_number_of_executors() -> None:
    pacer = ReportPacer()
    for number in range(5000):
        pacer.offer(replace(REPORT, executor_id=f"e{number}"), 0.0)
    while pacer.take_due(0.0):
        pass
    for seq in range(2, 50):  # more reports of the same executor leave one entry
        pacer.offer(replace(REPORT, executor_id="e1", seq=seq), 0.1)
    assert len(pacer._due) == 1
