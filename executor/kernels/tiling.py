"""Tiling of attention into programs. Pure: it depends on sizes that the host knows, never on the content of a device
tensor.

No search runs at serve time. Decodes, and chunks of GPUs of compute capability 9.0, with heads of 64 and 128 in half
precision and FP8 were measured on an H100 (docs/design/gpu-kernels.md). The others are the usual ones for this kind of
kernel.
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
# loads to run ahead of the products. Half of it is 1 % faster for one sequence and slower for many.
SPAN_KEYS = 256
FP8_SPAN_KEYS = 128
# Programs that one decode may occupy: about as many as the largest GPUs have processors.
MAX_PROGRAMS = 128
# Programs that share the decodes of a step: several for each processor, so that all end at about the same time.
MAX_DECODE_PROGRAMS = 1024
MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """`num_tokens` new tokens of `num_sequences` sequences. `element_bytes` are those of queries, `kv_element_bytes` of
    keys and values. `is_hopper`: the GPU is of compute capability 9.0."""

    num_tokens: int
    num_sequences: int
    num_kv_heads: int
    group: int
    head_dim: int
    element_bytes: int
    kv_element_bytes: int
    is_hopper: bool = False


@dataclass(frozen=True, slots=True)
class Tiling:
    """Rows (tokens times the heads of a group) and keys of a tile, and the number of parts of the keys, in spans of
    `span_keys`, a multiple of `keys`.

    It depends on the model alone, never on the batch: other rows, keys, splits or warps would add in another order.
    """

    rows: int
    keys: int
    splits: int
    num_warps: int
    num_stages: int
    span_keys: int = SPAN_KEYS


# Chunks on compute capability 9.0, by padded head size and bytes of a key's number. The matrix instruction takes 64
# rows of four warps. Heads of 256 are not measured; with 64 rows they would spill.
HOPPER_CHUNKS = {
    (64, 2): Tiling(128, 64, 1, 4, 3),
    (64, 1): Tiling(128, 128, 1, 4, 3),
    (128, 2): Tiling(128, 128, 1, 8, 3),
    (128, 1): Tiling(64, 128, 1, 4, 2),
    (256, 2): Tiling(128, 32, 1, 8, 2),
}


def decode_tiling(work: AttentionWork) -> Tiling:
    """Returns one row tile for each sequence and KV head."""
    rows, splits = max(MIN_ROWS, power_of_two(work.group)), _splits(work)
    if work.kv_element_bytes == 1 and work.element_bytes == 2 and rows == MIN_ROWS:
        # Widened tiles take so many registers that many programs of one warp hide loads better than loads ahead do.
        return Tiling(rows, 32, splits, 1, 2, FP8_SPAN_KEYS)
    # One warp for every 16 keys of a tile. Tiles of 16 keys and two warps are 2 to 3 % faster for a step of many
    # sequences, and slower by more for one.
    return Tiling(rows, _tile_keys(work), splits, 4 if rows <= 32 else 8, 3)


def chunk_tiling(work: AttentionWork) -> Tiling:
    """Returns the largest row tiles. Where a chunk does not fill them, loading its keys takes longer than the rows that
    are missing would."""
    if work.is_hopper and work.element_bytes == 2 and work.group <= 64:
        tiling = HOPPER_CHUNKS.get((padded_dim(work.head_dim), work.kv_element_bytes))
        if tiling is not None:
            return tiling
    rows = max(power_of_two(work.group), _max_rows(work))
    return Tiling(rows, _tile_keys(work), 1, 4 if rows <= 64 else 8, 2)


def num_decode_programs(work: AttentionWork, splits: int) -> int:
    """Returns the programs for each KV head in a launch with decodes: no more than there may be splits. No result
    depends on it."""
    return max(1, min(work.num_sequences * splits, MAX_DECODE_PROGRAMS // work.num_kv_heads))


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
