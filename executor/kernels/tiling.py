"""Tiling of attention into programs. Pure: it depends on sizes that the host knows, never on the content of a device
tensor.

No search runs at serve time. The figures are the usual ones for this kind of kernel; none is measured yet.
"""

from __future__ import annotations

from dataclasses import dataclass

# Rows of the smallest matrix instruction.
MIN_ROWS = 16
MAX_ROWS = 128
# Keys and values of one tile of keys: a few such stages fit the shared memory of any GPU since sm_80.
MAX_STAGE_BYTES = 32 * 1024
MAX_TILE_KEYS = 64
# A decode's keys are shared out in spans of this many. Few enough for a short context to occupy a GPU, and enough for
# loads to run ahead of the products.
SPAN_KEYS = 256
# Programs that one decode may occupy: about as many as the largest GPUs have processors.
MAX_PROGRAMS = 128
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """`num_tokens` new tokens of `num_sequences` sequences."""

    num_tokens: int
    num_sequences: int
    num_kv_heads: int
    group: int
    head_dim: int
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows (tokens times the heads of a group) and keys of a tile, and the number of programs that share the keys.

    It depends on the model alone, never on the batch: other rows, keys, splits or warps would add in another order.
    """

    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int


def decode_tiling(work: AttentionWork) -> Tiling:
    """Returns one row tile for each sequence and KV head."""
    rows, keys = max(MIN_ROWS, power_of_two(work.group)), _tile_keys(work)
    # One warp for every 16 keys of a tile; a fourth stage would cost more programs than it hides latency.
    return Tiling(rows, keys, _splits(work), 4 if rows <= 32 else 8, 3)


def chunk_tiling(work: AttentionWork) -> Tiling:
    """Returns the largest row tiles. Where a chunk does not fill them, loading its keys takes longer than the rows that
    are missing would."""
    rows = max(power_of_two(work.group), _max_rows(work))
    return Tiling(rows, _tile_keys(work), 1, 4 if rows <= 64 else 8, 2)


def num_row_tiles(work: AttentionWork, rows: int) -> int:
    """Returns the row tiles of a launch with chunks: at least as many as the sequences fill."""
    return work.num_tokens // (rows // work.group) + work.num_sequences


def power_of_two(value: int) -> int:
    """Returns the smallest power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()


def padded_dim(head_dim: int) -> int:
    """Returns the head size as matrix instructions take it."""
    return max(16, power_of_two(head_dim))


def _tile_keys(work: AttentionWork) -> int:
    return max(16, min(MAX_TILE_KEYS, MAX_STAGE_BYTES // (2 * padded_dim(work.head_dim) * work.element_bytes)))


def _max_rows(work: AttentionWork) -> int:
    # The sums of a tile are float32 in registers: 128 rows of 128 numbers are 64 KB. float32 is multiplied from
    # registers, too.
    wide = padded_dim(work.head_dim) * (1 if work.element_bytes == 2 else 4)
    return max(MIN_ROWS, min(MAX_ROWS, MAX_ROWS * 128 // wide))


def _splits(work: AttentionWork) -> int:
    most = max(1, min(MAX_PROGRAMS // work.num_kv_heads, MAX_SPLITS))
    return 1 << (most.bit_length() - 1)
