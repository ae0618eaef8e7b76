"""The life cycle of requests on one router: a pure state machine.

Events go in: events and answers of the ledger, events of links and clients, and timers
(`inflight.router.lifecycle.events`). Effects come out. `inflight.router.dispatch.dispatcher` executes them. No module
in this folder does I/O, waits, reads a clock or draws a random number.

`LiveRequests` holds the requests of one model. A `Lifecycle` is one request. Its state says where the request is, as
far as this router knows:

    NEW           not submitted yet
    SUBMITTING    the first submit is under way, and its outcome is unknown
    WAITING       in the ledger's queue
    RESUBMITTING  the ledger has lost it; it is submitted again
    ATTACHING     it ran at another router; this router asks its executor for its output
    PLACED        on an executor, under `attempt`
    REPLAYING     it has ended on its executor, which sends the output again
    HANDING_BACK  its placement failed and is being returned to the queue
    WITHDRAWING   no longer wanted; it is being removed from the queue
    ENDED         no longer served here; later messages of its executor are only settled
    LEFT          no longer served here; another router serves it, or will

Several calls can be under way at once (`calls`). For example, a submit whose reply is lost is overtaken by a
resubmission, or a client leaves while a placement is handed back. So an answer is legal in every state in which its
call is under way, and its effect depends on the state. `inflight.router.lifecycle.transitions` has every state that an
event can lead to. Any other transition raises `IllegalTransition` and changes nothing.

A placement is fenced by its attempt: `Lifecycle.handle` drops an event whose attempt is not the current one, so the
code behind it need not check that. Output does not pass through here; a link compares the same `current_attempt` when
it looks up the stream of a slot.

Invariants: a placement that the ledger gave is sent, settled or handed back; a served request leaves by exactly one
`Forget`; once the end or the error of a request is known, it does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.types import (
    Adopted,
    Cancelled,
    CancelRequested,
    Dropped,
    DropReason,
    Duplicate,
    Ending,
    HandBackRefusal,
    LeaseLapsed,
    LedgerEvent,
    LedgerState,
    Lost,
    Placement,
    PreemptRequested,
    Queued,
    Refused,
    TakenOver,
)
from inflight.router.lifecycle.events import (
    CANCELLED_END,
    DEADLINE_END,
    FENCED,
    LENGTH_END,
    Admitted,
    AdoptedElsewhere,
    AttachAnswered,
    AttachResult,
    CancelFound,
    Detached,
    DrainWaiting,
    End,
    Event,
    FirstToken,
    Forgotten,
    GiveUp,
    HandBackAnswered,
    Leave,
    LifecycleState,
    NoExecutor,
    NotLinked,
    PendingCall,
    ReaderEnded,
    Rejected,
    Release,
    RequeueReason,
    ResubmitAnswered,
    ResubmitDue,
    SequenceEnded,
    Submit,
    SubmitAnswer,
    SubmitAnswered,
    Unlinked,
    WithdrawAnswered,
    WithdrawDue,
    Withdrawn,
)
from inflight.router.lifecycle.transitions import TRANSITIONS, UNSERVED
from inflight.router.request.errors import ADAPTER, duplicate, mismatch, out_of_reach, output_lost, refusal, taken_over
from inflight.router.request.ids import client_id
from inflight.v1 import types_pb2

# How often in a row a request that was preempted before its next token is placed again at once; then at the pace of
# reports.
MAX_CONSECUTIVE_PREEMPTIONS = 3

# Reasons that are not failures of the executor: the ledger may place new requests there before its next report.
KEEPS_EXECUTOR = frozenset({RequeueReason.PREEMPTED, RequeueReason.EXTENDED})

# Attempts count from 1.
NO_ATTEMPT = 0

# Refusals of a resubmission after which a waiting request is submitted again.
PASSING_REASONS = frozenset({Reason.NO_EXECUTOR, Reason.STORE_UNAVAILABLE})


class Output(Protocol):
    """The part of a request's stream that the state machine reads."""

    @property
    def has_progressed(self) -> bool:
        """Whether the current placement has brought a token."""

    @property
    def is_complete(self) -> bool:
        """Whether it has all the tokens that it may have."""

    @property
    def has_used_reservation(self) -> bool:
        """Whether the current placement has brought all tokens that it reserved, and there may be more."""

    @property
    def has_been_accepted(self) -> bool:
        """Whether an executor has ever taken it."""


# Effects --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitToLedger:
    """Submit the request to the ledger; `is_served`: not for the first time."""

    life: Lifecycle
    is_served: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """Return the outcome of the first submit to its caller."""

    life: Lifecycle
    outcome: Admitted | RequestError


@dataclass(frozen=True, slots=True)
class RecordAdmitted:
    """The ledger has the request."""

    life: Lifecycle


@dataclass(frozen=True, slots=True)
class ScheduleResubmit:
    """Submit the request again when it is its turn; `is_retry`: after a pause."""

    life: Lifecycle
    is_retry: bool = False


