"""The parts of a step on a CPU against their limits: `python -m inflight.bench.engine.native_step`.

Loads a model, computes steps of some shapes through the native forward pass, and compares the time of each part with
its limit here: reading its weights or KV once at the measured bandwidth, or its operations at the measured rate of a
large matrix product, whichever is longer. The weights have the model's type, and int8 in a second model. Prints
Markdown. Shapes and types take turns, so that a disturbance affects all of them. Of each part it also prints the
processor time per thread without waiting, the least of the rounds, in which other processes hardly count.
`--prompts 512,2048,8192` measures whole prompts of these lengths alone, long ones in fewer rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from inflight.bench.engine.model_steps import BLOCK_SIZE, cpu_parser, greedy_sequence, load_native_model, made_up_ids
from inflight.bench.report.table import Table, shown
from inflight.cli.doctor import processor
from inflight.common.machine import num_usable_cores
from inflight.executor.checkpoint.decoder_weights import DecoderShape
from inflight.executor.cpu.decoder import PARTS, NativeDecoder
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.sequence import PlanRow, StepPlan
from inflight.executor.step.batch import StepBatch, pack

# Larger than caches that belong to this machine alone.
READ_BYTES = 512 << 20
# A number in int8 and its share of the scale of 64.
INT8_BYTES = 1 + 4 / 64
MATRIX_SIZE = 2048
SECONDS_OF_RATE = 0.5
DECODE_CONTEXT = 300


# Before the name of a part: its processor time per thread, without waiting; of the step with it.
TASKS = "tasks of "

Times = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class StepShape:
    """`num_sequences` with `num_context` tokens each, of which the step computes the last `num_new`.

    Beside them are `num_decodes` decodes with contexts of `DECODE_CONTEXT`.
    """

    num_sequences: int
    num_new: int
    num_context: int
    num_decodes: int = 0

    def __str__(self) -> str:
        if self.num_decodes > 0:
            chunk = f"{self.num_new} tokens of a prompt at the end of {self.num_context}"
            return f"{chunk}, beside {self.num_decodes} decodes with contexts of {DECODE_CONTEXT}"
        if self.num_new == 1:
            return f"decodes: {self.num_sequences}, contexts of {self.num_context}"
        return f"prompts: {self.num_sequences}, {self.num_new} new tokens each, contexts of {self.num_context}"


@dataclass(frozen=True, slots=True)
class Work:
    """What a part must do at least: bytes to read, operations."""

    num_bytes: float
    num_operations: float
    is_int8: bool = False

    def least_s(self, limits: MachineLimits) -> float:
        """The time that it takes at the machine's limits."""
        rate = limits.int8_operations_per_s if self.is_int8 else limits.operations_per_s
        return max(self.num_bytes / limits.bytes_per_s, self.num_operations / rate)


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What this machine does at most, measured."""

    bytes_per_s: float
    operations_per_s: float
    int8_operations_per_s: float


SHAPES = (StepShape(1, 1, 300), StepShape(8, 1, 300), StepShape(32, 1, 300), StepShape(1, 512, 512))
CHUNKS = (StepShape(1, 128, 128), StepShape(1, 128, 512, num_decodes=31))
# A step of so many tokens is measured in every round, a longer one in as many fewer.
TOKENS_OF_ROUNDS = 512


def part_works(shape: DecoderShape, step: StepShape, element_bytes: int, is_int8: bool) -> dict[str, Work]:
    """Returns the least work of the parts that have any to speak of; weights of layers may be int8."""
    num_tokens = step.num_sequences * step.num_new + step.num_decodes
    width, heads, inner = shape.hidden_size, shape.num_heads * shape.head_dim, shape.intermediate_size
    kv_width = shape.num_kv_heads * shape.head_dim
    # Multiplications per token; the head is computed for the last token of each sequence alone.
    products = {
        "qkv": (width * (heads + 2 * kv_width), num_tokens, shape.num_layers),
        "output": (heads * width, num_tokens, shape.num_layers),
        "gate_up": (2 * width * inner, num_tokens, shape.num_layers),
        "down": (inner * width, num_tokens, shape.num_layers),
        "head": (width * shape.vocabulary_size, step.num_sequences + step.num_decodes, 1),
    }
    works = {}
    for part, (size, rows, layers) in products.items():
        rounded = is_int8 and part != "head"
        num_bytes = INT8_BYTES if rounded else element_bytes
        works[part] = Work(size * layers * num_bytes, 2.0 * size * rows * layers, rounded)
    mean_context = step.num_context - (step.num_new - 1) / 2
    decode_keys = step.num_decodes * DECODE_CONTEXT
    num_keys = step.num_sequences * step.num_context + decode_keys
    num_pairs = step.num_sequences * step.num_new * mean_context + decode_keys
    works["attention"] = Work(
        num_keys * 2 * kv_width * element_bytes * shape.num_layers, 4.0 * num_pairs * heads * shape.num_layers
    )
    return works


def measure_limits(native: NativeDecoder, dtype: torch.dtype) -> MachineLimits:
    """Reads a large buffer on all threads, and multiplies large matrices; the best of some tries."""
    matrix = torch.rand(MATRIX_SIZE, MATRIX_SIZE).to(dtype)
    integers = torch.randint(-127, 128, (MATRIX_SIZE, MATRIX_SIZE), dtype=torch.int8)
    return MachineLimits(
        native.read_bytes_per_s(READ_BYTES),
        _best_rate(lambda: matrix @ matrix),
        _best_rate(lambda: torch._int_mm(integers, integers)),
    )


def _best_rate(product: Callable[[], torch.Tensor]) -> float:
    rates = []
    deadline = time.perf_counter() + SECONDS_OF_RATE
    while time.perf_counter() < deadline:
        began = time.perf_counter()
        product()
        rates.append(2 * MATRIX_SIZE**3 / (time.perf_counter() - began))
    return max(rates)


def measure_steps(
    models: Sequence[PagedModel], shapes: Sequence[StepShape], rounds: int
) -> list[list[dict[str, float]]]:
    """Seconds of each part, and of the whole step (`step`), for each model and shape.

    The median wall time, and under the name with `TASKS` the least processor time per thread.
    """
    for model in models:
        assert isinstance(model.forward, NativeForward)
        model.forward.decoder.processor_seconds = np.zeros(len(PARTS))
        model.allocate_kv(max(_all_blocks_of(shape) for shape in shapes), BLOCK_SIZE)
        for kv in model.kv:
            kv.keys.fill_(0.01)
            kv.values.fill_(0.01)
    batches = [batch_of(shape) for shape in shapes]
    times: list[list[list[Times]]] = [[[] for _ in shapes] for _ in models]
    for turn in range(rounds + 1):
        for place, batch in enumerate(batches):
            if turn > max(2, rounds * TOKENS_OF_ROUNDS // batch.num_tokens):
                continue
            for model, measured in zip(models, times, strict=True):
                measured[place].append(_part_times(model, batch))
    return [[_medians(one[1:]) for one in of_model] for of_model in times]


def _part_times(model: PagedModel, batch: StepBatch) -> Times:
    assert isinstance(model.forward, NativeForward)
    native = model.forward.decoder
    assert native.processor_seconds is not None
    before, began, cpu_began = native.part_seconds.copy(), time.perf_counter(), time.process_time()
    native.processor_seconds[:] = 0
    native.greedy(batch, model.kv)
    cpu, whole = time.process_time() - cpu_began, time.perf_counter() - began
    walls = np.append(native.part_seconds - before, whole)
    return np.concatenate([walls, np.append(native.processor_seconds, cpu) / num_usable_cores()])


def _medians(times: Sequence[Times]) -> dict[str, float]:
    names = (*PARTS, "step")
    walls, tasks = np.split(np.array(times), 2, axis=1)
    medians = dict(zip(names, np.median(walls, axis=0).tolist(), strict=True))
    return medians | dict(zip((TASKS + name for name in names), tasks.min(axis=0).tolist(), strict=True))


def table_of(measured: dict[str, float], works: dict[str, Work], limits: MachineLimits) -> Table:
    """Returns the parts of one shape, and the whole step."""
    least = {part: work.least_s(limits) for part, work in works.items()}
    least["step"] = sum(least.values())
    rows = []
    for part in (*PARTS, "step"):
        limit_s, measured_s = least.get(part), measured[part]
        limits_shown = [
            shown(None if limit_s is None else limit_s * 1e3, ".2f"),
            shown(None if limit_s is None else limit_s / measured_s, ".0%"),
        ]
        name = "**step**" if part == "step" else part
        rows.append([name, f"{measured_s * 1e3:.2f}", f"{measured[TASKS + part] * 1e3:.2f}", *limits_shown])
    return Table(["part", "measured ms", "processor ms", "limit ms", "share of the limit"], rows)


def blocks_of(shape: StepShape) -> int:
    """Returns the blocks of one sequence."""
    return -(-shape.num_context // BLOCK_SIZE)


def _all_blocks_of(shape: StepShape) -> int:
    return shape.num_sequences * blocks_of(shape) + shape.num_decodes * -(-DECODE_CONTEXT // BLOCK_SIZE)


def batch_of(shape: StepShape) -> StepBatch:
    """Returns the step of a shape, over the blocks from 1 on."""
    blocks = blocks_of(shape)
    # Blocks of different sequences take turns, as they do after some time of serving.
    tables = [
        list(range(1 + i, 1 + blocks * shape.num_sequences, shape.num_sequences)) for i in range(shape.num_sequences)
    ]
    rows = [
        PlanRow(
            greedy_sequence(made_up_ids(shape.num_context), table),
            shape.num_context - shape.num_new,
            shape.num_new,
            True,
        )
        for table in tables
    ]
    first, blocks = 1 + shape.num_sequences * blocks, -(-DECODE_CONTEXT // BLOCK_SIZE)
    for i in range(shape.num_decodes):
        table = list(range(first + i, first + blocks * shape.num_decodes, shape.num_decodes))
        rows.append(PlanRow(greedy_sequence(made_up_ids(DECODE_CONTEXT), table), DECODE_CONTEXT - 1, 1, True))
    return pack(StepPlan.of(rows), BLOCK_SIZE)


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = cpu_parser(__doc__, rounds=30)
    parser.add_argument("--prompts", default="", help="measure prompts of these lengths alone, such as 512,2048")
    options = parser.parse_args(argv)
    prompts = tuple(StepShape(1, int(length), int(length)) for length in options.prompts.split(",") if length)
    shapes = prompts or (*SHAPES, *CHUNKS)
    weight_types = tuple(dict.fromkeys((options.weight_dtype, "int8")))
    models = [load_native_model(options, weight_type) for weight_type in weight_types]
    loaded = [model for model in models if model is not None]
    if len(loaded) < len(models):
        return 1
    forward = loaded[0].forward
    assert isinstance(forward, NativeForward)
    native, dtype = forward.decoder, forward.layout.dtype
    limits = measure_limits(native, dtype)
    measured = measure_steps(loaded, shapes, options.rounds)
    print(f"- {processor().text}\n- {loaded[0].description.dtype}; {loaded[0].description.backend_reason}")
    print(f"- reading memory: {limits.bytes_per_s / 1e9:.1f} GB/s, large matrix product: ", end="")
    print(f"{limits.operations_per_s / 1e12:.2f} TFLOP/s, in int8: {limits.int8_operations_per_s / 1e12:.2f}\n")
    for place, shape in enumerate(shapes):
        for weight_type, of_model in zip(weight_types, measured, strict=True):
            works = part_works(native.form.shape, shape, dtype.itemsize, weight_type == "int8")
            print(f"## {shape}, weights: {weight_type}\n\n{table_of(of_model[place], works, limits).markdown()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
