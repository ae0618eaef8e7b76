"""Refusals of submits in plain Python. Part of `ledger_model`."""

from __future__ import annotations

from math import ceil

from inflight.common.errors import Reason
from inflight.router.ledger.types import Refused
from tests.property.ledger_estimates import MARGIN
from tests.property.ledger_pool import LEASE_MS, Pool, Request
from tests.property.ledger_tenants import exceeded

MIN_RETRY_MS, MAX_RETRY_MS = 100, 60_000


def impossible(pool: Pool, request: Request) -> Refused | None:
    """Why it can run nowhere."""
    if not any(pool.now_ms - one.last_report_ms <= LEASE_MS for one in pool.executors.values()):
        return Refused(Reason.NO_EXECUTOR)
    if pool.fits_somewhere(request):
        return None
    if not any(pool.serves(one, request) for one in pool.executors):
        return Refused(Reason.NO_EXECUTOR, "adapter")
    return Refused(Reason.NEVER_FITS)


def refusal_of_waiting(pool: Pool, request: Request) -> Refused | None:
    """Why it, which stands in line, may not: too much does, or it would come too late."""
    if request.demand.last_attempt or request.output:
        return None
    settings, demand = pool.settings, request.demand
    own, everything = pool.waiting(demand.tenant), pool.waiting()
    limit = exceeded(demand.limits, len(own), pool.tokens_waiting(own), pool.bytes_waiting(own))
    bounds = (
        ("max_queue_requests", len(everything), settings.max_queue_requests),
        ("max_queue_tokens", pool.tokens_waiting(everything), settings.max_queue_tokens),
        ("max_queue_bytes", pool.bytes_waiting(everything), settings.max_queue_bytes),
    )
    limit = limit or next((name for name, found, bound in bounds if bound is not None and found > bound), None)
    wait_ms = pool.estimated_wait_ms(demand.request_id)
    if limit:
        return Refused(Reason.QUEUE_FULL, limit, None if wait_ms is None else _retry_after_ms(wait_ms / 4))
    first_token_ms = ((wait_ms or 0) + pool.standby_ms(demand.request_id)) * MARGIN + pool.prefill_ms(request)
    if demand.deadline_ms is not None and first_token_ms > demand.deadline_ms:
        late_ms = first_token_ms - demand.deadline_ms
        return Refused(Reason.DEADLINE_UNMEETABLE, "first token deadline", _retry_after_ms(late_ms))
    output_ms = pool.output_ms(request)
    if demand.total_ms is not None and output_ms <= demand.total_ms < first_token_ms + output_ms:
        return Refused(
            Reason.DEADLINE_UNMEETABLE, "deadline", _retry_after_ms(first_token_ms + output_ms - demand.total_ms)
        )
    return None


def _retry_after_ms(wait_ms: float) -> int:
    return ceil(max(MIN_RETRY_MS, min(MAX_RETRY_MS, wait_ms)))
