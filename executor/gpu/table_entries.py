"""Block table entries that the device lacks. Pure.

A sequence's table only grows. A sequence that boards starts a new table in the row of its seat. Its table in the pool
of layers with a sliding window is in the row that is `first_window_row` behind; entries before the window are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from inflight.executor.scheduler.sequence import Sequence, StepPlan

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TableEntries:
    """New entries: `blocks[i]` at index `places[i]`, counted over all tables, row by row."""

    places: Places
    blocks: Places

    def split(self, most: int) -> SequenceOf[TableEntries]:
        """Splits the entries into parts of at most `most`; at least one part."""
        starts = range(0, max(1, len(self.places)), most)
        return [TableEntries(self.places[first : first + most], self.blocks[first : first + most]) for first in starts]


NO_ENTRIES = TableEntries(np.zeros(0, np.int64), np.zeros(0, np.int64))


class TableFollower:
    """Tracks how much of each seat's table was sent. Changes of a plan are kept until `sent` confirms them: after a
    failed launch they are sent with the next one."""

    def __init__(self, num_tables: int, max_blocks: int, *, first_window_row: int | None = None) -> None:
        """`first_window_row` is None without a pool for windows."""
        self._max_blocks, self._first_window_row = max_blocks, first_window_row
        # Of each seat, the ends of what was sent of its table and of its window table.
        self._num_sent = [(0, 0)] * num_tables
        # Sequences with new entries, by seat, and the ends of their tables when `follow` returned those entries.
        self._changed: dict[int, Sequence] = {}
        self._num_following: dict[int, tuple[int, int]] = {}

    def follow(self, plan: StepPlan) -> TableEntries:
        """Returns the entries that the device lacks, this plan included."""
        for sequence in plan.boarded:
            self._num_sent[sequence.seat_row] = (0, 0)
        self._changed.update((sequence.seat_row, sequence) for sequence in chain(plan.boarded, plan.grown))
        places: list[int] = []
        blocks: list[int] = []
        self._num_following = {}
        for seat, sequence in self._changed.items():
            if sequence.seat != seat:
                continue  # it has ended since
            (first, first_window), num_blocks = self._num_sent[seat], len(sequence.block_table)
            if num_blocks > self._max_blocks:
                raise RuntimeError(f"{sequence.request_id} has {num_blocks} blocks, a table holds {self._max_blocks}")
            row = seat * self._max_blocks
            places += range(row + first, row + num_blocks)
            blocks += sequence.block_table[first:]
            end = first_window
            if self._first_window_row is not None and (window := sequence.window_table) is not None:
                end = window.first + len(window.blocks)
                first_window = max(first_window, window.first)
                row = (self._first_window_row + seat) * self._max_blocks
                places += range(row + first_window, row + end)
                blocks += window.blocks[first_window - window.first :]
            self._num_following[seat] = (num_blocks, end)
        return TableEntries(np.array(places, np.int64), np.array(blocks, np.int64)) if places else NO_ENTRIES

    def sent(self) -> None:
        """Confirms that the device has the entries that `follow` returned last."""
        for seat, ends in self._num_following.items():
            self._num_sent[seat] = ends
        self._changed, self._num_following = {}, {}
