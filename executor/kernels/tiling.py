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
# Programs available to each processor, so that loads of one overlap with those of another.
PROGRAMS_PER_PROCESSOR = 3
MAX_SPLITS = 32
# Chunks are split into this many parts or not at all, because each number is a kernel to compile.
CHUNK_SPLITS = 8


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """`num_tokens` new tokens of `num_sequences` sequences, none of which sees more than `max_context` keys."""

    num_tokens: int
    num_sequences: int
    max_context: int
    num_kv_heads: int
    group: int
    head_dim: int
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows (tokens times the heads of a group) and keys of a tile, and the number of programs that share the keys."""

    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int


def decode_tiling(work: AttentionWork, num_processors: int) -> Tiling:
    """Returns one row tile for each sequence and KV head."""
    rows, keys = max(MIN_ROWS, power_of_two(work.group)), _tile_keys(work)
    num_programs = work.num_sequences * work.num_kv_heads
    # One warp for every 16 keys of a tile; a fourth stage would cost more programs than it hides latency.
    return Tiling(rows, keys, _splits(work, keys, num_programs, num_processors), 4 if rows <= 32 else 8, 3)


def chunk_tiling(work: AttentionWork, num_processors: int) -> Tiling:
    """Returns row tiles as large as the sequences fill them. Keys are split only where few rows leave processors
    idle."""
    keys = _tile_keys(work)
    most = max(power_of_two(work.group), _max_rows(work))
    mean_rows = -(-work.num_tokens // work.num_sequences) * work.group
    rows = min(most, max(MIN_ROWS, power_of_two(mean_rows), power_of_two(work.group)))
    num_programs = num_row_tiles(work, rows) * work.num_kv_heads
    is_split = rows < most and _splits(work, keys, num_programs, num_processors) > 1
    return Tiling(rows, keys, CHUNK_SPLITS if is_split else 1, 4 if rows <= 64 else 8, 3)


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
    # The sums of a tile are float32 in registers: 128 rows of 128 numbers are 64 KB.
    wide = padded_dim(work.head_dim) * (1 if work.element_bytes == 2 else 2)
    return max(MIN_ROWS, min(MAX_ROWS, MAX_ROWS * 128 // wide))


def _splits(work: AttentionWork, keys: int, num_programs: int, num_processors: int) -> int:
    wanted = -(-PROGRAMS_PER_PROCESSOR * num_processors // num_programs)
    num_tiles = -(-work.max_context // keys)
    return min(power_of_two(wanted), power_of_two(num_tiles), MAX_SPLITS)
