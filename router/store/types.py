"""What goes into the store and what comes out: requests, results and events. Plain data.

A *placement* is one attempt of a request on one executor; `attempt` fences it, `generation` says which start of the
executor is meant. Results answer a call, events come by themselves; both use the same types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from common.errors import Reason


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
class ClassQueue:
    """What waits in one class."""

    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TenantLine:
    """What a tenant has waiting in a class. `wait_ms` is how long the first in line has waited."""

    priority_class: int
    tenant: str
    num_requests: int
    num_tokens: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class EstimateQuality:
    """How well waits were foretold: the mean relative error, and what raw estimates are multiplied by."""

    num_estimates: int
    mean_error: float
    correction: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one moment: executors by id, and what waits per class, first class first; and, as far as asked for,
    per class and tenant, in this order."""

    executors: tuple[ExecutorStanding, ...]
    queues: tuple[ClassQueue, ...]
    estimates: EstimateQuality = EstimateQuality(0, 0.0, 1.0)
    lines: tuple[TenantLine, ...] = ()

    @property
    def num_waiting(self) -> tuple[int, ...]:
        """Requests that wait, per class."""
        return tuple(queue.num_requests for queue in self.queues)


class RequestState(Enum):
    """Where the ledger has a request."""

    WAITING = "WAITING"
    PLACED = "PLACED"
    LOST = "LOST"
    """Taken back from its executor; its owner hands it back or settles it."""
    ENDED = "ENDED"


DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may take of a pool; None is no limit. Rates count tokens of prompt and output.

    Of two tenants that both have work waiting, the one with twice the `weight` is served twice the tokens. A burst is
    what may come at once after a pause, and at least one request of any size may.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_queue_requests: int | None = None
    max_queue_tokens: int | None = None
    max_queue_bytes: int | None = None
    requests_per_s: float | None = None
    request_burst: int = 1
    tokens_per_s: float | None = None
    token_burst: int = 1

    @property
    def has_rates(self) -> bool:
        """Whether the ledger keeps rates of the tenant."""
        return self.requests_per_s is not None or self.tokens_per_s is not None


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of the pool. `priority_class` 1 goes first, 3 last.

    `blocks` hold prompt and `max_tokens` to the end; an executor that reserves what is likely reserves fewer, of
    `block_size` tokens each. `digest` stands for all that was asked: a submit with the same id and digest is a repeat,
    whoever sends it; empty: only its owner can repeat it. `is_served`: not a client asks, but the router that serves it
    already submits it again; that takes nothing over from another router that lives, nor starts anew what was
    cancelled: it is a `Duplicate`. `deadline_ms` counts from the submit, for the first token;
    past it the request is dropped, not placed. `last_attempt` and `output_tokens` are the last that its owner knows,
    where the pool had forgotten the request. `num_bytes` is what its prompt takes of its router's memory while it
    waits. `prefix_hashes` name ever longer beginnings of the prompt, as `router.request.prefix_hashes` chooses them.
    """

    request_id: str
    priority_class: int
    blocks: int
    sequences: int = 1
    deadline_ms: int | None = None
    last_attempt: int = 0
    tenant: str = DEFAULT_TENANT
    limits: TenantLimits = NO_LIMITS
    prompt_tokens: int = 0
    max_tokens: int = 0
    output_tokens: int = 0
    block_size: int = 16
    num_bytes: int = 0
    prefix_hashes: tuple[str, ...] = ()
    digest: str = ""
    is_served: bool = False


@dataclass(frozen=True, slots=True)
class Attempt:
    """One placement of a request, by number."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a placement and what was used: prompt tokens that were computed, not cached, and output tokens.

    Rates and fair shares are settled to that; None where nobody knows. `by_itself`: it produced its end or all of its
    `max_tokens`, so that its length says something about others. `cancelled`: by its client or for want of one, so
    that a repeated submit starts it anew.
    """

    request_id: str
    attempt: int
    computed_tokens: int | None = None
    output_tokens: int | None = None
    by_itself: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """What an executor reports to hold."""

    request_id: str
    attempt: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ExecutorReport:
    """An executor's report, as far as the ledger is concerned. `accepting` is false while it drains.

    `reserve_quantile` below 1 reserves, instead of all that a request can need, what its output stays within so often.
    `seats` are those of `budget_sequences` that can compute at once; None: all of them.
    """

    executor_id: str
    generation: int
    seq: int
    budget_blocks: int
    total_blocks: int
    budget_sequences: int
    accepting: bool
    held: tuple[HeldSequence, ...] = ()
    reserve_quantile: float = 1.0
    step_ms: float = 0.0
    prefill_tokens_per_s: float = 0.0
    seats: int | None = None


# Results and events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """The request has blocks and a sequence reserved on the executor; its owner submits it there.

    `blocks` are those reserved. `suspect`: an executor was lost under the request before it brought a token, so it is
    to be absolved with its first one. Neither is part of what makes a placement the same.
    """

    request_id: str
    attempt: int
    executor_id: str
    generation: int
    blocks: int = field(default=0, compare=False)
    suspect: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits, with about so many ahead of it: exact within a tenant, taking turns with the others.

    `estimated_wait_ms` is None where nothing was measured yet.
    """

    position: int
    estimated_wait_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not taken: QUEUE_FULL, RATE_LIMITED, DEADLINE_UNMEETABLE, NEVER_FITS or NO_EXECUTOR.

    `limit` names the limit that is reached (`max_queue_tokens`, `tenant max_queue_requests`, …); a retry makes sense
    after `retry_after_ms`.
    """

    reason: Reason
    limit: str = ""
    retry_after_ms: int | None = None


class WaitReason(Enum):
    """What keeps a request from its seat."""

    BLOCKS = "BLOCKS"
    SEAT = "SEAT"
    FAIRNESS = "FAIRNESS"
    ORDER = "ORDER"
    CLASS = "CLASS"
    TENANT_LIMIT = "TENANT_LIMIT"
    HELD_LINE = "HELD_LINE"
    EXECUTOR = "EXECUTOR"


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a request stands. What concerns waiting is there while it is WAITING, `executor_id` while it is PLACED.

    `available_blocks` is the most that any executor could promise now.
    """

    state: RequestState
    attempt: int = 0
    priority_class: int = 0
    tenant: str = ""
    executor_id: str | None = None
    position: int = 0
    estimated_wait_ms: int | None = None
    wait_reason: WaitReason | None = None
    needed_blocks: int = 0
    available_blocks: int = 0
    times_passed: int = 0


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Another request has the id, or had it lately."""

    state: RequestState


@dataclass(frozen=True, slots=True)
class Adopted:
    """The request has this placement, `ended` or not, and is the caller's from now on.

    Attach to it. Where the executor does not hold it, nobody has told it yet: submit the same attempt there.
    """

    placement: Placement
    ended: bool


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
    UNDECIDED = "UNDECIDED"
    """It has had them if the executors that were lost have died, which is not known yet: hand it back again soon."""
    STALE = "STALE"
    """It ended, has a newer attempt, or another router has adopted it; nothing was changed."""
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
class PreemptAsked:
    """The placement is to give way to a higher class: end it on its executor and hand it back as preempted."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Another router cancelled the request, which had no executor.

    `at_ms` is when, by Redis' clock; None where a router of an earlier version tells it.
    """

    request_id: str
    at_ms: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another router has adopted the request: its stream here ends, and nothing of it is this router's any more.

    `at_ms` is when, by Redis' clock.
    """

    request_id: str
    at_ms: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class LeaseLapsed:
    """The pool may have forgotten this router and what waited in its name: submit that again. What still waits stays.

    It is told so, too, after a reply got lost: with it may have gone that word, or a placement, which a submit returns.
    """


StoreEvent = Placement | Lost | CancelAsked | PreemptAsked | Cancelled | Dropped | TakenOver | LeaseLapsed


@dataclass(frozen=True, slots=True)
class StoreCall:
    """A call of a script that is over; `ended` is on `time.monotonic`'s clock."""

    script: str
    ended: float
    seconds: float
    succeeded: bool
