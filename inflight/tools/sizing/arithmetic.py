"""The arithmetic of `inflight size`: from a model, a memory and a traffic to blocks, seats and replicas. Pure.

docs/sizing.md explains it with an example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from inflight.common.kv_size import (
    KvBudget,
    StateSize,
    WindowSize,
    blocks_for,
    default_step_tokens,
    host_sizes,
    hybrid_sizes,
    kv_bytes_per_token,
    kv_groups,
    most_seats,
    num_host_kv_blocks,
    num_kv_blocks,
)
from inflight.common.model_files.layer_sizes import BYTES_PER_NUMBER, gpu_adapter_slot_bytes
from inflight.common.model_files.recurrent import RecurrentShape
from inflight.common.settings import SettingError
from inflight.tools.sizing.adapters import cpu_adapter_slot_bytes
from inflight.tools.sizing.model_shape import ModelShape
from inflight.tools.sizing.weights import Role, cpu_weight_bytes

GIBIBYTE = 1 << 30
# Memory that `nvidia-smi` reports, MiB.
GPUS_MIB = {
    "a10g-24gb": 23_028,
    "a100-40gb": 40_960,
    "a100-80gb": 81_920,
    "b200-180gb": 183_359,
    "h100-80gb": 81_559,
    "h200-141gb": 143_771,
    "l4-24gb": 23_034,
    "l40s-48gb": 46_068,
    "rtx4090-24gb": 24_564,
}
# The CPU's kernels keep heads in whole vectors of so many numbers.
CPU_LANES = 16
# Of a token's key or value in int8 or FP8, for each KV head; and of a row of a matrix in FP8.
SCALE_BYTES = 4
# Share of the time in which requests find a seat free, in standard deviations of the normal distribution.
SURE_DEVIATIONS = 1.645
# Requests admitted per second by one core of Redis with 1,000,000 queued and 1,000 executors: docs/design/scale.md.
ADMITTED_PER_S = 6_655


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Settings of an executor that decide its memory besides the KV pool, with their names."""

    weight_dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_adapters: int = 0
    max_adapter_rank: int = 64
    kv_cache_host_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """The place of an executor, or of each of its ranks. `working_bytes` is the memory of steps besides weights and
    KV."""

    memory_bytes: int
    is_gpu: bool
    fraction: float
    working_bytes: int
    options: MemoryOptions = MemoryOptions()


@dataclass(frozen=True, slots=True)
class Steps:
    """The largest step of an executor: its seats and tokens."""

    max_num_sequences: int
    max_num_tokens: int


@dataclass(frozen=True, slots=True)
class Pool:
    """The capacity of an executor's memory. Bytes are those of each rank; a block has a part on every rank.

    `num_window_blocks` is the pool of the layers with a sliding window for `num_window_seats`, if it is not 0. Bytes
    are those in all layers nevertheless.

    `num_state_slots` are the slots of recurrent state for `num_state_seats`, if there are such layers, and
    `num_host_slots` those in host memory.
    """

    weight_bytes: int
    bytes_per_token: int
    tokens_per_block: int
    bytes_per_block: int
    num_blocks: int
    num_ranks: int = 1
    num_window_blocks: int = 0
    num_window_seats: int = 0
    adapter_bytes: int = 0
    num_host_blocks: int = 0
    num_state_slots: int = 0
    num_checkpoints: int = 0
    slot_bytes: int = 0
    checkpoint_bytes: int = 0
    num_state_seats: int = 0
    num_host_slots: int = 0


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic. `max_tokens` is what requests ask for, which is reserved if sequences are never preempted.

    All prompts begin with the same `shared_prompt_tokens` tokens.

    Raises:
        SettingError: a prompt is shorter than what all share.
    """

    requests_per_s: float | None
    prompt_tokens: int
    prompt_tokens_p95: int
    output_tokens: int
    output_tokens_p95: int
    max_tokens: int
    shared_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        shortest = min(self.prompt_tokens, self.prompt_tokens_p95)
        if self.shared_prompt_tokens > shortest:
            raise SettingError(
                f"the {self.shared_prompt_tokens} shared tokens are more than the {shortest} of a prompt"
            )

    def num_shared_blocks(self, tokens_per_block: int) -> int:
        """Returns the blocks that all sequences share. The prefix cache shares full blocks, and at least the last token
        of a prompt is computed."""
        most_cached = min(self.prompt_tokens, self.prompt_tokens_p95) - 1
        return min(self.shared_prompt_tokens, most_cached) // tokens_per_block


@dataclass(frozen=True, slots=True)
class SeatsHeld:
    """The requests that fit the blocks at once, if all had the mean length, or that of the longest 5 %. `blocks_…` are
    the blocks of each request without those that all share."""

    blocks_mean: int
    seats_mean: int
    blocks_p95: int
    seats_p95: int


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of steps, and the source of the figure."""

    step_ms: float
    max_num_tokens: int


