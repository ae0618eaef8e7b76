"""The state of the ledger in plain Python: every sum, order and index by definition. Part of `ledger_model`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from math import ceil, floor, inf

from inflight.executor.scheduler.sequence import MAX_YIELDING_ATTEMPTS
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import Demand, ExecutorReport, LedgerEvent, LedgerState, Lost, Placement
from inflight.router.request.ids import named_block_counts
from tests.property.ledger_estimates import MIN_OUTPUTS, Estimates
from tests.property.ledger_lengths import Lengths
from tests.property.ledger_tenants import Tenant

SILENT_MS = 2000
LEASE_MS = 5000
PATIENCE_MS = 60_000
MAX_IMBALANCE = 0.25
MAX_HOLDERS = 4
REPORT_MS = 3000
FULLNESS_WEIGHT = 2
NO_OBSERVERS = ""


@dataclass(slots=True)
class Executor:
    """An executor by its last report."""

    report: ExecutorReport
    last_report_ms: int
    audited_ms: int
    suspended: bool = False
    prefilled_ms: float = 0.0
    """When it has computed the prompts that it was given."""


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended that was placed: its last attempt, where that was, if it was not handed back since."""

    attempt: int
    placement: Placement | None
    digest: str | None
    was_cancelled: bool


@dataclass(frozen=True, slots=True)
class Undecided:
    """An executor said to have died or `stalled` under a request."""

    executor_id: str
    generation: int
    at_ms: int
    stalled: bool


def placement_blocks_of(demand: Demand) -> int:
    """What one placement reserves where it may end before the request does."""
    return demand.blocks if demand.placement_blocks is None else demand.placement_blocks


@dataclass(slots=True)
class Request:
    """A request that has not ended. `claim` is the executor kept for it; `placement` says where it is or was last;
    `digest` None: only its executor knew of it.
    """

    demand: Demand
    owner_id: str
    arrival: int
    since_ms: int
    attempt: int
    class_: int
    digest: str | None
    output: int = 0
    placement_blocks: int = 0
    """Of its next placement where it may be served by several."""
    blocks: int = 0
    """To its end."""
    state: LedgerState | None = None
    failures: int = 0
    undecided: list[Undecided] = field(default_factory=list)
    """The failures for which it is not known yet whether the executor died."""
    counted: int = 0
    """The last attempt whose loss needs no more counting."""
    is_adopted: bool = False
    """Whether its placement had another owner, or none."""
    placement: Placement | None = None
    reserved: int | None = None
    placed_ms: int = 0
    lost_ms: int = 0
    age_ms: int = 0
    passed: int = 0
    claim: str | None = None
    asked_ms: int | None = None
    """When others were last asked to give way to it."""
    may_be_preempted: bool = False
    """Whether it was placed where it may be asked to give way, and was not."""
    charge: float | None = None
    rated: int | None = None
    estimate: tuple[int, float] | None = None

    def __post_init__(self) -> None:
        self.blocks = self.demand.blocks
        self.placement_blocks = placement_blocks_of(self.demand)

    @property
    def deadline_ms(self) -> int | None:
        """When it must have begun."""
        return None if self.demand.deadline_ms is None else self.since_ms + self.demand.deadline_ms

    @property
    def tokens(self) -> int:
        """What counts of it while it waits: what its next placement reserves."""
        tokens = self.demand.prompt_tokens + self.demand.max_tokens
        is_last = self.placement_blocks >= self.blocks
        return tokens if is_last else min(tokens, self.placement_blocks * self.demand.block_size)

    @property
    def output_tokens(self) -> int:
        """Those of them that are output."""
        return self.tokens - self.demand.prompt_tokens


