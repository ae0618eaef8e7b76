"""The part of the statistics that a caller may see. Pure.

An operator sees everything. Any other caller sees other tenants' requests without names, and their queues summed up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from inflight.v1 import inference_pb2, stats_pb2, types_pb2
from router.auth.caller import Caller
from router.request.ids import client_id, tenant_of
from router.store.types import Snapshot, TenantLine


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
        lines = [line for line in snapshot.lines if line.priority_class == number]
        told = [line for line in lines if caller.is_operator or line.tenant == caller.tenant]
        num_requests = queue.num_requests - sum(line.num_requests for line in told)
        if num_requests > 0:
            num_tokens = queue.num_tokens - sum(line.num_tokens for line in told)
            longest_ms = max((line.wait_ms for line in lines if line not in told), default=0)
            told.insert(0, TenantLine(number, "", num_requests, num_tokens, longest_ms))
        yield from _protos(model, told)


def _protos(model: str, lines: Iterable[TenantLine]) -> Iterator[inference_pb2.TenantQueue]:
    for line in lines:
        yield inference_pb2.TenantQueue(
            model=model,
            tenant=line.tenant,
            priority=types_pb2.PriorityClass.Name(line.priority_class),
            num_requests=line.num_requests,
            num_tokens=line.num_tokens,
            longest_wait_ms=line.wait_ms,
        )
