"""The decisions of the store's scripts in plain Python: each operation by its documented behaviour.

The oracle of `test_store_model.py`. It knows no mailboxes, indexes, bounds or repeated calls:
those are how, this is what. `ledger_pool` holds what there is, `ledger_board` says who boards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from inflight.common.errors import Reason
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    Adopted,
    Attempt,
    Cancelled,
    CancelOutcome,
    CancelRequested,
    Demand,
    Dropped,
    Duplicate,
    Ending,
    ExecutorReport,
    HandBackRefusal,
    HeldSequence,
    LeaseLapsed,
    LedgerState,
    Placement,
    Queued,
    Refused,
    ReportOutcome,
)
from tests.property import ledger_adoption as adoption
from tests.property.ledger_board import board, place
from tests.property.ledger_failures import clear_failures, decide_failures, record_failure
from tests.property.ledger_pool import LEASE_MS, NO_OBSERVERS, Executor, Pool, Request, placement_blocks_of
from tests.property.ledger_refusals import impossible, refusal_of_waiting
from tests.property.ledger_tenants import SHARE_STEP, smoothed_share

AUDIT_GRACE_MS = 2000
AUDIT_INTERVAL_MS = 1000
RENEWED_MS = 250  # a lease so fresh is not renewed
LOST_MS = 30_000
MAX_GAP_MS = 3000
IDLE_TENANT_MS = 600_000


@dataclass(slots=True)
class Ledger:
    """The operations. `known` are routers that have had a lease."""

    settings: LedgerSettings
    pool: Pool = field(default_factory=Pool)
    known: set[str] = field(default_factory=set)

    def flush(self) -> None:
        """Redis was emptied."""
        told, now_ms = self.pool.told, self.pool.now_ms
        self.pool = Pool(now_ms, told=told)

    def register(self, router_id: str) -> None:
        """Model of renew.lua."""
        until_ms = self.pool.routers.get(router_id)
        if until_ms is None and router_id in self.known:
            self.pool.tell(router_id, LeaseLapsed())
        self.known.add(router_id)
        if until_ms is None or until_ms - self.pool.now_ms < LEASE_MS - RENEWED_MS:
            self.pool.routers[router_id] = self.pool.now_ms + LEASE_MS

    # Requests --------------------------------------------------------------------------------------------------

    def submit(self, router_id: str, demand: Demand) -> Any:
        """Model of submit.lua."""
        self.register(router_id)
        pool, name, attempt = self.pool, demand.request_id, demand.last_attempt
        if name in pool.requests:
            return self._repeat(pool.requests[name], router_id, demand)
        if pool.is_tombstoned(name):
            again = adoption.repeat_of_ended(pool.endings.get(name), demand)
            if not isinstance(again, int):
                return again
            attempt = max(attempt, again)
        pool.settings = self.settings
        request = Request(
            demand,
            router_id,
            pool.num_arrivals,
            pool.now_ms,
            attempt,
            demand.priority_class,
            demand.digest,
            demand.output_tokens,
        )
        pool.num_arrivals += 1
        outcome = self._take_rates(request) or self._admit(router_id, request)
        if isinstance(outcome, Placement | Queued):  # what it was before is of no interest any more
            pool.ended_ms.pop(name, None)
            pool.endings.pop(name, None)
        return outcome

    def _repeat(self, known: Request, router_id: str, demand: Demand) -> Any:
        name = demand.request_id
        if adoption.is_adopting(self.pool, known, router_id, demand):
            was_told = known.owner_id != router_id or demand.last_attempt >= known.attempt
            adoption.take_over(self.pool, router_id, known)
            if known.digest is not None or known.state is not LedgerState.PLACED:
                known.digest = demand.digest
            known.is_adopted = known.state is LedgerState.PLACED
            if known.state is LedgerState.LOST:
                if was_told:
                    record_failure(self.pool, known, progressed=demand.output_tokens > known.output)
                self.pool.set_placement_blocks(known, placement_blocks_of(demand))
                self._requeue(router_id, known, demand.output_tokens)
                board(self.pool, router_id)
            return self._own_result(router_id, name)
        if adoption.is_own_repeat(known, router_id, demand) and known.state is not LedgerState.LOST:
            return self._standing(name)
        assert known.state
        return Duplicate(known.state)

    def _take_rates(self, request: Request) -> Refused | None:
        """Nothing of a request that is refused for its rate is remembered."""
        demand, limits = request.demand, request.demand.limits
        if demand.last_attempt == 0 and demand.output_tokens == 0:
            known = self.pool.tenants.get(demand.tenant)
            refusal = known.refusal_by_rates(limits, request.tokens, self.pool.now_ms) if known else None
            if refusal:
                return Refused(Reason.RATE_LIMITED, *refusal)
            tenant = self.pool.tenant(demand.tenant)
            tenant.requests.take(self.pool.now_ms, 1, limits.requests_per_s)
            tenant.tokens.take(self.pool.now_ms, request.tokens, limits.tokens_per_s)
            request.rated = None if limits.tokens_per_s is None else request.tokens
        self.pool.tenant(demand.tenant).limits = limits
        self.pool.update_active()
        return None

    def _admit(self, router_id: str, request: Request) -> Any:
        pool, name = self.pool, request.demand.request_id
        tenant = pool.tenant(request.demand.tenant)
        executor_id = pool.choose(name, request)
        is_first = not pool.waiting() and pool.running(request.demand.tenant) < tenant.max_running
        if not executor_id and (refused := impossible(pool, request)):
            self._give_back_rates(request)
            return refused
        pool.requests[name] = request
        if executor_id and is_first and not pool.is_dead(request):
            place(pool, name, executor_id)
            return self._standing(name)
        pool.enqueue(name)
        if executor_id:
            board(pool, router_id)
        if request.state is LedgerState.WAITING and name in pool.requests:
            if refused := refusal_of_waiting(pool, request):
                pool.forget(name)
                self._give_back_rates(request)
                return refused
            wait_ms = pool.estimated_wait_ms(name)
            if wait_ms is not None:
                request.estimate = (wait_ms, tenant.correction)
        return self._own_result(router_id, name)

    def _give_back_rates(self, request: Request) -> None:
        """As if it had not been taken; the bucket cannot have been full meanwhile."""
        demand = request.demand
        tenant = self.pool.tenant(demand.tenant)
        if request.demand.last_attempt == 0 and request.output == 0:
            tenant.requests.take(self.pool.now_ms, -1, demand.limits.requests_per_s)
            tenant.return_tokens(request.rated or 0)

    def settle(self, router_id: str, endings: Iterable[Attempt | Ending]) -> int:
        """Model of settle.lua."""
        ended: dict[str, bool] = {}
        for one in endings:
            request = self.pool.requests.get(one.request_id)
            if request is None:
                self.pool.end(one.request_id, was_cancelled=False)
            elif self._may_settle(router_id, request, one):
                if isinstance(one, Ending) and one.request_id not in ended:
                    self._settle_usage(request, one)
                ended.setdefault(one.request_id, isinstance(one, Ending) and one.cancelled)
        for name, was_cancelled in ended.items():  # who comes back is lifted when all is settled
            self.pool.end(name, was_cancelled=was_cancelled)
        board(self.pool, router_id)
        return len(ended)

    def _may_settle(self, router_id: str, request: Request, one: Attempt | Ending) -> bool:
        if request.attempt != one.attempt or request.state is LedgerState.WAITING:
            return False
        is_elsewhere = request.owner_id != router_id and self.pool.lives(request.owner_id, router_id)
        return not (isinstance(one, Ending) and one.cancelled and is_elsewhere)

    def _settle_usage(self, request: Request, ending: Ending) -> None:
        if ending.computed_tokens is None or ending.output_tokens is None:
            return
        demand = request.demand
        self.pool.tenant(demand.tenant).settle(
            request.charge, request.rated, ending.computed_tokens, ending.output_tokens, request.output_tokens
        )
        if request.output_tokens > 0:
            self.pool.estimates.num_outputs += 1
            step = max(SHARE_STEP, 1 / self.pool.estimates.num_outputs)
            share = smoothed_share(self.pool.output_share, ending.output_tokens, request.output_tokens, step)
            self.pool.output_share = share
        if ending.by_itself and self.pool.overcommits and demand.max_tokens:
            self.pool.lengths.learn(demand.tenant, demand.max_tokens, ending.output_tokens)

    def cancel(self, router_id: str, name: str, is_own: bool = False) -> CancelOutcome:
        """Model of cancel.lua."""
        pool = self.pool
        request = pool.requests.get(name)
        if request is None:
            return CancelOutcome(LedgerState.ENDED if pool.is_tombstoned(name) else None)
        told = request.owner_id != router_id and pool.lives(request.owner_id, router_id)
        if is_own and told:
            return CancelOutcome(None)
        is_placed = request.state is LedgerState.PLACED
        if told:
            pool.tell(request.owner_id, CancelRequested(name, request.attempt) if is_placed else Cancelled(name))
        if not is_placed:
            pool.end(name, was_cancelled=True)
            if request.charge is None:
                pool.tenant(request.demand.tenant).return_tokens(request.rated or 0)
        board(pool, router_id)
        return CancelOutcome(request.state, request.placement if is_placed else None, request.owner_id or None, told)

    def adopt(self, router_id: str, name: str) -> Adopted | LedgerState | None:
        """Model of adopt.lua."""
        self.register(router_id)
        return adoption.adopt(self.pool, router_id, name)

    def clear_suspect(self, router_id: str, one: Attempt) -> None:
        """Model of clear_suspect.lua."""
        request = self.pool.requests.get(one.request_id)
        if request and request.state is LedgerState.PLACED and request.attempt == one.attempt and request.failures:
            clear_failures(request)
            board(self.pool, router_id)

    def find_forgotten(self, router_id: str, waiting: Iterable[Attempt]) -> frozenset[str]:
        """Model of verify.lua."""
        return frozenset(one.request_id for one in waiting if self._has_forgotten(router_id, one))

    def _has_forgotten(self, router_id: str, one: Attempt) -> bool:
        request = self.pool.requests.get(one.request_id)
        if request is None or request.owner_id != router_id:
            return True
        return request.state is not LedgerState.WAITING and request.attempt <= one.attempt

    def hand_back(
        self,
        router_id: str,
        one: Attempt,
        max_attempts: int,
        why: str,
        output_tokens: int,
        progressed: bool,
        placement_blocks: int | None = None,
    ) -> Any:
        """Model of hand_back.lua; `why` is one of WHYS."""
        self.register(router_id)
        pool, name = self.pool, one.request_id
        request = pool.requests.get(name)
        if request is None:
            return HandBackRefusal.STALE if pool.is_tombstoned(name) else HandBackRefusal.UNKNOWN
        is_waiting = request.state is LedgerState.WAITING
        is_anothers = request.owner_id != router_id and (is_waiting or pool.lives(request.owner_id, router_id))
        if request.attempt != one.attempt or is_anothers:
            return HandBackRefusal.STALE
        if not is_waiting:
            if request.state is LedgerState.PLACED and why != "preempted" and request.placement:
                pool.executors[request.placement.executor_id].suspended = True
            if progressed or why in ("lost", "stood still"):
                record_failure(pool, request, progressed=progressed, is_stall=why == "stood still")
                refused = self._judge(router_id, name, max_attempts)
                if refused:
                    board(pool, router_id)
                    return refused
            if placement_blocks is not None:
                pool.set_placement_blocks(request, placement_blocks)
            self._requeue(router_id, request, output_tokens)
        board(pool, router_id)
        return self._own_result(router_id, name)

    def _judge(self, router_id: str, name: str, max_attempts: int) -> HandBackRefusal | None:
        pool, request = self.pool, self.pool.requests[name]
        decide_failures(pool, request)
        num_stalls = sum(one.stalled for one in request.undecided)
        num_deaths = request.failures - len(request.undecided)
        if num_deaths >= max_attempts or num_stalls >= max_attempts:
            pool.end(name, was_cancelled=False)
            return HandBackRefusal.EXHAUSTED if num_deaths >= max_attempts else HandBackRefusal.STALLED
        if request.failures - num_stalls >= max_attempts:
            request.owner_id, request.state, request.lost_ms = router_id, LedgerState.LOST, pool.now_ms
            pool.update_active()
            return HandBackRefusal.UNDECIDED
        return None

    def _requeue(self, router_id: str, request: Request, output_tokens: int) -> None:
        request.owner_id, request.placement, request.reserved = router_id, None, None
        request.output = max(request.output, output_tokens)
        self.pool.enqueue(request.demand.request_id)

    # Executors and leases --------------------------------------------------------------------------------------

    def report(self, router_id: str, report: ExecutorReport) -> ReportOutcome:
        """Model of report.lua."""
        pool, name = self.pool, report.executor_id
        known = pool.executors.get(name)
        if known and report.generation == known.report.generation and report.seq <= known.report.seq:
            return ReportOutcome(taken=False)
        has_lease = known and pool.now_ms - known.last_report_ms <= LEASE_MS
        if known and has_lease and report.generation < known.report.generation:
            return ReportOutcome(taken=False)
        may_make_room = not known or not pool.takes_work(name) or _may_make_room(known.report, report)
        if known and report.generation != known.report.generation:
            for one in pool.placed_on(name):
                pool.lose(one, router_id)
            known, may_make_room = None, True
        audited_ms = known.audited_ms if known else -AUDIT_INTERVAL_MS
        prefilled_ms = known.prefilled_ms if known else 0.0
        executor = pool.executors[name] = Executor(report, pool.now_ms, audited_ms, prefilled_ms=prefilled_ms)
        pool.overcommits |= report.reserve_quantile < 1
        pool.estimates.observe_speeds(report, is_any_waiting=bool(pool.waiting()))
        superseded: list[Attempt] = []
        if pool.now_ms - audited_ms >= AUDIT_INTERVAL_MS:
            executor.audited_ms = pool.now_ms
            placed = self._placed_on(name)
            superseded = self._audit(report, router_id)
            may_make_room |= self._placed_on(name) != placed
        if may_make_room:
            board(pool, router_id)
        return ReportOutcome(taken=True, superseded=tuple(superseded))

    def _placed_on(self, executor_id: str) -> set[tuple[str, int]]:
        return {(one, self.pool.requests[one].attempt) for one in self.pool.placed_on(executor_id)}

    def _audit(self, report: ExecutorReport, caller_id: str) -> list[Attempt]:
        """What the executor does not hold is lost; what was not placed there is adopted, or named as superseded."""
        pool, held = self.pool, {(one.request_id, one.attempt) for one in report.held}
        matched = set()
        for name in pool.placed_on(report.executor_id):
            request = pool.requests[name]
            if (name, request.attempt) in held:
                matched.add(name)
            elif pool.now_ms - request.placed_ms > AUDIT_GRACE_MS:
                pool.lose(name, caller_id, executor_lives=True)
        superseded = []
        for one in report.held:
            known = pool.requests.get(one.request_id)
            if one.request_id in matched:
                continue
            if known and known.attempt >= one.attempt:
                superseded.append(Attempt(one.request_id, one.attempt))
            elif not known and pool.is_tombstoned(one.request_id):
                if pool.now_ms - pool.ended_ms[one.request_id] > AUDIT_GRACE_MS:
                    superseded.append(Attempt(one.request_id, one.attempt))
            else:
                if not known:
                    self._take_in(one)
                clear_failures(pool.requests[one.request_id])  # it lost earlier attempts than this one
                pool.seat(one.request_id, report.executor_id, one.attempt, one.blocks)
        return superseded

    def _take_in(self, held: HeldSequence) -> None:
        """A request that only its executor knows: without a tenant, and ownerless until a router hands it back."""
        pool, name = self.pool, held.request_id
        demand = Demand(name, 2, held.blocks, tenant="", block_size=1, adapter=held.adapter)
        pool.requests[name] = Request(demand, NO_OBSERVERS, pool.num_arrivals, pool.now_ms, 0, 2, None, charge=0)
        pool.num_arrivals += 1

    def reap(self, router_id: str) -> None:
        """Model of reap.lua."""
        self.register(router_id)
        pool = self.pool
        self._forget_idle_tenants()
        last_ms, since_ms = pool.attended or (pool.now_ms - MAX_GAP_MS - 1, 0)
        since_ms = pool.now_ms if pool.now_ms - last_ms > MAX_GAP_MS else since_ms
        pool.attended = (pool.now_ms, since_ms)
        if pool.now_ms - since_ms > LEASE_MS:
            self._reap_leases(router_id)
        board(pool, router_id)

    def _reap_leases(self, router_id: str) -> None:
        pool = self.pool
        for gone in [name for name, until_ms in pool.routers.items() if until_ms < pool.now_ms]:
            del pool.routers[gone]
            for name in pool.waiting():
                if pool.requests[name].owner_id == gone:
                    pool.forget(name)
        for gone in [name for name, one in pool.executors.items() if pool.now_ms - one.last_report_ms > LEASE_MS]:
            for name in pool.placed_on(gone):
                pool.lose(name, router_id)
            for name in [one for one in pool.claims if pool.requests[one].claim == gone]:
                pool.unclaim(name)
            del pool.executors[gone]
        for name, request in list(pool.requests.items()):
            if request.state is LedgerState.LOST and pool.now_ms - request.lost_ms > LOST_MS:
                pool.forget(name)

    def _forget_idle_tenants(self) -> None:
        pool = self.pool
        for name, tenant in list(pool.tenants.items()):
            last_ms = max(tenant.used_ms, tenant.tokens.full_ms, tenant.requests.full_ms)
            is_idle = not pool.waiting(name) and not pool.running(name)
            if is_idle and pool.now_ms - last_ms > IDLE_TENANT_MS:
                del pool.tenants[name]
                if pool.overcommits and name:
                    pool.lengths.forget(name)

    # Results ---------------------------------------------------------------------------------------------------

    def _standing(self, name: str) -> Placement | Queued | Adopted:
        request = self.pool.requests[name]
        if request.state is LedgerState.PLACED:
            placement = adoption.placement_of(request)
            return Adopted(placement, ended=False) if request.is_adopted else placement
        return Queued(self.pool.num_ahead(name), self.pool.estimated_wait_ms(name))

    def _own_result(self, router_id: str, name: str) -> Any:
        """What the caller was told of its own request is the result, and not told again."""
        told = self.pool.told.get(router_id, [])
        own = [one for one in told if isinstance(one, Placement | Dropped) and one.request_id == name]
        if not own:
            return self._standing(name)
        told.remove(own[-1])
        return own[-1]


def _may_make_room(last: ExecutorReport, report: ExecutorReport) -> bool:
    """Whether more may fit on the executor than by its last report, or what fits there has changed."""
    if report.budget_blocks > last.budget_blocks:
        return True
    return (
        last.total_blocks,
        last.budget_sequences,
        last.accepting,
        last.reserve_quantile,
        last.ends_at_reservation,
        last.num_adapter_slots,
        last.adapters if last.num_adapter_slots else (),
    ) != (
        report.total_blocks,
        report.budget_sequences,
        report.accepting,
        report.reserve_quantile,
        report.ends_at_reservation,
        report.num_adapter_slots,
        report.adapters if report.num_adapter_slots else (),
    )
