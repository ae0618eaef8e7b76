"""Whole steps on a CPU by how weights are read: `python -m inflight.bench.engine.streams`.

Computes steps of some shapes through native forward passes that differ in nothing else, in turn: with panels apart and
no prefetch, and in the way that was measured to be the fastest when the model was loaded. Prints Markdown: the
processor time of a step per thread, least of the rounds, because a thread that waits for one without a core spins; and
the median wall time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

from inflight.bench.engine.model_steps import cpu_parser, load_variants
from inflight.bench.engine.native_step import SHAPES, StepShape, batch_of, blocks_of
from inflight.bench.report.table import Table
from inflight.cli.doctor import processor
from inflight.common.machine import num_usable_cores
from inflight.executor.cpu.decoder import NativeDecoder
from inflight.executor.cpu.streams import NEVER, WeightStream
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.model import PagedModel
from inflight.executor.step.batch import StepBatch

BEFORE = WeightStream(False, NEVER)


def timed(model: PagedModel, native: NativeDecoder, batch: StepBatch) -> tuple[float, float]:
    """Processor seconds per thread, and wall seconds, of one step."""
    cpu_began, began = time.process_time(), time.perf_counter()
    native.greedy(batch, model.kv)
    ended = time.perf_counter()
    return (time.process_time() - cpu_began) / num_usable_cores(), ended - began


def times_of(
    models: Sequence[PagedModel], natives: Sequence[NativeDecoder], shape: StepShape, rounds: int
) -> tuple[list[float], list[float]]:
    """Returns each model's least processor time per thread and median wall time of one shape, in milliseconds. The
    models take turns, once more than `rounds`, and the first turn does not count."""
    batch = batch_of(shape)
    times: list[list[tuple[float, float]]] = [[] for _ in models]
    turns = list(zip(models, natives, times, strict=True))
    for index in range(rounds + 1):
        for model, native, seconds in turns if index % 2 else reversed(turns):
            seconds.append(timed(model, native, batch))
    least = [min(cpu_s for cpu_s, _ in seconds[1:]) * 1e3 for seconds in times]
    median = [statistics.median(wall_s for _, wall_s in seconds[1:]) * 1e3 for seconds in times]
    return least, median


def row_of(models: Sequence[PagedModel], natives: Sequence[NativeDecoder], shape: StepShape, rounds: int) -> list[str]:
    """Returns the times of one shape with two models."""
    row = [str(shape)]
    for before, after in times_of(models, natives, shape, rounds):
        row += [f"{before:.1f}", f"{after:.1f}", f"{before / after:.2f}"]
    return row


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = cpu_parser(__doc__, rounds=15)
    options = parser.parse_args(argv)
    num_blocks = max(shape.num_sequences * blocks_of(shape) for shape in SHAPES)
    models = load_variants(options, [{"weight_stream": stream} for stream in (BEFORE, None)], num_blocks)
    if models is None:
        return 1
    natives = [model.forward.decoder for model in models if isinstance(model.forward, NativeForward)]
    described = models[0].description
    print(f"- {processor().text}\n- {described.dtype}, weights: {options.weight_dtype}; {described.backend_reason}")
    rows = [row_of(models, natives, shape, options.rounds) for shape in SHAPES]
    print(f"- before: {natives[0].stream}; after: {natives[1].stream}\n")
    columns = [
        "step",
        "least CPU ms before",
        "after",
        "times as fast",
        "median wall ms before",
        "after",
        "times as fast",
    ]
    print(Table(columns, rows).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
