"""Whole steps on a CPU by type of the weights: `python -m inflight.bench.engine.weight_types`.

Computes steps of some shapes through native forward passes that differ only in the type of the weights, in turn: that
of the model, int8, with activations in int8 as well, and int4; and those of a GGUF file, of which the others are made.
Prints Markdown: the processor time of a step per thread, the least of the rounds, and the median wall time; of types
other than the model's, how many times as fast.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from inflight.bench.engine.model_steps import allocate_kv, cpu_parser, load_native_models
from inflight.bench.engine.native_step import SHAPES, blocks_of
from inflight.bench.engine.streams import times_of
from inflight.bench.report.table import Table
from inflight.cli.doctor import processor
from inflight.common.model_source import resolve_model
from inflight.executor.checkpoint.gguf import import_gguf
from inflight.executor.forward.native import NativeForward


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = cpu_parser(__doc__, rounds=15)
    options = parser.parse_args(argv)
    source = resolve_model(options.model)
    dense = source if source.gguf_file is None else resolve_model(str(import_gguf(source)))
    kinds = {options.dtype: (dense, "auto"), "int8": (dense, "int8"), "int4": (dense, "int4")}
    if source.gguf_file is not None:
        kinds[source.gguf_file.stem.rpartition(".")[2]] = (source, "auto")
    arguments = {"dtype_name": options.dtype, "instructions": options.cpu_isa}
    models = load_native_models(
        [(of_kind, {**arguments, "weight_dtype": weight_type}) for of_kind, weight_type in kinds.values()]
    )
    if models is None:
        return 1
    natives = [model.forward.decoder for model in models if isinstance(model.forward, NativeForward)]
    for model in models:
        allocate_kv(model, max(shape.num_sequences * blocks_of(shape) for shape in SHAPES))
    print(f"- {processor().text}\n- {models[0].description.dtype}; {models[0].description.backend_reason}")
    sizes = [f"{kind} {native.num_matrix_bytes / 1e6:.1f} MB" for kind, native in zip(kinds, natives, strict=True)]
    print(f"- weights that a step reads: {', '.join(sizes)}\n")
    rows = []
    for shape in SHAPES:
        row = [str(shape)]
        for first, *others in times_of(models, natives, shape, options.rounds):
            row += [f"{first:.1f}", *(f"{other:.1f} ({first / other:.2f} ×)" for other in others)]
        rows.append(row)
    columns = [f"{name}, {kind}" for name in ("CPU ms", "wall ms") for kind in kinds]
    print(Table(["step", *columns], rows).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
