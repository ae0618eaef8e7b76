"""Tiling of attention into programs: enough of them for the GPU, and no more than there is work."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor.kernels.tiling import AttentionWork, chunk_tiling, decode_tiling, num_row_tiles

LLAMA_8B = AttentionWork(64, 64, 8192, num_kv_heads=8, group=4, head_dim=128, element_bytes=2)
PROCESSORS = 132


def of(num_tokens: int, num_sequences: int) -> AttentionWork:
    return replace(LLAMA_8B, num_tokens=num_tokens, num_sequences=num_sequences)


@pytest.mark.parametrize(("num_sequences", "splits"), [(256, 1), (64, 1), (32, 2), (16, 4), (8, 8), (1, 32)])
def test_few_decodes_share_their_keys_out(num_sequences: int, splits: int) -> None:
    assert decode_tiling(of(num_sequences, num_sequences), PROCESSORS).splits == splits


def test_there_are_no_more_splits_than_tiles_of_keys() -> None:
    assert decode_tiling(replace(of(1, 1), max_context=100), PROCESSORS).splits == 2


@pytest.mark.parametrize(("group", "rows"), [(1, 16), (4, 16), (16, 16), (17, 32), (30, 32)])
def test_rows_of_a_decode_hold_the_group(group: int, rows: int) -> None:
    assert decode_tiling(replace(LLAMA_8B, group=group), PROCESSORS).rows == rows


@pytest.mark.parametrize(
    ("num_tokens", "num_sequences", "rows"), [(2000, 1, 128), (10, 1, 64), (24, 8, 16), (64, 1, 128)]
)
def test_rows_of_a_chunk_follow_its_length(num_tokens: int, num_sequences: int, rows: int) -> None:
    assert chunk_tiling(of(num_tokens, num_sequences), PROCESSORS).rows == rows


def test_drafts_to_verify_share_their_keys_out_and_prompts_do_not() -> None:
    assert chunk_tiling(of(16, 4), PROCESSORS).splits > 1
    assert chunk_tiling(of(2000, 1), PROCESSORS).splits == 1


@pytest.mark.parametrize("lengths", [[1], [31, 32, 33], [5] * 7, [100, 1]])
def test_there_is_a_row_tile_for_every_token(lengths: list[int]) -> None:
    work = of(sum(lengths), len(lengths))
    needed = sum(-(-length // 8) for length in lengths)  # 32 rows are 8 tokens of 4 heads
    assert num_row_tiles(work, rows=32) >= needed


def test_wide_heads_and_float32_get_smaller_tiles() -> None:
    wide = replace(of(2000, 1), head_dim=256)
    assert (chunk_tiling(wide, PROCESSORS).rows, chunk_tiling(wide, PROCESSORS).keys) == (64, 32)
    exact = replace(wide, element_bytes=4)
    assert (chunk_tiling(exact, PROCESSORS).rows, chunk_tiling(exact, PROCESSORS).keys) == (32, 16)
