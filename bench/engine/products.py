"""The matrix products of a step alone, by how they read weights: `python -m inflight.bench.engine.products`.

For every matrix shape of a model, multiplies rows with as many such matrices as fit no cache, in several ways of
`inflight.executor.cpu.streams`. Times are processor time per thread, in which other processes do not count, though they
share caches and memory; the ways take turns. Prints Markdown: the time of all matrices, the bytes of weights read per
second, their share of the bandwidth of plain reading in the same run, and the operations per second.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from inflight.bench.report.table import Table
from inflight.cli.doctor import processor
from inflight.common.machine import num_usable_cores
from inflight.executor.cpu.streams import (
    NEVER,
    TRIAL_BYTES,
    ProductTrial,
    TrialCodes,
    TrialShape,
    WeightStream,
    choose_stream,
)
from inflight.executor.native.library import NAMES, NativeLibrary, load_native
from inflight.executor.native.pool import NativePool

# Columns, depth, and blocks of a task of SmolLM2-135M.
MATRICES = {
    "qkv": (960, 576, 2),
    "output": (576, 576, 1),
    "gate_up": (3072, 576, 2),
    "down": (576, 1536, 1),
    "head": (49152, 576, 4),
}
# int8, with which rows are int8 as well, and codes with a scale, and for asymmetric ones a shift, for each group.
WEIGHTS = {
    "auto": (False, None),
    "int8": (True, None),
    "int4-g32": (False, TrialCodes(4, 32, True)),
    "int4-g32-symmetric": (False, TrialCodes(4, 32, False)),
    "int4-g128": (False, TrialCodes(4, 128, True)),
    "int8-g32-symmetric": (False, TrialCodes(8, 32, False)),
}
WAYS = {
    "panels apart": WeightStream(False, NEVER),
    "apart, prefetch": WeightStream(False, 1),
    "interleaved": WeightStream(True, NEVER),
    "interleaved, prefetch": WeightStream(True, 1),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Median times of one matrix shape: of reading, and of each way for each number of rows."""

    num_bytes: int
    read_s: float
    product_s: dict[tuple[int, str], float]


def measure(
    library: NativeLibrary, pool: NativePool, shape: TrialShape, row_counts: Sequence[int], rounds: int
) -> Measured:
    """Times one shape; the ways take turns."""
    trial = ProductTrial(library, pool, shape, TRIAL_BYTES, max(row_counts))
    reads: list[float] = []
    times: dict[tuple[int, str], list[float]] = {(rows, way): [] for rows in row_counts for way in WAYS}
    for _ in range(rounds):
        reads.append(trial.read_seconds())
        for (num_rows, way), seconds in times.items():
            seconds.append(trial.seconds(num_rows, WAYS[way]))
    trial.close()
    medians = {case: statistics.median(seconds) for case, seconds in times.items()}
    return Measured(trial.num_matrices * shape.num_bytes, statistics.median(reads), medians)


def table_of(measured: Measured, num_weights: int) -> Table:
    """Returns a row for each number of rows and way."""
    rows = []
    for (num_rows, way), seconds in measured.product_s.items():
        rows.append(
            [
                str(num_rows),
                way,
                f"{seconds * 1e3:.2f}",
                f"{measured.num_bytes / seconds / 1e9:.1f}",
                f"{measured.read_s / seconds:.0%}",
                f"{2 * num_weights * num_rows / seconds / 1e9:.0f}",
                f"{measured.product_s[num_rows, 'panels apart'] / seconds:.2f}",
            ]
        )
    return Table(["rows", "weights", "ms", "GB/s", "of reading", "GFLOP/s", "times as fast"], rows)


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-isa", default="auto", choices=NAMES, help="instruction set; default: the best")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="default: %(default)s")
    parser.add_argument("--weight-dtype", default="auto", choices=WEIGHTS, help="default: auto")
    parser.add_argument("--rounds", type=int, default=7, help="times that each is measured; default: %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="default: %(default)s")
    parser.add_argument("--only", choices=MATRICES, help="one shape; default: all")
    options = parser.parse_args(argv)
    library = load_native(options.cpu_isa)
    if not isinstance(library, NativeLibrary):
        print(library.reason, file=sys.stderr)
        return 1
    pool = NativePool(library, num_usable_cores())
    print(f"- {processor().text}")
    how = f"built for {library.instructions}, {pool.num_threads} threads"
    print(f"- {options.dtype}, weights: {options.weight_dtype}; {how}")
    for name in [options.only] if options.only else MATRICES:
        dtype = torch.bfloat16 if options.dtype == "bfloat16" else torch.float32
        shape = TrialShape(*MATRICES[name], dtype, *WEIGHTS[options.weight_dtype])
        measured = measure(library, pool, shape, options.rows, options.rounds)
        num_weights = measured.num_bytes // shape.num_bytes * shape.columns * shape.depth
        read_rate = measured.num_bytes / measured.read_s / 1e9
        print(f"\n## {name}: {shape.columns} columns, depth {shape.depth}; reading: {read_rate:.1f} GB/s")
        print(
            f"chosen: {choose_stream(library, pool, shape)}\n\n{table_of(measured, num_weights).markdown()}", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
