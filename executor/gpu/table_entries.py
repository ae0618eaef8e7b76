"""What the device does not know yet of the block tables. Pure.

A sequence's table only grows; who boards starts a new one in the row of the seat.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from executor.sequence import StepPlan

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TableEntries:
    """What is new: `blocks[i]` at `places[i]`, counted over all tables, row by row."""

    places: Places
    blocks: Places

    def split(self, most: int) -> SequenceOf[TableEntries]:
        """In parts of at most so many entries; at least one part."""
        starts = range(0, max(1, len(self.places)), most)
        return [TableEntries(self.places[first : first + most], self.blocks[first : first + most]) for first in starts]


NO_ENTRIES = TableEntries(np.zeros(0, np.int64), np.zeros(0, np.int64))


class TableFollower:
    """Remembers how much of each seat's table was sent."""

    def __init__(self, num_tables: int, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._num_sent = [0] * num_tables

    def follow(self, plan: StepPlan) -> TableEntries:
        """What a plan adds to the tables; from now on it counts as sent."""
        places: list[int] = []
        blocks: list[int] = []
        for sequence in plan.boarded:
            assert sequence.seat is not None
            self._num_sent[sequence.seat] = 0
        for sequence in chain(plan.boarded, plan.grown):
            assert sequence.seat is not None
            first, num_blocks = self._num_sent[sequence.seat], len(sequence.block_table)
            row = sequence.seat * self._max_blocks
            places += range(row + first, row + num_blocks)
            blocks += sequence.block_table[first:]
            self._num_sent[sequence.seat] = num_blocks
        return TableEntries(np.array(places, np.int64), np.array(blocks, np.int64)) if places else NO_ENTRIES
