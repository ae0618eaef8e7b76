"""Boarding in plain Python: fair order, overtaken requests, executors kept for them, and preemption. Part of
`ledger_model`.

The head of the queue is examined only while some executor has a seat to offer, is kept for a request, or may be asked
to give a seat up.
"""

from __future__ import annotations

from enum import Enum, auto

from inflight.router.ledger.types import Dropped, DropReason, LedgerState, PreemptRequested
from tests.property.ledger_estimates import CORRECTION_STEP
from tests.property.ledger_pool import Pool, Request

MAX_PASSED = 4
MAX_VICTIMS = 8
MAX_CLAIMS = 8
PREEMPTION_MS = 2000


class Dealt(Enum):
    """What became of the next in line."""

    LEFT = auto()
    PASS = auto()
    HOLD = auto()


def board(pool: Pool, caller_id: str) -> None:
    """Places as many as fit."""
    _age(pool)
    passed: list[str] = []
    while _may_offer(pool):
        name = _next_in_queue(pool, passed)
        if name is None:
            return
        match _deal(pool, name, passed, caller_id):
            case Dealt.HOLD:
                return
            case Dealt.PASS:
                if len(passed) == MAX_PASSED:
                    return
                passed.append(name)


def _age(pool: Pool) -> None:
    """Who has waited long moves up a class, and keeps its place among those of its deadline."""
    for name in pool.waiting():
        request = pool.requests[name]
        if request.class_ > 1 and request.age_ms <= pool.now_ms:
            request.class_, request.age_ms = request.class_ - 1, pool.now_ms + pool.settings.age_ms
            pool.tenant(request.demand.tenant)


def _may_offer(pool: Pool) -> bool:
    return bool(pool.open_executors() or pool.claims or _may_preempt(pool))


def _may_preempt(pool: Pool) -> bool:
    """Without the setting only the last class gives way, and to others only."""
    if not pool.settings.preempt_for_priority and all(pool.requests[name].class_ == 3 for name in pool.waiting()):
        return False
    return any(one.may_be_preempted for one in _placed(pool).values())


def _placed(pool: Pool) -> dict[str, Request]:
    return {name: one for name, one in pool.requests.items() if one.state is LedgerState.PLACED}


def _next_in_queue(pool: Pool, passed: list[str]) -> str | None:
    """For whom room is kept; else by class, by what its tenant was served, by its place in the tenant's line."""
    for name in pool.claims:
        if _has_what_is_kept(pool, name):
            return name
    for class_ in (1, 2, 3):
        for _, tenant in sorted((counter, tenant) for tenant, counter in pool.active(class_).items()):
            for name in pool.line(tenant, class_):
                if name not in passed:
                    return name
    return None


def _has_what_is_kept(pool: Pool, name: str) -> bool:
    request = pool.requests[name]
    tenant, executor_id = request.demand.tenant, request.claim or ""
    may_run = pool.running(tenant) < pool.tenants[tenant].max_running
    return may_run and pool.takes_work(executor_id) and pool.has_room(executor_id, request)


def _deal(pool: Pool, name: str, passed: list[str], caller_id: str) -> Dealt:
    request = pool.requests[name]
    if not pool.lives(request.owner_id, caller_id):
        pool.forget(name)
        return Dealt.LEFT
    if pool.is_dead(request):
        return _drop(pool, name, DropReason.EXPIRED)
    executor_id = pool.choose(name, request)
    if executor_id is None:
        return _handle_head_of_line(pool, name, caller_id)
    pool.estimates.observe_placement(pool.now_ms, request.tokens)
    if request.estimate and request.attempt == 0:
        ratio = pool.estimates.observe_wait(pool.now_ms - request.since_ms, *request.estimate)
        tenant = pool.tenant(request.demand.tenant)
        tenant.correction += CORRECTION_STEP * (ratio - tenant.correction)
    place(pool, name, executor_id)
    assert request.placement
    pool.tell(request.owner_id, request.placement)
    for one in passed:
        pool.requests[one].passed += 1
    may_go_on = [_may_be_passed(pool, one) for one in passed]
    return Dealt.LEFT if all(may_go_on) else Dealt.HOLD


