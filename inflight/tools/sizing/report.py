"""The report of `inflight size`: each figure with its basis, and the flags of the executors. Plain data and text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from inflight.tools.sizing.arithmetic import (
    GIBIBYTE,
    Machine,
    MemoryOptions,
    Pool,
    SeatsHeld,
    Speed,
    Traffic,
    TrafficDemand,
)
from inflight.tools.sizing.model_shape import ModelShape

EXACT, COMPUTED, MEASURED, ESTIMATED = "exact", "computed", "measured", "estimated"
# From here on it is worth reserving less than a request may take.
WORTHWHILE = 1.5
# Below what one core was measured to carry (docs/benchmarks.md), so that bursts do not make it fall behind.
TOKENS_PER_ROUTER = 40_000


@dataclass(frozen=True, slots=True)
class Sizing:
    """The result of sizing. `speed` and `demand` are None if the step time or the request rate is unknown.

    `is_pool_given`: the user chose the size of the pool. `measured_at` names the running system that blocks and speed
    were taken from.
    """

    model: str
    shape: ModelShape
    machine: Machine | None
    dtype: str
    pool: Pool
    traffic: Traffic
    max_num_sequences: int
    max_num_tokens: int
    without_eviction: SeatsHeld
    at_max_utilization: SeatsHeld
    policy: str
    seats_per_replica: int
    speed: Speed | None
    demand: TrafficDemand | None
    is_pool_given: bool = False
    measured_at: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A figure, its basis, and how it was obtained."""

    what: str
    figure: str
    rests_on: str
    how: str = ""


def better_policy(without_eviction: SeatsHeld, at_max_utilization: SeatsHeld, wanted: int) -> str:
    """`guaranteed_no_evict`, unless `max_utilization` fills many more of the wanted seats."""
    held = without_eviction.seats_mean
    is_worthwhile = held < wanted and at_max_utilization.seats_mean >= WORTHWHILE * max(1, held)
    return "max_utilization" if is_worthwhile else "guaranteed_no_evict"


def rows(sizing: Sizing) -> Iterator[Row]:
    """Yields all figures, each after those that it depends on."""
    yield from _memory_rows(sizing)
    yield from _option_rows(sizing)
    yield from _seat_rows(sizing)
    yield from _demand_rows(sizing)


def start_flags(sizing: Sizing) -> list[str]:
    """Returns flags of `inflight executor`."""
    num_sequences = max(1, sizing.seats_per_replica)
    if sizing.demand is not None:
        num_sequences = max(1, min(num_sequences, math.ceil(sizing.demand.seats_needed / sizing.demand.replicas)))
    flags = [*(("--model", sizing.model) if sizing.model else ()), "--dtype", sizing.dtype]
    flags += ["--max-num-sequences", str(num_sequences)]
    flags += ["--max-num-tokens", str(max(sizing.max_num_tokens, num_sequences))]
    flags += ["--tokens-per-block", str(sizing.pool.tokens_per_block)]
    if sizing.pool.num_ranks > 1:
        flags += ["--tensor-parallel-size", str(sizing.pool.num_ranks)]
    if sizing.machine is not None:
        flags += _option_flags(sizing.machine.options)
    return [*flags, "--batch-scheduler-policy", sizing.policy]


def _option_flags(options: MemoryOptions) -> Iterator[str]:
    """Yields the flags of options that differ from an executor's defaults."""
    if options.weight_dtype != "auto":
        yield from ("--weight-dtype", options.weight_dtype)
    if options.kv_cache_dtype != "auto":
        yield from ("--kv-cache-dtype", options.kv_cache_dtype)
    if options.max_adapters:
        yield from ("--max-adapters", str(options.max_adapters), "--max-adapter-rank", str(options.max_adapter_rank))
    if options.kv_cache_host_memory_bytes:
        yield from ("--kv-cache-host-memory-bytes", str(options.kv_cache_host_memory_bytes))


def as_values(sizing: Sizing) -> dict[str, Any]:
    """Returns the figures as plain values for programs."""
    return {**asdict(sizing), "executor_flags": start_flags(sizing)}


def _memory_rows(sizing: Sizing) -> Iterator[Row]:
    shape, pool = sizing.shape, sizing.pool
    counted = EXACT if shape.counted else COMPUTED
    how = "the files of the weights" if shape.counted else "the configuration, as for a Llama"
    of_rank = f" of each of {pool.num_ranks} ranks" if pool.num_ranks > 1 else ""
    num_kv_heads = shape.kv_heads_of_rank(pool.num_ranks)
    figure = f"{shape.num_parameters / 1e9:.2f} billion, {_gib(pool.weight_bytes)}{of_rank}"
    yield Row("weights", figure, counted, how)
    kv_cache_dtype = "auto" if sizing.machine is None else sizing.machine.options.kv_cache_dtype
    numbers = sizing.dtype if kv_cache_dtype == "auto" else f"{kv_cache_dtype} with scales"
    per_token = f"2 × {shape.num_kv_layers} layers × {num_kv_heads} KV heads{of_rank} × {shape.head_dim} × {numbers}"
    yield Row("KV of a token", f"{pool.bytes_per_token:,} bytes{of_rank}", EXACT, per_token)
    blocks = f"{pool.num_blocks:,} of {pool.tokens_per_block} tokens"
    if pool.num_window_blocks:
        figure = f"{pool.num_window_blocks:,} of {pool.tokens_per_block} tokens"
        how = f"windows of {shape.sliding_window} tokens for {pool.num_window_seats} seats, and those of prefixes"
        yield Row(f"blocks of {shape.num_window_layers} layers", figure, COMPUTED, how)
    if pool.num_state_slots:
        figure = f"{pool.num_state_slots} slots and {pool.num_checkpoints:,} checkpoints"
        how = (
            f"{pool.slot_bytes:,} and {pool.checkpoint_bytes:,} bytes, without drafts, for {pool.num_state_seats} seats"
        )
        yield Row("recurrent state", figure, COMPUTED, how)
    if sizing.machine is None:
        yield Row("blocks", blocks, MEASURED, sizing.measured_at)
        return
    machine = sizing.machine
    if sizing.is_pool_given:
        yield Row("blocks", f"{pool.num_blocks:,} of {pool.tokens_per_block} tokens", EXACT, "the size that was given")
        return
    working = f", {_gib(machine.working_bytes)} for steps" if machine.working_bytes else ""
    memory = f"{_gib(machine.memory_bytes)}{of_rank}"
    how = f"{machine.fraction:g} of {memory} less weights{working}; the executor measures it"
    yield Row("blocks", blocks, ESTIMATED, how)


