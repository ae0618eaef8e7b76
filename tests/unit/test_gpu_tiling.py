"""Tiling of attention into programs: as the model needs it, whatever the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from inflight.executor.kernels.tiling import (
    AttentionWork,
    Tiling,
    chunk_tiling,
    decode_tiling,
    num_decode_programs,
    num_row_tiles,
)

LLAMA_8B = AttentionWork(64, 64, num_kv_heads=8, group=4, head_dim=128, element_bytes=2, kv_element_bytes=2)


def of(num_tokens: int, num_sequences: int) -> AttentionWork:
    return replace(LLAMA_8B, num_tokens=num_tokens, num_sequences=num_sequences)


@pytest.mark.parametrize(("num_kv_heads", "splits"), [(1, 32), (3, 32), (8, 16), (12, 8), (32, 4), (200, 1)])
def test_a_decode_may_occupy_as_many_programs_as_a_gpu_has_processors(num_kv_heads: int, splits: int) -> None:
    assert decode_tiling(replace(LLAMA_8B, num_kv_heads=num_kv_heads)).splits == splits


@pytest.mark.parametrize("tiling", [decode_tiling, chunk_tiling])
def test_tiling_does_not_depend_on_the_batch(tiling: Callable[[AttentionWork], Tiling]) -> None:
    assert len({tiling(of(*sizes)) for sizes in ((1, 1), (16, 4), (64, 64), (2000, 1))}) == 1


@pytest.mark.parametrize(("num_sequences", "programs"), [(1, 16), (4, 64), (8, 128), (500, 128)])
def test_programs_of_decodes_are_few_whatever_their_number(num_sequences: int, programs: int) -> None:
    assert num_decode_programs(of(num_sequences, num_sequences), splits=16) == programs


@pytest.mark.parametrize(("group", "rows"), [(1, 16), (4, 16), (16, 16), (17, 32), (30, 32)])
def test_rows_of_a_decode_hold_the_group(group: int, rows: int) -> None:
    assert decode_tiling(replace(LLAMA_8B, group=group)).rows == rows


@pytest.mark.parametrize("lengths", [[1], [31, 32, 33], [5] * 7, [100, 1]])
def test_there_is_a_row_tile_for_every_token(lengths: list[int]) -> None:
    work = of(sum(lengths), len(lengths))
    needed = sum(-(-length // 8) for length in lengths)  # 32 rows are 8 tokens of 4 heads
    assert num_row_tiles(work, rows=32) >= needed


def test_wide_heads_and_float32_get_smaller_tiles() -> None:
    wide = replace(of(2000, 1), head_dim=256)
    assert (chunk_tiling(wide).rows, chunk_tiling(wide).keys) == (64, 32)
    assert chunk_tiling(replace(wide, is_hopper=True)).rows == 128
    exact = replace(wide, element_bytes=4)
    assert (chunk_tiling(exact).rows, chunk_tiling(exact).keys) == (16, 16)
