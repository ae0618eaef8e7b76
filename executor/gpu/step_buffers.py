"""Device memory of a step at fixed addresses, and its upload.

What changes from step to step is sent in one copy: the words of `StepLayout`, and behind them the new entries of the
block tables. The tables are kept on the device, a row for each seat and a spare row that contains only the spare block.
Layers with a sliding window may have a pool of their own; their tables are as many rows behind these.
The host uses a ring of buffers; a buffer is written again only when its copy has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
from torch import Tensor

from inflight.executor.device import host_zeros, mark
from inflight.executor.gpu.row_groups import RowGroups
from inflight.executor.gpu.sampling import DrawRows
from inflight.executor.gpu.step_layout import ALIGNMENT_WORDS, FLOAT_FIELDS, StepLayout, Words
from inflight.executor.gpu.table_entries import TableEntries
from inflight.executor.kernels.step_inputs import follow_tables_kernel, resolve_kernel
from inflight.executor.recurrent.gpu_states import GpuStates
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling_columns import SamplingBatch

# Takes the words of a copy, and where the entries in them begin, and how many they are.
Mirror = Callable[[Words, int, int], None]
RING = 2
# Entries of block tables that fit one copy.
MAX_ENTRIES = 4096
TILE = 256


class HostRing:
    """Host buffers that are copied to the device without waiting."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        self._device = device
        self._buffers = [host_zeros(num_words, device) for _ in range(RING)]
        self._copied: list[torch.cuda.Event | None] = [None] * RING
        self._next = 0

    def take(self) -> Words:
        """Returns the words to write for the next copy."""
        copied = self._copied[self._next]
        if copied is not None:
            copied.synchronize()
        words: Words = self._buffers[self._next].numpy()
        return words

    def copy_to(self, target: Tensor, num_words: int) -> None:
        """Copies the first words of the buffer taken last."""
        target[:num_words].copy_(self._buffers[self._next][:num_words], non_blocking=True)
        self._copied[self._next] = mark(self._device)
        self._next = (self._next + 1) % RING


