"""What goes into the store and what comes out: requests, results and events. Plain data.

A *placement* is one attempt of a request on one executor; `attempt` fences it, `generation` says which start of the
executor is meant. Results answer a call, events come by themselves; both use the same types.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from common.errors import Reason


class RequestState(Enum):
    """Where the ledger has a request."""

    WAITING = "WAITING"
    PLACED = "PLACED"
    LOST = "LOST"
    """Taken back from its executor; its owner hands it back or settles it."""
    ENDED = "ENDED"


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of the pool. `priority_class` 1 goes first, 3 last.

    `deadline_ms` counts from the submit; past it the request is dropped, not placed. `last_attempt` is the last one
    its owner knows, where the pool had forgotten the request.
    """

    request_id: str
    priority_class: int
    blocks: int
    sequences: int = 1
    deadline_ms: int | None = None
    last_attempt: int = 0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One placement of a request, by number."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """What an executor reports to hold."""

    request_id: str
    attempt: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ExecutorReport:
    """An executor's report, as far as the ledger is concerned. `accepting` is false while it drains."""

    executor_id: str
    generation: int
    seq: int
    budget_blocks: int
    total_blocks: int
    budget_sequences: int
    accepting: bool
    held: tuple[HeldSequence, ...] = ()


# Results and events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """The request has blocks and a sequence reserved on the executor; its owner submits it there."""

    request_id: str
    attempt: int
    executor_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits, with so many ahead of it."""

    position: int


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not taken: QUEUE_FULL, NEVER_FITS or NO_EXECUTOR."""

    reason: Reason


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Another request has the id, or had it within the last minute."""

    state: RequestState


class DropReason(Enum):
    """Why a request left the line without a seat."""

    EXPIRED = "expired"
    """Its deadline passed."""
    NEVER_FITS = "never_fits"
    """No executor that is left is large enough."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The request left the line for good."""

    request_id: str
    reason: DropReason


class HandBackRefusal(Enum):
    """Why a request handed back does not wait again."""

    EXHAUSTED = "EXHAUSTED"
    """It has had its attempts and is gone from the ledger."""
    STALE = "STALE"
    """It ended, or has a newer attempt; nothing was changed."""
    UNKNOWN = "UNKNOWN"
    """The ledger has lost it: submit it again with its `last_attempt`."""


@dataclass(frozen=True, slots=True)
class CancelOutcome:
    """What a cancel found. `state` None: the id is unknown.

    WAITING and LOST requests are gone with it. For a PLACED one `owner_told` says whether its owner, another router,
    was asked to cancel it; where not, the caller cancels `placement` on the executor.
    """

    state: RequestState | None
    placement: Placement | None = None
    owner_id: str | None = None
    owner_told: bool = False


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """What a report brought: whether it was news, and what the executor holds that the caller has it cancel."""

    taken: bool
    superseded: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """The placement is void: the executor is gone, restarted, or does not hold it. Hand it back or settle it."""

    request_id: str
    attempt: int
    executor_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """Another router was asked to cancel this placement."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Another router cancelled the request, which had no executor."""

    request_id: str


@dataclass(frozen=True, slots=True)
class LeaseLapsed:
    """The pool had forgotten this router and what waited in its name: submit that again. What still waits stays."""


StoreEvent = Placement | Lost | CancelAsked | Cancelled | Dropped | LeaseLapsed


@dataclass(frozen=True, slots=True)
class ExecutorStanding:
    """How the ledger has an executor. `live`: it reported within the last 2 s."""

    executor_id: str
    generation: int
    budget_blocks: int
    total_blocks: int
    budget_sequences: int
    reserved_blocks: int
    reserved_sequences: int
    accepting: bool
    live: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one moment: executors by id, and how many wait per class, first class first."""

    executors: tuple[ExecutorStanding, ...]
    num_waiting: tuple[int, ...]
