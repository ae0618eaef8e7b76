"""Comparison of CUDA graphs with the steps that they replace, before an executor serves.

A graph replays addresses and sizes that were fixed when it was captured. One that was captured wrongly computes without
an error, so each is replayed once on rows with contexts of their own, and its logits and tokens are compared with those
of the same step launched kernel by kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.gpu.table_entries import TableEntries
from executor.kernels.tiling import SPAN_KEYS
from executor.scheduler.sequence import PlanRow, Sampling, StepPlan, Stopping
from executor.scheduler.sequence import Sequence as Row

# Relative distance of logits of the same kernels. cuBLAS may choose another algorithm under capture, which rounds
# otherwise: half precision differs by far less than a wrong context or weight would.
TOLERANCE = {torch.float32: 1e-4}
TOLERANCE_OF_HALF = 0.05
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


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

    def prefills(self, max_tokens: int) -> Iterator[tuple[int, StepPlan]]:
        """Yields steps that compute all tokens except the last of each sequence, with the seat of the first row. The
        rows of a step have consecutive seats."""
        for seat, sequence in enumerate(self.sequences):
            for start in range(0, sequence.num_tokens - 1, max_tokens):
                length = min(max_tokens, sequence.num_tokens - 1 - start)
                yield seat, StepPlan.of([PlanRow(sequence, start, length, False)])

    def decodes(self, bucket: int) -> StepPlan:
        """Returns a step that computes the last token of as many sequences as the bucket holds."""
        return StepPlan.of(PlanRow(sequence, sequence.num_tokens - 1, 1, True) for sequence in self.sequences[:bucket])


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Logits `[R, vocabulary]` of a step whose rows sample greedily, and the tokens that it drew, `[R]`."""

    logits: Tensor
    token_ids: Tensor


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
