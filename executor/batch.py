"""A step plan as tensors: every new token of every sequence in one flat row, and where its KV goes.

With S sequences, T new tokens and R rows that sample, in the order of the plan's rows:

    sequence i has tokens [query_starts[i], query_starts[i + 1]) of the T
    and attends to positions [0, context_lengths[i]), found through block_tables[table_rows[i]]

Block tables are kept between steps, a row for each seat, and a step names rows instead of copying them: packing a step
costs O(tokens), never O(context). So a step in flight reads the table that the host writes for the next one. That is
safe because of two rules, which the scheduler keeps:

- The row of a sequence only grows. A step reads the entries that its context needs; those were written before it was
  launched, and the host writes behind them.
- A seat is taken again only when every step that names it has retired (`Scheduler`, who is leaving).

What an entry behind a sequence's blocks holds means nothing, but it is always a block of the pool. Block 0 is the
spare: nothing real is ever stored there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor.sequence import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """The tensors of a step.

    `token_ids[T]`, `positions[T]`, `slot_mapping[T]` int64, a slot being `block * block_size + offset`; `query_starts[S
    + 1]`, `context_lengths[S]`, `block_tables[seats, max_blocks]`, `table_rows[S]` int32; `logit_rows[R]` int64, the
    flat rows that yield a token. The first `num_decodes` sequences have exactly one new token each.

    `token_ids[carried_rows[i]]` is not known on the host: it is token `carried_from[i]` of those that the step before
    sampled (both int64); until `resolve` it is 0.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    block_tables: Tensor
    table_rows: Tensor
    logit_rows: Tensor
    carried_rows: Tensor
    carried_from: Tensor
    num_decodes: int
    block_size: int

    @property
    def num_sequences(self) -> int:
        """S."""
        return self.context_lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.token_ids.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks of the longest context."""
        return -(-int(self.context_lengths.max()) // self.block_size)

    def to(self, device: torch.device) -> StepBatch:
        """The same batch on a device; itself if it is there already. Only the tables that the step reads go there."""
        if self.token_ids.device == device:
            return self
        tables = self.block_tables[self.table_rows.long(), : self.num_blocks]
        here = replace(self, block_tables=tables, table_rows=torch.arange(self.num_sequences, dtype=torch.int32))
        values = {field.name: getattr(here, field.name) for field in fields(here)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(here, **moved)

    def resolve(self, sampled_ids: Tensor) -> None:
        """Fills in the tokens that the step before sampled, on the device that they are on."""
        self.token_ids[self.carried_rows] = sampled_ids[self.carried_from]


class StepPacker:
    """What is kept between steps for each seat, and the batches that are made of it.

    Plans are packed in the order in which they are made, each before the next one is.
    """

    def __init__(self, num_seats: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((num_seats, max_blocks), np.int32)
        self._table_tensor = torch.from_numpy(self._tables)
        # Entries of each table that are written.
        self._num_written = [0] * num_seats
        # Where among the ids that the newest step samples the seat's token is.
        self._sampled_index = np.zeros(num_seats, np.int64)

    def pack(self, plan: StepPlan) -> StepBatch:
        """Lays a plan with at least one row out as tensors on the host."""
        self._follow_tables(plan)
        seats = seats_of(plan)
        starts, lengths = np.array(plan.starts, np.int32), np.array(plan.lengths, np.int32)
        query_starts = np.zeros(len(seats) + 1, np.int32)
        np.cumsum(lengths, out=query_starts[1:])
        row_of_token = np.repeat(np.arange(len(seats)), lengths)
        positions = np.arange(len(row_of_token)) - (query_starts[:-1] - starts)[row_of_token]
        blocks = self._tables[seats[row_of_token], positions // self._block_size].astype(np.int64)
        samples = np.array(plan.samples, np.bool_)
        carried_rows = np.flatnonzero(plan.carries)  # decodes are first, so row i is token i
        carried_from = self._sampled_index[seats[carried_rows]]
        sampling_seats = seats[samples]
        self._sampled_index[sampling_seats] = np.arange(len(sampling_seats))
        return StepBatch(
            token_ids=torch.from_numpy(_token_ids(plan)),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(blocks * self._block_size + positions % self._block_size),
            query_starts=torch.from_numpy(query_starts),
            context_lengths=torch.from_numpy(starts + lengths),
            block_tables=self._table_tensor,
            table_rows=torch.from_numpy(seats),
            logit_rows=torch.from_numpy((query_starts[1:][samples] - 1).astype(np.int64)),
            carried_rows=torch.from_numpy(carried_rows),
            carried_from=torch.from_numpy(carried_from),
            num_decodes=_num_leading_ones(lengths),
            block_size=self._block_size,
        )

    def _follow_tables(self, plan: StepPlan) -> None:
        for sequence in plan.boarded:
            assert sequence.seat is not None
            self._num_written[sequence.seat] = 0
        for sequence in chain(plan.boarded, plan.grown):
            assert sequence.seat is not None
            first, num_blocks = self._num_written[sequence.seat], len(sequence.block_table)
            self._tables[sequence.seat, first:num_blocks] = sequence.block_table[first:]
            self._num_written[sequence.seat] = num_blocks


def pack(plan: StepPlan, block_size: int) -> StepBatch:
    """Lays out a plan of sequences that have no seat, with tables of its own."""
    most_blocks = max(len(sequence.block_table) for sequence in plan.sequences)
    packer = StepPacker(plan.num_rows, most_blocks, block_size)
    for seat, sequence in enumerate(plan.sequences):
        sequence.seat = seat
    batch = packer.pack(replace(plan, boarded=tuple(plan.sequences)))
    for sequence in plan.sequences:
        sequence.seat = None
    return batch


def seats_of(plan: StepPlan) -> npt.NDArray[np.int32]:
    """The seat of each row."""
    return np.array([sequence.seat for sequence in plan.sequences], np.int32)


def _token_ids(plan: StepPlan) -> npt.NDArray[np.int64]:
    token_ids: list[int] = []
    for sequence, start, length, carries in zip(plan.sequences, plan.starts, plan.lengths, plan.carries, strict=True):
        if carries:
            token_ids.append(0)
        elif length == 1:
            token_ids.append(sequence.token_ids[start])
        else:
            token_ids += sequence.token_ids[start : start + length]
    return np.array(token_ids, np.int64)


def _num_leading_ones(lengths: npt.NDArray[np.int32]) -> int:
    longer = np.flatnonzero(lengths != 1)
    return int(longer[0]) if longer.size else len(lengths)
