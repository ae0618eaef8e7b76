"""Arguments, results and events of the ledger, and snapshots of a pool. Plain data.

A *placement* is one attempt of a request on one executor. `attempt` fences it. `generation` identifies the start of the
executor. A result answers a call. An event arrives without a call. Some types are used for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypedDict

from inflight.common.errors import Reason


@dataclass(frozen=True, slots=True)
class ExecutorStanding:
    """An executor's state in the ledger. `live`: its last report is at most 2 s old."""

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
    """The quality of wait estimates: their mean relative error, and the factor that corrects raw estimates."""

    num_estimates: int
    mean_error: float
    correction: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a pool at one moment.

    `executors` are ordered by id, `queues` by class, the first class first. `tenant_queues`, if requested, are ordered
    by class and tenant.
    """

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
    """Taken back from its executor. Its owner must hand it back or settle it."""
    ENDED = "ENDED"


DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """A tenant's limits in a pool; None is no limit. Token rates count tokens of prompt and output.

    Tenants with waiting requests are served tokens in proportion to their `weight`. The bursts may arrive at once after
    a pause. One request of any size always fits into a full burst.
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
        """Whether the tenant has a rate limit."""
        return self.requests_per_s is not None or self.tokens_per_s is not None


NO_LIMITS = TenantLimits()


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand of a request on the pool.

    - `priority_class`: 1 is served first, 3 last.
    - `blocks` hold the prompt and `max_tokens` tokens, `block_size` tokens each. An executor that reserves a quantile
      of the output length reserves fewer.
    - `deadline_ms` is the time from the submit until which the request must be placed, for its first token. After it
      the request is dropped.
    - `total_ms` is the time from the submit until which the whole output must be there. The ledger reads it once: it
      refuses a request whose wait would make it miss that time.
    - `last_attempt` and `output_tokens` are the last values that the owner knows, for a pool that has lost the request.
    - `reservation_tokens` limits the output that one placement reserves beyond the output so far, on executors that end
      a placement at its reservation. `placement_blocks` are then the blocks of the next placement.
    - `num_bytes` is the router memory that the prompt takes while the request waits.
    - `prefix_hashes` identify prefixes of the prompt, of increasing length, chosen by `inflight.router.request.ids`.
    - `digest` is the hash of the whole request. A submit with the same id and digest, from any router, is a repeat. If
      the digest is empty, only the owner can repeat the request.
    - `is_served`: the submit comes from the router that already serves the request, not from a client. It neither takes
      a request over from another live router nor restarts a cancelled request: the result is then a `Duplicate`.
    - `num_choices` is the number of choices that this submit admits. The first choice of a request admits all of them.
      The others are submitted with 0, and neither bounds nor rates refuse them.
    - `adapter` is the content hash of the request's adapter; empty: the base model.
    """

    request_id: str
    priority_class: int
    blocks: int
    sequences: int = 1
    deadline_ms: int | None = None
    total_ms: int | None = None
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
        """Returns the blocks of a placement that begins after `num_output_tokens` tokens of output."""
        if self.reservation_tokens is None:
            return self.blocks
        num_tokens = self.prompt_tokens + min(self.max_tokens, num_output_tokens + self.reservation_tokens)
        return min(self.blocks, -(-num_tokens // self.block_size))


@dataclass(frozen=True, slots=True)
class Attempt:
    """One placement of a request, identified by the number of its attempt."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a placement and its usage, to which rates and fair shares are settled.

    `computed_tokens` are the prompt tokens that were computed, not cached; None: unknown. `output_tokens` None:
    unknown. `by_itself`: the output ended with a stop or reached `max_tokens`, so its length is a sample for estimates.
    `cancelled`: the client cancelled the request or left. A repeated submit then starts it again.
    """

    request_id: str
    attempt: int
    computed_tokens: int | None = None
    output_tokens: int | None = None
    by_itself: bool = False
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """A sequence that an executor reports to hold. `adapter` is the hash of its adapter; empty: none or unknown."""

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
    """The part of an executor's report that the ledger uses. `accepting` is false while the executor drains.

    With a `reserve_quantile` below 1, a placement reserves that quantile of the output length instead of `max_tokens`.
    `ends_at_reservation`: a placement that has used its reservation ends as preempted, so it may reserve less than
    `max_tokens`. `seats` is how many of the `budget_sequences` can compute at once; None: all of them.
    `num_adapter_slots` of the `adapters` can be resident at once. `saved_blocks` can be reserved beyond
    `budget_blocks`. `checkpoints` are the names of the prefixes whose recurrent state it keeps, all of them or the last
    used; None: it does not report any. Speeds are 0 where not measured, `output_tokens_per_s` is that of the newest
    batch.
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
    output_tokens_per_s: float = 0.0
    num_standby: int = 0
    """Its sequences that wait for a seat."""
    seats: int | None = None
    ends_at_reservation: bool = False
    age_ms: int = 0
    """How long ago the report arrived at the router that relays it."""
    num_adapter_slots: int = 0
    adapters: tuple[ServedAdapter, ...] = ()
    saved_blocks: int = 0
    checkpoints: tuple[str, ...] | None = None
    lists_all_checkpoints: bool = True


