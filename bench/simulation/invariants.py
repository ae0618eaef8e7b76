"""The invariants of a simulation, checked while it runs. Trusts only what clients asked for and saw.

A violation stops the run; `World` adds the seed, the step and the time, which is all that is needed to repeat it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from inflight.bench.timeline.timeline import US_PER_S
from inflight.bench.timeline.traffic import SimRequest
from inflight.router.ledger.types import Snapshot, TenantLimits
from inflight.v1 import executor_pb2

# Of a rate limit: Redis counts in milliseconds, so a request may be seen one early.
RATE_TOLERANCE_S = 0.002


class InvariantViolation(AssertionError):
    """An invariant does not hold."""


class RequestOutcome(Enum):
    """How a request ended, as its client saw it."""

    COMPLETED = "completed"
    REFUSED = "refused"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"
    """The service gave it up: too many attempts, no executor left, the store away."""
    ROUTER_LOST = "router_lost"
    """The router that served it died; a real client resumes elsewhere."""


@dataclass(slots=True)
class Record:
    """One request and its history. Times are microseconds of the timeline."""

    request: SimRequest
    router_id: str
    arrived_us: int
    accepted_us: int | None = None
    placed_us: int | None = None
    boarded_us: int | None = None
    first_token_us: int | None = None
    last_token_us: int | None = None
    ended_us: int | None = None
    outcome: RequestOutcome | None = None
    reason: str = ""
    num_tokens: int = 0
    num_placements: int = 0
    may_be_cancelled: bool = False


@dataclass(slots=True)
class InvariantChecker:
    """Everything that clients and executors saw, and the checks of it."""

    records: dict[str, Record] = field(default_factory=dict)
    outcomes: Counter[RequestOutcome] = field(default_factory=Counter)
    num_tokens: int = 0
    num_accepted_attempts: int = 0
    longest_wait_us: dict[int, int] = field(default_factory=dict)
    # The executor's start that took each attempt.
    _attempts: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)
    _most_blocks: Counter[str] = field(default_factory=Counter)
    # Of tenants with a rate: when each request was let in.
    _taken_in: dict[str, list[tuple[int, TenantLimits]]] = field(default_factory=dict)

    # What clients see.

    def submitted(self, request: SimRequest, router_id: str, now_us: int) -> Record:
        """Notes a request that a client sends."""
        self.require(request.request_id not in self.records, f"{request.request_id} was submitted twice")
        record = self.records[request.request_id] = Record(request, router_id, now_us)
        return record

    def accepted(self, record: Record, asked_us: int) -> None:
        """The pool, asked then, took it: it waits or has a seat."""
        record.accepted_us = asked_us
        limits = record.request.limits
        if limits.requests_per_s is not None:
            self._taken_in.setdefault(record.request.tenant, []).append((asked_us, limits))

    def delivered(self, record: Record, offset: int, token_id: int, now_us: int) -> None:
        """Checks a token that reaches the client."""
        request = record.request
        self.require(record.outcome is None, f"{request.request_id}: token {offset} after its end")
        self.require(offset == record.num_tokens, f"{request.request_id}: token {offset}, not {record.num_tokens}")
        expected = request.token(offset)
        self.require(token_id == expected, f"{request.request_id}: token {offset} is {token_id}, not {expected}")
        if record.first_token_us is None:
            record.first_token_us = now_us
        record.last_token_us = now_us
        record.num_tokens += 1
        self.num_tokens += 1

    def ended(self, record: Record, outcome: RequestOutcome, now_us: int, reason: str = "") -> None:
        """Checks the end that the client sees."""
        request = record.request
        was = record.outcome and record.outcome.value
        self.require(record.outcome is None, f"{request.request_id} ended twice: {was}, then {outcome.value}")
        if outcome is RequestOutcome.COMPLETED:
            whole = record.num_tokens == request.num_output
            self.require(whole, f"{request.request_id}: {record.num_tokens} tokens of {request.num_output}")
        if outcome is RequestOutcome.CANCELLED:
            self.require(record.may_be_cancelled, f"{request.request_id} was cancelled without a request to cancel it")
        record.outcome, record.ended_us, record.reason = outcome, now_us, reason
        self.outcomes[outcome] += 1

    def boarded(self, record: Record, now_us: int) -> None:
        """Its sequence took a seat for the first time."""
        if record.boarded_us is None:
            record.boarded_us = now_us
            wait_us = now_us - record.arrived_us
            priority_class = record.request.priority_class
            self.longest_wait_us[priority_class] = max(wait_us, self.longest_wait_us.get(priority_class, 0))

    # What executors see.

    def taken(self, request_id: str, attempt: int, executor_id: str, generation: int) -> None:
        """Checks a placement that an executor accepts."""
        first = self._attempts.setdefault((request_id, attempt), (executor_id, generation))
        here = f"{executor_id} (generation {generation})"
        self.require(
            first == (executor_id, generation) and self.num_accepted_attempts < len(self._attempts),
            f"{request_id}: attempt {attempt} runs on {first[0]} (generation {first[1]}) and on {here}",
        )
        self.num_accepted_attempts += 1

    # Looks at the whole.

    def reported(self, executor_id: str, report: executor_pb2.Report) -> None:
        """Notes how many blocks an executor offers."""
        num_blocks = report.budget_blocks + report.saved_blocks
        self._most_blocks[executor_id] = max(num_blocks, self._most_blocks[executor_id])

    def look(self, snapshot: Snapshot, most_sequences: int, *, is_rebuilding: bool = False) -> None:
        """The ledger as it is now: nothing is promised twice, nothing is negative.

        While it is rebuilt from reports after Redis lost it, it may count what has ended for what still runs: then it
        promises too little, never too much.
        """
        for one in snapshot.executors:
            most_blocks = max(one.total_blocks, self._most_blocks[one.executor_id])
            blocks = f"{one.executor_id}: {one.reserved_blocks} of {most_blocks} blocks are reserved"
            self.require(one.reserved_blocks >= 0, blocks)
            self.require(is_rebuilding or one.reserved_blocks <= most_blocks, blocks)
            seats = f"{one.executor_id}: {one.reserved_sequences} of {most_sequences} sequences are reserved"
            self.require(one.reserved_sequences >= 0, seats)
            self.require(is_rebuilding or one.reserved_sequences <= most_sequences, seats)
        self.require(min(snapshot.num_waiting, default=0) >= 0, f"waiting: {snapshot.num_waiting}")

    def all_accounted_for(self, open_ids: Counter[str]) -> None:
        """Σ states = submitted: a request that has not ended is served by exactly one router."""
        twice = [request_id for request_id, count in open_ids.items() if count > 1]
        self.require(not twice, f"served by several routers: {twice[:5]}")
        not_ended = {request_id for request_id, record in self.records.items() if record.outcome is None}
        lost = sorted(not_ended - open_ids.keys())
        self.require(not lost, f"not ended, and served by no router: {lost[:5]}")
        self.require(sum(self.outcomes.values()) + len(not_ended) == len(self.records), f"outcomes: {self.outcomes}")

    def nothing_left(self, snapshot: Snapshot) -> None:
        """After everything: all requests ended, nothing waits, nothing is reserved."""
        unended = [request_id for request_id, record in self.records.items() if record.outcome is None]
        self.require(not unended, f"{len(unended)} requests without an end: {unended[:5]}")
        self.require(sum(snapshot.num_waiting) == 0, f"waiting in the ledger: {snapshot.num_waiting}")
        held = {one.executor_id: one.reserved_blocks for one in snapshot.executors if one.reserved_blocks}
        self.require(not held, f"still reserved: {held}")

    def within(self, running: Mapping[str, Sequence[SimRequest]]) -> None:
        """No tenant runs more than it may. `running` are those on executors under their current attempt."""
        for tenant, requests in running.items():
            most = requests[0].limits.max_running
            self.require(most is None or len(requests) <= most, f"tenant {tenant} runs {len(requests)}, and may {most}")

    def require(self, holds: bool, what: str) -> None:
        """Stops the run where something does not hold."""
        if not holds:
            raise InvariantViolation(what)

    def rates_kept(self) -> None:
        """No tenant got more in than its rate, over all routers: a bucket that the limit fills and requests empty."""
        for tenant, taken in self._taken_in.items():
            self._check_rate(tenant, sorted(taken, key=lambda one: one[0]))

    def _check_rate(self, tenant: str, taken: list[tuple[int, TenantLimits]]) -> None:
        limits = taken[0][1]
        assert limits.requests_per_s is not None
        most = float(limits.request_burst)
        level, before_us = most, taken[0][0]
        for at_us, _ in taken:
            level = min(most, level + (at_us - before_us) / US_PER_S * limits.requests_per_s) - 1.0
            before_us = at_us
            above = -level - RATE_TOLERANCE_S * limits.requests_per_s
            self.require(above <= 0, f"tenant {tenant} is {above:.3f} requests above its rate at {at_us / US_PER_S} s")
