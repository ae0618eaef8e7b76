"""The requests of one model between the service, the executors and the ledger.

Takes what the service asks for, what links tell and what the store tells, and passes it to who deals with it: the
`Placer` moves requests, the `LedgerWriter` writes ends and reports, the `QueueWatch` tells who waits how it goes. Owns
no socket and no key. Every request that enters by `submit` leaves by exactly one of: its executor's end, `release` by
its consumer, or an error told to its stream.

While Redis is away running streams go on: ends and hand-backs wait until it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from inflight.v1 import executor_pb2, types_pb2

from common.errors import Reason, RequestError
from router.ledger_writer import LedgerWriter
from router.links import ExecutorLink
from router.placing import Placer, Void
from router.queue_watch import QueueWatch
from router.refusals import RETRY_AFTER_MS, duplicate, no_executor
from router.store.store import AdmissionStore
from router.store.types import (
    Attempt,
    CancelAsked,
    Cancelled,
    Dropped,
    Ending,
    ExecutorReport,
    Explanation,
    HeldSequence,
    LeaseLapsed,
    Lost,
    Placement,
    PreemptAsked,
    Queued,
    RequestState,
    Snapshot,
    StoreEvent,
)
from router.streams import End, RequestStream

log = logging.getLogger(__name__)

QUEUE_EVENT_INTERVAL_S = 1.0
# Of the store's 16 connections: however many requests come in at once, reports and leases get through. One that has not
# had its turn after so long is refused, so that nobody waits behind a Redis that does not answer.
MAX_CONCURRENT_SUBMITS = 8
SUBMIT_TURN_S = 2.0


class Dispatcher:
    """The live requests of one model on this router."""

    def __init__(
        self,
        open_store: Callable[[Callable[[StoreEvent], None]], AdmissionStore],
        max_attempts: int,
        no_executor_grace_s: float,
        queue_event_interval_s: float = QUEUE_EVENT_INTERVAL_S,
    ) -> None:
        self._store = open_store(self._on_store_event)
        self._ledger = LedgerWriter(self._store, self._cancel_superseded)
        self._placer = Placer(self._store, self._ledger, self._spawn, max_attempts, no_executor_grace_s)
        self._queue_watch = QueueWatch(self._store.explain, queue_event_interval_s)
        self._no_executor_grace_s = no_executor_grace_s
        self._tasks = asyncio.TaskGroup()
        self._turns = asyncio.Semaphore(MAX_CONCURRENT_SUBMITS)

    @property
    def links(self) -> tuple[ExecutorLink, ...]:
        """The executors that can be used now."""
        return tuple(self._placer.links.values())

    @property
    def streams(self) -> tuple[RequestStream, ...]:
        """The requests that wait or run."""
        return tuple(self._placer.streams.values())

    def link_of(self, executor_id: str) -> ExecutorLink | None:
        """The link to an executor that can be used now."""
        return self._placer.links.get(executor_id)

    def stream_of(self, request_id: str) -> RequestStream | None:
        """The stream of a request that this router serves."""
        return self._placer.streams.get(request_id)

    async def run(self) -> None:
        """Works until cancelled."""
        async with self._tasks:
            self._tasks.create_task(self._store.run(), name="store")
            self._tasks.create_task(self._ledger.run(), name="ledger")
            self._tasks.create_task(self._queue_watch.run(), name="queue watch")

    async def close(self) -> None:
        """Settles what has ended, as far as that can be done now."""
        await self._ledger.settle_now()
        await self._store.aclose()

    # What the service asks for.

    async def submit(self, stream: RequestStream) -> Placement | Queued | Dropped:
        """Admits a request: it is placed or waits afterwards. Raises `RequestError` where it is refused.

        The store's call outlives a cancelled caller: a reply must not be left to the next one, and a request that was
        admitted all the same must be taken back.
        """
        if stream.request_id in self._placer.streams:
            raise duplicate(stream.request_id)
        self._placer.streams[stream.request_id] = stream
        stream.is_being_submitted = True
        try:
            outcome = await asyncio.shield(self._tasks.create_task(self._submit_first(stream)))
        except asyncio.CancelledError:
            self.release(stream)
            raise
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def watch_queue(self, stream: RequestStream, told: Queued) -> None:
        """The request waits, and wants to be told how that goes; it knows `told` already."""
        self._queue_watch.watch(stream, told)

    def release(self, stream: RequestStream) -> None:
        """The consumer wants no more: ends the request wherever it is. Safe to repeat, also after its end."""
        self._queue_watch.unwatch(stream)
        if stream.is_abandoned or self._placer.streams.get(stream.request_id) is not stream:
            return
        stream.is_abandoned = True
        # Before the ledger has answered, the id may be somebody else's; the placer deals with the answer.
        if not stream.is_being_submitted:
            self._placer.stop(stream)

    async def cancel(self, request_id: str) -> RequestState | None:
        """Ends a request of any router; returns where it was, None where there is no such request."""
        outcome = await self._store.cancel(request_id)
        if outcome.state is None:
            return None
        stream = self._placer.streams.get(request_id)
        if stream is not None:
            self._placer.cancelled(stream, outcome.state)
        elif outcome.placement is not None and not outcome.owner_told:
            self._placer.cancel_on_link(outcome.placement)
        return outcome.state

    async def explain(self, request_id: str) -> Explanation | None:
        """How a request of any router stands; None where there is no such request."""
        return await self._store.explain(request_id)

    async def snapshot(self) -> Snapshot:
        """The ledger as it is now."""
        return await self._store.snapshot()

    # What links tell.

    def on_linked(self, link: ExecutorLink) -> None:
        """An executor can be used."""
        self._placer.links[link.executor_id] = link

    def on_unlinked(self, link: ExecutorLink, streams: list[RequestStream]) -> None:
        """An executor is lost: its requests go back to the queue, with their output so far."""
        if self._placer.links.get(link.executor_id) is link:
            del self._placer.links[link.executor_id]
            self._ledger.forget(link.executor_id)
        for stream in streams:
            self._placer.void(stream)
        if not self._placer.links:
            self._spawn(self._give_up_without_executor())

    def on_rejected(self, stream: RequestStream, rejected: executor_pb2.SequenceRejected) -> None:
        """An executor did not take a placement: no room is a matter for the queue, anything else for the client."""
        if stream.placement is None or stream.placement.attempt != rejected.attempt:
            return
        if rejected.reason in (executor_pb2.REJECT_REASON_UNSUPPORTED, executor_pb2.REJECT_REASON_INVALID):
            reason = executor_pb2.RejectReason.Name(rejected.reason)
            log.error("%s: the executor refused it: %s", stream.request_id, reason)
            text = f"the executor refused the request: {rejected.detail}"
            self._placer.end(stream, RequestError(Reason.INTERNAL, text))
            self._ledger.settle(stream.ending(rejected.attempt))
            return
        self._placer.void(stream, Void.REJECTED)

    def on_preempted(self, stream: RequestStream, attempt: int) -> None:
        """A sequence gave way on its executor: its request goes back to the queue, with its output so far."""
        if stream.placement is not None and stream.placement.attempt == attempt:
            self._placer.void(stream, Void.PREEMPTED)

    def on_withdrawn(self, stream: RequestStream, attempt: int) -> None:
        """A sequence was cancelled that nobody wanted cancelled: the ledger took its placement for superseded."""
        if stream.placement is not None and stream.placement.attempt == attempt:
            self._placer.void(stream)

    def on_finished(self, stream: RequestStream, attempt: int) -> None:
        """A sequence ended: its reservation is free."""
        if stream.placement is not None and stream.placement.attempt == attempt:
            self._ledger.settle(stream.ending(attempt))
            self._placer.forget(stream)
        else:
            self._ledger.settle(Ending(stream.request_id, attempt))

    def on_report(self, link: ExecutorLink, report: executor_pb2.Report) -> None:
        """An executor says how it stands; the newest report is the one that counts."""
        self._ledger.report(ledger_report(link, report))

    # What the store tells.

    def _on_store_event(self, event: StoreEvent) -> None:
        match event:
            case Placement():
                self._placer.place(event)
            case Lost():
                self._placer.lose(event)
            case CancelAsked(request_id):
                stream = self._placer.streams.get(request_id)
                if stream is not None:
                    self._placer.cancelled(stream, RequestState.PLACED)
            case PreemptAsked():
                self._placer.preempt(event)
            case Cancelled(request_id):
                self._placer.drop(request_id, End(types_pb2.FINISH_REASON_CANCELLED, None))
            case Dropped():
                self._placer.dropped(event)
            case LeaseLapsed():
                self._placer.submit_waiting_again()

    def _cancel_superseded(self, executor_id: str, attempt: Attempt) -> None:
        self._placer.cancel_superseded(executor_id, attempt)

    async def _submit_first(self, stream: RequestStream) -> Placement | Queued | Dropped | RequestError:
        outcome = await self._submit_in_turn(stream)
        stream.is_being_submitted = False
        if isinstance(outcome, RequestError):
            self._placer.forget(stream)
        return outcome

    async def _submit_in_turn(self, stream: RequestStream) -> Placement | Queued | Dropped | RequestError:
        busy = RequestError(
            Reason.STORE_UNAVAILABLE, "too many requests come in at once", retry_after_ms=RETRY_AFTER_MS
        )
        try:
            async with asyncio.timeout(SUBMIT_TURN_S):
                await self._turns.acquire()
        except TimeoutError:
            return busy
        try:
            return busy if stream.is_abandoned else await self._placer.submit(stream)
        finally:
            self._turns.release()

    async def _give_up_without_executor(self) -> None:
        await asyncio.sleep(self._no_executor_grace_s)
        if self._placer.links:
            return
        text = f"no executor has been reachable for {self._no_executor_grace_s:g} s"
        for stream in self.streams:
            if stream.placement is None:
                stream.fail(no_executor(text))
                self._spawn(self._placer.withdraw(stream))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)


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