@dataclass(frozen=True, slots=True)
class ScheduleWithdraw:
    """Take the request out of the queue when it is its turn; `is_retry`: after a pause."""

    life: Lifecycle
    is_retry: bool = False


@dataclass(frozen=True, slots=True)
class WithdrawFromLedger:
    """Have the ledger take the request out of the queue."""

    life: Lifecycle


@dataclass(frozen=True, slots=True)
class Attach:
    """Ask the executor of a placement for the request's output; answer `AttachAnswered`."""

    life: Lifecycle
    adopted: Adopted
    is_first: bool


@dataclass(frozen=True, slots=True)
class ReadOutput:
    """Begin to read the sequence's output, from its first token on."""

    life: Lifecycle
    has_started: bool
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request to the executor of this placement; where it is not linked, answer `NotLinked`."""

    life: Lifecycle
    placement: Placement


@dataclass(frozen=True, slots=True)
class CancelSequence:
    """Have the executor end a placement for this reason. Without effect where it is not linked."""

    executor_id: str
    request_id: str
    attempt: int
    reason: int = types_pb2.FINISH_REASON_CANCELLED


@dataclass(frozen=True, slots=True)
class HandBack:
    """Return a placement to the queue; answer `HandBackAnswered`."""

    life: Lifecycle
    placement: Placement
    why: RequeueReason


@dataclass(frozen=True, slots=True)
class ExpectReport:
    """The ledger gives the executor nothing new before its next report."""

    executor_id: str


@dataclass(frozen=True, slots=True)
class Settle:
    """Return the reservation of a placement, with what it has used."""

    life: Lifecycle
    attempt: int


@dataclass(frozen=True, slots=True)
class SettleUnused:
    """Return a reservation whose use is not known."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class ClearSuspicion:
    """Have the ledger forget the executors that were lost before this placement, because it has brought a token."""

    life: Lifecycle
    attempt: int


@dataclass(frozen=True, slots=True)
class RecordRequeued:
    """The request has lost its placement and waits for another."""

    life: Lifecycle
    why: RequeueReason


@dataclass(frozen=True, slots=True)
class PublishEnd:
    """Tell the reader of the request's end or error."""

    life: Lifecycle


@dataclass(frozen=True, slots=True)
class Forget:
    """Stop serving the request."""

    life: Lifecycle


@dataclass(frozen=True, slots=True)
class Stray:
    """A placement or drop that reached a request which is no longer served. `LiveRequests` handles it."""

    outcome: Placement | Dropped


Effect = (
    SubmitToLedger
    | Answer
    | RecordAdmitted
    | ScheduleResubmit
    | ScheduleWithdraw
    | WithdrawFromLedger
    | Attach
    | ReadOutput
    | Send
    | CancelSequence
    | HandBack
    | ExpectReport
    | Settle
    | SettleUnused
    | ClearSuspicion
    | RecordRequeued
    | PublishEnd
    | Forget
    | Stray
)
Effects = list[Effect]


class IllegalTransition(Exception):
    """An event that the state does not allow, or that led to a wrong state: a bug of this router."""


S = LifecycleState


