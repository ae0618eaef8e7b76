"""The states of a request and the events that change them. Plain data.

Events that the ledger sends unasked are defined in `inflight.router.ledger.types`. Answers to calls, events of
executors, clients and timers are defined here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from inflight.common.errors import RequestError
from inflight.router.ledger.types import (
    Adopted,
    CancelOutcome,
    Dropped,
    HandBackOutcome,
    LedgerEvent,
    LedgerState,
    Placement,
    PreemptRequested,
    Queued,
    SubmitOutcome,
)
from inflight.v1 import types_pb2

SubmitAnswer = SubmitOutcome | RequestError
Admitted = Placement | Queued | Dropped | Adopted


class LifecycleState(Enum):
    """The state of a request; `inflight.router.lifecycle.lifecycle` has the table."""

    NEW = auto()
    SUBMITTING = auto()
    WAITING = auto()
    RESUBMITTING = auto()
    ATTACHING = auto()
    PLACED = auto()
    REPLAYING = auto()
    HANDING_BACK = auto()
    WITHDRAWING = auto()
    ENDED = auto()
    LEFT = auto()


class PendingCall(Enum):
    """A call that is open for a request."""

    SUBMIT = auto()
    """Its first submit, with the attachment that follows from it."""
    RESUBMIT_QUEUED = auto()
    """Waits for its turn to be submitted again."""
    RESUBMIT = auto()
    ATTACH = auto()
    HAND_BACK = auto()
    WITHDRAW_QUEUED = auto()
    """Waits for its turn to be taken out of the queue."""
    WITHDRAW = auto()


class RequeueReason(Enum):
    """Why a placement failed."""

    LOST = auto()
    """Its executor is gone or has forgotten it."""
    REJECTED = auto()
    """Its executor has not taken it."""
    STALLED = auto()
    """The engine made no step."""
    PREEMPTED = auto()
    """It gave way to another sequence."""
    EXTENDED = auto()
    """It has used its reservation, and another placement reserves more."""
    HANDED_BACK = auto()
    """Its executor drains, or preempted it again and again: nothing new for it before its next report."""
    WITHDRAWN = auto()
    """It was cancelled although neither its client nor another caller asked for that."""


@dataclass(frozen=True, slots=True)
class End:
    """The end that the executor reported (a value of `FinishReason` of the protocol). `constraint_unfinished` None:
    the router ended it and does not know whether the output satisfies the constraint."""

    reason: int
    stop_token_id: int | None
    constraint_unfinished: bool | None = None


CANCELLED_END = End(types_pb2.FINISH_REASON_CANCELLED, None)
LENGTH_END = End(types_pb2.FINISH_REASON_LENGTH, None)
DEADLINE_END = End(types_pb2.FINISH_REASON_DEADLINE, None)


# Events of the client and of this router ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """A client submits a request."""


@dataclass(frozen=True, slots=True)
class Release:
    """The client is gone, or has all that it wanted."""


@dataclass(frozen=True, slots=True)
class ReaderEnded:
    """The reader of the request ends it: a deadline has passed, or its text reached a stop string."""

    end: End


@dataclass(frozen=True, slots=True)
class DrainWaiting:
    """This router drains: waiting requests end, or stay in the queue for a repeat at another router."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class Leave:
    """This router stops: the request is left to the router where its client resumes it."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class NoExecutor:
    """There has been no executor for the grace period."""

    error: RequestError


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The ledger has had no executor for the grace period, and the request still has to be submitted again."""

    error: RequestError


# Answers of the ledger, and turns of calls that wait for one ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SubmitAnswered:
    """The answer to the first submit."""

    outcome: SubmitAnswer


@dataclass(frozen=True, slots=True)
class ResubmitDue:
    """The request's turn to be submitted again has come."""


@dataclass(frozen=True, slots=True)
class ResubmitAnswered:
    """The answer to a later submit."""

    outcome: SubmitAnswer


@dataclass(frozen=True, slots=True)
class HandBackAnswered:
    """The answer to the hand-back of this placement. `max_attempts` is the limit of the request's attempts."""

    placement: Placement
    why: RequeueReason
    outcome: HandBackOutcome
    max_attempts: int


@dataclass(frozen=True, slots=True)
class WithdrawDue:
    """The request's turn to be taken out of the queue has come. `is_replaced`: a repeat is served under its id by
    now."""

    is_replaced: bool = False


@dataclass(frozen=True, slots=True)
class WithdrawAnswered:
    """The answer to the withdrawal; None: the ledger does not answer."""

    outcome: CancelOutcome | None


@dataclass(frozen=True, slots=True)
class CancelFound:
    """A caller has cancelled the request, which was in this state in the ledger."""

    was: LedgerState


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The ledger does not have the request, which waits here, in its queue
    (`inflight.router.dispatch.waiting_audit`)."""


# Events of links ------------------------------------------------------------------------------------------------------


class AttachResult(Enum):
    """An executor's answer to an attach."""

    ATTACHED = auto()
    MISMATCH = auto()
    """It holds another request under this id."""
    NOT_HELD = auto()
    LINK_LOST = auto()
    """It did not answer, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class AttachAnswered:
    """The executor's answer, and what it knows of the sequence. `is_first`: the first submit has led to it."""

    adopted: Adopted
    result: AttachResult
    is_first: bool = False
    has_started: bool = False
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AdoptedElsewhere:
    """The executor has returned what it was told of a request that another router began."""

    adopted: Adopted
    has_started: bool = False
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NotLinked:
    """The executor of a placement is not linked."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Unlinked:
    """The link to the executor broke."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The executor did not take the placement. `refusal`: no other executor would either."""

    attempt: int
    refusal: RequestError | None = None


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The placement was given up by its link."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Detached:
    """Another router reads the sequence."""

    attempt: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A suspect has brought a token."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The sequence ended and its blocks are free. `is_draining`: its executor drains. With an `error` PREEMPTED says
    that the engine made no step."""

    attempt: int
    reason: int
    stop_token_id: int | None = None
    error: str = ""
    is_draining: bool = False
    constraint_unfinished: bool = False

    @property
    def is_stall(self) -> bool:
        """Whether the executor ended it because its engine made no step."""
        return self.reason == types_pb2.FINISH_REASON_PREEMPTED and bool(self.error)


LinkEvent = NotLinked | Unlinked | Rejected | Withdrawn | Detached | FirstToken | SequenceEnded
# Fenced by their attempt.
FENCED = frozenset({NotLinked, Unlinked, Rejected, Withdrawn, Detached, FirstToken, SequenceEnded, PreemptRequested})

Event = (
    Submit
    | Release
    | ReaderEnded
    | DrainWaiting
    | Leave
    | NoExecutor
    | GiveUp
    | SubmitAnswered
    | ResubmitDue
    | ResubmitAnswered
    | HandBackAnswered
    | WithdrawDue
    | WithdrawAnswered
    | CancelFound
    | Forgotten
    | AttachAnswered
    | AdoptedElsewhere
    | LinkEvent
    | LedgerEvent
)
