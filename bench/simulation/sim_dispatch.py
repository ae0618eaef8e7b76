"""Requests between the ledger and the executors, on one modelled router: as `router.dispatch.dispatcher.Dispatcher`.

What the dispatcher awaits is a callback here, so that the router may vanish in between. Clients are here too: what they
are told goes to the witness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.simulation.ledger import HandBackOutcome, Ledger, SubmitOutcome
from bench.simulation.ledger_writer import LedgerWriter
from bench.simulation.session import Session
from bench.simulation.sim_stream import RouterShape, SimStream
from bench.simulation.store_link import StoreLink
from bench.simulation.timeline import US_PER_MS, Process, Timeline
from bench.simulation.witness import Fate, Witness
from common.errors import Reason
from executor.scheduler.sequence import FinishReason
from router.store.codec import hand_back_args
from router.store.types import (
    Attempt,
    CancelAsked,
    Cancelled,
    CancelOutcome,
    Dropped,
    DropReason,
    Duplicate,
    Ending,
    HandBackRefusal,
    LeaseLapsed,
    Lost,
    Placement,
    PreemptAsked,
    Queued,
    Refused,
    RequestState,
    StoreEvent,
)

RETRY_US = 500 * US_PER_MS
# As `router.dispatch.waiting_audit`'s.
CONFIRM_US = 500 * US_PER_MS
MAX_PER_CALL = 256


class Dispatch:
    """The live requests of one router, its links, and what of them was sent over each link."""

    def __init__(
        self,
        router_id: str,
        shape: RouterShape,
        link: StoreLink,
        timeline: Timeline,
        process: Process,
        witness: Witness,
    ) -> None:
        self.streams: dict[str, SimStream] = {}
        self.links: dict[str, Session] = {}
        # Sent or accepted, by request and attempt.
        self.offered: dict[Session, dict[tuple[str, int], SimStream]] = {}
        self.ledger = Ledger(link, process, router_id, shape.store, self._on_store_event)
        self.writer = LedgerWriter(self.ledger, timeline, process, self._cancel_superseded)
        self._shape = shape
        self._timeline = timeline
        self._process = process
        self._witness = witness

    # What clients ask for.

    def submit(self, stream: SimStream) -> None:
        """Admits a request, or ends it with the reason."""
        self.streams[stream.request.request_id] = stream
        stream.is_being_submitted = True
        self._submit(stream, self._submitted_first)

    def release(self, stream: SimStream) -> None:
        """The client wants no more: ends the request wherever it is."""
        if stream.is_abandoned or self.streams.get(stream.request.request_id) is not stream:
            return
        stream.is_abandoned = True
        if not stream.is_being_submitted:
            self._stop(stream)

    def cancel(self, request_id: str) -> None:
        """Ends a request of any router."""
        self.ledger.cancel(request_id, lambda outcome: self._on_cancel_outcome(request_id, outcome), _nothing)

    def _on_cancel_outcome(self, request_id: str, outcome: CancelOutcome) -> None:
        stream = self.streams.get(request_id)
        if stream is not None and outcome.state is not None:
            self._cancelled(stream, outcome.state)
        elif outcome.placement is not None and not outcome.owner_told:
            self._cancel_on_link(outcome.placement)

    # What links tell.

    def on_linked(self, session: Session) -> None:
        """An executor can be used."""
        self.links[session.executor.executor_id] = session
        self.offered[session] = {}

    def on_unlinked(self, session: Session) -> None:
        """A stream broke: its requests go back to the queue, with their output so far."""
        if self.links.get(session.executor.executor_id) is session:
            del self.links[session.executor.executor_id]
        for (_, attempt), stream in self.offered.pop(session, {}).items():
            if stream.is_current(attempt):
                self.void(stream)
        if not self.links:
            self._timeline.after(self._shape.no_executor_grace_us, self._process.run, self._give_up_without_executor)

    # What the store tells.

    def _on_store_event(self, event: StoreEvent) -> None:
        match event:
            case Placement():
                self._place(event)
            case Lost():
                self._lose(event)
            case CancelAsked(request_id):
                stream = self.streams.get(request_id)
                if stream is not None:
                    self._cancelled(stream, RequestState.PLACED)
            case PreemptAsked(request_id, attempt):
                stream = self.streams.get(request_id)
                if stream is not None and stream.is_current(attempt):
                    assert stream.placement is not None
                    self._cancel_on_link(stream.placement, FinishReason.PREEMPTED)
            case Cancelled(request_id):
                self._drop(request_id, Fate.CANCELLED, "by another router")
            case Dropped():
                self._dropped(event)
            case LeaseLapsed():
                self._submit_waiting_again()

    # How a request moves.

    def _submit(self, stream: SimStream, then: Callable[[SimStream, SubmitOutcome], None]) -> None:
        asked_us = self._timeline.now_us

        def done(outcome: SubmitOutcome) -> None:
            if isinstance(outcome, Placement | Queued) and stream.record.accepted_us is None:
                self._witness.accepted(stream.record, asked_us)
            then(stream, outcome)

        self.ledger.submit(stream.demand(self._shape.block_size), done, lambda: done(Refused(Reason.STORE_UNAVAILABLE)))

    def _submitted_first(self, stream: SimStream, outcome: SubmitOutcome) -> None:
        stream.is_being_submitted = False
        if isinstance(outcome, Queued):
            stream.record.estimated_wait_ms = outcome.estimated_wait_ms
        if isinstance(outcome, Refused | Duplicate):
            if stream.record.accepted_us is not None:  # it was submitted again meanwhile, and admitted
                if stream.is_abandoned:
                    self._stop(stream)
                return
            self.end(stream, *_why(outcome))
            self.forget(stream)
        else:
            self._take_standing(stream, outcome)

    def _take_standing(self, stream: SimStream, outcome: Placement | Queued | Dropped) -> None:
        match outcome:
            case Placement():
                self._place(outcome)
            case Dropped():
                self._dropped(outcome)
            case Queued() if stream.is_abandoned:
                self._stop(stream)

    def _submit_waiting_again(self) -> None:
        for stream in list(self.streams.values()):
            if stream.placement is None and not stream.is_abandoned and not stream.is_handed_back:
                self._submit_again(stream)

    def _submit_again(self, stream: SimStream) -> None:
        """Puts a request in line whose placement or place the ledger has lost."""
        give_up_us = self._timeline.now_us + self._shape.no_executor_grace_us

        def done(stream: SimStream, outcome: SubmitOutcome) -> None:
            if not isinstance(outcome, Refused | Duplicate):
                self._take_standing(stream, outcome)
                return
            passing = isinstance(outcome, Refused) and outcome.reason in (Reason.NO_EXECUTOR, Reason.STORE_UNAVAILABLE)
            if stream.is_abandoned or not passing or self._timeline.now_us > give_up_us:
                self.end(stream, *_why(outcome))
                self.forget(stream)
            else:
                self._timeline.after(RETRY_US, self._process.run, self._submit, stream, done)

        self._submit(stream, done)

    def look_for_forgotten(self, suspected: Sequence[SimStream] | None = None) -> None:
        """Asks the ledger for what waits here, as `router.dispatch.waiting_audit`. What it lacks twice in a row is
        submitted again."""
        waiting = [stream for stream in (suspected or list(self.streams.values())) if self._waits(stream)]
        for start in range(0, len(waiting), MAX_PER_CALL):
            self._look_for_forgotten(waiting[start : start + MAX_PER_CALL], is_confirming=suspected is not None)

    def _look_for_forgotten(self, waiting: Sequence[SimStream], *, is_confirming: bool) -> None:
        def answered(ids: frozenset[str]) -> None:
            forgotten = [one for one in waiting if one.request.request_id in ids and self._waits(one)]
            if forgotten and not is_confirming:
                self._timeline.after(CONFIRM_US, self._process.run, self.look_for_forgotten, forgotten)
                return
            for stream in forgotten:
                self._submit_again(stream)

        self.ledger.find_forgotten([Attempt(one.request.request_id, one.attempt) for one in waiting], answered)

    def _waits(self, stream: SimStream) -> bool:
        is_served = self.streams.get(stream.request.request_id) is stream and not stream.has_ended
        is_moving = stream.is_being_submitted or stream.is_handed_back or stream.is_abandoned
        return is_served and stream.placement is None and not is_moving

    def _place(self, placement: Placement) -> None:
        stream = self.streams.get(placement.request_id)
        if stream is not None and stream.is_cancelled:
            self.end(stream, Fate.CANCELLED, "asked for")
        if stream is None or stream.is_abandoned or stream.has_ended:
            self.writer.settle(Ending(placement.request_id, placement.attempt))
            if stream is not None:
                self.forget(stream)
            return
        if stream.attempt >= placement.attempt:
            # Told twice; or the ledger, which had forgotten this request, used a number again that is spent.
            if stream.placement is None and not stream.is_handed_back:
                self._hand_back(stream, placement.attempt, was_rejected=True)
            return
        stream.placement, stream.attempt, stream.cached_tokens = placement, placement.attempt, 0
        stream.num_before_placement, stream.is_suspect = len(stream.output), placement.suspect
        stream.record.num_placements += 1
        if stream.record.placed_us is None:
            stream.record.placed_us = self._timeline.now_us
        session = self.links.get(placement.executor_id)
        if session is None or session.executor.generation != placement.generation:
            self.void(stream, was_rejected=True)
            return
        self.offered[session][placement.request_id, placement.attempt] = stream
        session.submit(
            stream.request, placement, stream.output, placement.blocks or stream.demand(self._shape.block_size).blocks
        )

    def _lose(self, lost: Lost) -> None:
        stream = self.streams.get(lost.request_id)
        if stream is None or stream.is_abandoned or stream.has_ended:
            self.writer.settle(Ending(lost.request_id, lost.attempt))
        elif stream.placement is not None and stream.placement.attempt == lost.attempt:
            self._cancel_on_link(stream.placement)
            self.void(stream)
        elif stream.placement is None and lost.attempt > stream.attempt:
            self._hand_back(stream, lost.attempt, was_rejected=True)

    def void(self, stream: SimStream, *, was_rejected: bool = False, was_preempted: bool = False) -> None:
        """The current placement is void: hands it back, or settles it where nobody waits for more."""
        placement = stream.placement
        if placement is None:
            return
        stream.placement = None
        if stream.is_cancelled:
            self.end(stream, Fate.CANCELLED, "asked for")
        if stream.is_abandoned or stream.has_ended:
            self.writer.settle(Ending(placement.request_id, placement.attempt))
            self.forget(stream)
        else:
            self._hand_back(stream, placement.attempt, was_rejected=was_rejected, was_preempted=was_preempted)

    def _hand_back(
        self, stream: SimStream, attempt: int, *, was_rejected: bool = False, was_preempted: bool = False
    ) -> None:
        stream.is_handed_back = True
        args = hand_back_args(
            stream.request.request_id,
            attempt,
            self._shape.max_attempts,
            rejected=was_rejected,
            preempted=was_preempted,
            output_tokens=len(stream.output),
            progressed=stream.has_progressed,
        )

        def ask_again() -> None:
            self._timeline.after(RETRY_US, self._process.run, ask)

        def answered(outcome: HandBackOutcome) -> None:
            if outcome is HandBackRefusal.UNDECIDED:
                ask_again()
            else:
                self._handed_back(stream, outcome)

        def ask() -> None:
            self.ledger.hand_back(stream.request.request_id, args, answered, ask_again)

        ask()

    def _handed_back(self, stream: SimStream, outcome: HandBackOutcome) -> None:
        stream.is_handed_back = False
        match outcome:
            case HandBackRefusal.EXHAUSTED:
                self.end(stream, Fate.FAILED, "attempts exhausted")
                self.forget(stream)
            case HandBackRefusal.UNKNOWN:
                self._submit_again(stream)
            case HandBackRefusal.STALE:
                # Where it has moved on it is placed again by now, or this asks how it stands.
                if stream.placement is None and not stream.has_ended:
                    self._submit_again(stream)
            case Placement() | Queued() | Dropped():
                self._take_standing(stream, outcome)

    def _stop(self, stream: SimStream) -> None:
        if stream.placement is None:
            self._withdraw(stream)
        else:
            self._cancel_on_link(stream.placement)

    def _withdraw(self, stream: SimStream) -> None:
        """Takes a waiting request out of the queue. Where it has just been placed, `_place` settles it."""

        def done(outcome: CancelOutcome) -> None:
            if outcome.placement is None:
                self.forget(stream)
            else:
                self._place(outcome.placement)

        self.ledger.cancel(stream.request.request_id, done, lambda: self.forget(stream))

    def _cancelled(self, stream: SimStream, was: RequestState) -> None:
        stream.is_cancelled = True
        if was is RequestState.PLACED and stream.placement is not None:
            self._cancel_on_link(stream.placement)
        elif was in (RequestState.WAITING, RequestState.LOST):
            self._drop(stream.request.request_id, Fate.CANCELLED, "asked for")

    def _cancel_on_link(self, placement: Placement, reason: FinishReason = FinishReason.CANCELLED) -> None:
        session = self.links.get(placement.executor_id)
        if session is not None:
            session.cancel(placement.request_id, placement.attempt, reason)

    def _cancel_superseded(self, executor_id: str, request_id: str, attempt: int) -> None:
        session = self.links.get(executor_id)
        if session is not None:
            session.cancel(request_id, attempt)

    def _dropped(self, event: Dropped) -> None:
        fate = Fate.EXPIRED if event.reason is DropReason.EXPIRED else Fate.FAILED
        self._drop(event.request_id, fate, event.reason.value)

    def _drop(self, request_id: str, fate: Fate, reason: str) -> None:
        """A request left the line without a seat."""
        stream = self.streams.get(request_id)
        if stream is not None:
            self.end(stream, fate, reason)
            self.forget(stream)

    def _give_up_without_executor(self) -> None:
        if self.links:
            return
        for stream in list(self.streams.values()):
            if stream.placement is None:
                self.end(stream, Fate.FAILED, "no executor")
                self._withdraw(stream)

    def end(self, stream: SimStream, fate: Fate, reason: str = "") -> None:
        """Tells the client the end. As of a stream of the router, the first is the one that counts."""
        if not stream.has_ended:
            self._witness.ended(stream.record, fate, self._timeline.now_us, reason)

    def forget(self, stream: SimStream) -> None:
        """It is over."""
        if self.streams.get(stream.request.request_id) is stream:
            del self.streams[stream.request.request_id]


def _why(outcome: Refused | Duplicate) -> tuple[Fate, str]:
    """What a refusal is to a client."""
    if isinstance(outcome, Duplicate):
        return Fate.FAILED, f"duplicate {outcome.state.value}"
    fate = Fate.FAILED if outcome.reason in (Reason.STORE_UNAVAILABLE, Reason.NO_EXECUTOR) else Fate.REFUSED
    return fate, outcome.reason.value


def _nothing() -> None:
    """Nobody waits for it."""