class Lifecycle:
    """One request. `output` is its stream. `deadline` is the time by which it must have ended, on the caller's clock.
    `is_repeatable`: a client may send it again under the same id."""

    def __init__(
        self, request_id: str, output: Output, deadline: float | None = None, *, is_repeatable: bool = False
    ) -> None:
        self.request_id = request_id
        self.output = output
        self.deadline = deadline
        self.is_repeatable = is_repeatable
        self.state = S.NEW
        self.calls: tuple[PendingCall, ...] = ()
        self.placement: Placement | None = None
        # The fence: the attempt of the current placement.
        self.current_attempt = NO_ATTEMPT
        # The newest placement, current or last; 0 and empty before the first.
        self.attempt = 0
        self.executor_id = ""
        # The newest answer of the ledger that is no refusal.
        self.admitted: Admitted | None = None
        self.end: End | None = None
        self.error: RequestError | None = None
        # An executor died under it before its next token, which the current placement has not brought yet.
        self.is_suspect = False
        # The client is gone, or has all that it wanted.
        self.is_abandoned = False
        # A caller has cancelled it: it ends whatever comes next.
        self.is_cancelled = False
        # Its stop string came, which executors do not see.
        self.has_matched_stop = False
        # The ledger says that the replayed output did not end by a cancellation.
        self.is_known_uncancelled = False
        self.consecutive_preemptions = 0
        self._effects: Effects = []

    @property
    def has_ended(self) -> bool:
        """Whether its end or its error is known."""
        return self.end is not None or self.error is not None

    @property
    def is_served(self) -> bool:
        """Whether this router serves it."""
        return self.state not in UNSERVED

    def is_current(self, attempt: int) -> bool:
        """Returns whether an attempt is that of the current placement. This is the fence against late events."""
        return attempt == self.current_attempt != NO_ATTEMPT

    @property
    def is_being_submitted(self) -> bool:
        """Whether the caller of its first submit waits for the answer."""
        return PendingCall.SUBMIT in self.calls

    @property
    def is_resubmit_queued(self) -> bool:
        """Whether it waits for its turn to be submitted again."""
        return PendingCall.RESUBMIT_QUEUED in self.calls

    @property
    def is_in_queue(self) -> bool:
        """Whether the ledger has it in its queue, as far as this router knows, and nothing about that is under way."""
        return self.state is S.WAITING and not (self.calls or self.is_abandoned or self.has_ended)

    @property
    def was_cancelled(self) -> bool:
        """Whether it ended by its client or because its client was gone."""
        if self.has_matched_stop:
            return False
        if self.end is not None:
            return self.end.reason == types_pb2.FINISH_REASON_CANCELLED
        return self.is_cancelled or self.is_abandoned

    def handle(self, event: Event) -> Effects:
        """Applies an event and returns its effects. Raises `IllegalTransition` without any change."""
        kind = type(event)
        if kind in FENCED and not self.is_current(event.attempt):  # type: ignore[union-attr]
            return []
        allowed = TRANSITIONS.get((self.state, kind))
        if allowed is None:
            raise IllegalTransition(f"{self.request_id}: {kind.__name__} in state {self.state.name}")
        before = CHANGING(self)
        effects = self._effects = []
        try:
            ON_EVENT[kind](self, event)
            if self.state not in allowed:
                raise IllegalTransition(f"{self.request_id}: {kind.__name__} led to {self.state.name}")
        except IllegalTransition:
            for name, value in zip(CHANGING_FIELDS, before, strict=True):
                setattr(self, name, value)
            raise
        return effects

    # Events of the client and this router.

    def _on_submit(self, event: Submit) -> None:
        self.state = S.SUBMITTING
        self._open_call(PendingCall.SUBMIT)
        self._effects.append(SubmitToLedger(self, is_served=False))

    def _on_release(self, event: Release) -> None:
        if self.is_abandoned:
            return
        self.is_abandoned = True
        # Before the ledger has answered, the id may be another request's; the answer is dealt with when it comes.
        if PendingCall.SUBMIT not in self.calls:
            self._stop()

    def _on_reader_ended(self, event: ReaderEnded) -> None:
        if event.end.reason == types_pb2.FINISH_REASON_STOP_STRING:
            self.has_matched_stop = True
        self._finish(event.end)

    def _on_drain_waiting(self, event: DrainWaiting) -> None:
        is_running = self.placement is not None or self.output.has_been_accepted
        if is_running or self.is_abandoned or PendingCall.SUBMIT in self.calls:
            return
        if self.is_repeatable:
            self._leave(event.error)
        else:
            self._fail(event.error)
            self._withdraw()

    def _on_leave(self, event: Leave) -> None:
        self._leave(event.error)

    def _on_no_executor(self, event: NoExecutor) -> None:
        if self.placement is None and self.deadline is None:
            self._fail(event.error)
            self._withdraw()

    def _on_give_up(self, event: GiveUp) -> None:
        self._close_call(PendingCall.RESUBMIT_QUEUED)
        if self._can_be_resubmitted:
            self._fail(event.error)
            self._forget()

    # Answers of the ledger.

    def _on_submit_answered(self, event: SubmitAnswered) -> None:
        outcome = self._admitted_or_error(event.outcome, is_served=False)
        if isinstance(outcome, RequestError):
            self._close_call(PendingCall.SUBMIT)
            if self.admitted is None:
                self._fail(outcome)
                self._forget()
                self._effects.append(Answer(self, outcome))
                return
            # A later submit was answered first: the request waits or runs.
            if self.is_abandoned and self.state is not S.LEFT:
                self._stop()
            self._effects.append(Answer(self, self.admitted))
            return
        if not self._admit(outcome, is_first=True):
            self._close_call(PendingCall.SUBMIT)
            self._effects.append(Answer(self, outcome))

    def _on_resubmit_due(self, event: ResubmitDue) -> None:
        if PendingCall.RESUBMIT_QUEUED not in self.calls:
            return
        self._close_call(PendingCall.RESUBMIT_QUEUED)
        if self._can_be_resubmitted:
            self._open_call(PendingCall.RESUBMIT)
            self._effects.append(SubmitToLedger(self, is_served=True))

    def _on_resubmit_answered(self, event: ResubmitAnswered) -> None:
        self._close_call(PendingCall.RESUBMIT)
        if self.state is S.LEFT:
            return
        outcome = self._admitted_or_error(event.outcome, is_served=True)
        if not isinstance(outcome, RequestError):
            self._admit(outcome, is_first=False)
        elif outcome.reason is Reason.DUPLICATE_REQUEST_ID and (self.attempt or self.is_repeatable):
            self._leave(taken_over())
        elif self.is_abandoned and outcome.reason is Reason.STORE_UNAVAILABLE:
            self._stop()  # the ledger may have taken it
        elif self.is_abandoned or outcome.reason not in PASSING_REASONS:
            self._fail(outcome)
            self._forget()
        elif self._can_be_resubmitted and not self.has_ended and PendingCall.RESUBMIT_QUEUED not in self.calls:
            self._open_call(PendingCall.RESUBMIT_QUEUED)
            self._effects.append(ScheduleResubmit(self, is_retry=True))

    def _on_hand_back_answered(self, event: HandBackAnswered) -> None:
        self._close_call(PendingCall.HAND_BACK)
        if event.why not in KEEPS_EXECUTOR:
            self._effects.append(ExpectReport(event.placement.executor_id))
        if self.state is S.HANDING_BACK:
            self.state = S.WAITING
        match event.outcome:
            case Placement() as placement:
                self._place(placement)
            case Dropped() as dropped:
                self._drop(dropped)
            case HandBackRefusal.EXHAUSTED | HandBackRefusal.STALLED:
                what = "executors died" if event.outcome is HandBackRefusal.EXHAUSTED else "engines have stalled"
                text = f"{event.max_attempts} {what} under the request before its next token"
                self._fail(RequestError(Reason.ATTEMPTS_EXHAUSTED, text))
                self._forget()
            case HandBackRefusal.UNKNOWN:
                self._resubmit()
            case HandBackRefusal.STALE if self.placement is None and not self.has_ended:
                self._resubmit()  # which says how it stands
            case Queued() if self.is_abandoned:
                self._stop()

    def _on_withdraw_due(self, event: WithdrawDue) -> None:
        self._close_call(PendingCall.WITHDRAW_QUEUED)
        if not event.is_replaced:
            self._open_call(PendingCall.WITHDRAW)
            self._effects.append(WithdrawFromLedger(self))

    def _on_withdraw_answered(self, event: WithdrawAnswered) -> None:
        self._close_call(PendingCall.WITHDRAW)
        if event.outcome is not None and event.outcome.placement is not None:
            self._place(event.outcome.placement)  # which settles it
            return
        self._forget()
        if event.outcome is None and PendingCall.WITHDRAW_QUEUED not in self.calls:
            self._open_call(PendingCall.WITHDRAW_QUEUED)
            self._effects.append(ScheduleWithdraw(self, is_retry=True))

    def _on_cancel_found(self, event: CancelFound) -> None:
        self.is_cancelled = True
        if event.was is LedgerState.PLACED and self.placement is not None:
            self._cancel_sequence(self.placement)
        elif event.was in (LedgerState.WAITING, LedgerState.LOST):
            self._finish(CANCELLED_END)
            self._forget()

    def _on_forgotten(self, event: Forgotten | LeaseLapsed) -> None:
        self._resubmit()

    # Events of the ledger.

    def _on_placement(self, event: Placement) -> None:
        self._place(event)

    def _on_lost(self, event: Lost) -> None:
        """The ledger took a placement back. This router may never have known of it, because a reply can be lost."""
        if self.is_abandoned or self.has_ended:
            ending = Ending(self.request_id, event.attempt, cancelled=self.was_cancelled)
            self._effects.append(SettleUnused(ending))
        elif self.placement is not None and self.current_attempt == event.attempt:
            self._cancel_sequence(self.placement)
            self._requeue(RequeueReason.LOST)
        elif self.placement is None and event.attempt > self.attempt:
            lost = Placement(event.request_id, event.attempt, event.executor_id, event.generation)
            self._hand_back(lost, RequeueReason.REJECTED)

    def _on_cancel_requested(self, event: CancelRequested) -> None:
        self.is_cancelled = True
        if self.placement is not None:
            self._cancel_sequence(self.placement)

    def _on_preempt_requested(self, event: PreemptRequested) -> None:
        assert self.placement is not None
        # The ledger wants the room at once: this preemption is no sign that the executor should wait for a report.
        self.consecutive_preemptions = max(0, self.consecutive_preemptions - 1)
        self._cancel_sequence(self.placement, types_pb2.FINISH_REASON_PREEMPTED)

    def _on_cancelled(self, event: Cancelled) -> None:
        self._finish(CANCELLED_END)
        self._forget()

    def _on_dropped(self, event: Dropped) -> None:
        self._drop(event)

    def _on_taken_over(self, event: TakenOver) -> None:
        if event.is_certain or not self._is_wanted:
            self._leave(taken_over())
        else:
            self._ask_whose_it_is()

    # Events of links.

    def _on_attach_answered(self, event: AttachAnswered) -> None:
        self._close_call(PendingCall.ATTACH)
        adopted, refused = event.adopted, None
        if event.result is AttachResult.ATTACHED:
            if self.state in (S.ATTACHING, S.WITHDRAWING):
                self._read_adopted(event)
                self.is_known_uncancelled = adopted.ended  # what was cancelled, the ledger starts again
                if self.is_abandoned:
                    self._stop()
        elif self.state is S.ATTACHING and (adopted.ended or event.result is AttachResult.MISMATCH):
            refused = _not_attached(event.result)
            self._fail(refused)
            self._forget()
        elif not adopted.ended and self.state is not S.LEFT:
            self._place(adopted.placement)  # no router has told the executor, or it cannot be reached
        if event.is_first:
            self._close_call(PendingCall.SUBMIT)
            self._effects.append(Answer(self, refused or adopted))

    def _on_adopted_elsewhere(self, event: AdoptedElsewhere) -> None:
        self._read_adopted(event)

    def _on_void(self, event: NotLinked | Unlinked | Withdrawn) -> None:
        self._requeue(_VOID[type(event)])

    def _on_rejected(self, event: Rejected) -> None:
        if event.refusal is None:
            self._requeue(RequeueReason.REJECTED)
            return
        self._clear_placement()
        self._fail(event.refusal)
        self._forget()
        self._effects.append(Settle(self, event.attempt))

    def _on_detached(self, event: Detached) -> None:
        """Another router reads the sequence. Its attach may have come late, after this router took the request from it:
        then the ledger says so, and this router attaches again. Otherwise the request is the other router's."""
        if self._is_wanted:
            self._ask_whose_it_is()
        else:
            self._leave(taken_over())

    def _on_first_token(self, event: FirstToken) -> None:
        self.is_suspect = False
        self._effects.append(ClearSuspicion(self, event.attempt))

    def _on_finished(self, event: SequenceEnded) -> None:
        if event.reason == types_pb2.FINISH_REASON_PREEMPTED:
            self._preempted(event)
            return
        is_unwanted_cancel = self._is_wanted or self.is_known_uncancelled
        if event.reason == types_pb2.FINISH_REASON_CANCELLED and is_unwanted_cancel:
            self._requeue(RequeueReason.WITHDRAWN)  # the ledger took the placement for superseded
            return
        if event.error:
            self._fail(RequestError(Reason.INTERNAL, event.error))
        else:
            self._finish(End(event.reason, event.stop_token_id, event.constraint_unfinished))
        is_replay = self.state is S.REPLAYING
        self._clear_placement()
        if not is_replay:
            self._effects.append(Settle(self, event.attempt))
        self._forget()

    def _preempted(self, event: SequenceEnded) -> None:
        """Its executor has ended the placement because its reservation is used up, for others, or because it drains or
        stalls. A request that was preempted several times before its next token waits for a report."""
        if event.is_stall:
            self._requeue(RequeueReason.STALLED)
            return
        if self.output.has_used_reservation and not event.is_draining:
            self.consecutive_preemptions = 0
            self._requeue(RequeueReason.EXTENDED)
            return
        self.consecutive_preemptions = 0 if self.output.has_progressed else self.consecutive_preemptions + 1
        is_refused = event.is_draining or self.consecutive_preemptions > MAX_CONSECUTIVE_PREEMPTIONS
        self._requeue(RequeueReason.HANDED_BACK if is_refused else RequeueReason.PREEMPTED)

    # Movement of a request.

    @property
    def _is_wanted(self) -> bool:
        """Whether more of its output is wanted."""
        return not (self.is_abandoned or self.is_cancelled or self.has_ended or self.state is S.REPLAYING)

    @property
    def _can_be_resubmitted(self) -> bool:
        """Whether it is in the queue, as far as this router knows, or was, and its client wants it."""
        return self.state in (S.SUBMITTING, S.WAITING, S.RESUBMITTING) and not self.is_abandoned

    def _admitted_or_error(self, outcome: SubmitAnswer, *, is_served: bool) -> Admitted | RequestError:
        if self.state is S.LEFT and self.error is not None:
            return self.error  # the answer is for the router that has it now
        if isinstance(outcome, Refused):
            return refusal(outcome)
        if isinstance(outcome, Duplicate):
            return mismatch() if self.is_repeatable and not is_served else duplicate(client_id(self.request_id))
        return outcome

    def _admit(self, outcome: Admitted, *, is_first: bool) -> bool:
        """Records that the ledger has the request. Returns whether its executor is asked first."""
        self.admitted = outcome
        self._effects.append(RecordAdmitted(self))
        match outcome:
            case Placement():
                self._place(outcome)
            case Dropped():
                self._drop(outcome)
            case Queued():
                if self.state in (S.SUBMITTING, S.RESUBMITTING):
                    self.state = S.WAITING
                if self.is_abandoned:
                    self._stop()
            case Adopted():
                return self._attach(outcome, is_first=is_first)
        return False

    def _attach(self, adopted: Adopted, *, is_first: bool) -> bool:
        if self.state not in (S.SUBMITTING, S.WAITING, S.RESUBMITTING, S.WITHDRAWING):
            if self.state is S.ENDED and not adopted.ended:
                self._effects.append(Stray(adopted.placement))
            return False
        if self.state is not S.WITHDRAWING:
            self.state = S.ATTACHING
        self._open_call(PendingCall.ATTACH)
        self._effects.append(Attach(self, adopted, is_first))
        return True

    def _read_adopted(self, event: AttachAnswered | AdoptedElsewhere) -> None:
        """Attaches to the current placement, which already ran on its executor. It sends from the first token on."""
        self._make_current(event.adopted.placement)
        self.state = S.REPLAYING if event.adopted.ended else S.PLACED
        self._effects.append(ReadOutput(self, event.has_started, event.num_cached_tokens))

    def _place(self, placement: Placement) -> None:
        """The ledger has chosen an executor, or gives back what is settled because it is not wanted any more."""
        if not self.is_served:
            self._effects.append(Stray(placement))
            return
        if self.is_cancelled:
            self._finish(CANCELLED_END)
        if self.is_abandoned or self.has_ended:
            self._effects.append(Settle(self, placement.attempt))
            self._forget()
        elif self.attempt < placement.attempt:
            self._make_current(placement)
            self.state = S.PLACED
            self._effects.append(Send(self, placement))
        elif self.placement is None and self.state is not S.HANDING_BACK:
            # Told twice, by the reply to the call and by an event; or the ledger had forgotten the request meanwhile
            # and counts its attempts from 1 again: then this one is spent, and no other router will return it.
            self._hand_back(placement, RequeueReason.REJECTED)

    def _requeue(self, why: RequeueReason) -> None:
        """Handles a void placement: hands it back, or settles it if no more is wanted."""
        placement, is_replay = self.placement, self.state is S.REPLAYING
        assert placement is not None
        self._clear_placement()
        if self.is_cancelled:
            self._finish(CANCELLED_END)
        if self.output.is_complete:
            # Only its end was still to come, and executors refuse what has nothing left to generate.
            self._finish(LENGTH_END)
        if is_replay:
            self._fail(output_lost("its executor did not send the output again to its end"))
            self._forget()
        elif self.is_abandoned or self.has_ended:
            self._effects.append(Settle(self, placement.attempt))
            self._forget()
        else:
            self._effects.append(RecordRequeued(self, why))
            self._hand_back(placement, why)

    def _hand_back(self, placement: Placement, why: RequeueReason) -> None:
        self.state = S.HANDING_BACK
        self._open_call(PendingCall.HAND_BACK)
        self._effects.append(HandBack(self, placement, why))

    def _ask_whose_it_is(self) -> None:
        """Submits a request again that another router may have taken over. The ledger has it as a duplicate then, and
        otherwise returns its placement."""
        if self.state is S.PLACED:
            self._clear_placement()
            self.state = S.RESUBMITTING
        self._resubmit()

    def _resubmit(self) -> None:
        if self._can_be_resubmitted and not self.has_ended:
            self.state = S.RESUBMITTING
            if PendingCall.RESUBMIT_QUEUED not in self.calls:
                self._open_call(PendingCall.RESUBMIT_QUEUED)
                self._effects.append(ScheduleResubmit(self))

    def _stop(self) -> None:
        """Ends a request wherever it is. The executor learns why, for those that read it there again."""
        if self.placement is None:
            self._withdraw()
        else:
            reason = types_pb2.FINISH_REASON_CANCELLED if self.end is None else self.end.reason
            self._cancel_sequence(self.placement, reason)

    def _withdraw(self) -> None:
        """Takes a waiting request out of the queue, as soon as the ledger can be asked to."""
        if self.is_served:
            self.state = S.WITHDRAWING
        if PendingCall.WITHDRAW_QUEUED not in self.calls:
            self._open_call(PendingCall.WITHDRAW_QUEUED)
            self._effects.append(ScheduleWithdraw(self))

    def _cancel_sequence(self, placement: Placement, reason: int = types_pb2.FINISH_REASON_CANCELLED) -> None:
        self._effects.append(CancelSequence(placement.executor_id, self.request_id, placement.attempt, reason))

    def _drop(self, dropped: Dropped) -> None:
        if not self.is_served:
            self._effects.append(Stray(dropped))
            return
        if dropped.reason is DropReason.EXPIRED:
            self._finish(DEADLINE_END)
        else:
            self._fail(refusal(Refused(Reason.NEVER_FITS, ADAPTER if dropped.adapter else "")))
        self._forget()

    def _leave(self, error: RequestError) -> None:
        if not self.is_served:
            return
        self.state = S.LEFT
        self._clear_placement()
        self._fail(error)
        self._effects.append(Forget(self))

    def _finish(self, end: End) -> None:
        if not self.has_ended:
            self.end = end
            self._effects.append(PublishEnd(self))

    def _fail(self, error: RequestError) -> None:
        if not self.has_ended:
            self.error = error
            self._effects.append(PublishEnd(self))

    def _forget(self) -> None:
        if not self.is_served:
            return
        if self.placement is not None:  # it has ended, but not on its executor
            self._stop()
            if self.state is S.REPLAYING:
                self._clear_placement()  # nothing is owed for it
        self.state = S.ENDED
        self._effects.append(Forget(self))

    def _make_current(self, placement: Placement) -> None:
        self.placement = placement
        self.attempt = self.current_attempt = placement.attempt
        self.is_suspect = placement.suspect
        self.executor_id = placement.executor_id

    def _clear_placement(self) -> None:
        self.placement = None
        self.current_attempt = NO_ATTEMPT

    def _open_call(self, call: PendingCall) -> None:
        self.calls += (call,)

    def _close_call(self, call: PendingCall) -> None:
        """Closes a call that was answered."""
        if call not in self.calls:
            raise IllegalTransition(f"{self.request_id}: no {call.name} is under way")
        index = self.calls.index(call)
        self.calls = self.calls[:index] + self.calls[index + 1 :]