class StepBuffers:
    """Inputs, block tables and sampled ids on the device. `sampled_ids` are those of the newest step."""

    def __init__(
        self,
        device: torch.device,
        most: StepLayout,
        num_tables: int,
        max_blocks: int,
        *,
        has_windows: bool = False,
        states: GpuStates | None = None,
    ) -> None:
        """`states` is the memory of recurrent layers."""
        num_words = most.num_words + 2 * MAX_ENTRIES
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._ring = HostRing(num_words, device)
        self.spare_table_row = num_tables
        num_groups = 2 if has_windows else 1
        self._tables = torch.zeros((num_groups * (num_tables + 1), max_blocks), dtype=torch.int32, device=device)
        self._has_windows = has_windows
        self._states = states
        self.sampled_ids = torch.zeros(most.num_logits, dtype=torch.int32, device=device)

    def upload(
        self,
        layout: StepLayout,
        batch: StepBatch,
        sampling: SamplingBatch,
        entries: TableEntries,
        mirror: Mirror | None = None,
    ) -> None:
        """Sends a step's inputs and its new block table entries, first to `mirror`, for the `receive` of others, and
        loads the checkpoints of recurrent state that it begins with."""
        if self._states is not None:
            batch = replace(batch, state_rows=torch.from_numpy(self._states.follow(batch)))
        *before, last = entries.split(MAX_ENTRIES)
        for part in before:
            self._send(self._ring.take(), 0, part, mirror)
        words = self._ring.take()
        num_used = layout.fill(words, batch, sampling, self.spare_table_row)
        self._send(words, num_used, last, mirror)

    def receive(self, received: Words, first: int, count: int) -> None:
        """Sends words that an `upload` elsewhere has mirrored."""
        self._ring.take()[: len(received)] = received
        self._copy(len(received), first, count)

    @property
    def first_table_rows(self) -> tuple[int, ...]:
        """The first rows of the tables of each pool."""
        return (0, self.spare_table_row + 1) if self._has_windows else (0,)

    @property
    def max_blocks(self) -> int:
        """Entries of a block table."""
        return self._tables.shape[1]

    def batch(self, layout: StepLayout, num_decodes: int, block_size: int) -> StepBatch:
        """Returns the inputs as the kernels take them."""
        of = self._field
        nothing, num_tables = self._words[:0], self.spare_table_row + 1
        return StepBatch(
            token_ids=of(layout, "token_ids"),
            positions=of(layout, "positions"),
            slot_mapping=of(layout, "slot_mapping"),
            query_starts=of(layout, "query_starts"),
            context_lengths=of(layout, "context_lengths"),
            block_tables=self._tables[:num_tables],
            table_rows=of(layout, "table_rows"),
            logit_rows=of(layout, "logit_rows"),
            carried_rows=nothing,
            carried_from=nothing,
            num_decodes=num_decodes,
            block_size=block_size,
            target_ids=of(layout, "target_ids"),
            window_tables=self._tables[num_tables:] if self._has_windows else None,
            window_slots=of(layout, "window_slots") if self._has_windows else None,
            state_rows=None if self._states is None else of(layout, "state_rows").view(layout.num_sequences, -1),
            is_padded=layout.is_padded,
        )

    def row_groups(self, layout: StepLayout) -> RowGroups | None:
        """Returns the rows by adapter; None without adapter slots."""
        if not layout.num_adapters:
            return None
        return RowGroups(self._field(layout, "adapter_rows"), self._field(layout, "adapter_slots"))

    def draw_rows(self, layout: StepLayout) -> DrawRows:
        """Returns the parameters of the draws."""
        columns = {one.name: self._field(layout, one.name) for one in fields(DrawRows)}
        floats = {name: columns[name].view(torch.float32) for name in FLOAT_FIELDS}
        return DrawRows(**columns | floats)

    def token_ids(self, layout: StepLayout) -> Tensor:
        """Returns the step's tokens, int32, complete after `resolve`."""
        return self._field(layout, "token_ids")

    def logit_rows(self, layout: StepLayout) -> Tensor:
        """Returns the tokens whose logits are needed, int32."""
        return self._field(layout, "logit_rows")

    def reported_rows(self, layout: StepLayout, count: int) -> Tensor:
        """Returns the first `count` of the rows that report log probabilities, int32."""
        return self._field(layout, "reported_rows")[:count]

    def target_ids(self, layout: StepLayout) -> Tensor:
        """Returns the tokens behind the positions that score, int32."""
        return self._field(layout, "target_ids")

    def resolve(self, layout: StepLayout) -> None:
        """Fills in the tokens that the previous step sampled."""
        of = self._field
        resolve_kernel[(-(-layout.num_sequences // TILE),)](
            *(of(layout, "token_ids"), of(layout, "is_carried"), of(layout, "carried_from"), self.sampled_ids),
            layout.num_sequences,
            TILE=TILE,
        )

    def follow(self, first: int, count: int) -> None:
        """Applies `count` entries of block tables that are in the words from `first` on."""
        places = self._words[first : first + count]
        second = _behind(first, count)
        blocks = self._words[second : second + count]
        follow_tables_kernel[(-(-count // TILE),)](self._tables, places, blocks, count, TILE=TILE)

    def _field(self, layout: StepLayout, name: str) -> Tensor:
        return self._words[layout.fields[name]]

    def _send(self, words: Words, first: int, entries: TableEntries, mirror: Mirror | None) -> None:
        """Copies the words `[0, first)` and the entries behind them, and applies the entries."""
        count = len(entries.places)
        second = _behind(first, count)
        words[first : first + count] = entries.places
        words[second : second + count] = entries.blocks
        if mirror is not None:
            mirror(words[: second + count], first, count)
        self._copy(second + count, first, count)

    def _copy(self, num_words: int, first: int, count: int) -> None:
        self._ring.copy_to(self._words, num_words)
        if count:
            self.follow(first, count)


def _behind(first: int, count: int) -> int:
    """Returns the first aligned word behind `count` words."""
    return first + -(-count // ALIGNMENT_WORDS) * ALIGNMENT_WORDS
