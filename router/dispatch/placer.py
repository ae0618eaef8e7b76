"""How the requests of one model move between the ledger and the executors.

Owns which request has which stream and which executors are linked; owns no socket and no key. Takes decisions of the
ledger to links, and what came to nothing back to the ledger. Every placement is either on a link, settled or handed
back, and every request leaves by an end or an error told to its stream.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from enum import Enum, auto
from typing import Any, cast

from common.errors import Reason, RequestError
from inflight.v1 import types_pb2
from router.dispatch.ledger_writer import STORE_RETRY_S, LedgerWriter
from router.dispatch.registry import KnownRequests, digest_of
from router.dispatch.retry_queue import RetryQueue
from router.executors.link import ExecutorLink
from router.request.errors import duplicate, mismatch, output_lost, refusal, taken_over
from router.request.ids import client_id
from router.store.store import AdmissionStore
from router.store.types import (
    Adopted,
    Attempt,
    Dropped,
    DropReason,
    Duplicate,
    Ending,
    HandBackRefusal,
    Lost,
    Placement,
    PreemptAsked,
    Queued,
    Refused,
    RequestState,
)
from router.stream.request_stream import End, RequestStream

log = logging.getLogger(__name__)

# How often in a row a request that was preempted before its next token is placed anew at once; then at the pace of
# reports.
MAX_FRUITLESS = 3

# What a request that waits outlasts when it is put in line again.
PASSING_REASONS = frozenset({Reason.NO_EXECUTOR, Reason.STORE_UNAVAILABLE})

Spawn = Callable[[Coroutine[Any, Any, None]], None]
AttachTo = Callable[[RequestStream, Adopted], Awaitable[RequestError | None]]


class Void(Enum):
    """Why a placement came to nothing."""

    LOST = auto()
    """Its executor is gone or has forgotten it."""
    REJECTED = auto()
    """Its executor has not taken it."""
    STOOD_STILL = auto()
    """The engine stood still under it."""
    PREEMPTED = auto()
    """It gave way to another sequence."""
    HANDED_BACK = auto()
    """Its executor drains, or made it give way again and again: nothing new for it before its next report."""
    WITHDRAWN = auto()
    """It was cancelled though nobody wanted that."""


# What listeners are told.
WHY_MOVED = {
    Void.LOST: "executor_lost",
    Void.REJECTED: "rejected",
    Void.STOOD_STILL: "stood_still",
    Void.PREEMPTED: "preempted",
    Void.HANDED_BACK: "preempted",
    Void.WITHDRAWN: "withdrawn",
}


class Placer:
    """The live requests of one model on this router, and where each of them is."""

    def __init__(
        self,
        store: AdmissionStore,
        ledger: LedgerWriter,
        spawn: Spawn,
        attach: AttachTo,
        known: KnownRequests,
        max_attempts: int,
        no_executor_grace_s: float,
    ) -> None:
        self.streams = known.served
        self.links: dict[str, ExecutorLink] = {}
        self._store = store
        self._ledger = ledger
        self._spawn = spawn
        self._attach = attach
        self._known = known
        self._max_attempts = max_attempts
        self._no_executor_grace_s = no_executor_grace_s
        # Their return to the queue is under way; what the ledger knows of them is in flux.
        self._handed_back: set[RequestStream] = set()
        # Left in line for another router, which has their clients: what the ledger tells of them is not for us.
        self._left: set[str] = set()
        self._resubmissions: RetryQueue[RequestStream] = RetryQueue(self._submit_again, spawn)
        self._withdrawals: RetryQueue[RequestStream] = RetryQueue(self._withdraw, spawn)
        # Since when the ledger answers every resubmission that there is no executor.
        self._no_executor_since: float | None = None
        self._linked = asyncio.Event()

    def add_link(self, link: ExecutorLink) -> None:
        """An executor can be used."""
        self.links[link.executor_id] = link
        self._linked.set()
        self._linked = asyncio.Event()

    async def link_to(self, placement: Placement, timeout_s: float) -> ExecutorLink | None:
        """The link to the executor of a placement; waits for it where it is not up yet."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    link = self.links.get(placement.executor_id)
                    if link is not None:
                        return link if link.description.generation == placement.generation else None
                    await self._linked.wait()
        return None

    async def submit(
        self, stream: RequestStream, *, is_served: bool = False
    ) -> Placement | Queued | Dropped | Adopted | RequestError:
        """Asks the ledger for a place, and takes it. What is `Adopted` has run elsewhere and is to be attached to."""
        demand = dataclasses.replace(stream.demand(), is_served=is_served)
        try:
            outcome = await self._store.submit(demand)
        except RequestError as error:
            return error
        if stream.error is not None and stream.is_let_go:  # meanwhile: the answer is for who has it now
            return stream.error
        if isinstance(outcome, Refused):
            return refusal(outcome)
        if isinstance(outcome, Duplicate):
            return mismatch() if demand.digest and not is_served else duplicate(client_id(stream.request_id))
        stream.record.admitted()
        stream.admitted = outcome
        match outcome:
            case Placement():
                self.place(outcome)
            case Dropped():
                self.dropped(outcome)
            case Queued() if stream.is_abandoned:
                self.stop(stream)
        return outcome

    def submit_waiting_again(self) -> None:
        """The ledger forgot what waits here: puts it in line again. What still waits there stays where it is."""
        for stream in tuple(self.streams.values()):
            if self._waits(stream):
                self._resubmit(stream)

    def _resubmit(self, stream: RequestStream) -> None:
        if not len(self._resubmissions):
            self._no_executor_since = None
        self._resubmissions.add(stream)

    def _waits(self, stream: RequestStream) -> bool:
        """Whether the request is in line, as far as this router knows, or was, and its client wants it."""
        is_served = self.streams.get(stream.request_id) is stream
        is_elsewhere = stream.placement is not None or stream in self._handed_back
        return is_served and not is_elsewhere and not stream.is_abandoned

    async def _submit_again(self, stream: RequestStream) -> bool:
        """Tries to put a request in line whose placement or place the ledger has lost. Returns whether that is done
        with. While Redis is away that waits, as requests in line do. Executors may be unknown to the ledger until their
        next report."""
        if not self._waits(stream):
            return True
        outcome = await self.submit(stream, is_served=True)
        refused = await self._attach(stream, outcome) if isinstance(outcome, Adopted) else None
        outcome = refused or outcome
        if not isinstance(outcome, RequestError):
            self._no_executor_since = None
            return True
        if stream.is_let_go:
            return True
        if outcome.reason is Reason.DUPLICATE_REQUEST_ID and (stream.attempt or digest_of(stream)):
            self.taken_over(stream)
            return True
        if stream.is_abandoned and outcome.reason is Reason.STORE_UNAVAILABLE:
            self.withdraw(stream)  # the ledger may have taken it
            return True
        if stream.is_abandoned or outcome.reason not in PASSING_REASONS:
            self.end(stream, outcome)
            return True
        if outcome.reason is Reason.NO_EXECUTOR:
            self._give_up_without_executor(stream, outcome)
        return stream.has_ended

    def _give_up_without_executor(self, refused: RequestStream, error: RequestError) -> None:
        """When the ledger has known no executor for the grace period: ends the requests still to be put in line again,
        except those that have a deadline to wait for."""
        now = time.monotonic()
        if self._no_executor_since is None:
            self._no_executor_since = now
        if now - self._no_executor_since <= self._no_executor_grace_s:
            return
        for stream in (refused, *self._resubmissions):
            if stream.deadline is None or now > stream.deadline:
                self._resubmissions.remove(stream)
                if self._waits(stream):
                    self.end(stream, error)

    def place(self, placement: Placement) -> None:
        """Sends a request to the executor that the ledger has chosen, or settles what nobody waits for."""
        stream = self.streams.get(placement.request_id)
        if stream is not None and stream.is_cancelled:
            stream.finish(End(types_pb2.FINISH_REASON_CANCELLED, None))
        if stream is None or stream.is_abandoned or stream.has_ended:
            if stream is None:
                if placement.request_id not in self._left:
                    self._ledger.settle(Ending(placement.request_id, placement.attempt, 0, 0, cancelled=True))
            else:
                self._settle(stream, placement.attempt)
            return
        if stream.attempt >= placement.attempt:
            # Told twice, by the reply to the call and by an event; or the ledger had forgotten the request meanwhile
            # and counts its attempts anew: then this one is spent, and nobody else will return it.
            if stream.placement is None and stream not in self._handed_back:
                self._spawn(self._hand_back(stream, placement, Void.REJECTED))
            return
        link = self.links.get(placement.executor_id)
        submit = stream.place(placement)
        stream.is_suspect = placement.suspect
        if link is None or link.description.generation != placement.generation:
            self.void(stream, Void.REJECTED)  # nobody has seen this attempt
        else:
            link.submit(stream, submit)

    def lose(self, lost: Lost) -> None:
        """The ledger took a placement back, which this router may never have been told of: a reply can be lost."""
        stream = self.streams.get(lost.request_id)
        placement = Placement(lost.request_id, lost.attempt, lost.executor_id, lost.generation)
        if stream is None or stream.is_abandoned or stream.has_ended:
            if lost.request_id not in self._left:
                was_cancelled = stream is None or stream.was_cancelled
                self._ledger.settle(Ending(lost.request_id, lost.attempt, cancelled=was_cancelled))
        elif stream.placement is not None and stream.placement.attempt == lost.attempt:
            self.cancel_on_link(stream.placement)
            self.void(stream)
        elif stream.placement is None and lost.attempt > stream.attempt:
            self._spawn(self._hand_back(stream, placement, Void.REJECTED))

    def void(self, stream: RequestStream, why: Void = Void.LOST) -> None:
        """The current placement is void: hands it back, or settles it where nobody waits for more."""
        placement = stream.placement
        if placement is None:
            return
        stream.displace()
        if stream.is_cancelled:
            stream.finish(End(types_pb2.FINISH_REASON_CANCELLED, None))
        if stream.is_complete:
            # Only its end was still to come, and executors refuse what has nothing left to generate.
            stream.finish(End(types_pb2.FINISH_REASON_LENGTH, None))
        if stream.is_over:
            self.end(stream, output_lost("its executor did not send the output again to its end"))
        elif stream.is_abandoned or stream.has_ended:
            self._settle(stream, placement.attempt)
        else:
            stream.pause()
            stream.record.moved(WHY_MOVED[why])
            self._spawn(self._hand_back(stream, placement, why))

    def preempted(self, stream: RequestStream) -> None:
        """Its executor has ended the current placement for others, or because it drains. It gets nothing new before its
        next report where it drains, and where it has placed and ended the request several times for nothing."""
        stream.num_fruitless = 0 if stream.has_progressed else stream.num_fruitless + 1
        link = self.links.get(stream.executor_id)
        drains = link is not None and link.report is not None and link.report.draining
        is_refused = drains or stream.num_fruitless > MAX_FRUITLESS
        self.void(stream, Void.HANDED_BACK if is_refused else Void.PREEMPTED)

    def _settle(self, stream: RequestStream, attempt: int) -> None:
        self._ledger.settle(stream.ending(attempt))
        self.forget(stream)

    def preempt(self, asked: PreemptAsked) -> None:
        """A request has to give way: its executor is told to end it, and it is handed back when it has."""
        stream = self.streams.get(asked.request_id)
        if stream is not None and stream.placement is not None and stream.placement.attempt == asked.attempt:
            self._cancel_on_link(stream.placement, types_pb2.FINISH_REASON_PREEMPTED)

    async def _hand_back(self, stream: RequestStream, placement: Placement, why: Void) -> None:
        self._handed_back.add(stream)
        try:
            outcome = await self._hand_back_to_store(stream, placement, why)
        finally:
            self._handed_back.discard(stream)
        if why is not Void.PREEMPTED:
            self._ledger.expect_report(placement.executor_id)
        match outcome:
            case Placement():
                self.place(outcome)
            case Dropped():
                self.dropped(outcome)
            case HandBackRefusal.EXHAUSTED:
                text = f"{self._max_attempts} executors died under the request before its next token"
                self.end(stream, RequestError(Reason.ATTEMPTS_EXHAUSTED, text))
            case HandBackRefusal.UNKNOWN:
                self._resubmit(stream)
            case HandBackRefusal.STALE if stream.placement is None and not stream.has_ended:
                self._resubmit(stream)  # which says how it stands
            case Queued() if stream.is_abandoned:
                self.stop(stream)

    async def _hand_back_to_store(
        self, stream: RequestStream, placement: Placement, why: Void
    ) -> Placement | Queued | Dropped | HandBackRefusal:
        while True:
            with suppress(RequestError):  # the store is away
                outcome = await self._store.hand_back(
                    placement.request_id,
                    placement.attempt,
                    self._max_attempts,
                    rejected=why in (Void.REJECTED, Void.HANDED_BACK),
                    preempted=why is Void.PREEMPTED,
                    output_tokens=len(stream.output_ids),
                    progressed=stream.has_progressed,
                    stood_still=why is Void.STOOD_STILL,
                )
                if outcome is not HandBackRefusal.UNDECIDED:
                    return outcome
            await asyncio.sleep(STORE_RETRY_S)

    def stop(self, stream: RequestStream) -> None:
        """Ends a request wherever it is. The executor learns why, for whoever reads it there again."""
        if stream.placement is None:
            self.withdraw(stream)
        elif stream.end is not None:
            self._cancel_on_link(stream.placement, cast(types_pb2.FinishReason, stream.end.reason))
        else:
            self.cancel_on_link(stream.placement)

    def taken_over(self, stream: RequestStream) -> None:
        """Another router has the request now."""
        stream.let_go(taken_over())
        self.forget(stream)

    def leave(self, stream: RequestStream, error: RequestError) -> None:
        """Leaves a request as it stands to whichever router its client turns to."""
        self._left.add(stream.request_id)
        stream.let_go(error)
        self.forget(stream)

    def withdraw(self, stream: RequestStream) -> None:
        """Takes a waiting request out of the queue, as soon as the store can be asked to."""
        self._withdrawals.add(stream)

    async def _withdraw(self, stream: RequestStream) -> bool:
        """Returns whether the request is out of the queue. Where it has just been placed, `place` settles it. Nothing
        where a repeat waits here under its id by now."""
        if self.streams.get(stream.request_id, stream) is not stream:
            return True
        try:
            outcome = await self._store.cancel(stream.request_id, is_own=True)
        except RequestError as error:
            log.debug("%s cannot be withdrawn yet: %s", stream.request_id, error)
            self.forget(stream)
            return False
        if outcome.placement is None:
            self.forget(stream)
        else:
            self.place(outcome.placement)
        return True

    def cancelled(self, stream: RequestStream, was: RequestState) -> None:
        """The ledger has cancelled a request of this router, which was there."""
        stream.is_cancelled = True
        if was is RequestState.PLACED and stream.placement is not None:
            self.cancel_on_link(stream.placement)
        elif was in (RequestState.WAITING, RequestState.LOST):
            self.drop(stream.request_id, End(types_pb2.FINISH_REASON_CANCELLED, None))

    def cancel_on_link(self, placement: Placement) -> None:
        """Has the executor end a placement."""
        self._cancel_on_link(placement, types_pb2.FINISH_REASON_CANCELLED)

    def _cancel_on_link(self, placement: Placement, reason: types_pb2.FinishReason) -> None:
        link = self.links.get(placement.executor_id)
        if link is not None:
            link.cancel(placement.request_id, placement.attempt, reason)

    def dropped(self, event: Dropped) -> None:
        """A request left the line without a seat."""
        if event.reason is DropReason.EXPIRED:
            self.drop(event.request_id, End(types_pb2.FINISH_REASON_DEADLINE, None))
        else:
            self.drop(event.request_id, refusal(Refused(Reason.NEVER_FITS)))

    def drop(self, request_id: str, why: End | RequestError) -> None:
        """Tells a request its end, where this router has it."""
        stream = self.streams.get(request_id)
        if stream is None:
            return
        if isinstance(why, End):
            stream.finish(why)
            self.forget(stream)
        else:
            self.end(stream, why)

    def cancel_superseded(self, executor_id: str, attempt: Attempt) -> None:
        """Has an executor drop what the ledger has placed anew."""
        link = self.links.get(executor_id)
        if link is not None:
            link.cancel(attempt.request_id, attempt.attempt)

    def end(self, stream: RequestStream, error: RequestError) -> None:
        """Tells a request that it cannot go on."""
        stream.fail(error)
        self.forget(stream)

    def forget(self, stream: RequestStream) -> None:
        """The request is no longer served here."""
        self._known.forget(stream)

    # What the ledger may have forgotten (`router.dispatch.waiting_audit`).

    def waiting(self) -> list[RequestStream]:
        """The requests that are in line, as far as this router knows."""
        return [stream for stream in self.streams.values() if self.waits(stream)]

    def waits(self, stream: RequestStream) -> bool:
        """Whether the request is in the queue, as far as this router knows, and neither entering nor leaving it."""
        is_entering = stream.is_being_submitted or stream in self._resubmissions
        return self._waits(stream) and not stream.has_ended and not is_entering

    def submit_forgotten_again(self, stream: RequestStream) -> None:
        """Submits a request again that the ledger does not have in the queue, although it waits here."""
        self._resubmit(stream)
