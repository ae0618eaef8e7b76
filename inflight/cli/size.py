"""`inflight size`: the blocks, seats and executors that a model and its traffic need, and the executors' flags."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from inflight.catalogue import Capacity
from inflight.cli.console import EXIT_USAGE, CommandError, open_console
from inflight.cli.flags import add_connection_flags, connected
from inflight.cli.parser import CommandParser
from inflight.common.kv_size import (
    MOST_SEATS_OF_CPU,
    MOST_SEATS_OF_GPU,
    MOST_SEATS_OF_LARGE_GPU,
    default_step_tokens,
    most_seats,
)
from inflight.common.model_files.layer_sizes import BYTES_PER_NUMBER
from inflight.common.model_source import ModelError
from inflight.common.settings import SettingError
from inflight.tools.sizing.arithmetic import (
    GIBIBYTE,
    GPUS_MIB,
    Machine,
    MemoryOptions,
    Pool,
    SeatsHeld,
    Speed,
    Steps,
    Traffic,
    demand_of,
    pool_of,
    seats_at_max_utilization,
    seats_without_eviction,
)
from inflight.tools.sizing.model_shape import ModelShape, read_model_shape
from inflight.tools.sizing.report import Row, Sizing, as_values, better_policy, rows, start_flags
from inflight.tools.sizing.weights import KV_CACHE_DTYPES, WEIGHT_DTYPES

STYLES = {"exact": "green", "measured": "green", "computed": "cyan", "estimated": "yellow"}
GPU_FRACTION, CPU_FRACTION = 0.9, 0.2
# Of an executor on a GPU: CUDA's own memory and that of the largest step. It is measured at start, and differs by
# model.
GPU_WORKING_GIB = 2.0


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    try:
        sizing = _size(flags)
    except (ModelError, SettingError) as error:
        raise CommandError(str(error), EXIT_USAGE) from None
    if flags.json:
        print(json.dumps(as_values(sizing)))
        return 0
    console = open_console()
    console.print(_table(list(rows(sizing))))
    console.print(f"inflight executor {shlex.join(start_flags(sizing))}", soft_wrap=True, style="bold")
    for warning in _warnings(sizing, flags):
        console.print(warning, style="yellow", soft_wrap=True)
    return 0


def _size(flags: argparse.Namespace) -> Sizing:
    traffic = _traffic(flags)
    shape = read_model_shape(flags.model)
    capacity = _capacity(flags) if flags.from_running else None
    flags.max_num_tokens = flags.max_num_tokens or default_step_tokens(_gpu_bytes(flags))
    flags.max_num_sequences = flags.max_num_sequences or _most_seats(flags, capacity)
    pool, machine = _pool(flags, shape, capacity)
    if machine is not None:
        pool = _with_seats(flags, shape, traffic, machine, pool)
    speed = _speed(flags, capacity)
    policy, free, full = _seats(flags, pool, traffic)
    held = (full if policy == "max_utilization" else free).seats_mean
    seats = min(held, pool.num_window_seats or pool.num_state_seats or held, flags.max_num_sequences)
    if seats < 1:
        raise SettingError(f"a request of {traffic.prompt_tokens} + {traffic.max_tokens} tokens does not fit")
    return Sizing(
        model=flags.model,
        shape=shape,
        machine=machine,
        dtype=flags.dtype,
        pool=pool,
        traffic=traffic,
        max_num_sequences=flags.max_num_sequences,
        max_num_tokens=flags.max_num_tokens,
        without_eviction=free,
        at_max_utilization=full,
        policy=policy,
        seats_per_replica=seats,
        speed=speed,
        demand=None if speed is None else demand_of(traffic, speed, seats, pool.tokens_per_block),
        is_pool_given=bool(flags.max_tokens_in_paged_kv_cache),
        measured_at="" if capacity is None else "the running system",
    )


def _most_seats(flags: argparse.Namespace, capacity: Capacity | None) -> int:
    """Returns the seats of the smallest running executor, else the most that an executor has by itself."""
    running = [] if capacity is None else [executor.seats_total for executor in capacity.executors]
    return min(running, default=0) or most_seats(_gpu_bytes(flags), flags.max_num_tokens)


def _gpu_bytes(flags: argparse.Namespace) -> int:
    """Returns the memory of the GPU; 0 for a CPU."""
    return GPUS_MIB[flags.gpu] << 20 if flags.memory_gib is None else 0


def _seats(flags: argparse.Namespace, pool: Pool, traffic: Traffic) -> tuple[str, SeatsHeld, SeatsHeld]:
    """Returns the policy, and the seats of the pool without eviction and with `max_utilization`."""
    free = seats_without_eviction(pool.num_blocks, pool.tokens_per_block, traffic)
    full = seats_at_max_utilization(pool.num_blocks, pool.tokens_per_block, traffic)
    better = better_policy(free, full, flags.max_num_sequences)
    if pool.num_host_slots:
        better = "max_utilization"  # without it no sequence goes to host memory
    return flags.batch_scheduler_policy or better, free, full


def _with_seats(
    flags: argparse.Namespace, shape: ModelShape, traffic: Traffic, machine: Machine, one_pool: Pool
) -> Pool:
    """Returns the pools with a group for sliding windows, or with recurrent state, that fill the most seats; the one
    pool without these. More seats need more memory of theirs, which leaves fewer blocks."""
    most = flags.max_tokens_in_paged_kv_cache
    depends_on_seats = shape.num_window_layers or shape.recurrent is not None
    for seats in range(flags.max_num_sequences if depends_on_seats else 0, 0, -1):
        steps = Steps(seats, max(flags.max_num_tokens, seats))
        pool = pool_of(shape, machine, flags.dtype, flags.tokens_per_block, most, one_pool.num_ranks, steps)
        policy, free, full = _seats(flags, pool, traffic)
        held = (full if policy == "max_utilization" else free).seats_mean
        if (pool.num_window_blocks or pool.num_state_slots) and held >= seats:
            return pool
    return one_pool


def _traffic(flags: argparse.Namespace) -> Traffic:
    output_p95 = flags.output_tokens_p95 or flags.output_tokens
    return Traffic(
        requests_per_s=flags.requests_per_s,
        prompt_tokens=flags.prompt_tokens,
        prompt_tokens_p95=flags.prompt_tokens_p95 or flags.prompt_tokens,
        output_tokens=flags.output_tokens,
        output_tokens_p95=output_p95,
        max_tokens=flags.max_tokens or output_p95,
        shared_prompt_tokens=flags.shared_prompt_tokens,
    )


def _capacity(flags: argparse.Namespace) -> Capacity:
    with connected(flags) as client:
        capacity = client.capacity(model=flags.served_model_name or "")
    if not capacity.executors:
        raise CommandError("there is no executor to take figures from")
    if len({executor.model for executor in capacity.executors}) > 1:
        raise CommandError("there are executors of several models; choose one with --served-model-name", EXIT_USAGE)
    return capacity


def _pool(flags: argparse.Namespace, shape: ModelShape, capacity: Capacity | None) -> tuple[Pool, Machine | None]:
    """Returns the pool of the smallest running executor, else the pool that would fit."""
    is_gpu = flags.memory_gib is None
    num_ranks = flags.tensor_parallel_size
    fraction = flags.fraction or (GPU_FRACTION if is_gpu else CPU_FRACTION)
    memory = _gpu_bytes(flags) if is_gpu else round(flags.memory_gib * GIBIBYTE)
    working_gib = flags.working_gib if flags.working_gib is not None else (GPU_WORKING_GIB if is_gpu else 0.0)
    options = MemoryOptions(
        flags.weight_dtype,
        flags.kv_cache_dtype,
        flags.max_adapters,
        flags.max_adapter_rank,
        flags.kv_cache_host_memory_bytes,
    )
    machine = Machine(memory, is_gpu, fraction, round(working_gib * GIBIBYTE), options)
    if capacity is None:
        most = flags.max_tokens_in_paged_kv_cache
        return pool_of(shape, machine, flags.dtype, flags.tokens_per_block, most, num_ranks), machine
    smallest = min(capacity.executors, key=lambda executor: executor.blocks_total)
    computed = pool_of(shape, machine, flags.dtype, smallest.block_size, smallest.block_size)
    return (
        Pool(
            computed.weight_bytes,
            computed.bytes_per_token,
            smallest.block_size,
            computed.bytes_per_block,
            smallest.blocks_total,
        ),
        None,
    )


def _speed(flags: argparse.Namespace, capacity: Capacity | None) -> Speed | None:
    if flags.step_ms is not None:
        return Speed(flags.step_ms, flags.max_num_tokens)
    steps = [] if capacity is None else [one.step_ms for one in capacity.executors if one.step_ms > 0]
    return Speed(max(steps), flags.max_num_tokens) if steps else None


def _warnings(sizing: Sizing, flags: argparse.Namespace) -> list[str]:
    warnings = []
    if sizing.speed is not None and flags.itl_ms is not None and sizing.speed.step_ms > flags.itl_ms:
        warnings.append(f"a step takes longer than the {flags.itl_ms:g} ms between tokens: use fewer seats")
    if sizing.demand is not None and flags.ttft_ms is not None and sizing.demand.ttft_ms > flags.ttft_ms:
        warnings.append(f"the prompt alone takes longer than the {flags.ttft_ms:g} ms to the first token")
    longest = sizing.traffic.prompt_tokens_p95 + sizing.traffic.max_tokens
    if sizing.shape.context_length is not None and longest > sizing.shape.context_length:
        warnings.append(f"{longest} tokens exceed the model's context of {sizing.shape.context_length}")
    return warnings


def _table(figures: Sequence[Row]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in figures:
        table.add_row(row.what, row.figure, Text(row.rests_on, STYLES[row.rests_on]), Text(row.how))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight size",
        description="Estimates the blocks, seats and executors that a model and its traffic need, and prints the flags "
        "of the executors. docs/sizing.md explains the arithmetic.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_model_flags(parser.add_argument_group("model and memory"))
    _add_traffic_flags(parser.add_argument_group("traffic"))
    parser.add_argument(
        "--from-running",
        action="store_true",
        help="take blocks and step time from the running system at --address",
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="with --from-running: name of the model there")
    add_connection_flags(parser)
    return parser


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model", default="", metavar="MODEL", help="folder, config.json, GGUF file or hub name; default: SmolLM2"
    )
    group.add_argument("--dtype", choices=BYTES_PER_NUMBER, default="bfloat16", help="default: bfloat16")
    memory = group.add_mutually_exclusive_group()
    memory.add_argument("--gpu", choices=GPUS_MIB, default="h100-80gb", help="GPU of an executor; default: h100-80gb")
    memory.add_argument("--memory-gib", type=_positive, metavar="GIB", help="free memory of an executor on a CPU")
    group.add_argument(
        "--tensor-parallel-size",
        type=_whole,
        default=1,
        metavar="N",
        help="ranks of an executor, each with a GPU or, on CPUs, with --memory-gib; default: 1",
    )
    group.add_argument(
        "--fraction",
        type=_positive,
        help=f"fraction of the remaining memory for KV; default: {GPU_FRACTION} on a GPU, {CPU_FRACTION} on a CPU",
    )
    group.add_argument(
        "--working-gib",
        type=float,
        metavar="GIB",
        help=f"memory that steps need; default: {GPU_WORKING_GIB:g} on a GPU",
    )
    _add_pool_flags(group)


def _add_pool_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tokens-per-block", type=_whole, default=16, metavar="N", help="default: 16")
    group.add_argument(
        "--max-tokens-in-paged-kv-cache", type=_whole, default=0, metavar="N", help="size of the pool; default: all"
    )
    group.add_argument(
        "--max-num-sequences",
        type=_whole,
        metavar="N",
        help=f"maximum number of seats; default: that of an executor, {MOST_SEATS_OF_GPU} on a GPU, "
        f"{MOST_SEATS_OF_LARGE_GPU} on one of 70 GiB, {MOST_SEATS_OF_CPU} on a CPU",
    )
    group.add_argument(
        "--max-num-tokens",
        type=_whole,
        metavar="N",
        help="maximum number of tokens of a step; default: 1024, and 8192 on a GPU of 70 GiB",
    )
    group.add_argument(
        "--weight-dtype", choices=WEIGHT_DTYPES, default="auto", help="as for an executor; default: auto"
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default="auto",
        help="as for an executor, in all layers; default: auto",
    )
    group.add_argument(
        "--max-adapters", type=_count, default=0, metavar="N", help="LoRA adapters in memory at once; default: 0"
    )
    group.add_argument(
        "--max-adapter-rank", type=_whole, default=64, metavar="N", help="maximum rank of an adapter; default: 64"
    )
    group.add_argument(
        "--kv-cache-host-memory-bytes",
        type=_count,
        default=0,
        metavar="N",
        help="host memory for KV beside the pool; default: 0",
    )
    group.add_argument("--batch-scheduler-policy", choices=("guaranteed_no_evict", "max_utilization"))


def _add_traffic_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--requests-per-s", type=_positive, metavar="N", help="requests per second")
    group.add_argument(
        "--prompt-tokens", type=_whole, default=500, metavar="N", help="mean prompt length; default: 500"
    )
    group.add_argument("--prompt-tokens-p95", type=_whole, metavar="N", help="95th percentile; default: the mean")
    group.add_argument(
        "--shared-prompt-tokens",
        type=_count,
        default=0,
        metavar="N",
        help="tokens of a beginning that all prompts share, such as a system prompt; default: 0",
    )
    group.add_argument(
        "--output-tokens", type=_whole, default=200, metavar="N", help="mean output length; default: 200"
    )
    group.add_argument("--output-tokens-p95", type=_whole, metavar="N", help="95th percentile; default: the mean")
    group.add_argument(
        "--max-tokens", type=_whole, metavar="N", help="max_tokens of the requests; default: the 95th percentile"
    )
    group.add_argument("--step-ms", type=_positive, metavar="MS", help="measured time of a step with as many seats")
    group.add_argument("--ttft-ms", type=_positive, metavar="MS", help="target: time to first token")
    group.add_argument("--itl-ms", type=_positive, metavar="MS", help="target: inter-token latency")


def _count(text: str) -> int:
    return _at_least(0, text)


def _whole(text: str) -> int:
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not greater than 0")
    return value
