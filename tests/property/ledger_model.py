"""What the store's scripts decide, in plain Python: the whole ledger in two dicts, every sum and order by definition.

The oracle of `test_store_model.py`. It knows no mailboxes, indexes, bounds or repeated calls:
those are how, this is what.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.errors import Reason
from router.store.types import (
    Attempt,
    CancelAsked,
    Cancelled,
    CancelOutcome,
    Demand,
    Dropped,
    DropReason,
    Duplicate,
    ExecutorReport,
    HandBackRefusal,
    LeaseLapsed,
    Lost,
    Placement,
    Queued,
    Refused,
    ReportOutcome,
    RequestState,
    StoreEvent,
)

SILENT_MS = 2000
LEASE_MS = 5000
AUDIT_GRACE_MS = 2000
AUDIT_INTERVAL_MS = 1000
TOMBSTONE_MS = 60_000
LOST_MS = 30_000
MAX_GAP_MS = 3000


@dataclass(slots=True)
class Executor:
    """An executor by its last report."""

    report: ExecutorReport
    last_report_ms: int
    audited_ms: int
    suspended: bool = False


@dataclass(slots=True)
class Request:
    """A request that has not ended. `placement` is the latest, where it still says something."""

    demand: Demand
    owner_id: str
    deadline_ms: int | None
    arrival: int
    attempt: int
    state: RequestState = RequestState.WAITING
    rejections: int = 0
    placement: Placement | None = None
    since_ms: int = 0
    has_output: bool = False

    @property
    def order(self) -> tuple[int, float, int]:
        """Its place in line."""
        deadline_ms = float("inf") if self.deadline_ms is None else self.deadline_ms
        return (self.demand.priority_class, deadline_ms, self.arrival)


@dataclass(slots=True)
class Ledger:
    """The pool. `told` collects, per router, what it is told; the result of a call is not told again."""

    max_waiting: int
    now_ms: int = 0
    executors: dict[str, Executor] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    ended_ms: dict[str, int] = field(default_factory=dict)
    routers: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    told: dict[str, list[StoreEvent]] = field(default_factory=dict)
    num_arrivals: int = 0
    attended: tuple[int, int] | None = None

    # What holds ------------------------------------------------------------------------------------------------

    def line(self) -> list[str]:
        """The ids that wait, first to last."""
        waiting = [name for name, one in self.requests.items() if one.state is RequestState.WAITING]
        return sorted(waiting, key=lambda name: self.requests[name].order)

    def placed_on(self, executor_id: str) -> list[str]:
        """The ids with a reservation there."""
        return sorted(
            name
            for name, one in self.requests.items()
            if one.state is RequestState.PLACED and one.placement and one.placement.executor_id == executor_id
        )

    def reserved(self, executor_id: str) -> tuple[int, int]:
        """Blocks and sequences promised there."""
        demands = [self.requests[name].demand for name in self.placed_on(executor_id)]
        return sum(one.blocks for one in demands), sum(one.sequences for one in demands)

    def available(self, executor_id: str) -> tuple[int, int] | None:
        """Blocks and sequences that can be promised there; None where nothing may board."""
        executor = self.executors[executor_id]
        is_live = self.now_ms - executor.last_report_ms <= SILENT_MS
        if not (is_live and executor.report.accepting) or executor.suspended:
            return None
        blocks, sequences = self.reserved(executor_id)
        return executor.report.budget_blocks - blocks, executor.report.budget_sequences - sequences

    def is_tombstoned(self, name: str) -> bool:
        """Whether the id ended lately."""
        return name in self.ended_ms and self.now_ms - self.ended_ms[name] <= TOMBSTONE_MS

    # Operations ------------------------------------------------------------------------------------------------

    def submit(self, router_id: str, demand: Demand) -> Placement | Queued | Refused | Duplicate | Dropped:
        """Model of submit.lua."""
        self.register(router_id)
        name = demand.request_id
        known = self.requests.get(name)
        if known:
            asked = (demand.priority_class, demand.deadline_ms, demand.blocks, demand.sequences)
            had = known.demand
            same = asked == (had.priority_class, had.deadline_ms, had.blocks, had.sequences)
            if same and known.owner_id == router_id and known.state is not RequestState.LOST:
                return self._standing(name)
            return Duplicate(known.state)
        if self.is_tombstoned(name):
            return Duplicate(RequestState.ENDED)
        if not any(self.now_ms - one.last_report_ms <= LEASE_MS for one in self.executors.values()):
            return Refused(Reason.NO_EXECUTOR)
        if not self._fits_somewhere(demand):
            return Refused(Reason.NEVER_FITS)
        deadline_ms = None if demand.deadline_ms is None else self.now_ms + demand.deadline_ms
        self.num_arrivals += 1
        self.requests[name] = Request(demand, router_id, deadline_ms, self.num_arrivals, demand.last_attempt)
        self._board(router_id)
        if self.requests[name].state is RequestState.WAITING and len(self.line()) > self.max_waiting:
            del self.requests[name]
            return Refused(Reason.QUEUE_FULL)
        return self._own_result(router_id, name)

    def settle(self, router_id: str, attempts: Iterable[Attempt]) -> int:
        """Model of settle.lua."""
        num_settled = 0
        for one in attempts:
            request = self.requests.get(one.request_id)
            if request is None:
                self._end(one.request_id)
            elif request.attempt == one.attempt and request.state is not RequestState.WAITING:
                self._end(one.request_id)
                num_settled += 1
        self._board(router_id)
        return num_settled

    def cancel(self, router_id: str, name: str) -> CancelOutcome:
        """Model of cancel.lua."""
        request = self.requests.get(name)
        if request is None:
            return CancelOutcome(RequestState.ENDED if self.is_tombstoned(name) else None)
        told = request.owner_id != router_id and self._lives(request.owner_id, router_id)
        is_placed = request.state is RequestState.PLACED
        if told:
            event = CancelAsked(name, request.attempt) if is_placed else Cancelled(name)
            self._tell(request.owner_id, event)
        if not is_placed:
            self._end(name)
        self._board(router_id)
        return CancelOutcome(request.state, request.placement if is_placed else None, request.owner_id or None, told)

    def hand_back(
        self, router_id: str, name: str, attempt: int, max_attempts: int, rejected: bool, has_output: bool
    ) -> Placement | Queued | Dropped | HandBackRefusal:
        """Model of hand_back.lua."""
        self.register(router_id)
        request = self.requests.get(name)
        if request is None:
            return HandBackRefusal.STALE if self.is_tombstoned(name) else HandBackRefusal.UNKNOWN
        is_waiting = request.state is RequestState.WAITING
        if request.attempt != attempt or (is_waiting and request.owner_id != router_id):
            return HandBackRefusal.STALE
        if request.state is RequestState.PLACED and request.placement:
            self.executors[request.placement.executor_id].suspended = True
        if not is_waiting:
            request.rejections += rejected
            if attempt - request.rejections >= max_attempts:
                self._end(name)
                self._board(router_id)
                return HandBackRefusal.EXHAUSTED
            request.state, request.owner_id, request.placement = RequestState.WAITING, router_id, None
            request.has_output = has_output
        self._board(router_id)
        return self._own_result(router_id, name)

    def _is_expired(self, request: Request) -> bool:
        is_late = request.deadline_ms is not None and request.deadline_ms < self.now_ms
        return is_late and not request.has_output

    def report(self, router_id: str, report: ExecutorReport) -> ReportOutcome:
        """Model of report.lua."""
        name = report.executor_id
        known = self.executors.get(name)
        if known and report.generation == known.report.generation and report.seq <= known.report.seq:
            return ReportOutcome(taken=False)
        has_lease = known and self.now_ms - known.last_report_ms <= LEASE_MS
        if known and has_lease and report.generation < known.report.generation:
            return ReportOutcome(taken=False)
        if known and report.generation != known.report.generation:
            self._lose_all(name, router_id)
            known = None
        audited_ms = known.audited_ms if known else -AUDIT_INTERVAL_MS
        executor = self.executors[name] = Executor(report, self.now_ms, audited_ms)
        superseded: tuple[Attempt, ...] = ()
        if self.now_ms - audited_ms >= AUDIT_INTERVAL_MS:
            executor.audited_ms = self.now_ms
            superseded = self._audit(report, router_id)
        self._board(router_id)
        return ReportOutcome(taken=True, superseded=superseded)

    def reap(self, router_id: str) -> None:
        """Model of reap.lua."""
        self.register(router_id)
        last_ms, since_ms = self.attended or (self.now_ms - MAX_GAP_MS - 1, 0)
        since_ms = self.now_ms if self.now_ms - last_ms > MAX_GAP_MS else since_ms
        self.attended = (self.now_ms, since_ms)
        if self.now_ms - since_ms > LEASE_MS:
            for name, executor in sorted(self.executors.items()):
                if self.now_ms - executor.last_report_ms > LEASE_MS:
                    self._lose_all(name, router_id)
                    del self.executors[name]
            for name, until_ms in sorted(self.routers.items()):
                if until_ms < self.now_ms:
                    self._forget_router(name)
            for name, request in sorted(self.requests.items()):
                if request.state is RequestState.LOST and self.now_ms - request.since_ms > LOST_MS:
                    del self.requests[name]
        self._board(router_id)

    def register(self, router_id: str) -> None:
        """Model of renew.lua."""
        if router_id not in self.routers and router_id in self.known:
            self._tell(router_id, LeaseLapsed())
        self.known.add(router_id)
        self.routers[router_id] = self.now_ms + LEASE_MS

    # Parts -----------------------------------------------------------------------------------------------------

    def _board(self, caller_id: str) -> None:
        for name in self.line():
            request = self.requests[name]
            seats = {one: self.available(one) for one in self.executors}
            room = {
                one: free[0]
                for one, free in seats.items()
                if free and free[0] >= request.demand.blocks and free[1] >= request.demand.sequences
            }
            if not self._lives(request.owner_id, caller_id):
                del self.requests[name]
            elif self._is_expired(request):
                self._end(name)
                self._tell(request.owner_id, Dropped(name, DropReason.EXPIRED))
            elif room:
                self._seat(name, min(room, key=lambda one: (-room[one], one)), request.attempt + 1)
                assert request.placement
                self._tell(request.owner_id, request.placement)
            elif self.executors and not self._fits_somewhere(request.demand):
                self._end(name)
                self._tell(request.owner_id, Dropped(name, DropReason.NEVER_FITS))
            else:
                return

    def _seat(self, name: str, executor_id: str, attempt: int) -> None:
        request = self.requests[name]
        generation = self.executors[executor_id].report.generation
        request.state, request.attempt, request.since_ms = RequestState.PLACED, attempt, self.now_ms
        request.placement = Placement(name, attempt, executor_id, generation)

    def _fits_somewhere(self, demand: Demand) -> bool:
        return any(
            one.report.total_blocks >= demand.blocks and one.report.budget_sequences >= demand.sequences
            for one in self.executors.values()
        )

    def _audit(self, report: ExecutorReport, caller_id: str) -> tuple[Attempt, ...]:
        held = {(one.request_id, one.attempt) for one in report.held}
        matched = set()
        for name in self.placed_on(report.executor_id):
            request = self.requests[name]
            if (name, request.attempt) in held:
                matched.add(name)
            elif self.now_ms - request.since_ms > AUDIT_GRACE_MS:
                self._lose(name, caller_id)
        superseded = []
        for one in report.held:
            known = self.requests.get(one.request_id)
            if one.request_id in matched:
                continue
            if known and known.attempt < one.attempt:
                self._seat(one.request_id, report.executor_id, one.attempt)
            elif known or self.is_tombstoned(one.request_id):
                is_fresh = not known and self.now_ms - self.ended_ms[one.request_id] <= AUDIT_GRACE_MS
                superseded += [] if is_fresh else [Attempt(one.request_id, one.attempt)]
            else:
                self.num_arrivals += 1
                demand = Demand(one.request_id, 2, one.blocks)
                self.requests[one.request_id] = Request(demand, "", None, self.num_arrivals, one.attempt)
                self._seat(one.request_id, report.executor_id, one.attempt)
        return tuple(superseded)

    def _lose_all(self, executor_id: str, caller_id: str) -> None:
        for name in self.placed_on(executor_id):
            self._lose(name, caller_id)

    def _lose(self, name: str, caller_id: str) -> None:
        request = self.requests[name]
        assert request.placement
        if not self._lives(request.owner_id, caller_id):
            del self.requests[name]
            return
        request.state, request.since_ms = RequestState.LOST, self.now_ms
        was = request.placement
        self._tell(request.owner_id, Lost(name, was.attempt, was.executor_id, was.generation))

    def _end(self, name: str) -> None:
        self.requests.pop(name, None)
        self.ended_ms[name] = self.now_ms

    def _forget_router(self, router_id: str) -> None:
        del self.routers[router_id]
        for name in self.line():
            if self.requests[name].owner_id == router_id:
                del self.requests[name]

    def _lives(self, owner_id: str, caller_id: str) -> bool:
        return owner_id in self.routers or (owner_id == caller_id and owner_id != "")

    def _tell(self, router_id: str, event: StoreEvent) -> None:
        self.told.setdefault(router_id, []).append(event)

    def _standing(self, name: str) -> Placement | Queued:
        placement = self.requests[name].placement
        return placement or Queued(self.line().index(name))

    def _own_result(self, router_id: str, name: str) -> Placement | Queued | Dropped:
        own = [
            event
            for event in self.told.get(router_id, [])
            if isinstance(event, Placement | Dropped) and event.request_id == name
        ]
        if not own:
            return self._standing(name)
        self.told[router_id].remove(own[-1])
        assert isinstance(own[-1], Placement | Dropped)
        return own[-1]
