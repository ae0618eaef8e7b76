"""The part of the statistics that a caller may see. Pure.

An operator sees everything. Any other caller sees other tenants' requests without names, and their queues summed up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from inflight.router.auth.caller import Caller
from inflight.router.ledger.types import Snapshot, TenantQueue
from inflight.router.request.ids import client_id, tenant_of
from inflight.v1 import inference_pb2, stats_pb2, types_pb2


def seen_sequence(held: stats_pb2.SequenceStats, caller: Caller) -> stats_pb2.SequenceStats:
    """Returns the visible part of a sequence, which the executor knows by its id in the ledger."""
    seen = stats_pb2.SequenceStats()
    seen.CopyFrom(held)
    tenant = tenant_of(held.request_id)
    is_known = caller.is_operator or tenant == caller.tenant
    seen.tenant = tenant if is_known else ""
    seen.request_id = client_id(held.request_id) if is_known else ""
    return seen


def seen_queues(model: str, snapshot: Snapshot, caller: Caller) -> Iterator[inference_pb2.TenantQueue]:
    """Returns the waiting requests by class and tenant. Tenants that the caller may not see are summed up without a
    name."""
    for number, queue in enumerate(snapshot.queues, start=1):
        of_class = [one for one in snapshot.tenant_queues if one.priority_class == number]
        visible = [one for one in of_class if caller.is_operator or one.tenant == caller.tenant]
        num_requests = queue.num_requests - sum(one.num_requests for one in visible)
        if num_requests > 0:
            num_tokens = queue.num_tokens - sum(one.num_tokens for one in visible)
            longest_ms = max((one.wait_ms for one in of_class if one not in visible), default=0)
            visible.insert(0, TenantQueue(number, "", num_requests, num_tokens, longest_ms))
        yield from _protos(model, visible)


def _protos(model: str, queues: Iterable[TenantQueue]) -> Iterator[inference_pb2.TenantQueue]:
    for queue in queues:
        yield inference_pb2.TenantQueue(
            model=model,
            tenant=queue.tenant,
            priority=types_pb2.PriorityClass.Name(queue.priority_class),
            num_requests=queue.num_requests,
            num_tokens=queue.num_tokens,
            longest_wait_ms=queue.wait_ms,
        )
