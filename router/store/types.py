"""Arguments, results and events of the store, and snapshots of a pool. Plain data.

A *placement* is one attempt of a request on one executor; `attempt` fences it, `generation` names the start of the
executor. Results answer a call, events come by themselves; both use the same types.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypedDict

from common.errors import Reason


@dataclass(frozen=True, slots=True)
class ExecutorStanding:
    """An executor's state in the ledger. `live`: it reported within the last 2 s."""

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
class PoolLoad:
    """The load of a pool: waiting requests, executors, those with an open seat, and live routers."""

    num_waiting: int
    num_executors: int
    num_with_room: int
    num_routers: int = 1


@dataclass(frozen=True, slots=True)
class ClassQueue:
    """The waiting requests of one class."""

    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TenantQueue:
    """A tenant's waiting requests of a class. `wait_ms` is how long the head of its queue has waited."""

    priority_class: int
    tenant: str
    num_requests: int
    num_tokens: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class EstimateAccuracy:
    """The quality of wait estimates: the mean relative error, and the correction factor of raw estimates."""

    num_estimates: int
    mean_error: float
    correction: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one moment: executors by id, waiting requests by class (first class first), and, if asked for, by
    class and tenant, in this order."""

    executors: tuple[ExecutorStanding, ...]
    queues: tuple[ClassQueue, ...]
    estimates: EstimateAccuracy = EstimateAccuracy(0, 0.0, 1.0)
    tenant_queues: tuple[TenantQueue, ...] = ()

    @property
    def num_waiting(self) -> tuple[int, ...]:
        """Waiting requests per class."""
        return tuple(queue.num_requests for queue in self.queues)


class LedgerState(Enum):
    """The state of a request in the ledger."""

    WAITING = "WAITING"
    PLACED = "PLACED"
    LOST = "LOST"
    """Taken back from its executor; its owner hands it back or settles it."""
    ENDED = "ENDED"


DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """A tenant's limits in a pool; None is no limit. Rates count tokens of prompt and output.

    Of two tenants with waiting requests, the one with twice the `weight` is served twice the tokens. A burst may come
    at once after a pause; one request of any size always fits a full burst.
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
    """The demand of a request on the pool. `priority_class` 1 goes first, 3 last.

    `blocks` hold prompt and `max_tokens`; an executor that reserves a quantile reserves fewer, of `block_size` tokens
    each. With `reservation_tokens` a placement reserves no more output than this beyond the output so far, on executors
    that end it there; `placement_blocks` are those of the next placement then. `digest` is the hash of the whole
    request: a submit with the same id and digest is a repeat, from any router; empty: only its owner can repeat it.
    `is_served`: the submit comes not from a client but from the router that already serves the request; it takes over
    nothing from another living router and starts no cancelled request again: that is a `Duplicate`. `deadline_ms`
    counts from the submit, for the first token; after it the request is dropped, not placed. `last_attempt` and
    `output_tokens` are the last that its owner knows, for a pool that has lost the request. `num_bytes` is the router
    memory that its prompt takes while it waits. `prefix_hashes` name prefixes of the prompt of increasing length, as
    `router.request.ids` chooses them. `num_choices` are the choices that this submit admits: the first choice of a
    request admits all of them, and the others, with 0, are within all bounds and rates then. `adapter` is the content
    hash of its adapter; empty: the base model.
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
    reservation_tokens: int | None = None
    placement_blocks: int | None = None
    num_bytes: int = 0
    prefix_hashes: tuple[str, ...] = ()
    digest: str = ""
    is_served: bool = False
    num_choices: int = 1
    adapter: str = ""

    def blocks_after(self, num_output_tokens: int) -> int:
        """Returns the blocks of a placement that begins with so much output."""
        if self.reservation_tokens is None:
            return self.blocks
        num_tokens = self.prompt_tokens + min(self.max_tokens, num_output_tokens + self.reservation_tokens)
        return min(self.blocks, -(-num_tokens // self.block_size))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One placement of a request, by number."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a placement and its usage: prompt tokens that were computed, not cached, and output tokens.

    Rates and fair shares are settled to that; None if unknown. `by_itself`: it produced its end token or all of its
    `max_tokens`, so that its length is a sample for estimates. `cancelled`: by its client, or because the client left;
    a repeated submit starts it again.
    """

    request_id: str
    attempt: int
    computed_tokens: int | None = None
    output_tokens: int | None = None
    by_itself: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """A sequence that an executor reports to hold. `adapter` is the hash of its adapter; empty: none, or not known."""

    request_id: str
    attempt: int
    blocks: int
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that an executor can serve, by its content hash. `is_resident`: it is in a slot."""

    adapter: str
    is_resident: bool


@dataclass(frozen=True, slots=True)
class ExecutorReport:
    """An executor's report, as far as the ledger is concerned. `accepting` is false while it drains.

    `reserve_quantile` below 1 reserves that quantile of the output length instead of `max_tokens`.
    `ends_at_reservation`: a placement that has used its reservation ends as preempted, so it may reserve less than
    `max_tokens`.
    `seats` are those of `budget_sequences` that can compute at once; None: all of them. Of the `adapters`,
    `num_adapter_slots` can be resident at once.
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
    ends_at_reservation: bool = False
    age_ms: int = 0
    """How long ago it came to the router that relays it."""
    num_adapter_slots: int = 0
    adapters: tuple[ServedAdapter, ...] = ()