@dataclass(frozen=True, slots=True)
class TrafficDemand:
    """The demand of the traffic by Little's law. `ttft_ms` excludes waiting."""

    seat_time_s: float
    seats_busy: float
    seats_needed: int
    output_tokens_per_s: float
    ttft_ms: float
    replicas: int
    ledger_share: float


def pool_of(
    shape: ModelShape,
    machine: Machine,
    dtype: str,
    tokens_per_block: int,
    max_tokens_in_pool: int = 0,
    num_ranks: int = 1,
    steps: Steps | None = None,
) -> Pool:
    """Returns what fits beside the weights, of which each rank has an equal part. With `steps`, layers with a sliding
    window keep their window where an executor does that.

    Raises:
        SettingError: not one block does, or not what is asked for, or the heads cannot be divided by the ranks, or
            executors refuse the options.
    """
    if num_ranks not in (sizes := shape.numbers_of_ranks()):
        raise SettingError(
            f"{shape.num_kv_heads} KV heads cannot be divided by {num_ranks} ranks; sizes that work: "
            f"{', '.join(map(str, sizes))}"
        )
    if machine.is_gpu and num_ranks > 1:
        if shape.recurrent is not None:
            raise SettingError("recurrent layers do not run on several GPUs")
        _check_gpu_ranks(machine.options)
    head_dim = shape.head_dim if machine.is_gpu else blocks_for(shape.head_dim, CPU_LANES) * CPU_LANES
    head_bytes = _head_bytes(machine, dtype, head_dim)
    bytes_per_token = kv_bytes_per_token(shape.num_kv_layers, shape.kv_heads_of_rank(num_ranks), head_bytes)
    bytes_per_block = bytes_per_token * tokens_per_block
    weight_bytes = _weight_bytes(shape, machine, dtype, num_ranks)
    adapter_bytes = _adapter_bytes(shape, machine, dtype, num_ranks)
    free_bytes = max(0, machine.memory_bytes - weight_bytes - adapter_bytes - machine.working_bytes)
    budget = KvBudget(max_tokens_in_pool, free_bytes, machine.fraction)
    if shape.recurrent is not None:
        pool = Pool(
            *(weight_bytes, bytes_per_token, tokens_per_block, bytes_per_block, 0, num_ranks),
            adapter_bytes=adapter_bytes,
        )
        return _with_states(pool, shape, shape.recurrent.of_rank(num_ranks), machine, dtype, budget, steps)
    num_blocks = num_kv_blocks(budget, tokens_per_block, bytes_per_block)
    host_bytes = machine.options.kv_cache_host_memory_bytes
    # Of a GPU's host the memory is not known.
    free_host_bytes = host_bytes if machine.is_gpu else free_bytes - num_blocks * bytes_per_block
    num_host_blocks = num_host_kv_blocks(host_bytes, bytes_per_block, free_host_bytes)
    pool = Pool(
        weight_bytes,
        bytes_per_token,
        tokens_per_block,
        bytes_per_block,
        num_blocks,
        num_ranks,
        adapter_bytes=adapter_bytes,
        num_host_blocks=num_host_blocks,
    )
    if (machine.is_gpu and num_ranks > 1) or host_bytes or steps is None or not shape.num_window_layers:
        return pool
    return _with_window_group(pool, shape, steps, is_limited=max_tokens_in_pool > 0)


