"""Background writes of a router to the ledger: ends of placements and executors' reports.

While a call is in progress, further writes collect for the next call. While Redis is unavailable, ends wait here. Of an
executor's reports only the newest counts, and not every router writes every report
(`inflight.router.dispatch.report_pacer`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from inflight.common.errors import RequestError
from inflight.common.protocol import RESERVATION_VERSION
from inflight.router.dispatch.report_pacer import ReportPacer
from inflight.router.dispatch.retry_queue import LEDGER_RETRY_S
from inflight.router.executors.link import ExecutorLink
from inflight.router.ledger.ledger import Ledger
from inflight.router.ledger.types import Attempt, Ending, ExecutorReport, HeldSequence, ServedAdapter
from inflight.router.request.ids import prefix_word
from inflight.v1 import executor_pb2, types_pb2

log = logging.getLogger(__name__)


class LedgerWriter:
    """The background writes for one pool. Implements `inflight.router.ledger.types.PoolEvents`.

    `on_superseded(executor_id, attempt)` is called for a sequence that an executor holds although the ledger no longer
    counts its attempt. It must cancel the sequence on the executor.
    """

    def __init__(self, ledger: Ledger, on_superseded: Callable[[str, Attempt], None]) -> None:
        self._ledger = ledger
        self._on_superseded = on_superseded
        self._ended: list[Ending] = []
        # By request: the number of ends that the ledger does not know yet.
        self._num_unsettled: Counter[str] = Counter()
        # Set by the next call of `settle_now`, to its error or None; None while no task waits for it.
        self._settling: asyncio.Future[RequestError | None] | None = None
        self._reports = ReportPacer(ledger.router_id)
        self._ended_wake = asyncio.Event()
        self._report_wake = asyncio.Event()
        ledger.listen(self)

    def settle(self, ending: Ending) -> None:
        """Queues the end of a placement, which releases its reservation."""
        self._ended.append(ending)
        self._num_unsettled[ending.request_id] += 1
        self._ended_wake.set()

    async def settled(self, request_id: str) -> None:
        """Waits until the ledger knows every queued end of the request. Raises `RequestError` if the ledger does not
        answer now.

        If the request were submitted again before that, the ledger could return the placement that is about to end.
        """
        while request_id in self._num_unsettled:
            if self._settling is None:
                self._settling = asyncio.get_running_loop().create_future()
            error = await asyncio.shield(self._settling)
            if error is not None:
                raise error

    def report(self, report: ExecutorReport) -> None:
        """Queues a report of an executor."""
        with self._waking():
            self._reports.offer(report, _now_s())

    def expect_report(self, executor_id: str) -> None:
        """Lets the executor's next report be sent at once, because the ledger waits for it."""
        with self._waking():
            self._reports.expect(executor_id)

    def start_over(self) -> None:
        """Relays one report of every executor, because the ledger may have lost them."""
        with self._waking():
            self._reports.start_over(_now_s())

    def on_routers(self, peers: frozenset[str]) -> None:
        """Divides the executors among the live routers."""
        with self._waking():
            self._reports.follow(peers, _now_s())

    def on_report_overdue(self, executor_id: str, silent_s: float) -> None:
        """Relays the executor's reports in place of a router that does not."""
        with self._waking():
            self._reports.report_overdue(executor_id, silent_s, _now_s())

    @contextmanager
    def _waking(self) -> Iterator[None]:
        """Wakes the relaying task if the change of the pacer in this context makes a report due earlier."""
        before = self._reports.next_due()
        yield
        due = self._reports.next_due()
        if due is not None and (before is None or due < before):
            self._report_wake.set()

    def forget(self, executor_id: str) -> None:
        """Drops the report of an executor that is gone."""
        self._reports.forget(executor_id)

    async def run(self) -> None:
        """Writes until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._settle_ends(), name="settle")
            tasks.create_task(self._relay_reports(), name="reports")

    async def settle_now(self) -> bool:
        """Settles all collected ends. Returns False if the ledger does not answer; the ends then stay queued."""
        ended, self._ended = self._ended, []
        failure: RequestError | None = None
        try:
            await self._ledger.settle(ended)
        except RequestError as error:
            log.debug("%d ends cannot be settled yet: %s", len(ended), error)  # the ledger logs its outage
            self._ended = ended + self._ended
            failure = error
        else:
            self._num_unsettled -= Counter(ending.request_id for ending in ended)
        if self._settling is not None:
            self._settling.set_result(failure)
            self._settling = None
        return failure is None

    async def _settle_ends(self) -> None:
        while True:
            await self._ended_wake.wait()
            self._ended_wake.clear()
            if not await self.settle_now():
                self._ended_wake.set()
                await asyncio.sleep(LEDGER_RETRY_S)

    async def _relay_reports(self) -> None:
        while True:
            while reports := self._reports.take_due(_now_s()):
                await self._relay(reports)
            due = self._reports.next_due()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due is None else max(0.0, due - _now_s())):
                    await self._report_wake.wait()
            self._report_wake.clear()

    async def _relay(self, reports: Sequence[ExecutorReport]) -> None:
        try:
            outcomes = await self._ledger.report_all(reports)
        except RequestError as error:
            log.debug("%d reports cannot be relayed: %s", len(reports), error)
            for report in reports:
                self._reports.fail(report.executor_id)
            return
        for report, outcome in zip(reports, outcomes, strict=True):
            for attempt in outcome.superseded:
                self._on_superseded(report.executor_id, attempt)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def ledger_report(link: ExecutorLink, report: executor_pb2.Report) -> ExecutorReport:
    """Returns the part of a report that the ledger uses."""
    return ExecutorReport(
        executor_id=link.executor_id,
        generation=link.description.generation,
        seq=report.seq,
        budget_blocks=report.budget_blocks,
        saved_blocks=report.saved_blocks,
        total_blocks=report.total_blocks,
        budget_sequences=report.budget_sequences,
        accepting=not report.draining,
        held=tuple(HeldSequence(h.request_id, h.attempt, h.reserved_blocks, h.adapter_hash) for h in report.held),
        reserve_quantile=report.reserve_quantile if report.HasField("reserve_quantile") else 1.0,
        step_ms=report.step_ms,
        prefill_tokens_per_s=report.prefill_tokens_per_s,
        output_tokens_per_s=_output_tokens_per_s(report),
        num_standby=report.num_waiting,
        seats=link.description.max_num_sequences,
        ends_at_reservation=_ends_at_reservation(link.description),
        num_adapter_slots=link.description.num_adapter_slots,
        adapters=tuple(ServedAdapter(one.hash, one.resident) for one in report.adapters),
        checkpoints=tuple(map(prefix_word, checkpoint_names(report))) if report.HasField("states") else None,
        lists_all_checkpoints=len(report.checkpoint_names) == report.states.kept_checkpoints,
    )


def _output_tokens_per_s(report: executor_pb2.Report) -> float:
    """Returns the output of the batch as it is now: a token of each sequence in a step, or more where drafts are
    accepted, which only the output of the last seconds tells."""
    now = 1000 * report.num_running / report.step_ms if report.step_ms else 0.0
    return max(now, report.output_tokens_per_s)


def checkpoint_names(report: executor_pb2.Report) -> Iterator[bytes]:
    """Returns the names of the prefixes whose recurrent state an executor keeps."""
    return (name.to_bytes(8, "little") for name in report.checkpoint_names)


def _ends_at_reservation(description: executor_pb2.DescribeResponse) -> bool:
    """Returns whether a placement ends when its reservation is used up, so that it may reserve less than its request
    can need.

    This is not so with `max_utilization`, which reserves the likely output instead, nor with static batching, where a
    request would wait for the rest of its batch at the end of each reservation.
    """
    return (
        description.protocol_version >= RESERVATION_VERSION
        and description.batching != types_pb2.BATCHING_MODE_STATIC
        and description.scheduler_policy != types_pb2.SCHEDULER_POLICY_MAX_UTILIZATION
    )