def _not_attached(result: AttachResult) -> RequestError:
    if result is AttachResult.MISMATCH:
        return mismatch()
    if result is AttachResult.LINK_LOST:
        return out_of_reach()
    return output_lost("the request has ended, and its executor does not hold its output any more")


_VOID = {
    NotLinked: RequeueReason.REJECTED,
    Unlinked: RequeueReason.LOST,
    Withdrawn: RequeueReason.WITHDRAWN,
}

ON_EVENT: dict[type, Callable[[Lifecycle, Any], None]] = {
    Submit: Lifecycle._on_submit,
    Release: Lifecycle._on_release,
    ReaderEnded: Lifecycle._on_reader_ended,
    DrainWaiting: Lifecycle._on_drain_waiting,
    Leave: Lifecycle._on_leave,
    NoExecutor: Lifecycle._on_no_executor,
    GiveUp: Lifecycle._on_give_up,
    SubmitAnswered: Lifecycle._on_submit_answered,
    ResubmitDue: Lifecycle._on_resubmit_due,
    ResubmitAnswered: Lifecycle._on_resubmit_answered,
    HandBackAnswered: Lifecycle._on_hand_back_answered,
    WithdrawDue: Lifecycle._on_withdraw_due,
    WithdrawAnswered: Lifecycle._on_withdraw_answered,
    CancelFound: Lifecycle._on_cancel_found,
    Forgotten: Lifecycle._on_forgotten,
    Placement: Lifecycle._on_placement,
    Lost: Lifecycle._on_lost,
    CancelRequested: Lifecycle._on_cancel_requested,
    PreemptRequested: Lifecycle._on_preempt_requested,
    Cancelled: Lifecycle._on_cancelled,
    Dropped: Lifecycle._on_dropped,
    TakenOver: Lifecycle._on_taken_over,
    LeaseLapsed: Lifecycle._on_forgotten,
    AttachAnswered: Lifecycle._on_attach_answered,
    AdoptedElsewhere: Lifecycle._on_adopted_elsewhere,
    NotLinked: Lifecycle._on_void,
    Unlinked: Lifecycle._on_void,
    Rejected: Lifecycle._on_rejected,
    Withdrawn: Lifecycle._on_void,
    Detached: Lifecycle._on_detached,
    FirstToken: Lifecycle._on_first_token,
    SequenceEnded: Lifecycle._on_finished,
}