def _with_states(
    pool: Pool,
    shape: ModelShape,
    recurrent: RecurrentShape,
    machine: Machine,
    dtype: str,
    budget: KvBudget,
    steps: Steps | None,
) -> Pool:
    """Returns the pool beside the state of recurrent layers, for the seats of `steps` or those that are likely."""
    gpu_bytes = machine.memory_bytes if machine.is_gpu else 0
    input_bytes = recurrent.input_numbers * BYTES_PER_NUMBER[dtype]
    slot_bytes, checkpoint_bytes = recurrent.slot_bytes + input_bytes, recurrent.checkpoint_bytes + input_bytes
    sizes = hybrid_sizes(
        budget,
        pool.tokens_per_block,
        pool.bytes_per_block,
        StateSize(slot_bytes, checkpoint_bytes, recurrent.grid_tokens),
        context_length=shape.context_length or pool.tokens_per_block,
        num_seats_set=0 if steps is None else steps.max_num_sequences,
        most_seats=most_seats(gpu_bytes, default_step_tokens(gpu_bytes)),
        keeps_prefixes=True,
    )
    host_bytes = machine.options.kv_cache_host_memory_bytes
    taken_bytes = sizes.num_blocks * pool.bytes_per_block + sizes.num_slots * slot_bytes
    free_host_bytes = host_bytes if machine.is_gpu else budget.free_bytes - taken_bytes
    num_host_blocks, num_host_slots = host_sizes(
        host_bytes, pool.bytes_per_block, slot_bytes, sizes.num_seats, free_host_bytes
    )
    return replace(
        pool,
        num_host_blocks=num_host_blocks,
        num_host_slots=num_host_slots,
        num_blocks=sizes.num_blocks,
        num_state_slots=sizes.num_slots,
        num_checkpoints=sizes.num_checkpoints,
        slot_bytes=slot_bytes,
        checkpoint_bytes=checkpoint_bytes,
        num_state_seats=sizes.num_seats,
    )


def _with_window_group(pool: Pool, shape: ModelShape, steps: Steps, *, is_limited: bool) -> Pool:
    """Returns the pool with a group of its own for layers with a sliding window, if the window is shorter than the
    context and the groups fit."""
    context_length = shape.context_length or shape.sliding_window
    if shape.sliding_window >= context_length:
        return pool
    layer_bytes = pool.bytes_per_block // shape.num_layers
    groups = kv_groups(
        pool.num_blocks,
        layer_bytes * (shape.num_layers - shape.num_window_layers),
        layer_bytes * shape.num_window_layers,
        WindowSize(shape.sliding_window, steps.max_num_tokens, context_length, 0, pool.tokens_per_block),
        num_seats_set=steps.max_num_sequences,
        most_seats=steps.max_num_sequences,
        is_limited=is_limited,
        keeps_prefixes=True,
    )
    if groups is None:
        return pool
    return replace(
        pool,
        num_blocks=groups.num_blocks,
        num_window_blocks=groups.num_window_blocks,
        num_window_seats=groups.num_seats,
    )


def _check_gpu_ranks(options: MemoryOptions) -> None:
    """Raises `SettingError` for options with which an executor refuses ranks on GPUs."""
    lacking = {
        f"--weight-dtype {options.weight_dtype}": options.weight_dtype in ("fp8", "quantized", "quantized_a8"),
        "--kv-cache-dtype fp8": options.kv_cache_dtype == "fp8",
        "--max-adapters": options.max_adapters > 0,
        "--kv-cache-host-memory-bytes": options.kv_cache_host_memory_bytes > 0,
    }
    for name, is_set in lacking.items():
        if is_set:
            raise SettingError(f"{name} does not go with --tensor-parallel-size on GPUs")