# Results and events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """The request has blocks and a sequence reserved on the executor; its owner submits it there.

    `blocks` are those reserved. `suspect`: an executor was lost while it ran this request, before the first token; the
    owner calls `absolve` at the first token. `adapter` is the hash of the adapter that is pinned there: that of the
    request's admission, whichever router repeats it. None of the three takes part in comparing placements.
    """

    request_id: str
    attempt: int
    executor_id: str
    generation: int
    blocks: int = field(default=0, compare=False)
    suspect: bool = field(default=False, compare=False)
    adapter: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits, with about so many ahead of it: exact within its tenant, estimated for other tenants.

    `estimated_wait_ms` is None if nothing was measured yet.
    """

    position: int
    estimated_wait_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was refused: QUEUE_FULL, RATE_LIMITED, DEADLINE_UNMEETABLE, NEVER_FITS or NO_EXECUTOR.

    `limit` names the limit that is reached (`max_queue_tokens`, `tenant max_queue_requests`, …); a retry makes sense
    after `retry_after_ms`.
    """

    reason: Reason
    limit: str = ""
    retry_after_ms: int | None = None


class WaitReason(Enum):
    """What a waiting request waits for."""

    BLOCKS = "BLOCKS"
    SEAT = "SEAT"
    FAIRNESS = "FAIRNESS"
    ORDER = "ORDER"
    CLASS = "CLASS"
    TENANT_LIMIT = "TENANT_LIMIT"
    HELD_LINE = "HELD_LINE"
    EXECUTOR = "EXECUTOR"
    ADAPTER = "ADAPTER"


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """The executor that last got a waiting request's longest known prefix.

    The request stays with it while the prompts in front of it there take at most `tolerated_ms`, which is no more than
    the prefix saves, less a price if this executor is fuller than the roomiest one; now they take `prefill_ms`.
    """

    executor_id: str
    prefill_ms: int
    tolerated_ms: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The state of a request. Fields about waiting are set while it is WAITING, `executor_id` while it is PLACED.

    `available_blocks` is the most that any executor has available now.
    """

    state: LedgerState
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
    prefix_holder: PrefixHolder | None = None


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Another request has the id, or had it recently."""

    state: LedgerState


@dataclass(frozen=True, slots=True)
class Adopted:
    """The request has this placement, `ended` or not, and the caller owns it from now on.

    The caller attaches to it. If the executor does not hold it, it was not submitted yet: submit the same attempt.
    """

    placement: Placement
    ended: bool


class DropReason(Enum):
    """Why a request left the queue without a placement."""

    EXPIRED = "expired"
    """Its deadline passed."""
    NEVER_FITS = "never_fits"
    """No remaining executor that serves its adapter is large enough."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The request left the queue for good. `adapter` is the hash of its adapter."""

    request_id: str
    reason: DropReason
    adapter: str = field(default="", compare=False)


