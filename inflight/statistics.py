"""Statistics of the routers as frozen values, which `stats()` of both clients yields. `Statistics.wire` is the message
itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from google.protobuf import json_format

from inflight.catalogue import ExecutorCapacity, decode, decode_executor, enum_name
from inflight.events import Resources, decode_resources
from inflight.notebook import html
from inflight.v1 import inference_pb2, stats_pb2


@dataclass(frozen=True, slots=True)
class Iteration:
    """One step of an executor. `constraint` is what kept the step from being larger, with the values of
    `ExecutorCapacity`. `parts_ms` is the host time by part of the engine's loop."""

    number: int
    ended_at: datetime
    latency_ms: float
    device_ms: float
    exposed_host_ms: float
    parts_ms: Mapping[str, float]
    seats_used: int
    seats_total: int
    num_waiting: int
    num_scheduled: int
    num_prefills: int
    num_decodes: int
    num_boarded: int
    num_completed: int
    num_preempted: int
    prompt_tokens: int
    output_tokens: int
    blocks_total: int
    blocks_used: int
    blocks_free: int
    blocks_evictable: int
    blocks_reserved: int
    cache_hit_rate: float
    constraint: str


@dataclass(frozen=True, slots=True)
class SequenceOnExecutor:
    """A sequence that an executor holds. `phase` is `standby`, `prefill`, `decode`, `preempted` or `unspecified`.

    `request_id` and `tenant` are empty if the caller may not see them.
    """

    request_id: str
    choice: int
    tenant: str
    phase: str
    seat: int | None
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks: int
    blocks_reserved: int


@dataclass(frozen=True, slots=True)
class ExecutorStatistics:
    """An executor: its capacity and, if requested, its latest steps, oldest first, and its sequences."""

    capacity: ExecutorCapacity
    iterations: tuple[Iteration, ...]
    sequences: tuple[SequenceOnExecutor, ...]


@dataclass(frozen=True, slots=True)
class TenantQueue:
    """The waiting requests of a tenant in a class. An empty `tenant` stands for all tenants that the caller may not
    see."""

    model: str
    tenant: str
    priority: str
    num_requests: int
    num_tokens: int
    longest_wait_s: float


@dataclass(frozen=True, slots=True)
class ModelLatency:
    """Latencies of a model in the last minute, measured by the router that answers. `output_tokens_per_s` is the mean
    over the last ten seconds. Percentiles are None if nothing was measured."""

    model: str
    num_ended: int
    num_refused: int
    output_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    inter_token_p50_ms: float | None
    inter_token_p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Statistics:
    """The statistics at one moment."""

    router_id: str
    time: datetime
    executors: tuple[ExecutorStatistics, ...]
    queues: tuple[TenantQueue, ...]
    latencies: tuple[ModelLatency, ...]
    wire: inference_pb2.GetStatsResponse = field(repr=False, compare=False)

    @property
    def num_queued(self) -> int:
        """Waiting requests in all queues."""
        return sum(queue.num_requests for queue in self.queues)

    def as_json(self) -> str:
        """Returns one line of JSON. Fields that TensorRT-LLM's statistics also have use its names."""
        return stats_json(self.wire)

    def _repr_html_(self) -> str:
        capacities = [executor.capacity for executor in self.executors]
        rows = [
            (c.executor_id, c.model, f"{c.seats_used}/{c.seats_total}", f"{c.blocks_used}/{c.blocks_total}",
             f"{c.output_tokens_per_s:.0f}", "-" if c.stands_still else f"{c.step_ms:.1f}")
            for c in capacities
        ]  # fmt: skip
        note = f"{self.num_queued} wait, {self.time:%H:%M:%S} UTC"
        return html.table(("executor", "model", "seats", "blocks", "tokens/s", "step ms"), rows, note)


def stats_json(wire: inference_pb2.GetStatsResponse) -> str:
    """Returns one line of JSON. Fields with the value zero are included, so that every line has the same names."""
    return json_format.MessageToJson(wire, indent=None, always_print_fields_with_no_presence=True)


