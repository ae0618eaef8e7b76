"""What the routers say about models, capacity and requests, as plain frozen values. Shared by both clients."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from inflight.v1 import inference_pb2, types_pb2


class RequestState(Enum):
    """Where a request stands."""

    UNKNOWN = "unknown"
    WAITING = "waiting"
    PLACED = "placed"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked for."""

    name: str
    context_length: int
    vocabulary_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    num_executors: int


@dataclass(frozen=True, slots=True)
class ExecutorCapacity:
    """What one executor holds. `batching` is `inflight`, `static` or `unspecified`.

    `device_busy_s` of the `elapsed_s` in which there was work are totals since its start; None where not measured.
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


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """What waits for a model in one class: `interactive`, `standard` or `batch`."""

    model: str
    priority: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Every executor and every queue in which something waits."""

    executors: tuple[ExecutorCapacity, ...]
    queues: tuple[QueueDepth, ...]

    @property
    def num_queued(self) -> int:
        """Requests that wait, in every queue."""
        return sum(queue.num_requests for queue in self.queues)


def decode_models(response: inference_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """The models of an answer."""
    return tuple(
        Model(
            name=model.name,
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            eos_token_ids=tuple(model.eos_token_ids),
            has_chat_template=model.has_chat_template,
            num_executors=model.num_executors,
        )
        for model in response.models
    )


def decode_capacity(response: inference_pb2.GetCapacityResponse) -> Capacity:
    """The capacity in an answer."""
    executors = tuple(_executor(executor) for executor in response.executors)
    queues = tuple(
        QueueDepth(queue.model, _name(types_pb2.PriorityClass, queue.priority, "PRIORITY_CLASS_"), queue.num_requests)
        for queue in response.queues
    )
    return Capacity(executors, queues)


def decode_state(state: inference_pb2.RequestState) -> RequestState:
    """Where a request stands; `UNKNOWN` for a state that this version does not know."""
    name = _name(inference_pb2.RequestState, state, "REQUEST_STATE_")
    return RequestState(name) if name in {known.value for known in RequestState} else RequestState.UNKNOWN


def _executor(wire: inference_pb2.ExecutorCapacity) -> ExecutorCapacity:
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
        batching=_name(types_pb2.BatchingMode, wire.batching, "BATCHING_MODE_"),
        num_steps=wire.num_steps,
        device_busy_s=wire.device_busy_s if wire.HasField("device_busy_s") else None,
        elapsed_s=wire.elapsed_s if wire.HasField("elapsed_s") else None,
    )


def _name(
    enum: type[types_pb2.BatchingMode | types_pb2.PriorityClass | inference_pb2.RequestState], value: int, prefix: str
) -> str:
    known: dict[int, str] = {number: name for name, number in enum.items()}
    return known[value].removeprefix(prefix).lower() if value in known else str(value)
