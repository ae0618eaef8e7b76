"""Models, capacity and states of requests, as frozen values. Shared by both clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar

from google.protobuf.message import Message

from inflight.notebook import html
from inflight.v1 import inference_pb2

Value = TypeVar("Value")


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


def decode(kind: type[Value], wire: Message, **others: object) -> Value:
    """Returns the dataclass of a message whose fields have the same names; `others` are those that have not.

    A field that is not set is None where the class allows it. Enum values are names as `enum_name` returns them.
    """
    found: dict[str, Any] = {}
    for one in fields(kind):  # type: ignore[arg-type]  # a dataclass
        if one.name in others:
            continue
        described = wire.DESCRIPTOR.fields_by_name[one.name]
        value = getattr(wire, one.name)
        if described.has_presence and "None" in str(one.type) and not wire.HasField(one.name):
            value = None
        elif described.enum_type is not None:
            value = enum_name(wire, one.name)
        elif str(one.type).startswith("tuple"):
            value = tuple(value)
        found[one.name] = value
    return kind(**found, **others)


def enum_name(wire: Message, name: str) -> str:
    """Returns the name of the value of an enum field, in lower case and without that of its type; the number if this
    version does not know the value."""
    enum, value = wire.DESCRIPTOR.fields_by_name[name].enum_type, getattr(wire, name)
    assert enum is not None
    known = enum.values_by_number
    prefix = known[0].name.removesuffix("UNSPECIFIED")
    return str(known[value].name.removeprefix(prefix).lower()) if value in known else str(value)


def decode_models(response: inference_pb2.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(
        decode(
            Model,
            model,
            adapters=tuple(decode(Adapter, one) for one in model.adapters),
            pooling=decode(Pooling, model.pooling) if model.HasField("pooling") else None,
        )
        for model in response.models
    )


def decode_capacity(response: inference_pb2.GetCapacityResponse) -> Capacity:
    return Capacity(
        tuple(decode_executor(executor) for executor in response.executors),
        tuple(decode(QueueDepth, queue) for queue in response.queues),
        tuple(decode(VariantCapacity, variant) for variant in response.variants),
        tuple(decode(EstimateQuality, one) for one in response.estimates),
        tuple(decode(UnusedExecutor, one) for one in response.unused),
    )


def decode_standing(response: inference_pb2.GetRequestResponse) -> RequestStanding:
    """Returns the state of a request in a response."""
    wait_s = response.estimated_wait.ToNanoseconds() / 1e9 if response.HasField("estimated_wait") else None
    return decode(RequestStanding, response, state=decode_state(response.state), estimated_wait_s=wait_s)


def decode_state(state: inference_pb2.RequestState) -> RequestState:
    """Returns the state; `UNKNOWN` for a state that this version does not know."""
    names = inference_pb2.RequestState
    known = {names.Value(f"REQUEST_STATE_{one.name}"): one for one in RequestState if one is not RequestState.UNKNOWN}
    return known.get(state, RequestState.UNKNOWN)


def decode_executor(wire: inference_pb2.ExecutorCapacity) -> ExecutorCapacity:
    """Returns the capacity of one executor in a response."""
    bounds = {enum_name(bound, "constraint"): bound.num_steps for bound in wire.bounds}
    return decode(ExecutorCapacity, wire, bounds=bounds, tokens_per_draft=tokens_per_draft(wire))


def tokens_per_draft(wire: inference_pb2.ExecutorCapacity) -> float | None:
    """Returns the mean number of tokens that a step produces for a sequence that verifies drafts; None if no sequence
    did."""
    drafts = wire.drafts
    return 1 + drafts.num_accepted / drafts.num_drafts if drafts.num_drafts else None
