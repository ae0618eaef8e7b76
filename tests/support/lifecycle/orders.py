"""All orders of events of one request: every open call is answered in each possible way, at any time.

More orders than can happen, because neither the ledger nor the executor has a memory here. Requests have at most two
attempts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.types import (
    Adopted,
    Cancelled,
    CancelOutcome,
    CancelRequested,
    Dropped,
    DropReason,
    Duplicate,
    HandBackOutcome,
    HandBackRefusal,
    LeaseLapsed,
    LedgerState,
    Lost,
    Placement,
    PreemptRequested,
    Queued,
    Refused,
    TakenOver,
)
from inflight.router.lifecycle.events import (
    DEADLINE_END,
    AdoptedElsewhere,
    AttachAnswered,
    AttachResult,
    CancelFound,
    Detached,
    DrainWaiting,
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
from inflight.router.lifecycle.lifecycle import CHANGING, CHANGING_FIELDS, Lifecycle
from inflight.router.lifecycle.transitions import UNSERVED
from inflight.v1 import types_pb2

Transition = tuple[LifecycleState, type, LifecycleState]

MAX_ATTEMPT = 2
ERROR = RequestError(Reason.DRAINING, "")
AWAY = RequestError(Reason.STORE_UNAVAILABLE, "")
DROPPED = Dropped("r", DropReason.EXPIRED)
PLACEMENTS = tuple(Placement("r", attempt, "e", 1) for attempt in range(1, MAX_ATTEMPT + 1))
ADOPTED = tuple(Adopted(placement, ended) for placement in PLACEMENTS for ended in (True, False))
SUBMITTED: tuple[SubmitAnswer, ...] = (
    *PLACEMENTS,
    *ADOPTED,
    Queued(0),
    DROPPED,
    AWAY,
    Refused(Reason.QUEUE_FULL),
    Refused(Reason.NO_EXECUTOR),
    Duplicate(LedgerState.PLACED),
)
HANDED_BACK: tuple[HandBackOutcome, ...] = (
    *PLACEMENTS,
    Queued(0),
    DROPPED,
    HandBackRefusal.EXHAUSTED,
    HandBackRefusal.STALLED,
    HandBackRefusal.STALE,
    HandBackRefusal.UNKNOWN,
)
REASONS = (
    types_pb2.FINISH_REASON_LENGTH,
    types_pb2.FINISH_REASON_CANCELLED,
    types_pb2.FINISH_REASON_PREEMPTED,
)


@dataclass(frozen=True, slots=True)
class Output:
    """What a stream is to the machine."""

    has_progressed: bool = False
    is_complete: bool = False
    has_been_accepted: bool = False
    has_used_reservation: bool = False


def possible_events(life: Lifecycle) -> Iterator[Event]:
    """What can happen to a request next."""
    yield ReaderEnded(DEADLINE_END)
    yield from _answers(life)
    if life.state is LifecycleState.NEW:
        yield Submit()
        yield from (AdoptedElsewhere(adopted) for adopted in ADOPTED)
    if life.state not in UNSERVED:
        yield from (Release(), DrainWaiting(ERROR), Leave(ERROR), NoExecutor(ERROR), LeaseLapsed())
        yield from (CancelFound(state) for state in LedgerState)
        yield from (CancelRequested("r", 1), Cancelled("r"), DROPPED, TakenOver("r"), TakenOver("r", is_certain=False))
        yield from PLACEMENTS
        yield from (Lost("r", placement.attempt, "e", 1) for placement in PLACEMENTS)
    if life.is_in_queue:
        yield Forgotten()
    if life.current_attempt:
        yield from _fenced(life.current_attempt)


def _answers(life: Lifecycle) -> Iterator[Event]:
    for call in set(life.calls):
        match call:
            case PendingCall.SUBMIT:
                yield from (SubmitAnswered(outcome) for outcome in SUBMITTED)
            case PendingCall.RESUBMIT_QUEUED:
                yield from (ResubmitDue(), GiveUp(ERROR))
            case PendingCall.RESUBMIT:
                yield from (ResubmitAnswered(outcome) for outcome in SUBMITTED)
            case PendingCall.ATTACH:
                for is_first in {False, PendingCall.SUBMIT in life.calls}:
                    for adopted in ADOPTED:
                        yield from (AttachAnswered(adopted, result, is_first) for result in AttachResult)
            case PendingCall.HAND_BACK:
                for outcome in HANDED_BACK:
                    yield HandBackAnswered(PLACEMENTS[0], RequeueReason.LOST, outcome, 2)
            case PendingCall.WITHDRAW_QUEUED:
                yield from (WithdrawDue(), WithdrawDue(is_replaced=True))
            case PendingCall.WITHDRAW:
                found = CancelOutcome(LedgerState.PLACED, PLACEMENTS[0])
                yield from (WithdrawAnswered(outcome) for outcome in (None, CancelOutcome(None), found))


def _fenced(attempt: int) -> Iterator[Event]:
    yield from (NotLinked(attempt), Unlinked(attempt), Withdrawn(attempt), Detached(attempt), FirstToken(attempt))
    yield from (
        Rejected(attempt),
        Rejected(attempt, RequestError(Reason.INTERNAL, "no executor would take it")),
        PreemptRequested("r", attempt),
    )
    yield from (SequenceEnded(attempt, reason) for reason in REASONS)
    yield SequenceEnded(attempt, types_pb2.FINISH_REASON_PREEMPTED, error="stalled")
    yield SequenceEnded(attempt, types_pb2.FINISH_REASON_ERROR, error="failed")


def copied(life: Lifecycle) -> Lifecycle:
    """Another request that is where this one is."""
    copy = Lifecycle(life.request_id, life.output, life.deadline, is_repeatable=life.is_repeatable)
    for name, value in zip(CHANGING_FIELDS, CHANGING(life), strict=True):
        setattr(copy, name, value)
    return copy


def explore(first: Lifecycle, max_calls: int) -> tuple[set[Transition], list[Lifecycle]]:
    """Every transition that can follow, and a request in each situation that it can come to. At most so many calls are
    under way at once."""
    seen = {_situation(first): first}
    transitions: set[Transition] = set()
    pending = [first]
    while pending:
        life = pending.pop()
        for event in possible_events(life):
            after = copied(life)
            after.handle(event)
            transitions.add((life.state, type(event), after.state))
            situation = _situation(after)
            if situation not in seen and len(after.calls) <= max_calls:
                seen[situation] = after
                pending.append(after)
    return transitions, list(seen.values())


def _situation(life: Lifecycle) -> tuple[object, ...]:
    return (
        life.state,
        tuple(sorted(life.calls, key=lambda call: call.value)),
        life.current_attempt,
        life.attempt,
        life.admitted is not None,
        life.end is not None,
        life.error is not None,
        life.is_abandoned,
        life.is_cancelled,
        life.is_known_uncancelled,
        min(life.consecutive_preemptions, 1),
    )