class HandBackDetails(TypedDict, total=False):
    """Why a placement is handed back, and what it did. Without a reason its executor was lost."""

    rejected: bool
    """The executor did not accept it: the attempt does not count, and the executor gets nothing new before its next
    report."""
    preempted: bool
    """The request gave up its seat: the attempt does not count, and the executor keeps getting work."""
    stood_still: bool
    """The executor reports a stalled engine: the attempt counts although the executor lives."""
    output_tokens: int
    """Tokens so far, 0 if left out. With any, the request waits without its first-token deadline, which was met."""
    progressed: bool
    """This placement produced tokens, so the request did not cause the loss: the count of losses starts again."""
    placement_blocks: int | None
    """Blocks of the next placement; None: as many as before."""


class HandBackRefusal(Enum):
    """Why a request that was handed back is not in the queue again."""

    EXHAUSTED = "EXHAUSTED"
    """Its attempts are used up; the ledger has removed it."""
    UNDECIDED = "UNDECIDED"
    """Its attempts are used up if the lost executors died, which is not known yet: hand it back again soon."""
    STALE = "STALE"
    """It ended, has a newer attempt, or another router has adopted it; nothing was changed."""
    UNKNOWN = "UNKNOWN"
    """The ledger has lost it: submit it again with its `last_attempt`."""


@dataclass(frozen=True, slots=True)
class CancelOutcome:
    """The result of a cancel. `state` None: the id is unknown.

    WAITING and LOST requests are removed by it. For a PLACED one `owner_notified` is true if its owner, another router,
    was asked to cancel it; otherwise the caller cancels `placement` on the executor.
    """

    state: LedgerState | None
    placement: Placement | None = None
    owner_id: str | None = None
    owner_notified: bool = False


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """The result of a report: whether it was new, and what the executor holds that the caller must cancel there."""

    taken: bool
    superseded: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """The placement is lost: the executor is dead, restarted, or does not hold it. Hand it back or settle it."""

    request_id: str
    attempt: int
    executor_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Another router was asked to cancel this placement."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class PreemptRequested:
    """The placement is preempted by a higher class: end it on its executor and hand it back as preempted."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Another router cancelled the request, which had no executor.

    `at_ms` is when, by Redis' clock; None from a router of an earlier version.
    """

    request_id: str
    at_ms: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another router has adopted the request: its stream here ends, and this router no longer owns it.

    `at_ms` is when, by Redis' clock.
    """

    request_id: str
    at_ms: int = field(default=0, compare=False)


ANY_ATTEMPT = 1 << 52
"""More than any number of an attempt."""


@dataclass(frozen=True, slots=True)
class LeaseLapsed:
    """The pool may have lost this router's waiting requests: ask it which, and submit those again.

    Also sent after a lost reply, which may have held this event or a placement: then it is not certain, and a submit
    returns that placement.
    """

    is_certain: bool = field(default=True, compare=False)


class PoolListener(Protocol):
    """Receives what a router's periodic calls tell of the pool besides events of its requests."""

    def on_routers(self, peers: frozenset[str]) -> None:
        """The other live routers have changed."""

    def on_report_overdue(self, executor_id: str, silent_s: float) -> None:
        """The ledger has had no report of the executor for so long."""


StoreEvent = Placement | Lost | CancelRequested | PreemptRequested | Cancelled | Dropped | TakenOver | LeaseLapsed


@dataclass(frozen=True, slots=True)
class StoreCall:
    """A call of a script that is over; `ended` is on `time.monotonic`'s clock, `command` what it was sent as."""

    script: str
    ended: float
    seconds: float
    succeeded: bool
    command: str = "EVALSHA"
