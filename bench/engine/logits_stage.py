"""The cost of penalties and bans on a CPU: `python -m inflight.bench.engine.logits_stage`.

Computes steps of 32 decodes through the native forward pass, whose rows have changes of their logits or none. The kinds
of rows take turns, in another order each round, so that neither a disturbance nor the kind before favours one of them.
Prints Markdown: the time of choosing, the time of the whole step, and what choosing costs beyond that of the same rows
without changes, as a share of their step: the median over the rounds, and the quartiles. Choosing is all of the step
but the layers: norms, the product with the vocabulary, and the choice of the tokens.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from inflight.bench.engine.model_steps import BLOCK_SIZE, load_native_model, model_parser
from inflight.bench.engine.native_step import StepShape, batch_of, blocks_of
from inflight.bench.report.table import Table
from inflight.executor.cpu.decoder import PARTS
from inflight.executor.forward.native import NativeForward
from inflight.executor.logits.row import LogitsRow
from inflight.executor.model.model import PagedModel
from inflight.executor.scheduler.sequence import NO_PROCESSORS, Processors, Sampling
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling import SampleRow
from inflight.executor.step.sampling_columns import SamplingBatch

SHAPE = StepShape(32, 1, 300)
NUM_PROMPT = 200
PENALTIES = Processors(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1)
BAD_WORDS = Processors(bad_words=tuple((1000 + i, 2000 + i, 3000 + i) for i in range(16)))
NGRAMS = Processors(no_repeat_ngram_size=3)
BIAS = Processors(bias=tuple((4000 + i, 1.0) for i in range(50)))
ALL = Processors(
    bias=BIAS.bias,
    repetition_penalty=PENALTIES.repetition_penalty,
    frequency_penalty=PENALTIES.frequency_penalty,
    presence_penalty=PENALTIES.presence_penalty,
    bad_words=BAD_WORDS.bad_words,
    no_repeat_ngram_size=NGRAMS.no_repeat_ngram_size,
)
# Parts of a step that do not depend on how tokens are chosen.
LAYER_PARTS = [PARTS.index(part) for part in ("embed", "qkv", "attention", "output", "gate_up", "down")]
CHANGES = {
    "none": NO_PROCESSORS,
    "three penalties": PENALTIES,
    "16 bad words": BAD_WORDS,
    "no repeated 3-gram": NGRAMS,
    "50 biases": BIAS,
    "all of these": ALL,
    "10,000 allowed ids": Processors(allowed_ids=frozenset(range(10_000))),
}
SAMPLINGS = {
    "greedy": Sampling(0.0, 0, 1.0, 0),
    "temperature 0.8": Sampling(0.8, 0, 1.0, 0),
    "temperature 0.8, top_p 0.95": Sampling(0.8, 0, 0.95, 0),
    "temperature 0.8, min_p 0.05": Sampling(0.8, 0, 1.0, 0, 0.05),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """Rows that are measured, by the names of their sampling and their changes."""

    sampling: str
    changes: str

    def batch(self, vocabulary_size: int) -> SamplingBatch:
        """Returns the rows of a step."""
        draws = np.random.default_rng(0)
        processors, sampling = CHANGES[self.changes], SAMPLINGS[self.sampling]
        rows = []
        for i in range(SHAPE.num_sequences):
            ids = draws.integers(0, vocabulary_size, SHAPE.num_context).tolist()
            row = LogitsRow(processors, ids, NUM_PROMPT, 2 * SHAPE.num_context, vocabulary_size)
            processed = None if processors is NO_PROCESSORS else row
            rows.append(SampleRow(sampling, i, frozenset(), processed))
        return SamplingBatch.of(rows)


Times = dict[Kind, npt.NDArray[np.float64]]  # seconds of choosing and of the whole step, [rounds, 2]


def kinds_of(sampling: str) -> list[Kind]:
    """Returns the kinds of one sampling, or of all."""
    return [Kind(name, changes) for name in SAMPLINGS if sampling in ("all", name) for changes in CHANGES]


def measure(model: PagedModel, batch: StepBatch, kinds: Sequence[Kind], rounds: int) -> Times:
    """Measures each kind once a round. The first round is not counted."""
    assert isinstance(model.forward, NativeForward)
    native = model.forward.decoder
    batches = {kind: kind.batch(model.description.vocabulary_size) for kind in kinds}
    times: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for kind in order.sample(kinds, len(kinds)):
            before, began = native.part_seconds.copy(), time.perf_counter()
            model.step(batch, batches[kind])
            step = time.perf_counter() - began
            layers = (native.part_seconds - before)[LAYER_PARTS].sum()
            times[kind].append((step - layers, step))
    return {kind: np.array(measured[1:]) for kind, measured in times.items()}


def table_of(times: Times) -> Table:
    """Returns a row for each kind."""
    rows = []
    for kind, measured in times.items():
        without = times[Kind(kind.sampling, "none")]
        share = 100 * (measured[:, 0] - without[:, 0]) / np.median(without[:, 1])
        low, middle, high = np.percentile(share, [25, 50, 75])
        choosing, step = np.median(measured, axis=0) * 1e3
        cells = [f"{choosing:.2f}", f"{step:.2f}", f"{middle:+.2f} %", f"{low:+.2f} to {high:+.2f} %"]
        rows.append([kind.sampling, kind.changes, *cells])
    return Table(["sampling", "changes", "choosing ms", "step ms", "beyond none, of a step", "quartiles"], rows)


def main(argv: Sequence[str]) -> int:
    """Measures and prints; returns the exit code."""
    parser = model_parser(__doc__, ["bfloat16", "float32"], rounds=30)
    parser.add_argument("--sampling", default="all", choices=["all", *SAMPLINGS], help="rows measured; default: all")
    options = parser.parse_args(argv)
    model = load_native_model(options)
    if model is None:
        return 1
    batch = batch_of(SHAPE)
    model.allocate_kv(SHAPE.num_sequences * blocks_of(SHAPE), BLOCK_SIZE)
    for kv in model.kv:
        kv.keys.fill_(0.01)
        kv.values.fill_(0.01)
    print(f"- {model.description.dtype}; {model.description.backend_reason}; {SHAPE}\n")
    print(table_of(measure(model, batch, kinds_of(options.sampling), options.rounds)).markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
