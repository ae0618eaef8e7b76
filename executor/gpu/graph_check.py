"""Comparison of CUDA graphs with the steps that they replace, before an executor serves.

A graph replays addresses and sizes that were fixed when it was captured. One that was captured wrongly computes without
an error, so each is replayed once on rows with contexts of their own, and its logits and tokens are compared with those
of the same step launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from common.model_source import ModelError
from executor.engine.runner import NO_TOKEN
from executor.gpu.device_step import DeviceStep, GraphedStep
from executor.gpu.graphs import Bucket, Graph
from executor.gpu.idle import idle_sampling
from executor.gpu.step_layout import StepLayout
from executor.gpu.table_entries import TableEntries
from executor.kernels.tiling import SPAN_KEYS
from executor.scheduler.limits import SchedulerLimits
from executor.scheduler.sequence import PlanRow, Sampling, StepPlan, Stopping
from executor.scheduler.sequence import Sequence as Row
from executor.step.batch import StepBatch, pack

# Relative distance of logits of the same kernels. cuBLAS may choose another algorithm under capture, which rounds
# otherwise: half precision differs by far less than a wrong context or weight would.
TOLERANCE = {torch.float32: 1e-4}
TOLERANCE_OF_HALF = 0.05
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


@dataclass(frozen=True, slots=True)
class Trial:
    """A step of some of the trial rows; `seats` are the rows of their block tables."""

    plan: StepPlan
    seats: Sequence[int]

    def pack(self, block_size: int) -> StepBatch:
        batch = pack(self.plan, block_size)
        return replace(batch, table_rows=torch.tensor(self.seats, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class TrialRows:
    """Sequences that have blocks of the pool for themselves, so that no two rows of a step write to one slot."""

    sequences: Sequence[Row]

    @classmethod
    def of(cls, most: int, num_blocks: int, block_size: int, context_length: int, vocabulary_size: int) -> TrialRows:
        """Makes at most `most` sequences in the blocks 1 to `num_blocks`.

        Their contexts have different lengths and end within a block. The first has several spans of keys if blocks and
        context suffice, so that a decode's splits have work.
        """
        num_rows = min(most, num_blocks)
        longest = min(context_length, block_size * (1 + num_blocks - num_rows), SPAN_KEYS + block_size // 2)
        lengths = [longest] + [min(context_length, 2 + 5 * row % (block_size - 1)) for row in range(1, num_rows)]
        sequences, next_block = [], 1
        for row, length in enumerate(lengths):
            sequence = _sequence([(11 * row + 7 * place + 1) % vocabulary_size for place in range(length)])
            last_block = next_block + -(-length // block_size)
            sequence.block_table = list(range(next_block, last_block))
            next_block = last_block
            sequences.append(sequence)
        return cls(sequences)

    def entries(self, max_blocks: int) -> TableEntries:
        """Returns the block tables, in the rows of the first seats."""
        places = [
            seat * max_blocks + index
            for seat, sequence in enumerate(self.sequences)
            for index in range(len(sequence.block_table))
        ]
        blocks = [block for sequence in self.sequences for block in sequence.block_table]
        return TableEntries(np.array(places, np.int64), np.array(blocks, np.int64))

    def prefills(self, max_tokens: int) -> Iterator[Trial]:
        """Yields steps that compute all tokens except the last of each sequence."""
        for seat, sequence in enumerate(self.sequences):
            for start in range(0, sequence.num_tokens - 1, max_tokens):
                length = min(max_tokens, sequence.num_tokens - 1 - start)
                yield Trial(StepPlan.of([PlanRow(sequence, start, length, False)]), [seat])

    def fill(self, bucket: Bucket) -> Trial:
        """Returns a step in which as many sequences as the bucket holds yield a token.

        In a bucket that is not of decodes, the later half decodes. The others compute as many of their last tokens as
        the bucket holds; the first token of each is left out, so that chunks have a prefix.
        """
        seats = list(range(min(bucket.num_sequences, len(self.sequences))))
        lengths = [1] * len(seats)
        if not bucket.is_decodes:
            num_chunks = -(-len(seats) // 2)
            num_left = bucket.num_tokens - len(seats)
            for seat in range(num_chunks):
                added = min(num_left, self.sequences[seat].num_tokens - 2)
                lengths[seat] += added
                num_left -= added
            seats = seats[num_chunks:] + seats[:num_chunks]
        return Trial(StepPlan.of(self._last(seat, lengths[seat]) for seat in seats), seats)

    def _last(self, seat: int, length: int) -> PlanRow:
        sequence = self.sequences[seat]
        return PlanRow(sequence, sequence.num_tokens - length, length, True)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Logits `[R, vocabulary]` of a step whose rows sample greedily, and the tokens that it drew, `[R]`."""

    logits: Tensor
    token_ids: Tensor


