"""A router in virtual time: the effects of `inflight.router.lifecycle`, executed on a timeline instead of an event
loop.

One object is one start of a router; a restart is another with a new id. What `inflight.router.dispatch.dispatcher`
awaits is a callback here, so that the process can die in between. What clients are told goes to the checker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inflight.bench.simulation.client import SimClient, client_of
from inflight.bench.simulation.invariants import InvariantChecker, RequestOutcome
from inflight.bench.simulation.ledger import HandBackOutcome, Ledger, SubmitOutcome
from inflight.bench.simulation.ledger_writer import LedgerWriter
from inflight.bench.simulation.session import Frame, Session
from inflight.bench.simulation.store_link import StoreLink
from inflight.bench.timeline.timeline import US_PER_MS, US_PER_S, Action, Process, Timeline
from inflight.bench.timeline.traffic import SimRequest
from inflight.common.errors import Reason, RequestError
from inflight.executor.scheduler.admission import Refusal
from inflight.executor.scheduler.sequence import FinishReason
from inflight.router.lifecycle.events import (
    DEADLINE_END,
    AttachAnswered,
    AttachResult,
    CancelFound,
    Event,
    FirstToken,
    Forgotten,
    HandBackAnswered,
    NotLinked,
    Rejected,
    RequeueReason,
    SequenceEnded,
    Unlinked,
    WithdrawAnswered,
)
from inflight.router.lifecycle.lifecycle import (
    KEEPS_EXECUTOR,
    Answer,
    Attach,
    CancelSequence,
    ClearSuspicion,
    Effect,
    Effects,
    ExpectReport,
    Forget,
    HandBack,
    Lifecycle,
    LiveRequests,
    PublishEnd,
    RecordRequeued,
    ScheduleResubmit,
    ScheduleWithdraw,
    Send,
    Settle,
    SettleUnused,
    SubmitToLedger,
)
from inflight.router.request.errors import no_executor
from inflight.router.store.settings import StoreSettings
from inflight.router.store.types import (
    ANY_ATTEMPT,
    Attempt,
    CancelOutcome,
    ExecutorReport,
    HandBackDetails,
    HandBackRefusal,
    LeaseLapsed,
    Placement,
    Queued,
    StoreEvent,
)
from inflight.v1 import types_pb2

# As `inflight.router.dispatch.waiting_audit`'s and `retry_queue`'s.
LOOK_US = 1_500 * US_PER_MS
CONFIRM_US = 500 * US_PER_MS
MAX_PER_CALL = 256
RETRY_US = 500 * US_PER_MS

OUTCOMES = {
    FinishReason.STOP_TOKEN: RequestOutcome.COMPLETED,
    FinishReason.STOP_STRING: RequestOutcome.COMPLETED,
    FinishReason.LENGTH: RequestOutcome.COMPLETED,
    FinishReason.CANCELLED: RequestOutcome.CANCELLED,
    FinishReason.DEADLINE: RequestOutcome.EXPIRED,
    FinishReason.ERROR: RequestOutcome.FAILED,
}
# The reasons of the protocol and the executor's, both ways.
TO_PROTOCOL = {reason: types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
TO_EXECUTOR = {number: reason for reason, number in TO_PROTOCOL.items()}


@dataclass(frozen=True, slots=True)
class RouterShape:
    """How routers behave; `block_size` is that of the executors."""

    block_size: int = 16
    max_attempts: int = 3
    no_executor_grace_us: int = 10 * US_PER_S
    store: StoreSettings = field(default_factory=lambda: StoreSettings(max_queue_requests=1_000_000))


class VirtualRouter:
    """One start of a router."""

    def __init__(
        self,
        router_id: str,
        shape: RouterShape,
        link: StoreLink,
        timeline: Timeline,
        checker: InvariantChecker,
    ) -> None:
        self.router_id = router_id
        self.process = Process(timeline)
        self.requests = LiveRequests(shape.no_executor_grace_us / US_PER_S)
        self.streams: dict[str, SimClient] = {}
        self.links: dict[str, Session] = {}
        # Sent or accepted, by request and attempt.
        self.offered: dict[Session, dict[tuple[str, int], SimClient]] = {}
        self._shape = shape
        self._timeline = timeline
        self._checker = checker
        self.ledger = Ledger(link, self.process, router_id, shape.store, self._on_store_event)
        self.writer = LedgerWriter(self.ledger, timeline, self.process, self._cancel_superseded)

    def start(self, phase_us: int) -> None:
        """Renews and reaps from now on; `phase_us` keeps routers apart."""
        self.ledger.start(phase_us)
        self._timeline.after(phase_us % LOOK_US, self.process.run, self._look)

    def die(self) -> None:
        """It is gone, and its clients see it."""
        self.process.kill()
        self.ledger.close()
        for client in self.streams.values():
            self._end(client, RequestOutcome.ROUTER_LOST)

    def _look(self) -> None:
        self._timeline.after(LOOK_US, self.process.run, self._look)
        self.look_for_forgotten()

    # What clients ask for.

    def arrive(self, request: SimRequest) -> None:
        """A client's request."""
        record = self._checker.submitted(request, self.router_id, self._timeline.now_us)
        client = SimClient(request, record, self._shape.block_size, self._timeline)
        deadline_ms = request.ledger_deadline_ms
        if deadline_ms is not None:
            # The relay keeps the exact deadline; the ledger drops what waits by itself.
            self._timeline.after(deadline_ms * US_PER_MS, self.process.run, self._first_token_is_late, client)
        if request.gone_after_us is not None:
            self._timeline.after(request.gone_after_us, self.process.run, self._client_gone, client)
        self.streams[request.request_id] = client
        self._execute(self.requests.submit(client.stream.life))

    def _client_gone(self, client: SimClient) -> None:
        if not client.has_ended:
            client.record.may_be_cancelled = True
            self._end(client, RequestOutcome.CANCELLED, "client gone")
            self._execute(self.requests.release(client.stream.life))

    def _first_token_is_late(self, client: SimClient) -> None:
        if not client.has_ended and not client.stream.output_ids:
            client.stream.finish(DEADLINE_END)
            self._end(client, RequestOutcome.EXPIRED, "by the router")
            self._execute(self.requests.release(client.stream.life))

    def cancel(self, request_id: str) -> None:
        """Ends a request of any router."""
        self.ledger.cancel(request_id, False, lambda outcome: self._cancelled(request_id, outcome), _nothing)

    def _cancelled(self, request_id: str, outcome: CancelOutcome) -> None:
        life = self.requests.served.get(request_id)
        if life is not None and outcome.state is not None:
            self._apply(life, CancelFound(outcome.state))
        elif outcome.placement is not None and not outcome.owner_notified:
            placement = outcome.placement
            self._cancel_sequence(CancelSequence(placement.executor_id, request_id, placement.attempt))

    # What executors tell.

    def on_linked(self, session: Session) -> None:
        """An executor can be used."""
        self.links[session.executor.executor_id] = session
        self.offered[session] = {}

    def on_unlinked(self, session: Session) -> None:
        """Returns the requests of a broken stream to the queue, with their output so far."""
        if self.links.get(session.executor.executor_id) is session:
            del self.links[session.executor.executor_id]
            self.writer.forget(session.executor.executor_id)
        for (_, attempt), client in self.offered.pop(session, {}).items():
            self._apply(client.stream.life, Unlinked(attempt))
        if not self.links:
            self._timeline.after(self._shape.no_executor_grace_us, self.process.run, self._give_up_without_executor)

    def _give_up_without_executor(self) -> None:
        if not self.links:
            self._execute(self.requests.no_executor(no_executor("no executor has been reachable")))

    def on_report(self, session: Session, report: ExecutorReport) -> None:
        """Passes on an executor's report."""
        self.writer.report(report)

    def wants_report(self, executor_id: str) -> bool:
        """Whether this router relays the executor's reports, or would if others do not."""
        return self.writer.has_use_of_report(executor_id)

    def on_frame(self, session: Session, frame: Frame) -> None:
        """What a turn of an executor's loop brought. See `ExecutorLink.receive`."""
        offered = self.offered[session]
        for request_id, attempt, refusal in frame.rejected:
            client = offered.pop((request_id, attempt), None)
            if client is not None:
                text = "refused by the executor" if refusal is Refusal.INVALID else None
                self._apply(client.stream.life, Rejected(attempt, text))
        for request_id, attempt, cached_tokens in frame.started:
            client = offered[request_id, attempt]
            if client.is_current(attempt):
                self._started(client, cached_tokens)
        for request_id, attempt, offset, token_id in frame.tokens:
            client = offered[request_id, attempt]
            if client.is_current(attempt):
                self._token(client, offset, token_id)
        for request_id, attempt, reason in frame.finished:
            client = offered.pop((request_id, attempt))
            error = "failed" if reason is FinishReason.ERROR else ""
            self._apply(client.stream.life, SequenceEnded(attempt, TO_PROTOCOL[reason], error=error))

    def _started(self, client: SimClient, cached_tokens: int) -> None:
        client.stream.start(cached_tokens)
        if not client.has_ended:
            client.record.cached_tokens += cached_tokens
            self._checker.boarded(client.record, self._timeline.now_us)

    def _token(self, client: SimClient, offset: int, token_id: int) -> None:
        stream = client.stream
        expected = len(stream.output_ids)
        is_next = stream.token(offset, token_id)
        self._checker.require(is_next, f"{stream.request_id}: token {expected} is missing before {offset}")
        if stream.life.is_suspect:
            self._apply(stream.life, FirstToken(stream.life.current_attempt))
        if offset == expected and not client.has_ended:
            self._checker.delivered(client.record, offset, token_id, self._timeline.now_us)

    # What the ledger tells, and what it is asked for without a request.

    def _on_store_event(self, event: StoreEvent) -> None:
        if not isinstance(event, LeaseLapsed):
            self._execute(self.requests.on_store_event(event))
            return
        self.writer.start_over()
        self._execute(self.requests.apply_lapse_outside_queue())
        self._look_at_all()

    def _look_at_all(self) -> None:
        """As `inflight.router.dispatch.waiting_audit` after a lapse."""
        lives = self.requests.waiting()
        for start in range(0, len(lives), MAX_PER_CALL):
            self._look_after_lapse(lives[start : start + MAX_PER_CALL])

    def _look_after_lapse(self, waiting: Sequence[Lifecycle]) -> None:
        def answered(ids: frozenset[str]) -> None:
            for life in waiting:
                if life.request_id in ids and self._waits(life):
                    self._apply(life, Forgotten())

        def failed() -> None:
            self._timeline.after(RETRY_US, self.process.run, self._look_at_all)

        self.ledger.find_forgotten([Attempt(life.request_id, ANY_ATTEMPT) for life in waiting], answered, failed)

    def _cancel_superseded(self, executor_id: str, request_id: str, attempt: int) -> None:
        self._cancel_sequence(CancelSequence(executor_id, request_id, attempt))

    def look_for_forgotten(self, suspected: Sequence[Lifecycle] | None = None) -> None:
        """Asks the ledger for what waits here, as `inflight.router.dispatch.waiting_audit`. What it does not have,
        twice in a row, is submitted again."""
        lives = self.requests.waiting() if suspected is None else [life for life in suspected if self._waits(life)]
        for start in range(0, len(lives), MAX_PER_CALL):
            self._look_for_forgotten(lives[start : start + MAX_PER_CALL], is_confirming=suspected is not None)

    def _look_for_forgotten(self, waiting: Sequence[Lifecycle], *, is_confirming: bool) -> None:
        def answered(ids: frozenset[str]) -> None:
            forgotten = [life for life in waiting if life.request_id in ids and self._waits(life)]
            if forgotten and not is_confirming:
                self._timeline.after(CONFIRM_US, self.process.run, self.look_for_forgotten, forgotten)
                return
            for life in forgotten:
                self._apply(life, Forgotten())

        self.ledger.find_forgotten([Attempt(life.request_id, life.attempt) for life in waiting], answered)

    def _waits(self, life: Lifecycle) -> bool:
        return self.requests.served.get(life.request_id) is life and life.is_in_queue

    # How effects are executed.

    def _apply(self, life: Lifecycle, event: Event) -> None:
        self._execute(self.requests.apply(life, event))

    def _execute(self, effects: Effects) -> None:
        for effect in effects:
            self._execute_one(effect)

    def _execute_one(self, effect: Effect) -> None:
        match effect:
            case SubmitToLedger(life, is_served=False):
                self._submit(life)
            case Answer(life, Queued() as queued):
                client_of(life).record.estimated_wait_ms = queued.estimated_wait_ms
            case Send(life, placement):
                self._send(life, placement)
            case HandBack(life, placement, why):
                self._hand_back(life, placement, why)
            case ExpectReport(executor_id):
                self.writer.expect_report(executor_id)
            case Settle(life, attempt):
                self.writer.settle(client_of(life).stream.ending(attempt))
            case SettleUnused(ending):
                self.writer.settle(ending)
            case CancelSequence():
                self._cancel_sequence(effect)
            case ScheduleResubmit(life, is_retry):
                self._soon(is_retry, self._submit_again, life)
            case ScheduleWithdraw(life, is_retry):
                self._soon(is_retry, self._withdraw, life)
            case Attach(life, adopted, is_first):
                # No router here adopts what another reads, so no executor lets another read it.
                event = AttachAnswered(adopted, AttachResult.NOT_HELD, is_first)
                self._timeline.after(0, self.process.run, self._apply, life, event)
            case ClearSuspicion(life, attempt):
                self.ledger.absolve(life.request_id, attempt)
            case RecordRequeued(life, why):
                client_of(life).stream.requeue(why)
            case PublishEnd(life):
                self._publish_end(client_of(life))
            case Forget(life):
                del self.streams[life.request_id]

    def _soon(self, is_retry: bool, action: Action, life: Lifecycle) -> None:
        self._timeline.after(RETRY_US if is_retry else 0, self.process.run, action, life)

    def _submit(self, life: Lifecycle) -> None:
        asked_us = self._timeline.now_us

        def answered(outcome: SubmitOutcome | RequestError) -> None:
            self._admitted(life, outcome, asked_us)
            self._execute(self.requests.submit_answered(life, outcome))

        self.ledger.submit(client_of(life).stream.demand(), answered, lambda: answered(_away()))

    def _submit_again(self, life: Lifecycle) -> None:
        if not self.requests.resubmit_due(life):
            return
        asked_us = self._timeline.now_us

        def answered(outcome: SubmitOutcome | RequestError) -> None:
            self._admitted(life, outcome, asked_us)
            now_s = self._timeline.now_us / US_PER_S
            self._execute(self.requests.resubmit_answered(life, outcome, now_s))

        self.ledger.submit(client_of(life).stream.demand(is_served=True), answered, lambda: answered(_away()))

    def _admitted(self, life: Lifecycle, outcome: SubmitOutcome | RequestError, asked_us: int) -> None:
        record = client_of(life).record
        if isinstance(outcome, Placement | Queued) and record.accepted_us is None:
            self._checker.accepted(record, asked_us)

    def _send(self, life: Lifecycle, placement: Placement) -> None:
        client = client_of(life)
        record = client.record
        record.num_placements += 1
        if record.placed_us is None:
            record.placed_us = self._timeline.now_us
        submit = client.stream.place(placement)
        session = self.links.get(placement.executor_id)
        if session is None or session.executor.generation != placement.generation:
            self._apply(life, NotLinked(placement.attempt))
            return
        self.offered[session][placement.request_id, placement.attempt] = client
        session.submit(client.request, placement, client.stream.output_ids, submit.reserved_blocks)

    def _hand_back(self, life: Lifecycle, placement: Placement, why: RequeueReason) -> None:
        stream = client_of(life).stream
        max_attempts = self._shape.max_attempts
        details: HandBackDetails = {
            "rejected": why in (RequeueReason.REJECTED, RequeueReason.HANDED_BACK),
            "preempted": why in KEEPS_EXECUTOR,
            "output_tokens": len(stream.output_ids),
            "progressed": stream.has_progressed,
            "stood_still": why is RequeueReason.STALLED,
            "placement_blocks": stream.placement_blocks,
        }

        def ask_again() -> None:
            self._timeline.after(RETRY_US, self.process.run, ask)

        def answered(outcome: HandBackOutcome) -> None:
            if outcome is HandBackRefusal.UNDECIDED:
                ask_again()
            else:
                self._apply(life, HandBackAnswered(placement, why, outcome, max_attempts))

        def ask() -> None:
            self.ledger.hand_back(life.request_id, placement.attempt, max_attempts, details, answered, ask_again)

        ask()

    def _withdraw(self, life: Lifecycle) -> None:
        def answered(outcome: CancelOutcome | None) -> None:
            self._apply(life, WithdrawAnswered(outcome))

        if self.requests.withdraw_due(life):
            self.ledger.cancel(life.request_id, True, answered, lambda: answered(None))

    def _cancel_sequence(self, effect: CancelSequence) -> None:
        session = self.links.get(effect.executor_id)
        if session is not None:
            session.cancel(effect.request_id, effect.attempt, TO_EXECUTOR[effect.reason])

    def _publish_end(self, client: SimClient) -> None:
        """Returns what the client receives, unless it has left."""
        life = client.stream.life
        if client.has_ended and life.is_abandoned:
            return
        now_us = self._timeline.now_us
        if life.end is not None:
            reason = TO_EXECUTOR[life.end.reason]
            self._checker.ended(client.record, OUTCOMES[reason], now_us, reason.value)
        elif life.error is not None:
            is_refusal = client.record.accepted_us is None and life.error.reason in REFUSALS
            outcome = RequestOutcome.REFUSED if is_refusal else RequestOutcome.FAILED
            self._checker.ended(client.record, outcome, now_us, life.error.reason.value)

    def _end(self, client: SimClient, outcome: RequestOutcome, reason: str = "") -> None:
        if not client.has_ended:
            self._checker.ended(client.record, outcome, self._timeline.now_us, reason)


REFUSALS = frozenset({Reason.QUEUE_FULL, Reason.RATE_LIMITED, Reason.DEADLINE_UNMEETABLE, Reason.NEVER_FITS})


def _away() -> RequestError:
    return RequestError(Reason.STORE_UNAVAILABLE, "Redis is away")


def _nothing() -> None:
    """The answer is not waited for."""