def stats_request(
    model: str, interval_s: float, *, want_iterations: bool, want_sequences: bool
) -> inference_pb2.GetStatsRequest:
    """Returns the request for statistics every `interval_s` seconds.

    Raises:
        ValueError: the interval is out of range.
    """
    if not 0.05 <= interval_s <= 60:
        raise ValueError(f"interval: {interval_s} is not between 0.05 and 60 seconds")
    return inference_pb2.GetStatsRequest(
        model=model,
        interval_ms=round(interval_s * 1000),
        want_iterations=want_iterations,
        want_sequences=want_sequences,
    )


def decode_stats(wire: inference_pb2.GetStatsResponse) -> Statistics:
    """Returns the statistics in a message."""
    return Statistics(
        router_id=wire.router_id,
        time=_time(wire.timestamp_ms),
        executors=tuple(_executor(executor) for executor in wire.executors),
        queues=tuple(decode(TenantQueue, one, longest_wait_s=one.longest_wait_ms / 1000) for one in wire.queues),
        latencies=tuple(decode(ModelLatency, latency) for latency in wire.latencies),
        wire=wire,
    )


def _executor(wire: inference_pb2.ExecutorStats) -> ExecutorStatistics:
    return ExecutorStatistics(
        capacity=decode_executor(wire.capacity),
        iterations=tuple(_iteration(iteration) for iteration in wire.iterations),
        sequences=tuple(
            decode(
                SequenceOnExecutor,
                sequence,
                choice=sequence.choice_index,
                blocks=sequence.num_blocks,
                blocks_reserved=sequence.reserved_blocks,
            )
            for sequence in wire.sequences
        ),
    )


def _iteration(wire: stats_pb2.IterationStats) -> Iteration:
    kv, batch = wire.kv_cache_stats, wire.inflight_batching_stats
    return Iteration(
        number=wire.iter,
        ended_at=_time(wire.timestamp_ms),
        latency_ms=wire.iter_latency_ms,
        device_ms=wire.device_ms,
        exposed_host_ms=wire.exposed_host_ms,
        parts_ms={part.name: part.ms for part in wire.parts},
        seats_used=wire.num_active_requests,
        seats_total=wire.max_num_active_requests,
        num_waiting=wire.num_queued_requests,
        num_scheduled=batch.num_scheduled_requests,
        num_prefills=batch.num_context_requests,
        num_decodes=batch.num_gen_requests,
        num_boarded=batch.num_boarded_requests,
        num_completed=batch.num_completed_requests,
        num_preempted=batch.num_paused_requests,
        prompt_tokens=batch.num_ctx_tokens,
        output_tokens=batch.num_gen_tokens,
        blocks_total=kv.max_num_blocks,
        blocks_used=kv.used_num_blocks,
        blocks_free=kv.free_num_blocks,
        blocks_evictable=kv.evictable_num_blocks,
        blocks_reserved=kv.reserved_num_blocks,
        cache_hit_rate=kv.cache_hit_rate,
        constraint=enum_name(wire, "constraint"),
    )


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


@dataclass(frozen=True, slots=True)
class UsageLine:
    """What a tenant used of a model on a day (UTC), in a class, with an adapter, on a class of executors. `is_system`:
    what no tenant is charged for. `cost` is None without a price."""

    day: str
    model: str
    tenant: str
    priority: str
    adapter: str
    executor_class: str
    is_system: bool
    used: Resources
    cost: float | None


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """The lines, ordered, and the currency of their costs (ISO 4217).

    The figures are complete from `complete_since_s` on, in seconds since 1970: usage from before may have been lost
    with Redis. None: none was booked."""

    lines: tuple[UsageLine, ...]
    currency: str
    complete_since_s: float | None = None


def decode_usage(response: inference_pb2.GetUsageResponse) -> TenantUsage:
    since_s = response.complete_since_unix_ms / 1000 if response.HasField("complete_since_unix_ms") else None
    return TenantUsage(tuple(_line(line) for line in response.lines), response.currency, since_s)


def _line(line: inference_pb2.UsageLine) -> UsageLine:
    priority = "" if line.is_system else enum_name(line, "priority")
    return decode(UsageLine, line, priority=priority, used=decode_resources(line.used))
