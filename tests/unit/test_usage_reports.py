"""Reports of usage: to whom they go, what they repeat, and what a router does not take."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from inflight.executor.engine.accounting import Account, AccountTotal
from inflight.executor.scheduler.sequence import Resources
from inflight.executor.serving.usage import REPEAT_S, UsageReporter
from inflight.router.executors.frame_checks import check_frame
from inflight.router.request.executor_context import FrameError
from inflight.v1 import executor_pb2, types_pb2


@dataclass(slots=True, eq=False)
class Router:
    """Takes reports."""

    router_id: str
    reports: list[list[str]] = field(default_factory=list)

    def charge(self, usage: executor_pb2.UsageReport) -> None:
        """Keeps the tenants of a report."""
        self.reports.append(sorted(one.tenant for one in usage.accounts))


class Executor:
    """A reporter with a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.reporter = UsageReporter(lambda: self.now_s)
        self.routers = [Router("a"), Router("b")]

    def use(self, tenant: str, day: int = 7) -> None:
        """An account grows."""
        self.reporter.take([AccountTotal(Account(day, tenant), Resources(busy_ns=1))])

    def send_after(self, seconds: float) -> None:
        """Time passes, and a report is sent."""
        self.now_s += seconds
        self.reporter.send(self.routers)


def test_each_report_goes_to_the_next_router_and_changes_are_repeated_for_a_minute() -> None:
    executor = Executor()
    executor.use("acme")
    for _ in range(4):
        executor.send_after(1.0)
    assert [router.reports for router in executor.routers] == [[["acme"]] * 2] * 2

    executor.use("other")
    executor.send_after(REPEAT_S - 4.5)
    executor.send_after(0.0)
    assert {tuple(router.reports[-1]) for router in executor.routers} == {("acme", "other")}


def test_everything_is_sent_once_a_minute_and_days_before_yesterday_are_not() -> None:
    executor = Executor()
    for day, tenant in ((5, "old"), (6, "yesterday"), (7, "today")):
        executor.use(tenant, day)
    executor.send_after(2 * REPEAT_S)
    executor.send_after(1.0)

    assert [report for router in executor.routers for report in router.reports] == [["today", "yesterday"]]


def test_executor_that_stops_tells_every_router_everything() -> None:
    executor = Executor()
    executor.use("acme")
    executor.now_s = 10 * REPEAT_S
    executor.reporter.send_all(executor.routers)

    assert [router.reports for router in executor.routers] == [[["acme"]]] * 2


@pytest.mark.parametrize(
    "account",
    [
        executor_pb2.AccountUsage(tenant="a\0b"),
        executor_pb2.AccountUsage(adapter_name="x" * 1000),
        executor_pb2.AccountUsage(day=2**32 - 1),
        executor_pb2.AccountUsage(used=types_pb2.ResourceUsage(busy_ns=2**60)),
    ],
)
def test_usage_that_cannot_be_true_breaks_the_link(account: executor_pb2.AccountUsage) -> None:
    response = executor_pb2.ServeResponse(generation=1, usage=executor_pb2.UsageReport(accounts=[account]))
    with pytest.raises(FrameError):
        check_frame(response, executor_pb2.DescribeResponse(generation=1), {}, ())
