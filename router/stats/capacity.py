"""Capacity of models and executors, from descriptions, last reports and the ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from inflight.router.dispatch.pools import ModelPool
from inflight.router.executors.link import ExecutorLink
from inflight.router.ledger.types import ClassQueue, ExecutorStanding, Snapshot
from inflight.v1 import executor_pb2, inference_pb2, types_pb2

CAPACITY_FIELDS = frozenset(field.name for field in inference_pb2.ExecutorCapacity.DESCRIPTOR.fields)

NO_WORK, SEATS, BLOCKS = (
    types_pb2.STEP_CONSTRAINT_NO_WORK,
    types_pb2.STEP_CONSTRAINT_SEATS,
    types_pb2.STEP_CONSTRAINT_BLOCKS,
)
NOT_KNOWN = types_pb2.STEP_CONSTRAINT_UNSPECIFIED
# Constraints of a step that apply although every request on the executor has a seat.
OF_PROMPTS = (types_pb2.STEP_CONSTRAINT_TOKENS, types_pb2.STEP_CONSTRAINT_PACE)


def described_model(pool: ModelPool) -> inference_pb2.Model:
    """Describes a model for clients; limits and defaults are unset while it has no executor."""
    model = inference_pb2.Model(
        name=pool.name, has_chat_template=pool.text.has_chat_template, num_executors=len(pool.links)
    )
    if pool.links:
        description = pool.describe()
        model.context_length = description.context_length
        model.vocabulary_size = description.vocabulary_size
        model.eos_token_ids.extend(description.eos_token_ids)
        model.default_sampling.CopyFrom(description.default_sampling)
        if description.HasField("pooling"):
            model.pooling.CopyFrom(description.pooling)
        model.adapters.extend(inference_pb2.Adapter(**asdict(adapter)) for adapter in pool.adapters.values())
    return model


def described_variants(name: str, pools: Sequence[ModelPool]) -> inference_pb2.Model:
    """Describes a name that stands for several models: limits that all of them allow, so that any of them can serve a
    request."""
    models = [described_model(pool) for pool in pools]
    linked = [model for model in models if model.num_executors]
    combined = inference_pb2.Model()
    if linked:
        combined.CopyFrom(min(linked, key=lambda model: model.context_length))
    combined.name = name
    combined.has_chat_template = all(model.has_chat_template for model in models)
    combined.num_executors = sum(model.num_executors for model in models)
    common = set[str]().union(*({one.name for one in model.adapters} for model in linked))
    common.intersection_update(*({one.name for one in model.adapters} for model in linked))
    kept = [adapter for adapter in combined.adapters if adapter.name in common]
    del combined.adapters[:]
    combined.adapters.extend(kept)
    return combined


def add_capacity(response: inference_pb2.GetCapacityResponse, pool: ModelPool, snapshot: Snapshot) -> None:
    """Adds a pool's executors, queues, and the quality of its wait estimates."""
    response.executors.extend(capacity for _, capacity in executor_capacities(pool, snapshot))
    for priority, num_requests in enumerate(snapshot.num_waiting, start=1):
        if num_requests:
            response.queues.add(
                model=pool.name, priority=types_pb2.PriorityClass.Name(priority), num_requests=num_requests
            )
    response.estimates.add(
        model=pool.name,
        num_estimates=snapshot.estimates.num_estimates,
        mean_error=snapshot.estimates.mean_error,
        correction=snapshot.estimates.correction,
    )


def executor_capacities(
    pool: ModelPool, snapshot: Snapshot
) -> Iterator[tuple[ExecutorLink, inference_pb2.ExecutorCapacity]]:
    """Returns the state of each usable executor of a pool, in order of id."""
    standings = {standing.executor_id: standing for standing in snapshot.executors}
    for link in pool.links:
        yield link, _executor_capacity(pool.name, link, standings.get(link.executor_id), snapshot.queues)


def admission_constraint(
    report: executor_pb2.Report | None,
    description: executor_pb2.DescribeResponse,
    standing: ExecutorStanding | None,
    queues: Sequence[ClassQueue],
) -> types_pb2.StepConstraint:
    """Returns what keeps waiting requests from running: those in the queue of the model, and those on the executor.

    The newest step explains requests on the executor. It may be old, and it does not know the queue.
    """
    if report is None:
        return NOT_KNOWN
    num_here, num_queued = report.num_waiting + report.num_preempted, sum(queue.num_requests for queue in queues)
    cuts_prompts = report.constraint in OF_PROMPTS
    if num_here and not cuts_prompts and report.constraint not in (NOT_KNOWN, NO_WORK):
        return report.constraint
    if num_here + num_queued and report.num_running >= description.max_num_sequences:
        return SEATS
    if cuts_prompts and report.waiting_prefill_tokens:
        return report.constraint
    if not num_here + num_queued:
        return NO_WORK
    return _promised(description, standing, queues) if num_queued and standing is not None else NOT_KNOWN


def _promised(
    description: executor_pb2.DescribeResponse, standing: ExecutorStanding, queues: Sequence[ClassQueue]
) -> types_pb2.StepConstraint:
    """Returns the resource that the ledger has exhausted. Assumes that a request needs blocks for the queue's mean
    length."""
    if not standing.accepting:
        return NOT_KNOWN
    if standing.reserved_sequences >= standing.budget_sequences:
        return SEATS
    num_tokens = sum(queue.num_tokens for queue in queues)
    num_requests = sum(queue.num_requests for queue in queues)
    free_tokens = (standing.budget_blocks - standing.reserved_blocks) * description.block_size
    return BLOCKS if free_tokens * num_requests < num_tokens else NOT_KNOWN


def _executor_capacity(
    model: str, link: ExecutorLink, standing: ExecutorStanding | None, queues: Sequence[ClassQueue]
) -> inference_pb2.ExecutorCapacity:
    report = link.report or executor_pb2.Report()
    capacity = inference_pb2.ExecutorCapacity(
        executor_id=link.executor_id,
        model=model,
        accepting=standing is not None and standing.live and standing.accepting,
        seats_total=link.description.max_num_sequences,
        seats_used=report.num_running,
        blocks_total=link.description.total_blocks,
        blocks_used=report.used_blocks,
        blocks_reserved=0 if standing is None else standing.reserved_blocks,
        blocks_cached=report.cached_blocks,
        block_size=link.description.block_size,
        batching=link.description.batching,
        scheduler_policy=link.description.scheduler_policy,
        host_blocks_used=report.used_host_blocks,
        host_blocks_total=link.description.host_blocks,
    )
    # The report has many fields under the same name.
    for field, value in report.ListFields():
        if field.name not in CAPACITY_FIELDS:
            continue
        if field.message_type is None:
            setattr(capacity, field.name, value)
        else:
            getattr(capacity, field.name).MergeFrom(value)
    # Not that of the report, which is of its newest step.
    capacity.constraint = admission_constraint(link.report, link.description, standing, queues)
    return capacity