@dataclass(slots=True)
class Pool:
    """The pool. `told` collects, per router, what it is told; `claims` are ids, oldest first; `settings` are those of
    the newest submit.
    """

    now_ms: int = 0
    settings: LedgerSettings = field(default_factory=LedgerSettings)
    executors: dict[str, Executor] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    ended_ms: dict[str, int] = field(default_factory=dict)
    endings: dict[str, End] = field(default_factory=dict)
    routers: dict[str, int] = field(default_factory=dict)
    tenants: dict[str, Tenant] = field(default_factory=dict)
    claims: list[str] = field(default_factory=list)
    prefixes: dict[str, tuple[tuple[str, int, int], ...]] = field(default_factory=dict)
    told: dict[str, list[LedgerEvent]] = field(default_factory=dict)
    lengths: Lengths = field(default_factory=Lengths)
    estimates: Estimates = field(default_factory=Estimates)
    overcommits: bool = False
    floor: float = 0.0
    output_share: float = 1.0
    num_arrivals: int = 0
    attended: tuple[int, int] | None = None

    # What holds ------------------------------------------------------------------------------------------------

    def waiting(self, tenant: str | None = None, class_: int | None = None) -> list[str]:
        """The ids in line, of a tenant or a class."""
        return [
            name
            for name, one in self.requests.items()
            if one.state is LedgerState.WAITING
            and (tenant is None or one.demand.tenant == tenant)
            and (class_ is None or one.class_ == class_)
        ]

    def line(self, tenant: str, class_: int) -> list[str]:
        """A tenant's ids in line, first to last: by deadline, which counts up to a minute ahead, and arrival."""
        return sorted(self.waiting(tenant, class_), key=lambda name: self.order(self.requests[name]))

    def order(self, request: Request) -> tuple[int, int]:
        """Its place in its tenant's line."""
        ahead_ms = PATIENCE_MS if request.demand.deadline_ms is None else min(PATIENCE_MS, request.demand.deadline_ms)
        return (request.since_ms + ahead_ms, request.arrival)

    def running(self, tenant: str) -> int:
        """The sequences that a tenant has placed."""
        placed = (one for one in self.requests.values() if one.state is LedgerState.PLACED)
        return sum(one.demand.sequences for one in placed if one.demand.tenant == tenant)

    def placed_on(self, executor_id: str) -> list[str]:
        """The ids with a reservation there."""
        return sorted(
            name
            for name, one in self.requests.items()
            if one.state is LedgerState.PLACED and one.placement and one.placement.executor_id == executor_id
        )

    def reserved(self, executor_id: str) -> tuple[int, int]:
        """Blocks and sequences promised there."""
        placed = [self.requests[name] for name in self.placed_on(executor_id)]
        return sum(one.reserved or 0 for one in placed), sum(one.demand.sequences for one in placed)

    def tokens_waiting(self, names: list[str]) -> int:
        """Tokens of these."""
        return sum(self.requests[name].tokens for name in names)

    def bytes_waiting(self, names: list[str]) -> int:
        """Bytes of these."""
        return sum(self.requests[name].demand.num_bytes for name in names)

    def num_ahead(self, name: str) -> int:
        """About how many are placed before it: higher classes, its tenant's line, and turns of other tenants."""
        request = self.requests[name]
        tenant, class_ = request.demand.tenant, request.class_
        in_tenant = self.line(tenant, class_).index(name)
        higher = sum(len(self.waiting(class_=one)) for one in range(1, class_))
        others = len(self.waiting(class_=class_)) - len(self.waiting(tenant, class_))
        num_tenants = len(self.active(class_).keys() - {tenant})
        return higher + in_tenant + min(others, num_tenants * (in_tenant + 1))

    def estimated_wait_ms(self, name: str) -> int | None:
        """Until it is placed."""
        each_ms = self.ms_each(name)
        correction = self.tenants[self.requests[name].demand.tenant].correction
        return None if each_ms is None else ceil((self.num_ahead(name) + 1) * each_ms * correction)

    def standby_ms(self, name: str) -> float:
        """From its placement to its seat."""
        return self.estimates.standby * len(self.executors) * (self.ms_each(name) or 0)

    def ms_each(self, name: str) -> float | None:
        """From one placement to the next."""
        waiting, request = self.waiting(), self.requests[name]
        tenant, prompt, reserved = (
            self.tenants[request.demand.tenant],
            request.demand.prompt_tokens,
            request.output_tokens,
        )
        estimates, num_executors = self.estimates, len(self.executors)
        speed = estimates.speed(estimates.reported_speed(prompt, reserved, tenant.output_share, num_executors))
        if speed is None or not waiting:
            return None
        return self.tokens_waiting(waiting) / len(waiting) / speed

    def prefill_ms(self, request: Request) -> float:
        """From its seat to its first token."""
        return self.estimates.prefill_ms(request.demand.prompt_tokens + request.output)

    def output_ms(self, request: Request) -> float:
        """From its first token to its last; 0 where it is not known how long outputs are."""
        if self.estimates.num_outputs < MIN_OUTPUTS:
            return 0.0
        share = self.tenants[request.demand.tenant].output_share
        return request.output_tokens * share * (self.estimates.step_ms or 0)

    def is_dead(self, request: Request) -> bool:
        """Whether it will not have begun in time. What has output has begun."""
        if request.deadline_ms is None or request.output:
            return False
        return self.now_ms + self.prefill_ms(request) / 2 > request.deadline_ms

    def is_tombstoned(self, name: str) -> bool:
        """Whether the id ended lately."""
        return name in self.ended_ms and self.now_ms - self.ended_ms[name] <= self.settings.remember_ended_ms

    def lives(self, owner_id: str, caller_id: str) -> bool:
        """Whether the router is there."""
        return owner_id != NO_OBSERVERS and (owner_id in self.routers or owner_id == caller_id)

    # Tenants ---------------------------------------------------------------------------------------------------

    def tenant(self, name: str) -> Tenant:
        """The tenant, whom this makes known."""
        tenant = self.tenants.setdefault(
            name, Tenant(output_share=self.output_share, correction=self.estimates.correction)
        )
        tenant.used_ms = self.now_ms
        return tenant

    def active(self, class_: int) -> dict[str, float]:
        """Who may be served in this class now, with what they were served, in whole tokens."""
        return {
            name: float(floor(tenant.counter))
            for name, tenant in self.tenants.items()
            if self.waiting(name, class_) and self.running(name) < tenant.max_running
        }

    def update_active(self) -> None:
        """Runs after a change: a tenant that comes back has saved no credit, and an empty queue is not measured."""
        for name, tenant in self.tenants.items():
            is_active = bool(self.waiting(name)) and self.running(name) < tenant.max_running
            if is_active and not tenant.is_active:
                tenant.counter = max(tenant.counter, self.floor)
            tenant.is_active = is_active
        if not self.waiting():
            self.estimates.stop_measuring()

    def charge(self, request: Request) -> None:
        """Charges the first placement. Who did not stand in line comes back only now."""
        if request.charge is not None:
            return
        tenant = self.tenant(request.demand.tenant)
        if request.state is not LedgerState.WAITING:
            tenant.counter = max(tenant.counter, 0 if tenant.is_active else self.floor)
        self.floor = max(self.floor, tenant.counter)
        request.charge = tenant.expected_charge(request.demand.prompt_tokens, request.output_tokens, request.output)
        tenant.counter += request.charge

    # Places -----------------------------------------------------------------------------------------------------------

    def takes_work(self, executor_id: str) -> bool:
        """Whether anything may board there."""
        one = self.executors.get(executor_id)
        return bool(
            one and one.report.accepting and not one.suspended and self.now_ms - one.last_report_ms <= SILENT_MS
        )

    def free(self, executor_id: str) -> tuple[int, int]:
        """Blocks and sequences that can be promised there."""
        report = self.executors[executor_id].report
        blocks, sequences = self.reserved(executor_id)
        return report.budget_blocks - blocks, report.budget_sequences - sequences

    def claimed(self) -> dict[str, str]:
        """Executors that are kept, with whom for."""
        return {self.requests[name].claim or "": name for name in self.claims}

    def open_executors(self) -> list[str]:
        """Returns those with a free sequence that any request may take, by available blocks."""
        free = [one for one in self.executors if self.takes_work(one) and self.free(one)[1] > 0]
        return sorted((one for one in free if one not in self.claimed()), key=lambda one: (-self.free(one)[0], one))

    def needed_blocks(self, request: Request, executor_id: str | None) -> int:
        """What the executor reserves for it."""
        report = self.executors[executor_id].report if executor_id else None
        if report and report.ends_at_reservation:
            return request.placement_blocks
        demand = replace(request.demand, blocks=request.blocks)
        return self.lengths.needed_blocks(demand, request.output, report.reserve_quantile if report else 1.0)

    def serves(self, executor_id: str, request: Request) -> bool:
        """Whether the executor has the request's adapter, or the request has none."""
        adapter = request.demand.adapter
        return not adapter or adapter in self._residents(executor_id)

    def _residents(self, executor_id: str) -> dict[str, bool]:
        """The adapters that the executor serves, and whether each was resident at its last report."""
        report = self.executors[executor_id].report
        return {one.adapter: one.is_resident for one in report.adapters} if report.num_adapter_slots else {}

    def pins(self, executor_id: str, without: Collection[str] = ()) -> Counter[str]:
        """The placements there of each adapter; `without` those of some requests."""
        placed = (self.requests[name].demand.adapter for name in self.placed_on(executor_id) if name not in without)
        return Counter(adapter for adapter in placed if adapter)

    def has_slot(self, executor_id: str, request: Request, without: Collection[str] = ()) -> bool:
        """Whether its adapter, if it has one, is pinned there or may be."""
        if not request.demand.adapter:
            return True
        pins, num_slots = self.pins(executor_id, without), self.executors[executor_id].report.num_adapter_slots
        return self.serves(executor_id, request) and (request.demand.adapter in pins or len(pins) < num_slots)

    def _loading_rank(self, executor_id: str, adapter: str) -> int:
        """0 where the adapter is in a slot, 1 where a slot is empty, 2 where another must go."""
        residents = {one for one, is_resident in self._residents(executor_id).items() if is_resident}
        in_slots = residents | self.pins(executor_id).keys()
        if adapter in in_slots:
            return 0
        return 1 if len(in_slots) < self.executors[executor_id].report.num_adapter_slots else 2

    def suspects_on(self, executor_id: str) -> list[str]:
        """Those placed there under which an executor was lost."""
        return [name for name in self.placed_on(executor_id) if self.requests[name].failures]

    def would_share_blame(self, executor_id: str, request: Request) -> bool:
        """Whether it is a suspect, and the executor has another."""
        return request.failures > 0 and bool(self.suspects_on(executor_id))

    def has_room(self, executor_id: str, request: Request) -> bool:
        """Whether it fits there, and may be there."""
        return self.has_slot(executor_id, request) and self.has_room_without_adapter(executor_id, request)

    def has_room_without_adapter(self, executor_id: str, request: Request) -> bool:
        """Whether it would fit there without its adapter."""
        if self.would_share_blame(executor_id, request):
            return False
        blocks, sequences = self.free(executor_id)
        return sequences >= request.demand.sequences and blocks >= self.needed_blocks(request, executor_id)

    def choose(self, name: str, request: Request) -> str | None:
        """Where the request goes: what is kept for it; the best or its prefix; what is kept for lower classes."""
        own = [request.claim] if request.claim else []
        lower = [self.requests[one].claim or "" for one in self.claims if self.requests[one].class_ > request.class_]
        if kept := self._first_with_room(own, request):
            return kept
        best = self._best_open(request)
        if best is None:
            return self._first_with_room(lower, request)
        if not request.demand.prefix_hashes:
            return best
        candidates = [*self.holders(request), best]
        return min(
            (one for one in candidates if self._is_near(one, best, request)),
            key=lambda one: self._cost_ms(one, request),
        )

    def _best_open(self, request: Request) -> str | None:
        """The roomiest; for an adapter the one that loads least, among those that are not much fuller."""
        first, adapter = self._first_with_room(self.open_executors(), request), request.demand.adapter
        if first is None or not adapter:
            return first
        most = self._load(first) + MAX_IMBALANCE
        fit = [one for one in self.open_executors() if self.has_room(one, request) and self._load(one) <= most]
        return min(fit, key=lambda one: self._loading_rank(one, adapter))

    def _first_with_room(self, executor_ids: list[str], request: Request) -> str | None:
        return next((one for one in executor_ids if self.takes_work(one) and self.has_room(one, request)), None)

    def holders(self, request: Request) -> Iterator[str]:
        """Executors that hold a beginning of its prompt that can be used, the longest first."""
        return (
            one
            for name in reversed(request.demand.prefix_hashes)
            for one, _, due_ms in self.prefixes.get(name, ())
            if self.can_use(one, name, due_ms)
        )

    def _is_near(self, executor_id: str, best: str, request: Request) -> bool:
        can_take = self.takes_work(executor_id) and executor_id not in self.claimed()
        if not (can_take and self.has_room(executor_id, request)):
            return False
        is_measured = self.executors[executor_id].report.prefill_tokens_per_s > 0
        is_far = not is_measured and self._load(executor_id) > self._load(best) + MAX_IMBALANCE
        tolerated_ms = self.tolerated_wait(request, best)
        waits_long = self.cached_tokens(request, executor_id) and self.prefill_wait(executor_id) > tolerated_ms
        return not is_far and (executor_id == best or not waits_long)

    def _cost_ms(self, executor_id: str, request: Request) -> float:
        """The time of the prompts in front, that of what is not cached, and a price for fullness. Nothing if no speed
        is known."""
        tokens_per_ms = self.executors[executor_id].report.prefill_tokens_per_s / 1000
        if not tokens_per_ms:
            return 0.0
        tokens = request.demand.prompt_tokens + request.output
        missing = max(0, tokens - self.cached_tokens(request, executor_id))
        price = FULLNESS_WEIGHT * self._load(executor_id) * tokens
        return self.prefill_wait(executor_id) + (missing + price) / tokens_per_ms

    def cheaper_ms(self, request: Request, executor_id: str, best: str) -> float:
        """How long it would wait there rather than wait on the roomiest one and compute what this one has of its
        prompt. As long as it has to where no speed is known."""
        tokens_per_ms = self.executors[executor_id].report.prefill_tokens_per_s / 1000
        if not tokens_per_ms:
            return self.prefill_wait(executor_id)
        fuller = self._load(executor_id) - self._load(best)
        price = FULLNESS_WEIGHT * fuller * (request.demand.prompt_tokens + request.output)
        saved_ms = max(0, self.cached_tokens(request, executor_id) - price) / tokens_per_ms
        return self.prefill_wait(best) + saved_ms

    def prefill_wait(self, executor_id: str) -> float:
        """Milliseconds until it has computed the prompts that it was given."""
        return max(0.0, self.executors[executor_id].prefilled_ms - self.now_ms)

    def tolerated_wait(self, request: Request, best: str) -> float:
        """How long the prompts in front may take on the holder of its prefix, in milliseconds. Infinite where they take
        longer on the roomiest executor, too."""
        tolerated_ms: float = self.settings.tolerated_ttft_ms
        if request.deadline_ms is not None and not request.output:
            tolerated_ms = min(tolerated_ms, request.deadline_ms - self.now_ms)
        return inf if self.prefill_wait(best) > tolerated_ms else tolerated_ms

    def cached_tokens(self, request: Request, executor_id: str) -> int:
        """Tokens of the longest beginning of its prompt that this executor was given, and with recurrent layers keeps
        the state of."""
        names = self._named_lengths(request)
        for name, tokens, next_tokens in reversed(names):
            for one, length, due_ms in self.prefixes.get(name, ()):
                if one == executor_id and self.can_use(executor_id, name, due_ms):
                    is_whole = ":" not in name and length < next_tokens
                    return max(tokens, length) if is_whole else tokens
        return 0

    def can_use(self, executor_id: str, name: str, due_ms: float) -> bool:
        """Whether the prefix needs no recurrent state, or the executor keeps that or will soon report it."""
        report = self.executors[executor_id].report if executor_id in self.executors else None
        if ":" not in name or self.now_ms <= due_ms or report is None or report.checkpoints is None:
            return True
        return not report.lists_all_checkpoints or name.partition(":")[0] in report.checkpoints

    def remember_prefixes(self, request: Request, executor_id: str) -> None:
        """The executor will hold its prompt's beginnings, beside those before it where several prompts share them."""
        names = self._named_lengths(request)
        known = [(self.prefixes[name][0][1], *lengths) for name, *lengths in reversed(names) if name in self.prefixes]
        are_shared = bool(known) and not known[0][0] < known[0][2] and known[0][1] < known[0][0]
        for name, _, _ in names:
            before = self.prefixes.get(name, ())
            others = [one for one in before if one[0] != executor_id] if are_shared or len(before) > 1 else []
            due_ms = floor(max(self.now_ms, self.executors[executor_id].prefilled_ms)) + REPORT_MS
            own = (executor_id, request.demand.prompt_tokens, due_ms)
            self.prefixes[name] = (own, *others[: MAX_HOLDERS - 1])

    @staticmethod
    def _named_lengths(request: Request) -> list[tuple[str, int, int]]:
        """Its named prefixes, the shortest first, with the tokens of each and of the next one."""
        demand = request.demand
        lengths = named_block_counts(demand.prompt_tokens // demand.block_size)
        num_names = len(demand.prefix_hashes)
        if any(":" in name for name in demand.prefix_hashes):
            lengths = tuple(int(name.partition(":")[2]) for name in demand.prefix_hashes)
            return [*zip(demand.prefix_hashes, lengths, [*lengths[1:], *lengths[-1:]], strict=True)]
        tokens = [demand.block_size * one for one in [*([0] * num_names), *lengths][-num_names:]] if num_names else []
        return [*zip(demand.prefix_hashes, tokens, [*tokens[1:], *tokens[-1:]], strict=True)]

    def expect_prefill(self, request: Request, executor_id: str) -> None:
        """Adds the prompt to those that the executor is to compute."""
        executor = self.executors[executor_id]
        cached = 0 if executor_id in self.claimed() else self.cached_tokens(request, executor_id)
        if executor.report.prefill_tokens_per_s > 0:
            tokens = max(0, request.demand.prompt_tokens + request.output - cached)
            begins_ms = max(self.now_ms, executor.prefilled_ms)
            executor.prefilled_ms = begins_ms + tokens / (executor.report.prefill_tokens_per_s / 1000)

    def _load(self, executor_id: str) -> float:
        report, (blocks, sequences) = self.executors[executor_id].report, self.reserved(executor_id)
        return max(blocks / max(1, report.budget_blocks), sequences / max(1, report.budget_sequences))

    def could_hold(self, executor_id: str, request: Request) -> bool:
        """Whether it is large enough, empty, and has the adapter."""
        report = self.executors[executor_id].report
        is_large_enough = report.total_blocks >= request.blocks and report.budget_sequences >= request.demand.sequences
        return is_large_enough and self.serves(executor_id, request)

    def fits_somewhere(self, request: Request) -> bool:
        """Whether any executor is large enough."""
        return any(self.could_hold(one, request) for one in self.executors)

    # Changes of state ------------------------------------------------------------------------------------------

    def set_placement_blocks(self, request: Request, blocks: int) -> None:
        """What the next placement reserves beyond the one before is charged and taken from the rate."""
        before = request.tokens
        request.placement_blocks, request.blocks = blocks, max(request.blocks, blocks)
        more = request.tokens - before
        if more <= 0:
            return
        tenant = self.tenant(request.demand.tenant)
        if request.charge is not None:
            charge = tenant.output_charge(more)
            request.charge, tenant.counter = request.charge + charge, tenant.counter + charge
        if request.rated is not None:
            request.rated += more
            tenant.return_tokens(-more)

    def enqueue(self, name: str) -> None:
        """Puts it in line."""
        request = self.requests[name]
        request.state, request.age_ms = LedgerState.WAITING, self.now_ms + self.settings.age_ms
        self.tenant(request.demand.tenant)
        self.update_active()

    def unclaim(self, name: str) -> None:
        """Gives up the executor that is kept for it."""
        if name in self.claims:
            self.claims.remove(name)
        self.requests[name].claim = None

    def seat(self, name: str, executor_id: str, attempt: int, blocks: int) -> None:
        """Reserves on the executor, and charges."""
        request = self.requests[name]
        self.unclaim(name)
        self.charge(request)
        self.tenant(request.demand.tenant)
        request.state, request.attempt, request.placed_ms = LedgerState.PLACED, attempt, self.now_ms
        generation = self.executors[executor_id].report.generation
        request.placement, request.reserved = (
            Placement(name, attempt, executor_id, generation, suspect=request.failures > 0),
            blocks,
        )
        request.is_adopted = False
        request.passed, request.asked_ms, request.estimate = 0, None, None
        lowest_that_stays = 1 if self.settings.preempt_for_priority else 2
        request.may_be_preempted = request.class_ > lowest_that_stays and attempt <= MAX_YIELDING_ATTEMPTS
        self.update_active()

    def lose(self, name: str, caller_id: str, *, executor_lives: bool = False) -> None:
        """Takes a placement back; what follows is for its owner to say, if there is one."""
        request = self.requests[name]
        assert request.placement
        self.tenant(request.demand.tenant)
        if self.lives(request.owner_id, caller_id):
            request.state, request.lost_ms = LedgerState.LOST, self.now_ms
            if executor_lives:
                request.counted = request.attempt
            was = request.placement
            self.tell(request.owner_id, Lost(name, was.attempt, was.executor_id, was.generation))
        else:
            del self.requests[name]
        self.update_active()

    def forget(self, name: str) -> None:
        """Takes it out of whatever state it is in."""
        request = self.requests[name]
        if request.state in (LedgerState.WAITING, LedgerState.PLACED):
            self.tenant(request.demand.tenant)
        self.unclaim(name)
        del self.requests[name]
        self.update_active()

    def end(self, name: str, *, was_cancelled: bool) -> None:
        """Takes it out and remembers that it ended, and how, if it was ever placed."""
        request = self.requests.get(name)
        if request or not self.is_tombstoned(name):
            self.endings.pop(name, None)
        if request:
            self.forget(name)
            if request.attempt:
                self.endings[name] = End(request.attempt, request.placement, request.digest, was_cancelled)
        self.ended_ms[name] = self.now_ms

    def tell(self, router_id: str, event: LedgerEvent) -> None:
        """Tells a router."""
        self.told.setdefault(router_id, []).append(event)
