"""Wait reasons in plain Python, as the protocol's comments define them. Part of `ledger_model`."""

from __future__ import annotations

from math import ceil, floor

from inflight.router.ledger.types import Explanation, LedgerState, PrefixHolder, WaitReason
from tests.property.ledger_pool import SILENT_MS, Pool, Request


def explain(pool: Pool, name: str) -> Explanation | None:
    """Model of explain.lua."""
    request = pool.requests.get(name)
    if request is None:
        return Explanation(LedgerState.ENDED) if pool.is_tombstoned(name) else None
    assert request.state
    is_waiting, is_placed = request.state is LedgerState.WAITING, request.state is LedgerState.PLACED
    best = next(iter(pool.open_executors()), None)
    return Explanation(
        request.state,
        request.attempt,
        request.class_,
        request.demand.tenant,
        request.placement.executor_id if is_placed and request.placement else None,
        pool.num_ahead(name) if is_waiting else 0,
        pool.estimated_wait_ms(name) if is_waiting else None,
        _wait_reason(pool, name, request) if is_waiting else None,
        request.reserved if is_placed and request.reserved else pool.needed_blocks(request, best),
        max(0, pool.free(best)[0]) if best else 0,
        request.passed,
        _prefix_holder(pool, request) if is_waiting else None,
    )


def _prefix_holder(pool: Pool, request: Request) -> PrefixHolder | None:
    holder = next((one for one in pool.holders(request) if one in pool.executors), None)
    if holder is None:
        return None
    best = next(iter(pool.open_executors()), holder)
    tolerated_ms = min(pool.tolerated_wait(request, best), pool.cheaper_ms(request, holder, best))
    return PrefixHolder(holder, ceil(pool.prefill_wait(holder)), floor(tolerated_ms))


def _wait_reason(pool: Pool, name: str, request: Request) -> WaitReason:
    tenant, active = request.demand.tenant, pool.active(request.class_)
    if not any(pool.now_ms - one.last_report_ms <= SILENT_MS for one in pool.executors.values()):
        return WaitReason.EXECUTOR
    if tenant not in active:
        return WaitReason.TENANT_LIMIT
    if any(pool.active(higher) for higher in range(1, request.class_)):
        return WaitReason.CLASS
    if pool.line(tenant, request.class_)[0] != name:
        return WaitReason.ORDER
    if min((counter, other) for other, counter in active.items())[1] != tenant:
        return WaitReason.FAIRNESS
    if pool.claims and not request.claim and not pool.open_executors():
        return WaitReason.HELD_LINE
    if any(
        pool.has_room_without_adapter(one, request) and not pool.has_room(one, request) for one in pool.open_executors()
    ):
        return WaitReason.ADAPTER
    has_seat = any(not pool.would_share_blame(one, request) for one in pool.open_executors())
    return WaitReason.BLOCKS if has_seat else WaitReason.SEAT
