"""A step plan as tensors: every new token of every sequence in one flat row, and where its KV goes.

Work per step is O(tokens + blocks in the tables); nothing here touches the context itself. With S sequences, T new
tokens and R rows that sample, in the order of the plan's rows:

    sequence i has tokens [query_starts[i], query_starts[i + 1]) of the T
    and attends to positions [0, context_lengths[i]), found through block_tables[i]

Block 0 is the spare: tables are padded with it, and nothing real is ever stored there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.sequence import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """The tensors of a step.

    `token_ids[T]`, `positions[T]`, `slot_mapping[T]` int64, a slot being `block * block_size + offset`;
    `query_starts[S + 1]`, `context_lengths[S]`, `block_tables[S, max_blocks]` int32; `logit_rows[R]` int64, the flat
    rows that yield a token. The first `num_decodes` sequences have exactly one new token each.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    context_lengths: Tensor
    block_tables: Tensor
    logit_rows: Tensor
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

    def to(self, device: torch.device) -> StepBatch:
        """The same batch on a device; itself if it is there already."""
        if self.token_ids.device == device:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def pack(plan: StepPlan, block_size: int) -> StepBatch:
    """Lays a plan with at least one row out as tensors on the host."""
    rows = plan.rows
    lengths = np.fromiter((row.num_tokens for row in rows), np.int32, len(rows))
    starts = np.fromiter((row.start for row in rows), np.int32, len(rows))
    query_starts = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(plan.num_tokens) - (query_starts[:-1] - starts)[row_of_token]
    block_tables = _block_tables(plan, starts + lengths, block_size)
    blocks = block_tables[row_of_token, positions // block_size].astype(np.int64)
    samples = np.fromiter((row.samples for row in rows), np.bool_, len(rows))
    return StepBatch(
        token_ids=torch.from_numpy(_token_ids(plan)),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(blocks * block_size + positions % block_size),
        query_starts=torch.from_numpy(query_starts),
        context_lengths=torch.from_numpy(starts + lengths),
        block_tables=torch.from_numpy(block_tables),
        logit_rows=torch.from_numpy((query_starts[1:][samples] - 1).astype(np.int64)),
        num_decodes=_num_leading_ones(lengths),
        block_size=block_size,
    )


def _token_ids(plan: StepPlan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    token_ids: list[int] = []
    for row in plan.rows:
        known = row.sequence.token_ids
        if row.num_tokens == 1:
            token_ids.append(known[row.start])
        else:
            token_ids += known[row.start : row.start + row.num_tokens]
    return np.array(token_ids, np.int64)


def _block_tables(
    plan: StepPlan, context_lengths: np.ndarray[tuple[int], np.dtype[np.int32]], block_size: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    num_blocks = -(-context_lengths // block_size)
    tables = np.zeros((len(plan.rows), int(num_blocks.max())), np.int32)
    for table, row, count in zip(tables, plan.rows, num_blocks.tolist(), strict=True):
        table[:count] = row.sequence.block_table[:count]
    return tables


def _num_leading_ones(lengths: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    longer = np.flatnonzero(lengths != 1)
    return int(longer[0]) if longer.size else len(lengths)