@dataclass(frozen=True, slots=True)
class Account:
    """Who used what on a day, in days since 1970-01-01 UTC. `priority_class` is 0 and the tenant empty for the system,
    which has what no tenant is charged for."""

    day: int
    tenant: str
    priority_class: int
    adapter: str
    executor_class: str
    is_system: bool = False


FIGURES = (
    "busy_ns",
    "seat_us",
    "block_ms",
    "computed_prompt_tokens",
    "cached_prompt_tokens",
    "output_tokens",
    "wasted_draft_tokens",
    "recomputed_tokens",
)
"""The figures of an account, in the order in which the ledger has them: fields of the protocol's `ResourceUsage`."""


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """What an account has used: a figure for each of `FIGURES`."""

    account: Account
    figures: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DayUsage:
    """What all accounts used on a day. The ledger has booked usage since `since_ms`, milliseconds since 1970; what was
    booked before was lost. None: it has not booked any."""

    accounts: Sequence[AccountUsage]
    since_ms: int | None


@dataclass(frozen=True, slots=True)
class ExecutorUsage:
    """What accounts have used of one start of an executor since that start."""

    executor_id: str
    generation: int
    totals: tuple[AccountUsage, ...]


@dataclass(frozen=True, slots=True)
class ChargeOutcome:
    """The result of a charge: what was added to the ledger's totals, the number of accounts that it has no room for,
    and the days of which it had no totals before."""

    added: tuple[AccountUsage, ...]
    num_left_out: int = 0
    first_days: frozenset[int] = frozenset()


# Results and events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Placement:
    """The request has blocks and a sequence reserved on the executor. Its owner submits it there.

    `blocks` is the number of reserved blocks. `suspect`: an executor was lost while it ran this request, before the
    first token. The owner calls `clear_suspect` at the first token. `adapter` is the hash of the adapter that is pinned
    on the executor. It is chosen when the request is admitted, and a repeat does not change it. Comparisons of
    placements ignore these three fields.
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
    """The request waits. `position` is the number of requests ahead of it: exact for its own tenant, estimated for
    other tenants. `estimated_wait_ms` is None if nothing was measured yet."""

    position: int
    estimated_wait_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was refused: QUEUE_FULL, RATE_LIMITED, DEADLINE_UNMEETABLE, NEVER_FITS or NO_EXECUTOR.

    `limit` names the limit that was reached (`max_queue_tokens`, `tenant max_queue_requests`, …). A retry may succeed
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

    The request prefers this executor while the prompts ahead of it there take at most `tolerated_ms` to compute. They
    take `prefill_ms` now. `tolerated_ms` is at most the time of the prompts ahead on the executor with the most room,
    plus the time that the prefix saves. It is smaller if this executor has less room than that one.
    """

    executor_id: str
    prefill_ms: int
    tolerated_ms: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The state of a request. The fields about waiting are set while it is WAITING, `executor_id` while it is PLACED.

    `available_blocks` is the highest number of blocks that any executor has available now. `times_passed` is how often
    other requests have bypassed it.
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
    """The id is in use or was used recently, and the submit is not a repeat that this router may serve."""

    state: LedgerState


