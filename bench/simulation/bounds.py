"""Time bounds of a deployment, measured in virtual time.

`docs/design/time-bounds.md` states them. The numbers here are those of that page, not those of the tested code. A
bound counts from the later of two moments: when a state that must end was first seen, and when what has to end it was
last disturbed (a process hung, died or started, a link broke, Redis was away or lost its contents). So faults may
overlap; a bound is checked where the system had the time that it needs.

Checked at every look of `World`, and the first after every turn of an executor's loop:

| state | ends within |
| --- | --- |
| blocks of a sequence that has ended or was cancelled | 2 steps |
| a sequence whose client has left | 2 steps |
| a reservation that its executor does not hold | at once; an audit where the message that should free it was lost |
| a place in line of a request that has ended | at once; a lease and two reaps where its router died |
| a sequence for which nothing is reserved | an audit, and 2 steps |
| a lease of a dead router, or of a dead or hung executor | a lease and two reaps |
| room on an executor, beside a line in which every request would fit | at once |
| a stream without its next token, its router and executor being well | the longest step and prefill |
| the same of an interrupted stream, where a seat is free (`has_room`) | its fault's bound, and the above |

An executor that is dead or hung gets no new work from 2 s after its last report.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from inflight.bench.simulation.invariants import InvariantViolation, Record
from inflight.bench.timeline.faults import Fault, FaultKind
from inflight.bench.timeline.timeline import US_PER_MS, US_PER_S, Timeline

if TYPE_CHECKING:
    from inflight.bench.simulation.client import SimClient
    from inflight.bench.simulation.sim_executor import ExecutorShape, SimExecutor
    from inflight.bench.simulation.sim_router import SimRouter
    from inflight.bench.simulation.store_link import StoreLink
    from inflight.executor.engine.engine import Engine
    from inflight.executor.scheduler.sequence import Sequence

MAX_STEPS = 2
"""Until the blocks of a sequence that ended are free."""
LEASE_US = 5 * US_PER_S
SILENT_US = 2 * US_PER_S
REAP_US = US_PER_S
REPORT_US = US_PER_S
AUDIT_US = SILENT_US + US_PER_S + REPORT_US
"""The grace of a placement, and the audit after it: at most once a second, and with a report."""
RELAYED_US = 3 * US_PER_S
"""Beyond the two seconds: until all others relay the executor's reports if two routers cannot, a reap that says so and
the next report."""
AT_ONCE_US = 10 * US_PER_MS
"""A few round trips, none of which waits for a timer."""
CALL_FAILS_US = 2_500 * US_PER_MS
"""A call to Redis that gets no answer, and the time until it is made again."""
REAPED_US = LEASE_US + 2 * REAP_US
"""Leases start again after a time in which no router reaped: one reap begins them, one ends them."""
RESUMED_US = LEASE_US + REAP_US + AT_ONCE_US

STORE = ("store",)
Part = tuple[str, ...]
"""What can be disturbed: the store, a router, an executor, the link between the two."""


class BoundExceeded(InvariantViolation):
    """A bound is exceeded."""


class StepBound:
    """Checks of one executor that blocks are free within two steps of the end of their sequence."""

    def __init__(self, executor_id: str, engine: Engine) -> None:
        self._executor_id = executor_id
        self._engine = engine
        self._left: dict[Sequence, int] = {}

    def left(self, sequence: Sequence) -> None:
        """Its router asked for its end, or was told of it."""
        self._left.setdefault(sequence, self._engine.num_steps)

    def check(self) -> None:
        """Checks an executor after a turn of its loop."""
        for sequence, num_steps in list(self._left.items()):
            if not sequence.block_table and sequence.host_copy is None:
                del self._left[sequence]
            elif self._engine.num_steps - num_steps > MAX_STEPS:
                held = len(sequence.block_table)
                raise BoundExceeded(
                    f"{self._executor_id}: {sequence.request_id} left {self._engine.num_steps - num_steps} steps ago "
                    f"and holds {held} blocks; they must be free within {MAX_STEPS} steps"
                )


class Calm:
    """Until when each part was disturbed last."""

    def __init__(self) -> None:
        self._until_us: dict[Part, int] = {}

    def disturb(self, part: Part, until_us: int) -> None:
        """The part cannot be relied on until then."""
        self._until_us[part] = max(until_us, self._until_us.get(part, 0))

    def since_us(self, *parts: Part) -> int:
        """Returns the time since when all of them are healthy."""
        return max((self._until_us.get(part, 0) for part in parts), default=0)

    def all_since_us(self, kind: str) -> int:
        """Since when all parts of a kind are well."""
        return max((until_us for part, until_us in self._until_us.items() if part[0] == kind), default=0)


@dataclass(frozen=True, slots=True)
class Lasting:
    """A state that must end within `bound_us` of `since_us`, or of when it was first seen; None: it has no bound."""

    what: str
    since_us: int
    bound_us: int | None


@dataclass(slots=True)
class Ledger:
    """What the ledger says at one moment. Times are milliseconds."""

    now_ms: float
    waiting: list[str]
    placements: dict[tuple[str, str, int], None]
    """Executor, request and attempt."""
    routers: dict[str, float]
    reports: dict[str, float]
    room: dict[str, float]
    """Blocks that can be promised, by executor with a free seat."""

    @classmethod
    def read(cls, link: StoreLink) -> Ledger:
        """Reads the current state."""
        keys = link.keys
        waiting = [
            member[member.index("\0") + 27 :]  # tenant, 0, 13 digits of order, 13 of arrival, request
            for number in (1, 2, 3)
            for member in link.query("ZRANGE", keys.key(f"waiting:{number}"), 0, -1)
        ]
        placements = (member.split("\0", 2) for member in link.query("ZRANGE", keys.key("placements"), 0, -1))
        room = _scores(link, "room")
        return cls(
            now_ms=link.now_ms(),
            waiting=waiting,
            placements={
                (executor_id, request_id, int(attempt)): None for executor_id, attempt, request_id in placements
            },
            routers=_scores(link, "routers"),
            reports=_scores(link, "reports"),
            room={executor_id: -score for executor_id, score in room.items()},
        )


def _scores(link: StoreLink, name: str) -> dict[str, float]:
    pairs = link.query("ZRANGE", link.keys.key(name), 0, -1, "WITHSCORES")
    return dict(pairs)


@dataclass(slots=True)
class _Look:
    """A snapshot of everything at one moment."""

    now_us: int
    ledger: Ledger
    routers: Mapping[str, SimRouter]
    executors: Mapping[str, SimExecutor]
    records: Mapping[str, Record]
    streams: dict[str, tuple[str, SimClient]] = field(default_factory=dict)
    """By request, the router that serves it."""
    held: dict[tuple[str, str, int], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for router_id, router in self.routers.items():
            self.streams.update((request_id, (router_id, one)) for request_id, one in router.streams.items())
        for executor_id, executor in self.executors.items():
            self.held.update(((executor_id, one.request_id, one.attempt), None) for one in executor.told())

    @property
    def live_ms(self) -> float:
        """The ledger's time from which on a report makes its executor live."""
        return self.ledger.now_ms - SILENT_US / US_PER_MS