# What an illegal transition must leave as it was.
CHANGING_FIELDS = (
    "state",
    "calls",
    "placement",
    "current_attempt",
    "attempt",
    "executor_id",
    "admitted",
    "end",
    "error",
    "is_suspect",
    "is_abandoned",
    "is_cancelled",
    "has_matched_stop",
    "is_known_uncancelled",
    "consecutive_preemptions",
)
CHANGING = attrgetter(*CHANGING_FIELDS)


class LiveRequests:
    """The requests of one model that one router serves, by id, and the ledger's events about others."""

    def __init__(self, no_executor_grace_s: float) -> None:
        self._no_executor_grace_s = no_executor_grace_s
        self._served: dict[str, Lifecycle] = {}
        self.served: Mapping[str, Lifecycle] = MappingProxyType(self._served)
        # Left in the queue for another router, which has their clients. The ledger's events about them are not for this
        # router.
        self._left: set[str] = set()
        self._draining: RequestError | None = None
        # Those that wait for their turn to be submitted again, and since when the ledger answers that there is no
        # executor.
        self._to_resubmit: dict[Lifecycle, None] = {}
        self._no_executor_since: float | None = None

    def waiting(self) -> list[Lifecycle]:
        """Returns the requests that are in the queue, as far as this router knows."""
        return [life for life in self._served.values() if life.is_in_queue]

    def submit(self, life: Lifecycle) -> Effects:
        """Begins a client's request. Raises `RequestError` if a request of its id is served."""
        if life.request_id in self._served:
            raise duplicate(client_id(life.request_id))
        self._served[life.request_id] = life
        return self.apply(life, Submit())

    def adopt(self, life: Lifecycle, event: AdoptedElsewhere) -> Effects:
        """Continues a request that another router began."""
        before = self._served.get(life.request_id)
        effects = [] if before is None else self.apply(before, TakenOver(life.request_id))
        self._served[life.request_id] = life
        return effects + self.apply(life, event)

    def apply(self, life: Lifecycle, event: Event) -> Effects:
        """Applies an event to a request."""
        effects = life.handle(event)
        for effect in tuple(effects):
            kind = type(effect)
            if kind is Forget:
                if self._served.get(life.request_id) is life:
                    del self._served[life.request_id]
                if type(event) in (DrainWaiting, Leave):
                    self._left.add(life.request_id)
            elif isinstance(effect, ScheduleResubmit):
                if not (effect.is_retry or self._to_resubmit):
                    self._no_executor_since = None
                self._to_resubmit[life] = None
            elif isinstance(effect, Stray):
                effects.remove(effect)
                effects += self.on_ledger_event(effect.outcome)
        return effects

    def release(self, life: Lifecycle) -> Effects:
        """Handles a client that wants no more. Safe to repeat, also after the request's end."""
        return self.apply(life, Release()) if self._served.get(life.request_id) is life else []

    def submit_answered(self, life: Lifecycle, outcome: SubmitAnswer) -> Effects:
        """Applies the ledger's answer to a first submit."""
        effects = self.apply(life, SubmitAnswered(outcome))
        if self._draining is not None and life.is_served:
            effects += self.apply(life, DrainWaiting(self._draining))
        return effects

    def resubmit_due(self, life: Lifecycle) -> Effects:
        """Submits a request again: its turn has come."""
        self._to_resubmit.pop(life, None)
        return self.apply(life, ResubmitDue())

    def resubmit_answered(self, life: Lifecycle, outcome: SubmitAnswer, now: float) -> Effects:
        """Applies the ledger's answer to a later submit."""
        effects = self.apply(life, ResubmitAnswered(outcome))
        if not isinstance(outcome, RequestError | Refused | Duplicate):
            self._no_executor_since = None
        elif isinstance(outcome, Refused) and outcome.reason is Reason.NO_EXECUTOR and life.is_resubmit_queued:
            effects += self._give_up_without_executor(refusal(outcome), now)
        return effects

    def withdraw_due(self, life: Lifecycle) -> Effects:
        """Takes a request out of the queue: its turn has come."""
        return self.apply(life, WithdrawDue(self._served.get(life.request_id, life) is not life))

    def drain_waiting(self, error: RequestError) -> Effects:
        """Drains: waiting requests end now, also those that begin to wait later. A request that can be repeated keeps
        its place in the queue."""
        self._draining = error
        return self._apply_to_all(DrainWaiting(error))

    def leave_all(self, error: RequestError) -> Effects:
        return self._apply_to_all(Leave(error))

    def no_executor(self, error: RequestError) -> Effects:
        """No executor has been linked for the grace period. Requests with a deadline wait until that."""
        return self._apply_to_all(NoExecutor(error))

    def apply_lapse_outside_queue(self) -> Effects:
        """Applies a lapsed lease to the requests that are not in the queue. `WaitingAudit` checks those that are."""
        effects: Effects = []
        for life in tuple(self._served.values()):
            if not life.is_in_queue:
                effects += self.apply(life, LeaseLapsed())
        return effects

    def on_ledger_event(self, event: LedgerEvent) -> Effects:
        """Applies an event of the ledger. Placements of requests that are not served are settled."""
        if isinstance(event, LeaseLapsed):
            return self._apply_to_all(event)
        life = self._served.get(event.request_id)
        if life is not None:
            return self.apply(life, event)
        if event.request_id not in self._left:
            match event:
                case Placement(request_id, attempt):
                    return [SettleUnused(Ending(request_id, attempt, 0, 0, cancelled=True))]
                case Lost(request_id, attempt):
                    return [SettleUnused(Ending(request_id, attempt, cancelled=True))]
        return []

    def _apply_to_all(self, event: Event) -> Effects:
        effects: Effects = []
        for life in tuple(self._served.values()):
            effects += self.apply(life, event)
        return effects

    def _give_up_without_executor(self, error: RequestError, now: float) -> Effects:
        """When the ledger has known no executor for the grace period: ends the requests still to be submitted again,
        except those that have a deadline to wait for."""
        if self._no_executor_since is None:
            self._no_executor_since = now
        effects: Effects = []
        if now - self._no_executor_since > self._no_executor_grace_s:
            for life in tuple(self._to_resubmit):
                if life.deadline is None or now > life.deadline:
                    del self._to_resubmit[life]
                    effects += self.apply(life, GiveUp(error))
        return effects