def _head_bytes(machine: Machine, dtype: str, head_dim: int) -> int:
    """Returns the memory of a token's key or value in one KV head. Quantized ones have a scale."""
    kv_cache_dtype = machine.options.kv_cache_dtype
    if kv_cache_dtype == "auto":
        return head_dim * BYTES_PER_NUMBER[dtype]
    if machine.is_gpu != (kv_cache_dtype == "fp8"):
        needed = "a GPU: give --gpu" if kv_cache_dtype == "fp8" else "a CPU: give --memory-gib"
        raise SettingError(f"--kv-cache-dtype {kv_cache_dtype} needs {needed}")
    return head_dim + SCALE_BYTES


def _weight_bytes(shape: ModelShape, machine: Machine, dtype: str, num_ranks: int) -> int:
    """Returns the weights of a rank. On a GPU those of layers are dense, as in a quantized checkpoint, or in FP8."""
    weight_dtype = machine.options.weight_dtype
    if weight_dtype == "fp8":
        if not machine.is_gpu:
            raise SettingError("--weight-dtype fp8 needs a GPU: give --gpu")
        return -(-fp8_weight_bytes(shape, dtype) // num_ranks)
    if machine.is_gpu or not shape.weights:
        is_quantized = any(weight.codes is not None for weight in shape.weights)
        if weight_dtype == "quantized" and machine.is_gpu and not is_quantized:
            raise SettingError("--weight-dtype quantized is for quantized checkpoints, and this one is not")
        if weight_dtype in ("quantized_a8", "int8", "int4") or (weight_dtype == "quantized" and not machine.is_gpu):
            raise SettingError(f"--weight-dtype {weight_dtype} needs a CPU: give --memory-gib")
        num_numbers = shape.num_parameters
        if machine.is_gpu and num_ranks > 1 and shape.weights:
            # Ranks divide the embedding and the output layer differently, so they do not share a tied one.
            num_numbers = sum(weight.number for weight in shape.weights)
        dense_bytes = -(-num_numbers // num_ranks) * BYTES_PER_NUMBER[dtype]
        # Ranks on GPUs expand a quantized checkpoint.
        return dense_bytes if num_ranks > 1 or weight_dtype == "dense" else dense_bytes - _saved_bytes(shape, dtype)
    return -(-cpu_weight_bytes(shape.weights, dtype, weight_dtype) // num_ranks)


def _saved_bytes(shape: ModelShape, dtype: str) -> int:
    """Returns what the matrices of a quantized checkpoint take less than dense ones on a GPU. The embedding is dense
    there; a tied output layer that is quantized has numbers of its own."""
    is_tied = sum(weight.number for weight in shape.weights) > shape.num_parameters
    saved = 0.0
    for weight in shape.weights:
        if weight.codes is not None and weight.role is not Role.EMBEDDING:
            dense_bytes = 0 if is_tied and weight.role is Role.HEAD else BYTES_PER_NUMBER[dtype]
            saved += weight.number * (dense_bytes - weight.codes.gpu_bytes_each)
    return math.floor(saved)


def fp8_weight_bytes(shape: ModelShape, dtype: str) -> int:
    """Returns the weights of an executor on a GPU with `--weight-dtype fp8`: a byte for each number of a layer's
    matrices and a float32 scale for each row of them; embedding, output layer and vectors are in `dtype`."""
    if shape.sizes is None or shape.has_experts:
        raise SettingError("--weight-dtype fp8 is for models without experts")
    num_matrix = sum(weight.number for weight in shape.weights if weight.role is Role.MATRIX)
    sizes = shape.sizes
    num_rows = shape.num_layers * (sizes.attention + 2 * sizes.kv + 2 * sizes.inner + 2 * sizes.hidden)
    return (shape.num_parameters - num_matrix) * BYTES_PER_NUMBER[dtype] + num_matrix + num_rows * SCALE_BYTES


def _adapter_bytes(shape: ModelShape, machine: Machine, dtype: str, num_ranks: int) -> int:
    """Returns the memory of the adapter slots."""
    options = machine.options
    if not options.max_adapters or shape.sizes is None:
        return 0
    num_recurrent, max_rank = 0 if shape.recurrent is None else shape.recurrent.num_layers, options.max_adapter_rank
    num_layers = shape.num_kv_layers + num_recurrent
    if machine.is_gpu:
        has_bare_layers = shape.recurrent is not None and shape.recurrent.num_feed_forward > 0
        if shape.sizes.has_gates or has_bare_layers:
            raise SettingError(
                "adapters of models with gates of attention, or with feed-forward layers without gates, need a CPU: "
                "give --memory-gib"
            )
        slot_bytes = gpu_adapter_slot_bytes(
            num_layers,
            shape.sizes,
            max_rank,
            BYTES_PER_NUMBER[dtype],
            has_experts=shape.has_experts,
            num_recurrent=num_recurrent,
        )
        return options.max_adapters * slot_bytes
    kv = shape.kv_heads_of_rank(num_ranks) * shape.head_dim
    outputs = shape.sizes.of_rank(num_ranks, kv)
    slot_bytes = cpu_adapter_slot_bytes(
        num_layers,
        shape.sizes,
        outputs,
        max_rank,
        dtype,
        has_experts=shape.has_experts,
        num_recurrent=num_recurrent,
    )
    return options.max_adapters * slot_bytes


def seats_without_eviction(num_blocks: int, tokens_per_block: int, traffic: Traffic) -> SeatsHeld:
    """Returns the seats of `guaranteed_no_evict`, which reserves the prompt and all of `max_tokens`."""
    return _seats_held(num_blocks, tokens_per_block, traffic, traffic.max_tokens)


def seats_at_max_utilization(num_blocks: int, tokens_per_block: int, traffic: Traffic) -> SeatsHeld:
    """Returns the seats of `max_utilization`, which reserves the prompt and the likely output: here its 95th
    percentile."""
    output = min(traffic.max_tokens, traffic.output_tokens_p95)
    return _seats_held(num_blocks, tokens_per_block, traffic, output)


def _seats_held(num_blocks: int, tokens_per_block: int, traffic: Traffic, output_tokens: int) -> SeatsHeld:
    """Returns the seats of requests that reserve so much output."""
    mean = blocks_for(traffic.prompt_tokens + output_tokens, tokens_per_block)
    p95 = blocks_for(traffic.prompt_tokens_p95 + output_tokens, tokens_per_block)
    shared = traffic.num_shared_blocks(tokens_per_block)
    seats_mean, seats_p95 = (_num_seats(num_blocks, reserved, shared) for reserved in (mean, p95))
    return SeatsHeld(mean - shared, seats_mean, p95 - shared, seats_p95)


def _num_seats(num_blocks: int, num_reserved: int, num_shared: int) -> int:
    """Returns how many sequences fit that reserve so many blocks and share so many of them. Each is placed by its whole
    reservation; what it shares is known to the router once it has its seat. So the shared blocks count twice."""
    if num_reserved > num_blocks:
        return 0
    return max(1, (num_blocks - 2 * num_shared) // (num_reserved - num_shared))


def demand_of(traffic: Traffic, speed: Speed, seats_per_replica: int, tokens_per_block: int) -> TrafficDemand | None:
    """Returns what the traffic needs; None if its rate is unknown. Shared blocks of prompts are not computed again.

    Little's law: seats busy = arrivals per second × seconds on a seat. Arrivals at random (Poisson) make the number of
    busy seats vary by its square root; so many are needed that 95 % of arrivals find one free.
    """
    if traffic.requests_per_s is None:
        return None
    num_cached_tokens = traffic.num_shared_blocks(tokens_per_block) * tokens_per_block
    prefill_steps = blocks_for(traffic.prompt_tokens - num_cached_tokens, speed.max_num_tokens)
    seat_time_s = (prefill_steps + max(0, traffic.output_tokens - 1)) * speed.step_ms / 1000
    busy = traffic.requests_per_s * seat_time_s
    needed = max(1, math.ceil(busy + SURE_DEVIATIONS * math.sqrt(busy)))
    return TrafficDemand(
        seat_time_s=seat_time_s,
        seats_busy=busy,
        seats_needed=needed,
        output_tokens_per_s=traffic.requests_per_s * traffic.output_tokens,
        ttft_ms=prefill_steps * speed.step_ms,
        replicas=-(-needed // seats_per_replica),
        ledger_share=traffic.requests_per_s / ADMITTED_PER_S,
    )
