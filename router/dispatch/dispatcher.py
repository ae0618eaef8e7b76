"""The requests of one model between the service, the executors and the ledger.

Takes what the service asks for, what links tell and what the store tells, and passes it to who deals with it: the
`Placer` moves requests, the `LedgerWriter` writes ends and reports, the `QueueWatch` tells who waits how it goes, the
`WaitingAudit` asks whether the ledger still knows who waits. Owns no socket and no key. Every request that enters by
`submit` or `resume` leaves by exactly one of: its executor's end, `release` for want of a reader, an error told to its
stream, or another router that takes it over. What has ended is kept for a while, to be read again.

While Redis is away running streams go on: ends and hand-backs wait until it is back.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from common.errors import Reason, RequestError
from inflight.v1 import executor_pb2, types_pb2
from router.dispatch.adoption import Adopter, OpenAttached
from router.dispatch.ledger_writer import LedgerWriter, ledger_report
from router.dispatch.placer import Placer, Void
from router.dispatch.queue_updates import QueueWatch
from router.dispatch.registry import KnownRequests, digest_of
from router.dispatch.submit_limiter import SubmitTurns
from router.dispatch.waiting_audit import WaitingAudit
from router.executors.link import ExecutorLink
from router.request.errors import draining, duplicate, no_executor
from router.request.ids import client_id
from router.store.store import AdmissionStore
from router.store.types import (
    Adopted,
    Attempt,
    CancelAsked,
    Cancelled,
    Dropped,
    Explanation,
    LeaseLapsed,
    Lost,
    Placement,
    PreemptAsked,
    Queued,
    Refused,
    RequestState,
    Snapshot,
    StoreEvent,
    TakenOver,
    TenantLimits,
)
from router.stream.relay import Relay
from router.stream.request_stream import End, RequestStream
from router.stream.write_timeout import unattended_s

log = logging.getLogger(__name__)

QUEUE_EVENT_INTERVAL_S = 1.0
KEEP_ENDED_S = 60.0
# How long a request that was adopted waits for whoever had it adopted.
UNCLAIMED_S = 1.0


class Dispatcher:
    """The live requests of one model on this router."""

    def __init__(
        self,
        open_store: Callable[[Callable[[StoreEvent], None]], AdmissionStore],
        max_attempts: int,
        no_executor_grace_s: float,
        queue_event_interval_s: float = QUEUE_EVENT_INTERVAL_S,
        keep_ended_s: float = KEEP_ENDED_S,
        on_lapse: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = open_store(self._on_store_event)
        self._ledger = LedgerWriter(self._store, self._cancel_superseded)
        self._known = KnownRequests(keep_ended_s)
        self._placer = Placer(
            self._store, self._ledger, self._spawn, self._attach, self._known, max_attempts, no_executor_grace_s
        )
        self._adopter = Adopter(self._store, self._ledger, self._placer)
        self._adopting: dict[str, asyncio.Task[RequestStream | RequestError]] = {}
        self._keep_ended_s = keep_ended_s
        self._on_lapse = on_lapse
        self._is_draining = False
        self._has_stopped = False
        self._queue_watch = QueueWatch(self._store.explain, queue_event_interval_s)
        self._waiting_audit = WaitingAudit(self._placer, self._store.find_forgotten)
        self._no_executor_grace_s = no_executor_grace_s
        self._tasks = asyncio.TaskGroup()
        self._turns = SubmitTurns()

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
        try:
            async with self._tasks:
                self._tasks.create_task(self._store.run(), name="store")
                self._tasks.create_task(self._ledger.run(), name="ledger")
                self._tasks.create_task(self._queue_watch.run(), name="queue watch")
                self._tasks.create_task(self._waiting_audit.run(), name="waiting audit")
        finally:
            self._has_stopped = True

    async def close(self) -> None:
        """Settles what has ended, as far as that can be done now."""
        await self._ledger.settle_now()
        await self._store.aclose()

    # What the service asks for.

    async def submit(self, stream: RequestStream) -> Placement | Queued | Dropped | Adopted:
        """Admits a request: it is placed or waits afterwards, or goes on where it ran. Raises `RequestError` where it
        is refused.

        The store's call outlives a cancelled caller: a reply must not be left to the next one, and a request that was
        admitted all the same must be taken back.
        """
        if stream.request_id in self._placer.streams:
            raise duplicate(client_id(stream.request_id))
        self._placer.streams[stream.request_id] = stream
        stream.is_being_submitted = True
        try:
            outcome = await asyncio.shield(self._tasks.create_task(self._submit_first(stream)))
        except asyncio.CancelledError:
            self.leave(stream, 0)
            raise
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    async def check_rates(
        self, tenant: str, limits: TenantLimits, tokens: int, request_id: str = "", *, takes: bool = False
    ) -> Refused | None:
        """See `AdmissionStore`. Raises `RequestError`."""
        return await self._store.check_rates(tenant, limits, tokens, request_id, takes=takes)

    async def find_repeated(self, stream: RequestStream) -> RequestStream | None:
        """The request that this one repeats, where it is served or kept here. Raises `RequestError` where the id is
        that of another one."""
        return await self._known.find_repeated(stream)

    async def find(self, ledger_id: str) -> RequestStream | None:
        """A request that is served or kept here, for a client that comes back to it. Raises `RequestError`."""
        return await self._known.find(ledger_id)

    async def resume(self, ledger_id: str, open_attached: OpenAttached) -> RequestStream:
        """Goes on here with a request that another router began. Raises `RequestError` where that cannot be.

        Outlives a cancelled caller: what was adopted is this router's, with or without a reader.
        """
        adopting = self._adopting.get(ledger_id)
        if adopting is None:
            adopting = self._adopting[ledger_id] = self._tasks.create_task(self._adopt(ledger_id, open_attached))
        outcome = await asyncio.shield(adopting)
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    async def _adopt(self, ledger_id: str, open_attached: OpenAttached) -> RequestStream | RequestError:
        outcome = await self._adopter.resume(ledger_id, open_attached)
        del self._adopting[ledger_id]
        if isinstance(outcome, RequestStream):
            # Unless somebody reads it by then, it is one whose client went away.
            asyncio.get_running_loop().call_later(UNCLAIMED_S, self.leave, outcome, 0)
        return outcome

    def leave(self, stream: RequestStream, reader: int, grace_s: float = 0.0) -> None:
        """Its reader is gone: it ends, or goes on for as long as its client asked, or for `grace_s` seconds where that
        is longer. Nothing where another reads it."""
        if reader != stream.reader:
            return
        self._queue_watch.unwatch(stream)
        goes_on_s = unattended_s(stream.reading, grace_s, self._keep_ended_s)
        if stream.has_ended or goes_on_s == 0:
            self.release(stream)
        elif self._placer.streams.get(stream.request_id) is stream:
            self._spawn(self._go_on_unattended(stream, goes_on_s))

    async def _go_on_unattended(self, stream: RequestStream, goes_on_s: float | None) -> None:
        """Reads it for nobody, so that stops and deadlines hold."""
        reader = stream.attend()
        try:
            async with asyncio.timeout(goes_on_s):
                await Relay(stream, None).run()
        except TimeoutError:
            log.info("%s: no client resumed the request within %g s", stream.request_id, goes_on_s)
        except RequestError as error:
            log.debug("%s: without a client: %s", stream.request_id, error.reason.value)
        if reader == stream.reader:
            self.release(stream)

    def turn_away_waiting(self) -> None:
        """This router goes away: who still waits ends now. A request that can be repeated keeps its place for that."""
        self._is_draining = True
        for stream in self.streams:
            self._turn_away(stream)

    async def emptied(self) -> None:
        """Waits until no request waits or runs here."""
        while self._placer.streams:
            await next(iter(self._placer.streams.values())).forgotten.wait()

    def leave_running(self) -> None:
        """Leaves everything to whichever routers its clients turn to."""
        for stream in self.streams:
            self._placer.leave(stream, draining("the router has drained; resume on another", is_resumable=True))

    def _turn_away(self, stream: RequestStream) -> None:
        if stream.has_been_accepted or stream.placement is not None or stream.is_being_submitted or stream.is_abandoned:
            return
        error = draining("the router is draining")
        if digest_of(stream):
            self._placer.leave(stream, error)
            return
        stream.fail(error)
        self._placer.withdraw(stream)

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

    async def snapshot(self, max_lines: int = 0) -> Snapshot:
        """The ledger as it is now."""
        return await self._store.snapshot(max_lines)

    # What links tell.

    def on_linked(self, link: ExecutorLink) -> None:
        """An executor can be used."""
        self._placer.add_link(link)

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
            self._placer.preempted(stream)

    def on_stood_still(self, stream: RequestStream, attempt: int) -> None:
        """The engine stood still under a sequence, which counts as if it had died."""
        if stream.placement is not None and stream.placement.attempt == attempt:
            self._placer.void(stream, Void.STOOD_STILL)

    def on_withdrawn(self, stream: RequestStream, attempt: int) -> None:
        """A sequence was cancelled that nobody wanted cancelled: the ledger took its placement for superseded."""
        if stream.placement is not None and stream.placement.attempt == attempt:
            self._placer.void(stream, Void.WITHDRAWN)

    def on_detached(self, stream: RequestStream) -> None:
        """Another router reads the sequence; the ledger's word of that is on its way."""
        self._placer.taken_over(stream)

    def on_absolved(self, stream: RequestStream, attempt: int) -> None:
        """A suspect has brought a token."""
        self._spawn(self._absolve(stream.request_id, attempt))

    async def _absolve(self, ledger_id: str, attempt: int) -> None:
        try:
            await self._store.absolve(ledger_id, attempt)
        except RequestError as error:
            log.debug("%s stays under suspicion: %s", ledger_id, error)

    def on_finished(self, stream: RequestStream, attempt: int) -> None:
        """A sequence ended: its reservation is free. That of a former placement is returned by its hand-back, and only
        by that: settled, the request would have ended with it."""
        if stream.placement is not None and stream.placement.attempt == attempt:
            if not stream.is_over:
                self._ledger.settle(stream.ending(attempt))
            self._placer.forget(stream)

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
            case TakenOver(request_id):
                stream = self._placer.streams.get(request_id)
                if stream is not None:
                    self._placer.taken_over(stream)
            case LeaseLapsed():
                self._on_lapse()
                self._placer.submit_waiting_again()

    def _cancel_superseded(self, executor_id: str, attempt: Attempt) -> None:
        self._placer.cancel_superseded(executor_id, attempt)

    async def _submit_first(self, stream: RequestStream) -> Placement | Queued | Dropped | Adopted | RequestError:
        outcome = await self._turns.take(functools.partial(self._submit_unless_abandoned, stream))
        refused = outcome if isinstance(outcome, RequestError) else None
        if isinstance(outcome, Adopted):
            refused = await self._attach(stream, outcome)
        stream.is_being_submitted = False
        if isinstance(outcome, RequestError) and stream.admitted is not None:
            # Another call for it, made since a reply was lost, was answered first: it waits or runs.
            if stream.is_abandoned:
                self._placer.stop(stream)
            return stream.admitted
        if refused is not None:
            self._placer.end(stream, refused)
        elif self._is_draining:
            self._turn_away(stream)
        return refused or outcome

    async def _submit_unless_abandoned(
        self, stream: RequestStream
    ) -> Placement | Queued | Dropped | Adopted | RequestError:
        if stream.is_abandoned:  # while it waited for its turn: nobody reads the answer
            return draining("the client is gone")
        return await self._placer.submit(stream)

    async def _attach(self, stream: RequestStream, adopted: Adopted) -> RequestError | None:
        return await self._adopter.attach(stream, adopted)

    async def _give_up_without_executor(self) -> None:
        """Who has a deadline for the whole waits until that."""
        await asyncio.sleep(self._no_executor_grace_s)
        if self._placer.links:
            return
        text = f"no executor has been reachable for {self._no_executor_grace_s:g} s"
        for stream in self.streams:
            if stream.placement is None and stream.deadline is None:
                stream.fail(no_executor(text))
                self._placer.withdraw(stream)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._has_stopped:  # what is left to do is the next router's
            work.close()
            return
        self._tasks.create_task(work)
