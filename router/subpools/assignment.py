"""What belongs to which sub-pool, and what of a tenant's limits and of the queue's bounds each of them has. Pure.

Everything follows from ids by rendezvous hashing, so all routers compute the same. An executor belongs to one sub-pool
for as long as the number of sub-pools stays the same: it is in one ledger, whatever other executors come or go.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import defaultdict
from collections.abc import Sequence

from inflight.router.store.settings import StoreSettings
from inflight.router.store.types import ClassQueue, EstimateAccuracy, Snapshot, TenantLimits, TenantQueue

# A tenant with a bound on its running requests uses so few sub-pools that each has this share of the bound.
MIN_RUNNING_PER_SUBPOOL = 16


@functools.lru_cache(maxsize=1 << 16)
def ranked(name: str, num_subpools: int) -> tuple[int, ...]:
    """Returns the sub-pools in the order of a name."""

    def weight(number: int) -> bytes:
        return hashlib.blake2b(f"{number}\0{name}".encode(), digest_size=8).digest()

    return tuple(sorted(range(num_subpools), key=weight))


def home_of(name: str, num_subpools: int) -> int:
    """Returns the sub-pool of an executor, or the one that keeps the claim of a request."""
    return ranked(name, num_subpools)[0]


def open_to(tenant: str, limits: TenantLimits, num_subpools: int) -> tuple[int, ...]:
    """Returns the sub-pools that a tenant's requests may use."""
    if limits.max_running is None:
        return tuple(range(num_subpools))
    num_used = max(1, min(num_subpools, limits.max_running // MIN_RUNNING_PER_SUBPOOL))
    return ranked(f"tenant {tenant}", num_subpools)[:num_used]


def share_of_limits(limits: TenantLimits, num_used: int) -> TenantLimits:
    """Returns a tenant's limits in each of the sub-pools that it uses. The sum of the rates is the tenant's rate. A
    burst is at least one request in each, and a bound of the queue is rounded up."""
    return dataclasses.replace(
        limits,
        max_running=None if limits.max_running is None else max(1, limits.max_running // num_used),
        max_queue_requests=_part(limits.max_queue_requests, num_used),
        max_queue_tokens=_part(limits.max_queue_tokens, num_used),
        max_queue_bytes=_part(limits.max_queue_bytes, num_used),
        requests_per_s=None if limits.requests_per_s is None else limits.requests_per_s / num_used,
        request_burst=max(1, limits.request_burst // num_used),
        tokens_per_s=None if limits.tokens_per_s is None else limits.tokens_per_s / num_used,
        token_burst=max(1, limits.token_burst // num_used),
    )


def without_bounds(limits: TenantLimits) -> TenantLimits:
    """Returns the limits of a request that was admitted before: rates and bounds of the queue do not refuse it."""
    return TenantLimits(weight=limits.weight, max_running=limits.max_running)


def share_of_settings(settings: StoreSettings, num_subpools: int) -> StoreSettings:
    """Returns the settings of one sub-pool: its part of the bounds of the queue, rounded up."""
    return dataclasses.replace(
        settings,
        max_queue_requests=-(-settings.max_queue_requests // num_subpools),
        max_queue_tokens=_part(settings.max_queue_tokens, num_subpools),
        max_queue_bytes=_part(settings.max_queue_bytes, num_subpools),
    )


def merged(snapshots: Sequence[Snapshot], max_tenant_queues: int) -> Snapshot:
    """Returns the snapshot of all sub-pools together."""
    executors = sorted((one for each in snapshots for one in each.executors), key=lambda one: one.executor_id)
    queues = [
        ClassQueue(sum(queue.num_requests for queue in of_class), sum(queue.num_tokens for queue in of_class))
        for of_class in zip(*(each.queues for each in snapshots), strict=True)
    ]
    by_tenant: defaultdict[tuple[int, str], list[TenantQueue]] = defaultdict(list)
    for one in (one for each in snapshots for one in each.tenant_queues):
        by_tenant[one.priority_class, one.tenant].append(one)
    joined = [
        TenantQueue(
            priority_class,
            tenant,
            sum(one.num_requests for one in of_tenant),
            sum(one.num_tokens for one in of_tenant),
            max(one.wait_ms for one in of_tenant),
        )
        for (priority_class, tenant), of_tenant in sorted(by_tenant.items())
    ]
    accuracies = [each.estimates for each in snapshots]
    return Snapshot(tuple(executors), tuple(queues), _mean(accuracies), tuple(joined[:max_tenant_queues]))


def _mean(accuracies: Sequence[EstimateAccuracy]) -> EstimateAccuracy:
    num_estimates = sum(one.num_estimates for one in accuracies)
    if not num_estimates:
        return EstimateAccuracy(0, 0.0, 1.0)
    return EstimateAccuracy(
        num_estimates,
        sum(one.num_estimates * one.mean_error for one in accuracies) / num_estimates,
        sum(one.num_estimates * one.correction for one in accuracies) / num_estimates,
    )


def _part(bound: int | None, num_parts: int) -> int | None:
    return None if bound is None else -(-bound // num_parts)
