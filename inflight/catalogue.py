"""Models, capacity and states of requests, as frozen values. Shared by both clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from inflight.notebook import html
from inflight.v1 import inference_pb2, stats_pb2, types_pb2


class RequestState(Enum):
    """State of a request."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    PLACED = "placed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of a model. `hash` is the content hash that new requests get. `num_executors` executors serve that
    content. `num_resident` of them have it in a slot."""

    name: str
    hash: str
    rank: int
    num_executors: int
    num_resident: int


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a model makes of a prompt: an embedding of `size` numbers, of `kind` "last" or "mean", or a "score". A
    model that `is_only` this does not generate."""

    kind: str
    size: int
    is_normalized: bool
    is_only: bool


@dataclass(frozen=True, slots=True)
class Model:
    """A model that the routers serve. `pooling` None: it makes no embeddings and no scores."""

    name: str
    context_length: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    num_executors: int
    adapters: tuple[Adapter, ...] = ()
    pooling: Pooling | None = None


@dataclass(frozen=True, slots=True)
class ExecutorCapacity:
    """Utilization and speed of one executor.

    - `batching` is `inflight`, `static` or `unspecified`.
    - `output_tokens_per_s` and `steps_per_s` are means over the last ten seconds, `step_ms` over about the last 20
      steps.
    - `elapsed_s` is the time with work since the start of the executor. `device_busy_s` is the part of it in which the
      device was busy. None if not measured.
    - `scheduler_policy` is `guaranteed_no_evict` or `max_utilization`, which reserves the `reserve_quantile` of the
      likely output.
    - `constraint` is what keeps waiting requests from boarding now: `no_work`, `seats`, `blocks`, `tokens`, `pace`,
      `static_batch` or `twin`. `bounds` counts the steps by constraint.
    - `tokens_per_draft` is the mean number of tokens that a step produces for a sequence that verifies drafts, since
      the start; None if no sequence did.
    """

    executor_id: str
    model: str
    accepting: bool
    seats_total: int
    seats_used: int
    num_waiting: int
    blocks_total: int
    blocks_used: int
    blocks_reserved: int
    blocks_cached: int
    block_size: int
    output_tokens_per_s: float
    step_ms: float
    batching: str
    num_steps: int
    device_busy_s: float | None = None
    elapsed_s: float | None = None
    scheduler_policy: str = "unspecified"
    reserve_quantile: float | None = None
    num_preemptions: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    num_preempted: int = 0
    host_blocks_used: int = 0
    host_blocks_total: int = 0
    constraint: str = "unspecified"
    bounds: Mapping[str, int] = field(default_factory=dict)
    steps_per_s: float | None = None
    tokens_per_draft: float | None = None

    @property
    def stands_still(self) -> bool:
        """Whether it made no step in the last ten seconds, so that `step_ms` is old."""
        return self.steps_per_s == 0


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The number of requests that wait for a model in one class: `interactive`, `standard` or `batch`."""

    model: str
    priority: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class UnusedExecutor:
    """An executor that the router has found and does not use, and why."""

    executor_id: str
    model: str
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class VariantCapacity:
    """Measurements of a model variant by the router that answers. Percentiles are None if nothing was measured yet."""

    model: str
    variant: str
    share: float
    num_requests: int
    num_refused: int
    num_ended: int
    output_tokens: int
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    inter_token_p50_ms: float | None
    inter_token_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class EstimateQuality:
    """Quality of wait estimates for a model: the mean relative error, and the factor that corrects raw estimates."""

    model: str
    num_estimates: int
    mean_error: float
    correction: float


@dataclass(frozen=True, slots=True)
class RequestStanding:
    """State of a request. The fields about waiting are set while it waits, `executor_id` while it is placed.

    If a request waits and has an `executor_id`, it waits on that executor for a seat. `waiting_for` is a sentence.
    `wait_reason` is the same as one word: `blocks`, `seat`, `fairness`, `order`, `class`, `tenant_limit`, `held_line`,
    `executor`, `adapter`, or `unspecified`.
    """

    request_id: str
    state: RequestState
    position: int
    waiting_for: str
    wait_reason: str
    estimated_wait_s: float | None
    needed_blocks: int
    available_blocks: int
    times_passed: int
    priority: str
    executor_id: str
    output_tokens: int
    variant: str
    step_constraint: str


@dataclass(frozen=True, slots=True)
class Capacity:
    """All executors, the queues that are not empty, model variants, the quality of wait estimates, and, for operators,
    the executors that the router does not use."""

    executors: tuple[ExecutorCapacity, ...]
    queues: tuple[QueueDepth, ...]
    variants: tuple[VariantCapacity, ...] = ()
    estimates: tuple[EstimateQuality, ...] = ()
    unused: tuple[UnusedExecutor, ...] = ()

    @property
    def num_queued(self) -> int:
        """Waiting requests in all queues."""
        return sum(queue.num_requests for queue in self.queues)

    def _repr_html_(self) -> str:
        rows = [
            (one.executor_id, one.model, f"{one.seats_used}/{one.seats_total}", f"{one.blocks_used}/{one.blocks_total}")
            for one in self.executors
        ]
        return html.table(("executor", "model", "seats", "blocks"), rows, f"{self.num_queued} wait")


def decode_models(response: inference_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """Returns the models in a response."""
    return tuple(
        Model(
            name=model.name,
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            eos_token_ids=tuple(model.eos_token_ids),
            has_chat_template=model.has_chat_template,
            num_executors=model.num_executors,
            adapters=tuple(
                Adapter(one.name, one.hash, one.rank, one.num_executors, one.num_resident) for one in model.adapters
            ),
            pooling=_decode_pooling(model.pooling) if model.HasField("pooling") else None,
        )
        for model in response.models
    )


def _decode_pooling(pooling: types_pb2.Pooling) -> Pooling:
    kind = types_pb2.PoolingKind.Name(pooling.kind).removeprefix("POOLING_KIND_").lower()
    return Pooling(kind, pooling.size, pooling.is_normalized, pooling.is_only)


def decode_capacity(response: inference_pb2.GetCapacityResponse) -> Capacity:
    """Returns the capacity in a response."""
    executors = tuple(decode_executor(executor) for executor in response.executors)
    queues = tuple(
        QueueDepth(
            queue.model, enum_name(types_pb2.PriorityClass, queue.priority, "PRIORITY_CLASS_"), queue.num_requests
        )
        for queue in response.queues
    )
    estimates = tuple(
        EstimateQuality(one.model, one.num_estimates, one.mean_error, one.correction) for one in response.estimates
    )
    unused = tuple(UnusedExecutor(one.executor_id, one.model, one.address, one.reason) for one in response.unused)
    return Capacity(executors, queues, tuple(_variant(variant) for variant in response.variants), estimates, unused)


def decode_standing(response: inference_pb2.GetRequestResponse) -> RequestStanding:
    """Returns the state of a request in a response."""
    wait_s = response.estimated_wait.ToNanoseconds() / 1e9 if response.HasField("estimated_wait") else None
    return RequestStanding(
        request_id=response.request_id,
        state=decode_state(response.state),
        position=response.position,
        waiting_for=response.waiting_for,
        wait_reason=enum_name(inference_pb2.WaitReason, response.wait_reason, "WAIT_REASON_"),
        estimated_wait_s=wait_s,
        needed_blocks=response.needed_blocks,
        available_blocks=response.available_blocks,
        times_passed=response.times_passed,
        priority=enum_name(types_pb2.PriorityClass, response.priority, "PRIORITY_CLASS_"),
        executor_id=response.executor_id,
        output_tokens=response.output_tokens,
        variant=response.variant,
        step_constraint=enum_name(types_pb2.StepConstraint, response.step_constraint, "STEP_CONSTRAINT_"),
    )


def decode_state(state: inference_pb2.RequestState) -> RequestState:
    """Returns the state; `UNKNOWN` for a state that this version does not know."""
    name = enum_name(inference_pb2.RequestState, state, "REQUEST_STATE_")
    return RequestState(name) if name in {known.value for known in RequestState} else RequestState.UNKNOWN


def decode_executor(wire: inference_pb2.ExecutorCapacity) -> ExecutorCapacity:
    """Returns the capacity of one executor in a response."""
    return ExecutorCapacity(
        executor_id=wire.executor_id,
        model=wire.model,
        accepting=wire.accepting,
        seats_total=wire.seats_total,
        seats_used=wire.seats_used,
        num_waiting=wire.num_waiting,
        blocks_total=wire.blocks_total,
        blocks_used=wire.blocks_used,
        blocks_reserved=wire.blocks_reserved,
        blocks_cached=wire.blocks_cached,
        block_size=wire.block_size,
        output_tokens_per_s=wire.output_tokens_per_s,
        step_ms=wire.step_ms,
        batching=enum_name(types_pb2.BatchingMode, wire.batching, "BATCHING_MODE_"),
        num_steps=wire.num_steps,
        device_busy_s=_measured(wire, "device_busy_s"),
        elapsed_s=_measured(wire, "elapsed_s"),
        scheduler_policy=enum_name(types_pb2.SchedulerPolicy, wire.scheduler_policy, "SCHEDULER_POLICY_"),
        reserve_quantile=_measured(wire, "reserve_quantile"),
        num_preemptions=wire.num_preemptions,
        computed_tokens=wire.computed_tokens,
        recomputed_tokens=wire.recomputed_tokens,
        num_preempted=wire.num_preempted,
        host_blocks_used=wire.host_blocks_used,
        host_blocks_total=wire.host_blocks_total,
        constraint=enum_name(types_pb2.StepConstraint, wire.constraint, "STEP_CONSTRAINT_"),
        bounds={
            enum_name(types_pb2.StepConstraint, bound.constraint, "STEP_CONSTRAINT_"): bound.num_steps
            for bound in wire.bounds
        },
        steps_per_s=_measured(wire, "steps_per_s"),
        tokens_per_draft=tokens_per_draft(wire),
    )


def tokens_per_draft(wire: inference_pb2.ExecutorCapacity) -> float | None:
    """Returns the mean number of tokens that a step produces for a sequence that verifies drafts; None if no sequence
    did."""
    drafts = wire.drafts
    return 1 + drafts.num_accepted / drafts.num_drafts if drafts.num_drafts else None


def _variant(wire: inference_pb2.VariantCapacity) -> VariantCapacity:
    return VariantCapacity(
        model=wire.model,
        variant=wire.variant,
        share=wire.share,
        num_requests=wire.num_requests,
        num_refused=wire.num_refused,
        num_ended=wire.num_ended,
        output_tokens=wire.output_tokens,
        ttft_p50_ms=_measured(wire, "ttft_p50_ms"),
        ttft_p99_ms=_measured(wire, "ttft_p99_ms"),
        inter_token_p50_ms=_measured(wire, "inter_token_p50_ms"),
        inter_token_p99_ms=_measured(wire, "inter_token_p99_ms"),
    )


def _measured(wire: inference_pb2.ExecutorCapacity | inference_pb2.VariantCapacity, field_name: str) -> float | None:
    """Returns a value, or None if it was not measured."""
    return float(getattr(wire, field_name)) if wire.HasField(field_name) else None


def enum_name(
    enum: type[
        types_pb2.BatchingMode
        | types_pb2.PriorityClass
        | types_pb2.SchedulerPolicy
        | types_pb2.StepConstraint
        | inference_pb2.RequestState
        | inference_pb2.WaitReason
        | stats_pb2.SequencePhase
    ],
    value: int,
    prefix: str,
) -> str:
    """Returns the name of a value without the prefix, in lower case; its number if this version does not know it."""
    known: dict[int, str] = {number: name for name, number in enum.items()}
    return known[value].removeprefix(prefix).lower() if value in known else str(value)
