"""A recurrent layer gives the same bits for a position alone, in a batch, in any chunks, behind drafts that were not
accepted, in a slot that another sequence had, and behind a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from inflight.common.model_files.recurrent import MixerShape
from inflight.executor.recurrent.gated_delta import DeltaInputs, DeltaMemory, delta_rule
from inflight.executor.recurrent.mixer import StateSizes, StateStep
from inflight.executor.recurrent.short_conv import ConvMemory, convolve
from inflight.executor.scheduler.sequence import (
    PlanRow,
    Sampling,
    Sequence,
    StateLoad,
    StateSave,
    StepPlan,
    Stopping,
)
from inflight.executor.step.batch import pack
from tests.support.device.torch_threads import torch_threads
from tests.support.examples import examples

LENGTH, MAX_DRAFTS, NUM_SEQUENCES = 160, 6, 3
SIZES = StateSizes(NUM_SEQUENCES + 1, 4, MAX_DRAFTS)
CHANNELS, WIDTH = 10, 4
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 4, 12, 20

# The layer's outputs for some inputs `[T, numbers]`.
Layer = Callable[[Tensor, StateStep], Tensor]


def short_conv() -> Layer:
    weights = torch.randn((WIDTH, CHANNELS), generator=torch.Generator().manual_seed(1)).unbind(0)
    memory = ConvMemory.allocate(CHANNELS, WIDTH, SIZES, torch.float32, torch.device("cpu"))
    return lambda inputs, step: convolve(memory.taps(inputs[:, :CHANNELS], step), weights)


def gated_delta(*, corrects: bool = True) -> Layer:
    shape = MixerShape(2, 1, KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, corrects)
    memory = DeltaMemory.allocate(shape, SIZES, torch.float32, torch.device("cpu"))

    def compute(inputs: Tensor, step: StateStep) -> Tensor:
        sizes = (HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM, HEADS, HEADS)
        queries, keys, values, gates, betas = inputs.split(sizes, -1)
        keys = torch.nn.functional.normalize(keys.unflatten(-1, (KEY_HEADS, KEY_DIM)), dim=-1)
        made = DeltaInputs(
            queries.unflatten(-1, (HEADS, KEY_DIM)),
            keys.repeat_interleave(HEADS // KEY_HEADS, 1),
            values.unflatten(-1, (HEADS, VALUE_DIM)),
            # Some forget at once, others hardly.
            -(4 * gates).exp(),
            betas.sigmoid() if corrects else None,
        )
        return delta_rule(made, memory, step).flatten(1)

    return compute


LAYERS: dict[str, Callable[[], Layer]] = {
    "short convolution": short_conv,
    "gated delta net": gated_delta,
    "Mamba 2": partial(gated_delta, corrects=False),
}
NUMBERS = HEADS * (KEY_DIM + VALUE_DIM + 2) + KEY_HEADS * KEY_DIM
INPUTS = torch.randn((NUM_SEQUENCES, LENGTH, NUMBERS), generator=torch.Generator().manual_seed(2))


@dataclass(slots=True)
class Row:
    """A row of a step: positions `[start, end)` of the inputs of a sequence, of which `num_wrong` are drafts that are
    not accepted."""

    number: int
    slot: int
    start: int
    end: int
    num_wrong: int = 0
    save: tuple[int, int] | None = None
    load: StateLoad | None = None


def run(layer: Layer, rows: list[Row], seed: int = 0) -> list[Tensor]:
    """Computes a step. Returns the outputs of each row, without those of wrong drafts."""
    sequences = [sequence_of(row) for row in rows]
    plan = StepPlan.of(
        PlanRow(one, row.start, row.end - row.start, samples=True) for one, row in zip(sequences, rows, strict=True)
    )
    saves = [StateSave(index, sequences[index], *row.save) for index, row in enumerate(rows) if row.save is not None]
    loads = tuple(row.load for row in rows if row.load is not None)
    step = StateStep(pack(replace(plan, state_loads=loads, state_saves=tuple(saves)), 16))
    wrong = torch.Generator().manual_seed(seed)
    inputs = []
    for row in rows:
        known = row.end - row.num_wrong
        inputs += [INPUTS[row.number, row.start : known], torch.randn((row.num_wrong, NUMBERS), generator=wrong)]
    outputs = layer(torch.cat(inputs), step).split([row.end - row.start for row in rows])
    return [of_row[: len(of_row) - row.num_wrong] for of_row, row in zip(outputs, rows, strict=True)]


def sequence_of(row: Row) -> Sequence:
    sequence = Sequence("r", 1, [0] * LENGTH, LENGTH, Sampling(0.0, 0, 1.0, 0), Stopping(1, 0, frozenset()), 1, b"")
    sequence.block_table, sequence.state_slot = list(range(1, 12)), row.slot
    return sequence


@dataclass(slots=True)
class Progress:
    """How far each sequence is, in which slot, and the outputs so far; the checkpoints that may be loaded."""

    layer: Layer
    slots: list[int]
    places: list[int] = field(default_factory=lambda: [0] * NUM_SEQUENCES)
    outputs: list[list[Tensor]] = field(default_factory=lambda: [[] for _ in range(NUM_SEQUENCES)])
    checkpoints: dict[int, int] = field(default_factory=dict)


@settings(max_examples=examples(6), deadline=None)
@given(name=st.sampled_from(sorted(LAYERS)), num_threads=st.sampled_from((1, 2)), seed=st.integers(0, 10_000))
def test_bits_do_not_depend_on_the_steps(name: str, num_threads: int, seed: int) -> None:
    rng = random.Random(seed)
    with torch_threads(num_threads):
        alone = [run(LAYERS[name](), [Row(number, number, 0, LENGTH)])[0] for number in range(NUM_SEQUENCES)]
        progress = Progress(LAYERS[name](), list(range(NUM_SEQUENCES)))
        while any(place < LENGTH for place in progress.places):
            step(progress, rng)
    for number in range(NUM_SEQUENCES):
        found = torch.cat(progress.outputs[number])
        assert torch.equal(found, alone[number]), f"{(found != alone[number]).any(-1).nonzero()[:, 0].tolist()}"


def step(progress: Progress, rng: random.Random) -> None:
    """Computes some rows of sequences that are not at their end. Now and then the first one is computed again in
    another slot, from its start or from a checkpoint that was saved on its way."""
    rows, ends = [], {}
    among = [number for number in range(NUM_SEQUENCES) if progress.places[number] < LENGTH]
    for number in rng.sample(among, rng.randint(1, len(among))):
        start, load = progress.places[number], None
        if number == 0 and start and rng.random() < 0.08:
            progress.slots[0] = NUM_SEQUENCES - progress.slots[0]
            start = rng.choice((0, *progress.checkpoints.values()))
            progress.outputs[0] = [torch.cat(progress.outputs[0])[:start]]
            held = [checkpoint for checkpoint, position in progress.checkpoints.items() if position == start]
            load = StateLoad(held[0], progress.slots[0], start) if held else None
        length = rng.choice((1, 1, 2, 15, 16, 40, 63, 64, 65, 130, LENGTH))
        known = min(LENGTH, start + length)
        num_wrong = rng.randint(0, MAX_DRAFTS) if length <= 2 else 0
        row = Row(number, progress.slots[number], start, known + num_wrong, num_wrong, load=load)
        position = (known if length > 2 else start + 1) // 64 * 64
        if number == 0 and position > max(0, start - 2):
            row.save = position, len(progress.checkpoints) % SIZES.num_checkpoints
        rows.append(row)
        ends[number] = known
    for row, outputs in zip(rows, run(progress.layer, rows, rng.randrange(1000)), strict=True):
        progress.outputs[row.number].append(outputs)
        progress.places[row.number] = ends[row.number]
        if row.save is not None:
            progress.checkpoints[row.save[1]] = row.save[0]