class GraphCheck:
    """Trial steps in the blocks of a pool that is not used yet."""

    def __init__(self, step: DeviceStep, graphed: GraphedStep, limits: SchedulerLimits) -> None:
        self._step, self._graphed, self._limits = step, graphed, limits
        num_blocks, vocabulary_size = step.kv[0].num_blocks - 1, step.logits.shape[1]
        sizes = (limits.max_num_sequences, num_blocks, step.block_size, limits.context_length, vocabulary_size)
        self._rows = TrialRows.of(*sizes)
        self._entries = self._rows.entries(step.buffers.max_blocks)

    def run(self, graphs: Mapping[Bucket, Graph]) -> None:
        """Compares a replay of each graph with the same step launched kernel by kernel, which has no padding except in
        buckets of decodes.

        Raises:
            ModelError: a graph computes something else.
        """
        for trial in self._rows.prefills(self._limits.max_num_tokens):
            self._launch(trial)
        for bucket, graph in graphs.items():
            trial = self._rows.fill(bucket)
            form = self._graphed.form_in(bucket, trial.plan.num_sampled)
            launched = self._launch(trial, form.layout if bucket.is_decodes else None)
            self._upload(trial.pack(self._step.block_size), form.layout)
            self._graphed.replay(graph, form)
            if reason := difference(launched, self._take_result(trial.plan.num_sampled)):
                raise ModelError(
                    f"the CUDA graph of {bucket} does not compute what its kernels compute: {reason}; "
                    "start with enable_cuda_graphs=false, and report this"
                )

    def _launch(self, trial: Trial, layout: StepLayout | None = None) -> StepResult:
        """Computes a step kernel by kernel, in its own layout unless another one is given."""
        batch, num_yields = trial.pack(self._step.block_size), trial.plan.num_sampled
        num_decodes = batch.num_decodes
        if layout is None:
            sizes = (batch.num_tokens, batch.num_sequences, num_yields)
            layout = StepLayout(*sizes, num_adapters=self._step.num_adapters)
        else:
            num_decodes = layout.num_sequences
        self._upload(batch, layout)
        self._step.compute(layout, num_decodes)
        return self._take_result(num_yields)

    def _upload(self, batch: StepBatch, layout: StepLayout) -> None:
        self._step.buffers.upload(layout, batch, idle_sampling(len(batch.logit_rows)), self._entries)

    def _take_result(self, num_rows: int) -> StepResult:
        """Copies logits and tokens of the newest step, and overwrites them, so that a step that writes none is
        noticed."""
        logits, token_ids = self._step.logits, self._step.buffers.sampled_ids
        result = StepResult(logits[:num_rows].clone(), token_ids[:num_rows].clone())
        logits.fill_(float("nan"))
        token_ids.fill_(NO_TOKEN)
        return result


def difference(launched: StepResult, replayed: StepResult) -> str | None:
    """Returns how a replay differs from the same step launched kernel by kernel, in words; None if it does not, except
    for rounding.

    A row may choose another token only if the margin between both is within the rounding.
    """
    expected, found = launched.logits.float(), replayed.logits.float()
    tolerance = TOLERANCE.get(launched.logits.dtype, TOLERANCE_OF_HALF)
    norms = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    distance = float(((found - expected).norm(dim=-1) / norms).max())
    if not distance <= tolerance:  # NaN is no distance
        return f"its logits differ by {distance:.2g}"
    largest = found.amax(-1)
    ids = replayed.token_ids.long()
    is_id = (ids >= 0) & (ids < found.shape[1])
    drawn = found.gather(1, ids.clamp(0, found.shape[1] - 1)[:, None])[:, 0]
    if not bool((is_id & (drawn == largest)).all()):
        return "it draws a token that is not the likeliest of its logits"
    margins = expected.amax(-1) - expected.gather(1, ids[:, None])[:, 0]
    widest = float((margins / (norms / expected.shape[1] ** 0.5)).max())
    if not widest <= tolerance:
        return f"it chooses another token where the margin is {widest:.2g} standard deviations"
    return None


def _sequence(token_ids: list[int]) -> Row:
    return Row("graph-check", 1, token_ids, len(token_ids), GREEDY, Stopping(1, 0, frozenset()), 0, None)
