"""The requests of one model between the ledger and the executors.

Takes decisions from the store to links and ends from links to the store. Owns which request has which stream; owns no
socket and no key. Every request that enters by `submit` leaves by exactly one of: its executor's end, `release` by its
consumer, or an error told to its stream; and every placement is either on a link, settled or handed back.

While Redis is away running streams go on: ends and hand-backs wait until it is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from inflight.v1 import executor_pb2, types_pb2

from common.errors import Reason, RequestError
from router.ledger_writer import STORE_RETRY_S, LedgerWriter
from router.links import ExecutorLink
from router.refusals import duplicate, no_executor, refusal
from router.store.store import AdmissionStore
from router.store.types import (
    Attempt,
    CancelAsked,
    Cancelled,
    CancelOutcome,
    Dropped,
    DropReason,
    Duplicate,
    ExecutorReport,
    HandBackRefusal,
    HeldSequence,
    LeaseLapsed,
    Lost,
    Placement,
    Queued,
    Refused,
    RequestState,
    Snapshot,
    StoreEvent,
)
from router.streams import End, RequestStream

log = logging.getLogger(__name__)


class Dispatcher:
    """The live requests of one model on this router."""

    def __init__(
        self,
        open_store: Callable[[Callable[[StoreEvent], None]], AdmissionStore],
        max_attempts: int,
        no_executor_grace_s: float,
    ) -> None:
        self._store = open_store(self._on_store_event)
        self._ledger = LedgerWriter(self._store, self._cancel_superseded)
        self._max_attempts = max_attempts
        self._no_executor_grace_s = no_executor_grace_s
        self._streams: dict[str, RequestStream] = {}
        self._links: dict[str, ExecutorLink] = {}
        # Their return to the queue is under way; what the ledger knows of them is in flux.
        self._handed_back: set[RequestStream] = set()
        self._tasks = asyncio.TaskGroup()

    @property
    def links(self) -> tuple[ExecutorLink, ...]:
        """The executors that can be used now."""
        return tuple(self._links.values())

    @property
    def streams(self) -> tuple[RequestStream, ...]:
        """The requests that wait or run."""
        return tuple(self._streams.values())

    async def run(self) -> None:
        """Works until cancelled."""
        async with self._tasks:
            self._tasks.create_task(self._store.run(), name="store")
            self._tasks.create_task(self._ledger.run(), name="ledger")

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
        if stream.request_id in self._streams:
            raise duplicate(stream.request_id)
        self._streams[stream.request_id] = stream
        stream.is_being_submitted = True
        outcome = await asyncio.shield(self._tasks.create_task(self._submit_first(stream)))
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome

    def release(self, stream: RequestStream) -> None:
        """The consumer wants no more: ends the request wherever it is. Safe to repeat, also after its end."""
        if stream.is_abandoned or self._streams.get(stream.request_id) is not stream:
            return
        stream.is_abandoned = True
        # Before the ledger has answered, the id may be somebody else's; `_submit` deals with the answer.
        if not stream.is_being_submitted:
            self._stop(stream)

    async def cancel(self, request_id: str) -> RequestState:
        """Ends a request of any router; returns where it was. Raises `RequestError` where there is none."""
        outcome = await self._store.cancel(request_id)
        if outcome.state is None:
            raise RequestError(Reason.UNKNOWN_REQUEST, "request_id: no such request waits or runs")
        stream = self._streams.get(request_id)
        if stream is not None:
            self._cancelled(stream, outcome.state)
        elif outcome.placement is not None and not outcome.owner_told:
            self._cancel_on_link(outcome.placement)
        return outcome.state

    async def snapshot(self) -> Snapshot:
        """The ledger as it is now."""
        return await self._store.snapshot()

    # What links tell.

    def on_linked(self, link: ExecutorLink) -> None:
        """An executor can be used."""
        self._links[link.executor_id] = link

    def on_unlinked(self, link: ExecutorLink, streams: list[RequestStream]) -> None:
        """An executor is lost: its requests go back to the queue, with their output so far."""
        if self._links.get(link.executor_id) is link:
            del self._links[link.executor_id]
        for stream in streams:
            self._void(stream)
        if not self._links:
            self._spawn(self._give_up_without_executor())

    def on_rejected(self, stream: RequestStream, rejected: executor_pb2.SequenceRejected) -> None:
        """An executor did not take a placement: no room is a matter for the queue, anything else for the client."""
        if stream.placement is None or stream.placement.attempt != rejected.attempt:
            return
        if rejected.reason in (executor_pb2.REJECT_REASON_UNSUPPORTED, executor_pb2.REJECT_REASON_INVALID):
            reason = executor_pb2.RejectReason.Name(rejected.reason)
            log.error("%s: the executor refused it: %s", stream.request_id, reason)
            self._end(stream, RequestError(Reason.INTERNAL, f"the executor refused the request: {rejected.detail}"))
            self._ledger.settle(stream.request_id, rejected.attempt)
            return
        self._void(stream, was_rejected=True)

    def on_finished(self, stream: RequestStream, attempt: int) -> None:
        """A sequence ended: its reservation is free."""
        self._ledger.settle(stream.request_id, attempt)
        if stream.placement is not None and stream.placement.attempt == attempt:
            self._forget(stream)

    def on_report(self, link: ExecutorLink, report: executor_pb2.Report) -> None:
        """An executor says how it stands; the newest report is the one that counts."""
        self._ledger.report(
            ExecutorReport(
                executor_id=link.executor_id,
                generation=link.description.generation,
                seq=report.seq,
                budget_blocks=report.budget_blocks,
                total_blocks=report.total_blocks,
                budget_sequences=report.budget_sequences,
                accepting=not report.draining,
                held=tuple(HeldSequence(h.request_id, h.attempt, h.reserved_blocks) for h in report.held),
            )
        )

    # What the store tells.

    def _on_store_event(self, event: StoreEvent) -> None:
        match event:
            case Placement():
                self._place(event)
            case Lost():
                self._lose(event)
            case CancelAsked(request_id):
                stream = self._streams.get(request_id)
                if stream is not None:
                    self._cancelled(stream, RequestState.PLACED)
            case Cancelled(request_id):
                self._drop(request_id, End(types_pb2.FINISH_REASON_CANCELLED, None))
            case Dropped():
                self._dropped(event)
            case LeaseLapsed():
                self._submit_waiting_again()

    # How a request moves.

    async def _submit_first(self, stream: RequestStream) -> Placement | Queued | Dropped | RequestError:
        outcome = await self._submit(stream)
        stream.is_being_submitted = False
        if isinstance(outcome, RequestError):
            self._forget(stream)
        return outcome

    async def _submit(self, stream: RequestStream) -> Placement | Queued | Dropped | RequestError:
        try:
            outcome = await self._store.submit(stream.demand())
        except RequestError as error:
            return error
        match outcome:
            case Refused(reason):
                return refusal(reason)
            case Duplicate():
                return duplicate(stream.request_id)
            case Placement():
                self._place(outcome)
            case Dropped():
                self._dropped(outcome)
            case Queued() if stream.is_abandoned:
                self._stop(stream)
        return outcome

    def _submit_waiting_again(self) -> None:
        """The ledger forgot what waits here: puts it in line again. What still waits there stays where it is."""
        for stream in tuple(self._streams.values()):
            if stream.placement is None and not stream.is_abandoned and stream not in self._handed_back:
                self._spawn(self._submit_again(stream))

    async def _submit_again(self, stream: RequestStream) -> None:
        """Puts a request in line whose placement or place the ledger has lost. Executors may be unknown there until
        their next report."""
        give_up = time.monotonic() + self._no_executor_grace_s
        while True:
            outcome = await self._submit(stream)
            if not isinstance(outcome, RequestError):
                return
            is_passing = outcome.reason in (Reason.NO_EXECUTOR, Reason.STORE_UNAVAILABLE)
            if stream.is_abandoned or not is_passing or time.monotonic() > give_up:
                self._end(stream, outcome)
                return
            await asyncio.sleep(STORE_RETRY_S)

    def _place(self, placement: Placement) -> None:
        stream = self._streams.get(placement.request_id)
        if stream is not None and stream.is_cancelled:
            stream.finish(End(types_pb2.FINISH_REASON_CANCELLED, None))
        if stream is None or stream.is_abandoned or stream.has_ended:
            self._ledger.settle(placement.request_id, placement.attempt)
            if stream is not None:
                self._forget(stream)
            return
        if stream.attempt >= placement.attempt:
            return  # told twice: by the reply to the call and by an event
        link = self._links.get(placement.executor_id)
        submit = stream.place(placement)
        if link is None or link.description.generation != placement.generation:
            self._void(stream, was_rejected=True)  # nobody has seen this attempt
        else:
            link.submit(stream, submit)

    def _lose(self, lost: Lost) -> None:
        """The ledger took a placement back, which this router may never have been told of: a reply can be lost."""
        stream = self._streams.get(lost.request_id)
        placement = Placement(lost.request_id, lost.attempt, lost.executor_id, lost.generation)
        if stream is None or stream.is_abandoned or stream.has_ended:
            self._ledger.settle(lost.request_id, lost.attempt)
        elif stream.placement is not None and stream.placement.attempt == lost.attempt:
            self._cancel_on_link(stream.placement)
            self._void(stream)
        elif stream.placement is None and lost.attempt > stream.attempt:
            self._spawn(self._hand_back(stream, placement, was_rejected=True))

    def _void(self, stream: RequestStream, *, was_rejected: bool = False) -> None:
        """The current placement is void: hands it back, or settles it where nobody waits for more."""
        placement = stream.placement
        if placement is None:
            return
        stream.displace()
        if stream.is_cancelled:
            stream.finish(End(types_pb2.FINISH_REASON_CANCELLED, None))
        if stream.is_abandoned or stream.has_ended:
            self._ledger.settle(placement.request_id, placement.attempt)
            self._forget(stream)
        else:
            self._spawn(self._hand_back(stream, placement, was_rejected))

    async def _hand_back(self, stream: RequestStream, placement: Placement, was_rejected: bool) -> None:
        self._handed_back.add(stream)
        try:
            outcome = await self._hand_back_to_store(stream, placement, was_rejected)
        finally:
            self._handed_back.discard(stream)
        match outcome:
            case Placement():
                self._place(outcome)
            case Dropped():
                self._dropped(outcome)
            case HandBackRefusal.EXHAUSTED:
                text = f"{self._max_attempts} executors did not bring the request to its end"
                self._end(stream, RequestError(Reason.ATTEMPTS_EXHAUSTED, text))
            case HandBackRefusal.UNKNOWN:
                await self._submit_again(stream)
            case Queued() if stream.is_abandoned:
                self._stop(stream)

    async def _hand_back_to_store(
        self, stream: RequestStream, placement: Placement, was_rejected: bool
    ) -> Placement | Queued | Dropped | HandBackRefusal:
        while True:
            try:
                return await self._store.hand_back(
                    placement.request_id,
                    placement.attempt,
                    self._max_attempts,
                    rejected=was_rejected,
                    output_tokens=len(stream.output_ids),
                )
            except RequestError:
                await asyncio.sleep(STORE_RETRY_S)

    def _stop(self, stream: RequestStream) -> None:
        if stream.placement is None:
            self._spawn(self._withdraw(stream))
        else:
            self._cancel_on_link(stream.placement)

    async def _withdraw(self, stream: RequestStream) -> None:
        """Takes a waiting request out of the queue. Where it has just been placed, `_place` settles it."""
        try:
            outcome = await self._store.cancel(stream.request_id)
        except RequestError as error:
            log.warning("%s cannot be withdrawn: %s", stream.request_id, error)
            outcome = CancelOutcome(None)
        if outcome.placement is None:
            self._forget(stream)
        else:
            self._place(outcome.placement)

    def _cancelled(self, stream: RequestStream, was: RequestState) -> None:
        stream.is_cancelled = True
        if was is RequestState.PLACED and stream.placement is not None:
            self._cancel_on_link(stream.placement)
        elif was in (RequestState.WAITING, RequestState.LOST):
            self._drop(stream.request_id, End(types_pb2.FINISH_REASON_CANCELLED, None))

    def _cancel_on_link(self, placement: Placement) -> None:
        link = self._links.get(placement.executor_id)
        if link is not None:
            link.cancel(placement.request_id, placement.attempt)

    def _dropped(self, event: Dropped) -> None:
        if event.reason is DropReason.EXPIRED:
            self._drop(event.request_id, End(types_pb2.FINISH_REASON_DEADLINE, None))
        else:
            self._drop(event.request_id, refusal(Reason.NEVER_FITS))

    def _drop(self, request_id: str, why: End | RequestError) -> None:
        """A request left the line without a seat."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if isinstance(why, End):
            stream.finish(why)
            self._forget(stream)
        else:
            self._end(stream, why)

    def _cancel_superseded(self, executor_id: str, attempt: Attempt) -> None:
        link = self._links.get(executor_id)
        if link is not None:
            link.cancel(attempt.request_id, attempt.attempt)

    async def _give_up_without_executor(self) -> None:
        await asyncio.sleep(self._no_executor_grace_s)
        if self._links:
            return
        text = f"no executor has been reachable for {self._no_executor_grace_s:g} s"
        for stream in tuple(self._streams.values()):
            if stream.placement is None:
                stream.fail(no_executor(text))
                self._spawn(self._withdraw(stream))

    def _end(self, stream: RequestStream, error: RequestError) -> None:
        stream.fail(error)
        self._forget(stream)

    def _forget(self, stream: RequestStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.create_task(work)
