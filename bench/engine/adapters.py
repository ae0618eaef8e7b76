"""The cost of LoRA adapters in a step on a CPU: `python -m inflight.bench.engine.adapters [--rank 16]`.

Loads a model and random adapters of all seven projections, and computes the same steps with no adapter, with one that
all rows have, and with eight that rows have in turn. Prints Markdown: milliseconds per step, and tokens per second
relative to the step without adapters. The variants take turns, so that a disturbance affects all of them; a ratio is
the median of those of the rounds. Few decodes are limited by memory, so it also prints the bytes of the weights and of
an adapter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from inflight.bench.engine.model_steps import BLOCK_SIZE, load_native_model, model_parser
from inflight.bench.engine.native_step import StepShape, batch_of, blocks_of
from inflight.bench.report.table import Table
from inflight.executor.adapters.weights import MATRICES, AdapterLimits, AdapterMatrix, AdapterWeights
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.model import PagedModel
from inflight.executor.step.batch import StepBatch

NUMS_ADAPTERS = (0, 1, 8)
SHAPES = (StepShape(8, 1, 300), StepShape(32, 1, 300), StepShape(8, 64, 300))


def random_adapter(limits: AdapterLimits, rank: int, seed: int) -> AdapterWeights:
    """Returns an adapter of all projections."""
    generator = torch.Generator().manual_seed(seed)
    matrices = [
        AdapterMatrix(
            torch.randn(rank, inputs, generator=generator) / inputs**0.5,
            torch.randn(outputs, rank, generator=generator) / rank**0.5,
            0.01,
        )
        for _, (outputs, inputs) in limits.modules()
    ]
    starts = range(0, len(matrices), len(MATRICES))
    return AdapterWeights(tuple(tuple(matrices[start : start + len(MATRICES)]) for start in starts))


def with_adapters(batch: StepBatch, num_adapters: int) -> StepBatch:
    """Returns the step with adapters that the sequences have in turn."""
    if not num_adapters:
        return batch
    slots = torch.arange(batch.num_sequences, dtype=torch.int32) % num_adapters
    return replace(batch, adapter_slots=slots)


def measure(model: PagedModel, rounds: int) -> Table:
    """Returns the time of each shape by number of adapters."""
    assert isinstance(model.forward, NativeForward)
    native = model.forward.decoder
    model.allocate_kv(max(shape.num_sequences * blocks_of(shape) for shape in SHAPES), BLOCK_SIZE)
    for kv in model.kv:
        kv.keys.fill_(0.01)
        kv.values.fill_(0.01)
    rows = []
    for shape in SHAPES:
        batches = [with_adapters(batch_of(shape), number) for number in NUMS_ADAPTERS]
        times_s = np.zeros((rounds + 1, len(batches)))
        for measured in times_s:
            for i, batch in enumerate(batches):
                began = time.perf_counter()
                native.greedy(batch, model.kv)
                measured[i] = time.perf_counter() - began
        medians_s = np.median(times_s[1:], axis=0)
        ratios = np.median(times_s[1:, :1] / times_s[1:], axis=0)
        rows += [
            [str(shape), str(number), f"{median_s * 1e3:.2f}", f"{ratio:.0%}"]
            for number, median_s, ratio in zip(NUMS_ADAPTERS, medians_s.tolist(), ratios.tolist(), strict=True)
        ]
    return Table(["step", "adapters", "ms", "tokens/s of the base"], rows)


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = model_parser(__doc__, ["bfloat16", "float32"], rounds=30)
    parser.add_argument("--rank", type=int, default=16, help="default: %(default)s")
    options = parser.parse_args(argv)
    model = load_native_model(options)
    if model is None:
        return 1
    assert isinstance(model.forward, NativeForward)
    limits = AdapterLimits(model.forward.decoder.form.shape, options.rank)
    model.forward.decoder.reserve_adapters(max(NUMS_ADAPTERS), options.rank)
    for slot in range(max(NUMS_ADAPTERS)):
        model.forward.decoder.load_adapter(slot, random_adapter(limits, options.rank, slot))
    print(measure(model, options.rounds).markdown())
    weights_mb, adapter_mb = (
        model.forward.decoder.num_matrix_bytes / 1e6,
        model.forward.decoder.adapter_slot_bytes(options.rank) / 1e6,
    )
    print(f"\nWeights of {weights_mb:.0f} MB, adapters of {adapter_mb:.1f} MB each.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
