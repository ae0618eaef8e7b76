"""The cost of swapping a sequence's KV against recomputing it: `python -m inflight.bench.host_tier.swap`.

Loads a model and, for contexts of some lengths, copies their blocks to host memory and back as a preemption does, and
recomputes the same tokens in steps of `--max-num-tokens`. The two take turns, so that a disturbance affects both.
Prints Markdown, and in the last line the costs per token: one way of its KV, and its computation.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from inflight.bench.engine.model_steps import BLOCK_SIZE, greedy_sequence, made_up_ids, model_parser
from inflight.bench.report.table import Table
from inflight.common.machine import num_usable_cores
from inflight.common.model_source import resolve_model
from inflight.executor.attention.host_tier import open_host_tier
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.sequence import PlanRow, StepPlan
from inflight.executor.step.batch import StepBatch, pack

CONTEXTS = (16, 128, 512, 2048)


@dataclass(frozen=True, slots=True)
class Measured:
    """Least seconds for a context of `num_tokens`: other load on the machine only lengthens times."""

    num_tokens: int
    out_s: float
    in_s: float
    recompute_s: float

    @property
    def round_trip_s(self) -> float:
        return self.out_s + self.in_s


def measure(model: PagedModel, contexts: Sequence[int], max_num_tokens: int, rounds: int) -> list[Measured]:
    """Copies and computes; the blocks of a context lie scattered, as they do after some time of serving."""
    most_blocks = max(contexts) // BLOCK_SIZE
    model.allocate_kv(2 * most_blocks, BLOCK_SIZE)
    tier = open_host_tier(model.kv, most_blocks)
    numbers = random.Random(0)
    timed: list[list[tuple[float, float, float]]] = [[] for _ in contexts]
    for _ in range(rounds + 1):
        for num_tokens, times in zip(contexts, timed, strict=True):
            table = numbers.sample(range(1, 2 * most_blocks + 1), num_tokens // BLOCK_SIZE)
            batches = _batches(num_tokens, max_num_tokens, table)
            recompute_s = _seconds(model.device, partial(_compute, model, batches))
            swaps_out = list(zip(table, range(most_blocks), strict=False))
            swaps_in = [(host_block, block) for block, host_block in swaps_out]
            out_s = _seconds(model.device, partial(tier.swap, swaps_out, ()))
            in_s = _seconds(model.device, partial(tier.swap, (), swaps_in))
            times.append((out_s, in_s, recompute_s))
    # The first round takes memory and compiles.
    return [
        Measured(num_tokens, *(min(column) for column in zip(*times[1:], strict=True)))
        for num_tokens, times in zip(contexts, timed, strict=True)
    ]


def _compute(model: PagedModel, batches: Sequence[StepBatch]) -> None:
    for batch in batches:
        model.logits(batch)


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _batches(num_tokens: int, max_num_tokens: int, block_table: list[int]) -> list[StepBatch]:
    """Returns the chunks in which a prompt of so many tokens is computed. Only the last asks for logits."""
    sequence = greedy_sequence(made_up_ids(num_tokens), block_table)
    ends = [min(start + max_num_tokens, num_tokens) for start in range(0, num_tokens, max_num_tokens)]
    rows = [
        PlanRow(sequence, start, end - start, end == num_tokens) for start, end in zip([0, *ends], ends, strict=False)
    ]
    return [pack(StepPlan.of([row]), BLOCK_SIZE) for row in rows]


def table_of(measured: Sequence[Measured], bytes_per_block: int) -> Table:
    header = ["tokens", "out, µs per block", "in, µs per block", "GB/s", "recompute, µs per token", "recompute / swap"]
    return Table(header, [_row(one, one.num_tokens / BLOCK_SIZE, bytes_per_block) for one in measured])


def _row(one: Measured, num_blocks: float, bytes_per_block: int) -> list[str]:
    return [
        str(one.num_tokens),
        f"{one.out_s / num_blocks * 1e6:.0f}",
        f"{one.in_s / num_blocks * 1e6:.0f}",
        f"{2 * num_blocks * bytes_per_block / one.round_trip_s / 1e9:.1f}",
        f"{one.recompute_s / one.num_tokens * 1e6:.0f}",
        f"{one.recompute_s / one.round_trip_s:.1f}",
    ]


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = model_parser(__doc__, ["auto", "bfloat16", "float32"], rounds=5)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="default: auto")
    parser.add_argument("--max-num-tokens", type=int, default=1024, help="most tokens in a step; default: 1024")
    options = parser.parse_args(argv)
    torch.set_num_threads(num_usable_cores())
    model = load_model(
        resolve_model(options.model),
        dtype_name=options.dtype,
        device_name=options.device,
        weight_dtype=options.weight_dtype,
    )
    bytes_per_block = model.forward.layout.bytes_per_block(BLOCK_SIZE)
    contexts = [num_tokens for num_tokens in CONTEXTS if num_tokens <= model.description.context_length]
    measured = measure(model, contexts, options.max_num_tokens, options.rounds)
    described = model.description
    print(f"- {model.device}, {described.dtype}, weights: {options.weight_dtype}; {described.backend_reason}")
    print(f"- a block of {BLOCK_SIZE} tokens takes {bytes_per_block} bytes\n")
    print(table_of(measured, bytes_per_block).markdown() + "\n")
    longest = measured[-1]
    swap_us, recompute_us = (s / longest.num_tokens * 1e6 for s in (longest.round_trip_s / 2, longest.recompute_s))
    print(f"swap: one_way_us_per_token={swap_us:.2f} recompute_us_per_token={recompute_us:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
