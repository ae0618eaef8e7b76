"""Packing a plan: flat tokens, positions, slots, tables."""

from __future__ import annotations

import torch

from inflight.executor.scheduler.sequence import PlanRow, StepPlan
from inflight.executor.step.batch import pack
from tests.support.device.paged_cases import make_sequence

BLOCK_SIZE = 16


def test_decodes_and_chunks_lie_behind_one_another() -> None:
    # Given a decode at position 17 and a prefill chunk of positions [14, 19)
    decode = make_sequence(list(range(100, 118)), [5, 3])
    chunk = make_sequence(list(range(200, 230)), [9, 2])
    plan = StepPlan.of([PlanRow(decode, 17, 1, True), PlanRow(chunk, 14, 5, False)])

    batch = pack(plan, BLOCK_SIZE)

    assert batch.token_ids.tolist() == [117, 214, 215, 216, 217, 218]
    assert batch.positions.tolist() == [17, 14, 15, 16, 17, 18]
    assert batch.slot_mapping.tolist() == [3 * 16 + 1, 9 * 16 + 14, 9 * 16 + 15, 2 * 16, 2 * 16 + 1, 2 * 16 + 2]
    assert batch.query_starts.tolist() == [0, 1, 6]
    assert batch.context_lengths.tolist() == [18, 19]
    assert batch.block_tables.tolist() == [[5, 3], [9, 2]]
    assert batch.logit_rows.tolist() == [0], "a chunk that does not end its prompt yields no token"
    assert (batch.num_decodes, batch.num_sequences, batch.num_tokens) == (1, 2, 6)


def test_shorter_tables_are_padded_with_the_spare_block() -> None:
    short, long = make_sequence([1] * 3, [7]), make_sequence([1] * 33, [1, 2, 3])
    batch = pack(StepPlan.of([PlanRow(short, 2, 1, True), PlanRow(long, 32, 1, True)]), BLOCK_SIZE)
    assert batch.block_tables.tolist() == [[7, 0, 0], [1, 2, 3]]
    assert batch.num_decodes == 2


def test_types_are_what_the_kernels_read() -> None:
    batch = pack(StepPlan.of([PlanRow(make_sequence([1, 2], [1]), 0, 2, False)]), BLOCK_SIZE)
    longs = (batch.token_ids, batch.positions, batch.slot_mapping, batch.logit_rows)
    carried = (batch.carried_rows, batch.carried_from)
    ints = (batch.query_starts, batch.context_lengths, batch.block_tables, batch.table_rows)
    assert all(tensor.dtype == torch.int64 for tensor in (*longs, *carried))
    assert all(tensor.dtype == torch.int32 and tensor.is_contiguous() for tensor in ints)
    assert batch.logit_rows.shape == (0,)
    assert batch.to(torch.device("cpu")) is batch
