"""Tensors of a step: every new token of every sequence in one flat row, and where its KV goes.

With S sequences, T new tokens, R positions that yield a token (one of each row that samples, and one for each draft)
and Q positions that score a prompt, in the order of the plan's rows:

    sequence i has tokens [query_starts[i], query_starts[i + 1]) of the T
    and attends to positions [0, context_lengths[i]), found through block_tables[table_rows[i]]

Block tables are kept between steps, a row for each seat, and a step names rows instead of copying them: packing a step
costs O(tokens), never O(context). So a step in flight reads the table that the host writes for the next one. That is
safe because of two rules, which the scheduler keeps:

- The row of a sequence only grows. A step reads the entries that its context needs. Those were written before it was
  launched, and the host writes behind them.
- A seat is taken again only when every step that names it has retired (`Scheduler`, leaving sequences).

Entries behind a sequence's blocks have no meaning, but they are always blocks of the pool. Block 0 is the spare one; no
sequence stores anything there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inflight.executor.scheduler.sequence import PooledRows, ScoredRows, Sequence, StateLoad, StepPlan

NO_TARGETS = torch.zeros(0, dtype=torch.int64)
NO_SLOT = -1  # in `state_rows`, of a padding sequence


class SavedState(NamedTuple):
    """The state after the first `position` tokens, which row `row` saves to a checkpoint."""

    row: int
    position: int
    checkpoint: int


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """The recurrent states of a step: the slot of each sequence, `slots[S]` int64, and the checkpoints that are loaded
    before the rows are computed and saved with them."""

    slots: Tensor
    loads: tuple[StateLoad, ...] = ()
    saves: tuple[SavedState, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """The tensors of a step.

    `token_ids[T]`, `positions[T]`, `slot_mapping[T]` int64, a slot being `block * block_size + offset`; `query_starts[S
    + 1]`, `context_lengths[S]`, `block_tables[seats, max_blocks]`, `table_rows[S]` int32; `logit_rows[R + Q]`
    int64, the flat rows whose logits are needed: first those that yield a token, then the positions that score a
    prompt, whose next tokens are `target_ids[Q]` int64. The first `num_decodes` sequences have exactly one new token
    each.

    With `is_padded`, `num_decodes` is only the most sequences that may be such: the device finds out which ones are.
    Behind the real sequences are some without tokens, behind the real tokens some that belong to no sequence.

    `token_ids[carried_rows[i]]` is not known on the host: it is token `carried_from[i]` of those that the previous step
    sampled (both int64). Until `resolve` it is 0.

    Layers with a sliding window may have a pool of their own. `window_tables` and `window_slots` then are their
    `block_tables` and `slot_mapping`, and `for_windows` is the batch that they compute. Entries before the window have
    no meaning there.

    `adapter_slots[S]` int32 are the slots of the sequences' adapters, -1 for none; None if no sequence has one.
    `states` are their recurrent states; None if no layer is recurrent. `state_rows[S, words]` int32 are the same, as a
    GPU reads them (`recurrent.gpu_states`).

    `hidden_rows[P]` int64 are the flat rows whose hidden states after the final norm are needed. Whatever computes the
    step writes them to `hidden[P, hidden_size]` float32, if that is set.
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
    target_ids: Tensor = NO_TARGETS
    adapter_slots: Tensor | None = None
    window_tables: Tensor | None = None
    window_slots: Tensor | None = None
    states: StateRows | None = None
    state_rows: Tensor | None = None
    is_padded: bool = False
    hidden_rows: Tensor = NO_TARGETS
    hidden: Tensor | None = None

    @property
    def for_windows(self) -> StepBatch:
        """The batch of the layers with a sliding window."""
        if self.window_tables is None or self.window_slots is None:
            return self
        return replace(self, block_tables=self.window_tables, slot_mapping=self.window_slots)

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
        """Returns the batch on a device, itself if it is there already. Only the tables that the step reads are
        copied."""
        if self.token_ids.device == device:
            return self
        tables = self.block_tables[self.table_rows.long(), : self.num_blocks]
        here = replace(self, block_tables=tables, table_rows=torch.arange(self.num_sequences, dtype=torch.int32))
        values = {field.name: getattr(here, field.name) for field in fields(here)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(here, **moved)

    def with_hidden(self, hidden_size: int) -> StepBatch:
        """Returns the batch with room for the hidden states that it needs."""
        size = (self.hidden_rows.shape[0], hidden_size)
        return replace(self, hidden=torch.empty(size, dtype=torch.float32, device=self.token_ids.device))

    def resolve(self, sampled_ids: Tensor) -> None:
        """Fills in the tokens that the previous step sampled, on their device. `NO_TOKEN` becomes 0: that embedding is
        read, and the result is dropped."""
        self.token_ids[self.carried_rows] = sampled_ids[self.carried_from].clamp(min=0)


def pooled_sums(hidden: Tensor, pooled: Iterable[PooledRows]) -> tuple[array[float], ...]:
    """Returns the sum of the hidden states `[P, hidden_size]` of each of a plan's `pooled`, in float64."""
    parts = hidden.to("cpu", torch.float64).split([rows.end - rows.start for rows in pooled])
    return tuple(array("d", part.sum(0).numpy().tobytes()) for part in parts)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """A plan's rows as arrays `[S]`."""

    sequences: list[Sequence]
    seats: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    num_decodes: int
    adapter_slots: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class YieldingRows:
    """The plan's row of each position that yields a token, `rows[R]`, and how many positions of that row are behind it,
    `num_behind[R]`."""

    rows: npt.NDArray[np.int64]
    num_behind: npt.NDArray[np.int64]

    @classmethod
    def of(cls, plan: StepPlan) -> YieldingRows:
        rows = np.flatnonzero(plan.samples)
        if not plan.drafts:
            return cls(rows, np.zeros(len(rows), np.int64))
        num_behind = [np.arange(len(plan.drafts.get(row, ())), -1, -1) for row in rows.tolist()]
        return cls(np.repeat(rows, [len(behind) for behind in num_behind]), np.concatenate(num_behind))

    @classmethod
    def of_decodes(cls, counted: npt.NDArray[np.int64], plan: StepPlan) -> YieldingRows:
        """Returns those of a plan that has nothing but decodes. `counted` are the numbers from 0 on."""
        return cls(counted[: plan.num_rows], np.zeros(plan.num_rows, np.int64))


class StepPacker:
    """Packs plans into batches, with block tables kept by seat between steps.

    Plans must be packed in the order in which they are made, each before the next one is made. Most steps decode the
    same sequences as the previous step. Then even the arrays of the rows are reused, with one added to each position.
    """

    def __init__(
        self,
        num_seats: int,
        max_blocks: int,
        block_size: int,
        *,
        has_windows: bool = False,
        has_states: bool = False,
    ) -> None:
        self._block_size = block_size
        self._has_states = has_states
        # The same for the pool of the layers with a sliding window, if they have one.
        self._window_tables = np.zeros((num_seats, max_blocks), np.int32) if has_windows else None
        self._tables = np.zeros((num_seats, max_blocks), np.int32)
        self._table_tensor = torch.from_numpy(self._tables)
        # Number of entries written of each table.
        self._num_written = [0] * num_seats
        # Index of the seat's token among the ids that the newest step samples.
        self._sampled_index = np.zeros(num_seats, np.int64)
        self._counted = np.arange(num_seats + 1)
        self._newest = _Rows([], np.zeros(0, np.int32), np.zeros(0, np.int64), 0)

    def pack(self, plan: StepPlan) -> StepBatch:
        """Packs a plan with at least one row into tensors on the host."""
        self._follow_tables(plan)
        self._newest = rows = self._rows(plan)
        if plan.num_decodes == plan.num_rows:
            lengths, query_starts = np.ones(plan.num_rows, np.int64), self._counted[: plan.num_rows + 1]
            positions, seat_of_token, yielding = rows.starts, rows.seats, YieldingRows.of_decodes(self._counted, plan)
        else:
            lengths = np.array(plan.lengths)
            query_starts = np.concatenate(([0], np.cumsum(lengths)))
            seat_of_token = np.repeat(rows.seats, lengths)
            positions = np.arange(len(seat_of_token)) + np.repeat(rows.starts - query_starts[:-1], lengths)
            yielding = YieldingRows.of(plan)
        slots = self._slots(self._tables, seat_of_token, positions)
        windows = self._window_tables
        carried_rows, carried_from = self._carried(plan, rows)
        logit_rows = query_starts[1:][yielding.rows] - 1 - yielding.num_behind
        if plan.scored:
            logit_rows = np.concatenate([logit_rows, _flat_rows(plan.scored, query_starts[:-1] - rows.starts)])
        # No step carries a token of a row with drafts, which has several.
        self._sampled_index[rows.seats[yielding.rows]] = np.arange(len(yielding.rows))
        return StepBatch(
            token_ids=torch.from_numpy(_token_ids(plan, len(carried_rows))),
            positions=torch.from_numpy(positions),
            slot_mapping=slots,
            query_starts=torch.from_numpy(query_starts.astype(np.int32)),
            context_lengths=torch.from_numpy((rows.starts + lengths).astype(np.int32)),
            block_tables=self._table_tensor,
            table_rows=torch.from_numpy(rows.seats),
            logit_rows=torch.from_numpy(logit_rows),
            carried_rows=torch.from_numpy(carried_rows),
            carried_from=torch.from_numpy(carried_from),
            num_decodes=_num_leading_ones(plan),
            block_size=self._block_size,
            target_ids=torch.tensor([i for one in plan.scored for i in one.target_ids]) if plan.scored else NO_TARGETS,
            adapter_slots=rows.adapter_slots,
            window_tables=None if windows is None else torch.from_numpy(windows),
            window_slots=None if windows is None else self._slots(windows, seat_of_token, positions),
            states=_states(plan) if self._has_states else None,
            hidden_rows=(
                torch.from_numpy(_flat_rows(plan.pooled, query_starts[:-1] - rows.starts))
                if plan.pooled
                else NO_TARGETS
            ),
        )

    def _slots(
        self, tables: npt.NDArray[np.int32], seat_of_token: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]
    ) -> Tensor:
        blocks = tables[seat_of_token, positions // self._block_size].astype(np.int64)
        return torch.from_numpy(blocks * self._block_size + positions % self._block_size)

    def _rows(self, plan: StepPlan) -> _Rows:
        newest = self._newest
        if plan.num_decodes == plan.num_rows == newest.num_decodes and plan.sequences == newest.sequences:
            return _Rows(
                plan.sequences, newest.seats, newest.starts + 1, plan.num_decodes, adapter_slots=newest.adapter_slots
            )
        seats = np.array([sequence.seat for sequence in plan.sequences], np.int32)
        starts = np.array(plan.starts, np.int64)
        return _Rows(plan.sequences, seats, starts, plan.num_decodes, adapter_slots=_adapter_slots(plan.sequences))

    def _carried(self, plan: StepPlan, rows: _Rows) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Returns the rows whose input token the previous step yields, and its index there. Decodes are first: row i is
        token i."""
        carried_rows = self._counted[: plan.num_rows] if all(plan.carries) else np.flatnonzero(plan.carries)
        return carried_rows, self._sampled_index[rows.seats[carried_rows]]

    def _follow_tables(self, plan: StepPlan) -> None:
        for sequence in plan.boarded:
            self._num_written[sequence.seat_row] = 0
        for sequence in chain(plan.boarded, plan.grown):
            seat = sequence.seat_row
            first, num_blocks = self._num_written[seat], len(sequence.block_table)
            self._tables[seat, first:num_blocks] = sequence.block_table[first:]
            self._num_written[seat] = num_blocks
            table = sequence.window_table
            if self._window_tables is not None and table is not None:
                # The entries that were there are written again with the same blocks.
                self._window_tables[seat, table.first : table.first + len(table.blocks)] = table.blocks


def pack(plan: StepPlan, block_size: int) -> StepBatch:
    """Packs a plan of sequences that have no seat, with temporary tables."""
    most_blocks = max(len(sequence.block_table) for sequence in plan.sequences)
    has_states = plan.sequences[0].state_slot is not None
    packer = StepPacker(plan.num_rows, most_blocks, block_size, has_states=has_states)
    for seat, sequence in enumerate(plan.sequences):
        sequence.seat = seat
    batch = packer.pack(replace(plan, boarded=tuple(plan.sequences)))
    for sequence in plan.sequences:
        sequence.seat = None
    return batch


def _flat_rows(
    needed: tuple[ScoredRows, ...] | tuple[PooledRows, ...], firsts: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Returns the flat rows of positions of a plan's rows. `firsts[i]` would be that of position 0 of row i."""
    return np.concatenate([np.arange(one.start, one.end) + firsts[one.row] for one in needed])


def _states(plan: StepPlan) -> StateRows:
    slots = torch.tensor([sequence.state_slot for sequence in plan.sequences])
    saves = tuple(SavedState(save.row, save.position, save.checkpoint) for save in plan.state_saves)
    return StateRows(slots, plan.state_loads, saves)


def _token_ids(plan: StepPlan, num_carried: int) -> npt.NDArray[np.int64]:
    if num_carried == plan.num_rows:
        return np.zeros(num_carried, np.int64)
    token_ids: list[int] = []
    columns = zip(plan.sequences, plan.starts, plan.lengths, plan.carries, strict=True)
    for row, (sequence, start, length, carries) in enumerate(columns):
        if carries:
            token_ids.append(0)
        elif length == 1:
            token_ids.append(sequence.token_ids[start])
        else:
            token_ids += sequence.token_ids[start : start + length]
            token_ids += plan.drafts.get(row, ())
    return np.array(token_ids, np.int64)


def _adapter_slots(sequences: list[Sequence]) -> Tensor | None:
    slots = [sequence.adapter_slot for sequence in sequences]
    if not any(slot is not None for slot in slots):
        return None
    return torch.tensor([-1 if slot is None else slot for slot in slots], dtype=torch.int32)


def _num_leading_ones(plan: StepPlan) -> int:
    """Returns the number of decodes, and of chunks of one token directly behind them."""
    count = plan.num_decodes
    while count < plan.num_rows and plan.lengths[count] == 1:
        count += 1
    return count