class Bounds:
    """Watches the bounds of one run. With `has_room` an interrupted stream always finds a seat, so its next token has a
    bound, too."""

    def __init__(self, timeline: Timeline, shape: ExecutorShape, has_room: bool) -> None:
        self._timeline = timeline
        self._has_room = has_room
        self._shape = shape
        self._calm = Calm()
        self._first_seen_us: dict[Hashable, int] = {}
        self._placements_before: tuple[int, dict[tuple[str, str, int], None]] = (0, {})
        self._down_us: dict[str, int] = {}
        self._next_token_us: dict[str, int] = {}
        self._routers: list[SimRouter] = []

    # What happens.

    def changed(self, *, router: SimRouter | None = None, executor: SimExecutor | None = None) -> None:
        """Records that a process starts or dies, or that a link between two begins."""
        now_us = self._timeline.now_us
        if router is not None:
            self._calm.disturb(_router(router.router_id), now_us)
        if executor is not None:
            self._calm.disturb(_executor(executor.executor_id), now_us)

    def broken(self, fault: Fault, router: SimRouter, executor: SimExecutor) -> None:
        """Records a fault of the schedule that affects one of these, or Redis."""
        now_us = self._timeline.now_us
        until_us = now_us + fault.duration_us
        if fault.kind is FaultKind.ROUTER_HANG:
            self._calm.disturb(_router(router.router_id), until_us)
            self._interrupt(router.streams, until_us)
        elif fault.kind is FaultKind.EXECUTOR_HANG:
            self._calm.disturb(_executor(executor.executor_id), until_us)
            self._interrupt(_on(executor), min(until_us, now_us + RESUMED_US))
        elif fault.kind is FaultKind.STORE_AWAY:
            self._calm.disturb(STORE, until_us + CALL_FAILS_US)
        elif fault.kind.value.startswith("store"):
            self._calm.disturb(STORE, now_us)

    def lost(self, executor: SimExecutor, router: SimRouter | None = None) -> None:
        """Records that an executor dies, or that its link to a router breaks."""
        now_us = self._timeline.now_us
        self.changed(router=router, executor=executor)
        interrupted = set(_on(executor))
        if router is not None:
            interrupted &= router.streams.keys()
        self._interrupt(interrupted, now_us + AT_ONCE_US)

    def _interrupt(self, request_ids: Iterable[str], until_us: int) -> None:
        for request_id in request_ids:
            self._next_token_us[request_id] = max(until_us, self._next_token_us.get(request_id, 0))

    # What is looked at.

    def look(
        self,
        link: StoreLink,
        routers: Iterable[SimRouter],
        executors: Iterable[SimExecutor],
        records: Mapping[str, Record],
    ) -> None:
        """Checks all bounds in the current state. Raises `BoundExceeded`."""
        look = _Look(
            self._timeline.now_us,
            Ledger.read(link),
            {router.router_id: router for router in routers},
            {executor.executor_id: executor for executor in executors},
            records,
        )
        self._note_down(look)
        lasting: dict[Hashable, Lasting] = {}
        lasting.update(self._unheld(look))
        lasting.update(self._unreserved(look))
        lasting.update(self._unwanted(look))
        lasting.update(self._unserved(look))
        lasting.update(self._lapsed(look))
        lasting.update(self._unheard(look))
        lasting.update(self._unboarded(look))
        self._check(look, lasting)
        self._check_new_work(look)
        if self._has_room:
            self._check_tokens(look)

    def _check(self, look: _Look, lasting: Mapping[Hashable, Lasting]) -> None:
        for gone in self._first_seen_us.keys() - lasting.keys():
            del self._first_seen_us[gone]
        for key, one in lasting.items():
            since_us = max(self._first_seen_us.setdefault(key, look.now_us), one.since_us)
            if one.bound_us is not None:
                _require_by(look.now_us, since_us, one.bound_us, one.what)

    def _note_down(self, look: _Look) -> None:
        """Who is dead or hung, and since when: at the latest since the look before."""
        for executor_id, executor in look.executors.items():
            if executor.process.is_alive and not executor.process.is_hung:
                self._down_us.pop(executor_id, None)
            else:
                self._down_us.setdefault(executor_id, look.now_us)
                self._calm.disturb(_executor(executor_id), look.now_us)
        if not any(not router.process.is_hung for router in look.routers.values()):
            self._calm.disturb(_router("any"), look.now_us)

    def _audited_since_us(self, executor_id: str) -> int:
        """Since when an audit of the executor can be relied on; any router may have the report to relay."""
        return max(self._calm.since_us(STORE, _executor(executor_id)), self._calm.all_since_us("router"))

    def _within(self, key: Hashable, now_us: int, *parts: Part) -> bool:
        """Returns whether these parts were well when the state began, and all the time that a call may take before."""
        began_us = self._first_seen_us.get(key, now_us)
        return self._calm.since_us(*parts) + CALL_FAILS_US + US_PER_S < began_us

    def _unheld(self, look: _Look) -> Iterable[tuple[Hashable, Lasting]]:
        """Reservations that their executor, which lives, does not hold."""
        for placement in look.ledger.placements:
            executor_id, request_id, attempt = placement
            if placement in look.held or executor_id in self._down_us:
                continue
            key = ("unheld", *placement)
            record = look.records.get(request_id)
            router = _router("any" if record is None else record.router_id)
            what = f"{executor_id} does not hold {request_id} (attempt {attempt}), for which it is reserved"
            is_served = record is not None and record.router_id in look.routers
            if is_served and self._within(key, look.now_us, STORE, router, _executor(executor_id)):
                yield key, Lasting(what, 0, AT_ONCE_US)
            else:
                yield key, Lasting(what, self._audited_since_us(executor_id), AUDIT_US + AT_ONCE_US)

    def _unreserved(self, look: _Look) -> Iterable[tuple[Hashable, Lasting]]:
        """Sequences for which nothing is reserved: to be taken in, or cancelled within two steps."""
        steps_us = MAX_STEPS * self._longest_step_us()
        for placement in look.held:
            executor_id, request_id, attempt = placement
            if placement not in look.ledger.placements and executor_id not in self._down_us:
                what = f"{executor_id} runs {request_id} (attempt {attempt}), and nothing is reserved for it"
                since_us = self._audited_since_us(executor_id)
                yield ("unreserved", *placement), Lasting(what, since_us, AUDIT_US + steps_us + AT_ONCE_US)

    def _unwanted(self, look: _Look) -> Iterable[tuple[Hashable, Lasting]]:
        """Returns sequences whose client has left or knows their end, and whose router could have reported it."""
        for executor_id, request_id, attempt in look.held:
            record = look.records.get(request_id)
            if record is None or record.outcome is None or executor_id in self._down_us:
                continue
            key = ("unwanted", executor_id, request_id, attempt)
            parts = (STORE, _router(record.router_id), _executor(executor_id))
            could_say = record.router_id in look.routers and self._within(key, look.now_us, *parts)
            what = f"{executor_id} runs {request_id}, which has ended ({record.outcome.value})"
            yield key, Lasting(what, 0, MAX_STEPS * self._longest_step_us() + AT_ONCE_US if could_say else None)

    def _unserved(self, look: _Look) -> Iterable[tuple[Hashable, Lasting]]:
        """Returns queue entries of requests that have ended or whose router is gone."""
        for request_id in look.ledger.waiting:
            record = look.records.get(request_id)
            if record is None or record.outcome is None:
                continue
            key = ("unserved", request_id)
            what = f"{request_id} has ended ({record.outcome.value}) and stands in line"
            if record.router_id not in look.routers:
                since_us = max(self._calm.since_us(STORE), self._calm.all_since_us("router"))
                yield key, Lasting(what, since_us, REAPED_US)
            else:
                # Where Redis was away when it should have left, it leaves when it comes to its turn.
                could_leave = self._within(key, look.now_us, STORE, _router(record.router_id))
                yield key, Lasting(what, 0, AT_ONCE_US if could_leave else None)

    def _lapsed(self, look: _Look) -> Iterable[tuple[Hashable, Lasting]]:
        """Leases of dead routers, and of dead or hung executors."""
        others_us = max(self._calm.since_us(STORE), self._calm.all_since_us("router"))
        for router_id in look.ledger.routers.keys() - look.routers.keys():
            yield ("router", router_id), Lasting(f"router {router_id} is dead and has a lease", others_us, REAPED_US)
        for executor_id in look.ledger.reports.keys() & self._down_us.keys():
            what = f"{executor_id} is dead or hung and has a lease"
            yield ("executor", executor_id), Lasting(what, others_us, REAPED_US)

    def _unheard(self, look: _Look) -> Iterable[tuple[Hashable, Lasting]]:
        """Executors that report and get no new work, because no router relays it."""
        for executor_id in look.executors.keys() - self._down_us.keys():
            if look.ledger.reports.get(executor_id, 0) < look.live_ms:
                what = f"{executor_id} reports and the ledger does not hear of it"
                since_us = self._calm.since_us(STORE, _executor(executor_id), _router("any"))
                yield ("unheard", executor_id), Lasting(what, since_us, RELAYED_US)

    def _unboarded(self, look: _Look) -> Iterable[tuple[Hashable, Lasting]]:
        """Room beside a line in which every request would fit. Not where one has a tenant's limit or may be a suspect,
        which needs an executor without another suspect."""
        room = [free for one, free in look.ledger.room.items() if look.ledger.reports.get(one, 0) >= look.live_ms]
        waiting = [look.streams.get(request_id) for request_id in look.ledger.waiting]
        if not room or not waiting or self._shape.limits().is_overcommitted:
            return
        for entry in waiting:
            if entry is None:
                return
            stream = entry[1]
            needed = stream.request.num_blocks(self._shape.block_size)
            if stream.request.limits.max_running is not None or stream.record.num_placements or needed > max(room):
                return
        since_us = max(self._calm.since_us(STORE), self._calm.all_since_us("router"))
        what = f"{len(waiting)} requests wait beside room for each of them: {look.ledger.room}"
        # Another line, or another placement, is another moment.
        newest = max(look.ledger.placements, key=lambda one: one[1], default=None)
        yield (
            ("unboarded", tuple(look.ledger.waiting), len(look.ledger.placements), newest),
            Lasting(what, since_us, AT_ONCE_US),
        )

    def _check_new_work(self, look: _Look) -> None:
        """Nothing was placed since the last look on who was down for 2 s by then."""
        before_us, before = self._placements_before
        self._placements_before = (look.now_us, dict(look.ledger.placements))
        # A router that hung may relay a report from before it did.
        relayed_us = max(self._calm.all_since_us("router"), self._calm.since_us(STORE))
        for placement in look.ledger.placements.keys() - before.keys():
            down_us = self._down_us.get(placement[0])
            if down_us is not None:
                what = f"{placement[1]} is placed on {placement[0]}, which is dead or hung"
                _require_by(before_us, max(down_us, relayed_us), SILENT_US + AT_ONCE_US, what)

    def _check_tokens(self, look: _Look) -> None:
        """Each stream that has begun has its next token in time."""
        for request_id, (router_id, stream) in look.streams.items():
            record = stream.record
            if record.outcome is not None or record.last_token_us is None:
                continue
            since_us = max(record.last_token_us, self._next_token_us.get(request_id, 0))
            where = stream.placement.executor_id if stream.placement is not None else "no executor"
            what = f"{request_id} (router {router_id}, {where}) has no token {record.num_tokens}"
            _require_by(look.now_us, since_us, self.next_token_us(), what)

    def next_token_us(self) -> int:
        """Returns the longest time until a token of a stream that has a seat: the whole context of every seat is
        computed first, and two more steps follow."""
        limits = self._shape.limits()
        num_steps = -(-limits.max_num_sequences * limits.context_length // limits.max_num_tokens) + MAX_STEPS
        return num_steps * self._longest_step_us() + AT_ONCE_US

    def _longest_step_us(self) -> int:
        shape, cost = self._shape, self._shape.cost
        longest_s = cost.step_s + cost.token_s * shape.max_num_tokens
        longest_s += cost.context_s * shape.num_seats * shape.context_length
        longest_s += cost.prefill_s * shape.max_num_tokens * shape.context_length
        return round(US_PER_S * (longest_s + cost.block_copy_s * shape.num_host_blocks))


def _router(router_id: str) -> Part:
    return ("router", router_id)


def _executor(executor_id: str) -> Part:
    return ("executor", executor_id)


def _on(executor: SimExecutor) -> list[str]:
    return [sequence.request_id for sequence in executor.told()]


def _require_by(now_us: int, since_us: int, bound_us: int, what: str) -> None:
    if now_us - since_us > bound_us:
        lasted_s, bound_s = (now_us - since_us) / US_PER_S, bound_us / US_PER_S
        raise BoundExceeded(f"{what}, for {lasted_s:.3f} s; the bound is {bound_s:.3f} s")
