"""Steps on a CPU by type of the KV cache: `python -m inflight.bench.engine.kv_cache`.

Computes steps of some shapes through native forward passes that differ only in the type of the KV cache, in turn: that
of the model, and int8. Prints Markdown: the processor time of a step per thread, the wall time of its attention, both
the least of the rounds, and the size of a block.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from inflight.bench.engine.model_steps import BLOCK_SIZE, cpu_parser, load_variants
from inflight.bench.engine.native_step import StepShape, batch_of, blocks_of
from inflight.bench.engine.streams import timed
from inflight.bench.report.table import Table
from inflight.cli.doctor import processor
from inflight.executor.cpu.decoder import PARTS
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.model import PagedModel

KV_TYPES = ("auto", "int8")
SHAPES = (
    StepShape(1, 1, 300),
    StepShape(32, 1, 300),
    StepShape(32, 1, 1024),
    StepShape(32, 1, 2048),
    StepShape(1, 1, 2048),
    StepShape(1, 512, 512),
    StepShape(1, 512, 2048),
)
COLUMNS = ["step", "CPU ms", "int8", "times as fast", "attention ms", "int8", "times as fast"]


def row_of(models: Sequence[PagedModel], shape: StepShape, rounds: int) -> list[str]:
    """Returns the times of one shape; the models take turns."""
    batch = batch_of(shape)
    steps: list[list[float]] = [[] for _ in models]
    attentions: list[list[float]] = [[] for _ in models]
    turns = list(zip(models, steps, attentions, strict=True))
    for index in range(rounds + 1):
        for model, step, attention in turns if index % 2 else reversed(turns):
            assert isinstance(model.forward, NativeForward)
            native = model.forward.decoder
            before = native.part_seconds[PARTS.index("attention")]
            step.append(timed(model, native, batch)[0])
            attention.append(native.part_seconds[PARTS.index("attention")] - before)
    row = [str(shape)]
    for times in (steps, attentions):
        plain, int8 = (min(of_model[1:]) * 1e3 for of_model in times)
        row += [f"{plain:.2f}", f"{int8:.2f}", f"{plain / int8:.2f}"]
    return row


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = cpu_parser(__doc__, rounds=10)
    options = parser.parse_args(argv)
    num_blocks = max(shape.num_sequences * blocks_of(shape) for shape in SHAPES)
    models = load_variants(options, [{"kv_cache_dtype": kv_type} for kv_type in KV_TYPES], num_blocks)
    if models is None:
        return 1
    plain, int8 = models
    described = plain.description
    print(f"- {processor().text}\n- {described.dtype}, weights: {options.weight_dtype}; {described.backend_reason}")
    sizes = [model.forward.layout.bytes_per_block(BLOCK_SIZE) for model in models]
    print(
        f"- a block of {BLOCK_SIZE} tokens: {sizes[0]} bytes, int8 {sizes[1]} bytes, {sizes[0] / sizes[1]:.3f} times\n"
    )
    rows = [row_of((plain, int8), shape, options.rounds) for shape in SHAPES]
    print(Table(COLUMNS, rows).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