def _option_rows(sizing: Sizing) -> Iterator[Row]:
    if sizing.machine is None:
        return
    options, pool = sizing.machine.options, sizing.pool
    if options.max_adapters:
        how = f"{options.max_adapters} slots for ranks up to {options.max_adapter_rank}; with --adapter-folder"
        yield Row("adapters", _gib(pool.adapter_bytes), EXACT, how)
    if pool.num_host_blocks:
        prefixes = " and evicted prefixes" if not pool.num_host_slots else f", {pool.num_host_slots} slots of state"
        how = f"{_gib(options.kv_cache_host_memory_bytes)} for preempted sequences{prefixes}"
        yield Row("blocks in host memory", f"{pool.num_host_blocks:,}", EXACT, how)


def _seat_rows(sizing: Sizing) -> Iterator[Row]:
    traffic = sizing.traffic
    tokens_per_block = sizing.pool.tokens_per_block
    num_shared = traffic.num_shared_blocks(tokens_per_block)
    if num_shared:
        how = f"full blocks of the {traffic.shared_prompt_tokens} tokens that all prompts begin with; stored once"
        yield Row("shared blocks", f"{num_shared:,} of {tokens_per_block} tokens", COMPUTED, how)
    likely = min(traffic.max_tokens, traffic.output_tokens_p95)
    how = _reserved(sizing.without_eviction, traffic, num_shared, f"max_tokens {traffic.max_tokens}")
    yield Row("seats, nothing evicted", f"{sizing.without_eviction.seats_mean:,}", COMPUTED, how)
    how = _reserved(sizing.at_max_utilization, traffic, num_shared, f"likely output {likely}")
    yield Row("seats, max_utilization", f"{sizing.at_max_utilization.seats_mean:,}", ESTIMATED, how)
    how = f"by {sizing.policy}, at most {sizing.max_num_sequences} (--max-num-sequences)"
    yield Row("seats of an executor", f"{sizing.seats_per_replica:,}", COMPUTED, how)


def _reserved(held: SeatsHeld, traffic: Traffic, num_shared: int, output: str) -> str:
    less_shared = f", less {num_shared} shared blocks" if num_shared else ""
    each = f"{held.blocks_mean} blocks each: prompt {traffic.prompt_tokens} + {output}{less_shared}"
    if held.blocks_p95 == held.blocks_mean:
        return each
    return f"{each}; {held.seats_p95:,} if all prompts had {traffic.prompt_tokens_p95}"


def _demand_rows(sizing: Sizing) -> Iterator[Row]:
    demand, speed = sizing.demand, sizing.speed
    if speed is None:
        yield Row("replicas", "unknown", ESTIMATED, "give --step-ms, or --from-running for a system under this load")
        return
    source = sizing.measured_at if sizing.measured_at else "--step-ms"
    yield Row("step", f"{speed.step_ms:.1f} ms", MEASURED, source)
    if demand is None:
        yield Row("replicas", "unknown", ESTIMATED, "give --requests-per-s")
        return
    how = f"{sizing.traffic.output_tokens} tokens, one a step, and the prompt's steps"
    yield Row("time on a seat", f"{demand.seat_time_s:.2f} s", ESTIMATED, how)
    how = (
        f"Little's law: {sizing.traffic.requests_per_s:g}/s × {demand.seat_time_s:.2f} s = {demand.seats_busy:.1f} busy"
    )
    yield Row("seats needed", f"{demand.seats_needed:,}", ESTIMATED, f"{how}; 95 % of requests find one free")
    yield Row("output", f"{demand.output_tokens_per_s:,.0f} tokens/s", COMPUTED, "of all executors")
    yield Row("first token", f"{demand.ttft_ms:.0f} ms", ESTIMATED, "without a wait for a seat")
    how = f"{demand.replicas + 1} to stand the loss of one"
    yield Row("executors", f"{demand.replicas:,}", ESTIMATED, how)
    num_routers = max(1, math.ceil(demand.output_tokens_per_s / TOKENS_PER_ROUTER))
    how = f"one may go away; {TOKENS_PER_ROUTER:,} tokens/s each, of 50,000 on a core (docs/benchmarks.md)"
    yield Row("routers", f"{1 + num_routers}", ESTIMATED, how)
    share = (
        f"{demand.ledger_share:.1%} of a core of Redis"
        if demand.ledger_share < 1
        else (f"{demand.ledger_share:.1f} cores of Redis: more than a model's ledger can have")
    )
    yield Row("ledger", share, MEASURED, "docs/design/scale.md, its largest size, on its machine")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIBIBYTE:.2f} GiB"