@dataclass(frozen=True, slots=True)
class Adopted:
    """The request has this placement, and the caller owns it from now on. `ended`: the placement has ended.

    The caller attaches to the placement. If the executor does not hold it, it was not submitted yet, and the caller
    submits the same attempt.
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
    """The request left the queue and is not placed. `adapter` is the hash of its adapter."""

    request_id: str
    reason: DropReason
    adapter: str = field(default="", compare=False)


SubmitOutcome = Placement | Queued | Dropped | Adopted | Refused | Duplicate
AdoptOutcome = Adopted | Refused | LedgerState | None


class HandBackDetails(TypedDict, total=False):
    """Why a placement is handed back, and what it has produced. Without a reason, its executor was lost."""

    rejected: bool
    """The executor did not accept it. The attempt does not count. The executor gets no new placement before its next
    report."""
    preempted: bool
    """The request gave up its seat. The attempt does not count. The executor continues to get placements."""
    stood_still: bool
    """The executor reports a stalled engine. The attempt counts until the engine makes a step again."""
    output_tokens: int
    """Output tokens so far; 0 if omitted. If there are any, the first-token deadline was met and no longer applies."""
    progressed: bool
    """This placement produced tokens, so the request did not cause the loss. The count of losses starts again."""
    placement_blocks: int | None
    """Blocks of the next placement; None: as many as before."""


class HandBackRefusal(Enum):
    """Why a request that was handed back did not return to the queue."""

    EXHAUSTED = "EXHAUSTED"
    """Its attempts are used up, because executors died. The ledger has removed it."""
    STALLED = "STALLED"
    """Its attempts are used up, because engines stall. The ledger has removed it."""
    UNDECIDED = "UNDECIDED"
    """Its attempts are used up if the lost executors died. This is not known yet, so the caller hands it back again
    soon."""
    STALE = "STALE"
    """It ended, has a newer attempt, or another router has adopted it. Nothing was changed."""
    UNKNOWN = "UNKNOWN"
    """The ledger has lost it. The caller submits it again with its `last_attempt`."""


HandBackOutcome = Placement | Queued | Dropped | HandBackRefusal


@dataclass(frozen=True, slots=True)
class CancelOutcome:
    """The result of a cancel. `state` is the state before it; None: the id is unknown.

    A cancel removes a WAITING or LOST request. For a PLACED request, `owner_notified` is true if another live router
    owns it and was asked to cancel it. Otherwise the caller cancels `placement` on the executor.
    """

    state: LedgerState | None
    placement: Placement | None = None
    owner_id: str | None = None
    owner_notified: bool = False


@dataclass(frozen=True, slots=True)
class ReportOutcome:
    """The result of a report. `taken`: the report was new. `superseded` are sequences that the executor holds and that
    the caller must cancel there."""

    taken: bool
    superseded: tuple[Attempt, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """The placement is lost: the executor is dead, has restarted, or does not hold it. The owner hands it back or
    settles it."""

    request_id: str
    attempt: int
    executor_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A client asked another router to cancel this placement. The owner cancels it on the executor."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class PreemptRequested:
    """A higher class preempts the placement. The owner ends it on its executor and hands it back as preempted."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Another router cancelled the request, which had no executor.

    `at_ms` is the time of the cancel on the ledger's clock; None from a router of an earlier version.
    """

    request_id: str
    at_ms: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TakenOver:
    """Another router has adopted the request. This router no longer owns it, and its stream here ends.

    `at_ms` is the time of the adoption on the ledger's clock. Without `is_certain`, this router adopted the request in
    the same millisecond, and only the ledger knows which of the two was later.
    """

    request_id: str
    at_ms: int = field(default=0, compare=False)
    is_certain: bool = True


ANY_ATTEMPT = 1 << 52
"""Greater than the number of any attempt."""


@dataclass(frozen=True, slots=True)
class LeaseLapsed:
    """The pool may have lost this router's waiting requests. The router asks which ones, and submits those again.

    Also sent after a lost reply, with `is_certain` false: the reply may have contained this event or a placement. A
    submit of the request returns that placement.
    """

    is_certain: bool = field(default=True, compare=False)


class PoolEvents(Protocol):
    """Receives what a router's periodic calls report about the pool, except events of requests."""

    def on_routers(self, peers: frozenset[str]) -> None:
        """Called when the set of other live routers has changed."""

    def on_report_overdue(self, executor_id: str, silent_s: float) -> None:
        """Called while the ledger has had no report of the executor, for `silent_s` seconds so far."""


LedgerEvent = Placement | Lost | CancelRequested | PreemptRequested | Cancelled | Dropped | TakenOver | LeaseLapsed


@dataclass(frozen=True, slots=True)
class LedgerCall:
    """A finished call of a script. `ended` is a time of `time.monotonic`."""

    script: str
    ended: float
    seconds: float
    succeeded: bool