def place(pool: Pool, name: str, executor_id: str) -> None:
    """Gives the request its next attempt there; the executor will hold its prompt's beginnings."""
    request = pool.requests[name]
    pool.expect_prefill(request, executor_id)
    pool.seat(name, executor_id, request.attempt + 1, pool.needed_blocks(request, executor_id))
    pool.remember_prefixes(request, executor_id)


def _drop(pool: Pool, name: str, reason: DropReason) -> Dealt:
    request = pool.requests[name]
    pool.end(name, was_cancelled=True)
    if request.charge is None:
        pool.tenant(request.demand.tenant).return_tokens(request.rated or 0)
    pool.tell(request.owner_id, Dropped(name, reason))
    return Dealt.LEFT


def _may_be_passed(pool: Pool, name: str) -> bool:
    """Whether others may go first once more, or an executor is kept."""
    request = pool.requests[name]
    return bool(request.claim) or request.passed < pool.settings.max_bypass or _claim(pool, name)


def _handle_head_of_line(pool: Pool, name: str, caller_id: str) -> Dealt:
    request = pool.requests[name]
    if pool.executors and not pool.fits_somewhere(request):
        return _drop(pool, name, DropReason.NEVER_FITS)
    if pool.settings.preempt_for_priority or request.demand.priority_class < 3:
        _ask_others(pool, name, caller_id)
    if request.claim and not (pool.takes_work(request.claim) and pool.could_hold(request.claim, request)):
        pool.unclaim(name)
    return Dealt.PASS if _may_be_passed(pool, name) else Dealt.HOLD


def _claim(pool: Pool, name: str) -> bool:
    """Keeps the executor for it that is nearest to having room. False where there is none to be kept."""
    request, claimed = pool.requests[name], pool.claimed()
    fit = [
        one for one in pool.executors if pool.takes_work(one) and one not in claimed and pool.could_hold(one, request)
    ]
    if not fit or len(claimed) >= MAX_CLAIMS:
        return False
    totals = {one: pool.executors[one].report.total_blocks for one in fit}
    pool.requests[name].claim = min(fit, key=lambda one: (-pool.free(one)[0], totals[one], one))
    pool.claims.append(name)
    return True


def _ask_others(pool: Pool, asking: str, caller_id: str) -> None:
    """Asks the newest of lower classes on one executor, not kept for another, to give way, if that makes room."""
    request, claimed = pool.requests[asking], pool.claimed()
    if request.asked_ms is not None and pool.now_ms - request.asked_ms < PREEMPTION_MS:
        return
    lower = {name: one for name, one in _placed(pool).items() if one.may_be_preempted and one.class_ > request.class_}
    newest = sorted(lower, key=lambda name: (lower[name].class_, lower[name].placed_ms, name), reverse=True)
    chosen: str | None = None
    victims: list[str] = []
    for name in newest[:MAX_VICTIMS]:
        placement = lower[name].placement
        assert placement
        executor_id = placement.executor_id
        if chosen not in (None, executor_id) or not pool.takes_work(executor_id):
            continue
        if pool.would_share_blame(executor_id, request) or not pool.serves(executor_id, request):
            continue
        if claimed.get(executor_id, asking) != asking or not pool.lives(lower[name].owner_id, caller_id):
            continue
        chosen = executor_id
        if (
            request.demand.adapter
            and _has_room_after(pool, request, chosen, victims)
            and not lower[name].demand.adapter
        ):
            continue  # it needs a slot, which this one does not free
        victims.append(name)
        if _has_room_after(pool, request, chosen, victims) and pool.has_slot(chosen, request, without=victims):
            request.asked_ms = pool.now_ms
            for one in victims:
                lower[one].may_be_preempted = False
                pool.tell(lower[one].owner_id, PreemptRequested(one, lower[one].attempt))
            return


def _has_room_after(pool: Pool, request: Request, executor_id: str, victims: list[str]) -> bool:
    """Whether blocks and sequences suffice without these."""
    blocks, sequences = pool.free(executor_id)
    blocks += sum(pool.requests[one].reserved or 0 for one in victims)
    sequences += sum(pool.requests[one].demand.sequences for one in victims)
    return blocks >= pool.needed_blocks(request, executor_id) and sequences >= request.demand.sequences
