"""Changes of matrix products by LoRA adapters, in Triton: rows are grouped by adapter, and two kernels add B (A x).

Rows come in tiles of `TILE_ROWS`, each of rows of one adapter: lane `l` of tile `t` is row `rows[t * TILE_ROWS + l]` of
the inputs, or none where that is -1, and `slots[t]` is the slot of the tile's adapter, or -1 for a tile without rows.
Rows without an adapter are in no tile, and their outputs are not touched.

A fused product has parts that share their inputs, such as queries, keys and values. Each part has `RANK` rows of A, so
that one product computes those of all parts. Ranks below `RANK` are filled with zeros.

The sizes of tiles and splits depend on the model alone. A row's result does not depend on the other rows or on its
place in a tile.
"""

import triton
import triton.language as tl


@triton.jit
def shrink_kernel(
    inputs,  # [rows, size]
    a,  # [slots, NUM_RANKS, size]
    rows, slots,
    partials,  # [NUM_SPLITS, tiles * TILE_ROWS, NUM_RANKS] float32
    input_stride, size,
    NUM_RANKS: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_RANKS: tl.constexpr, TILE_INPUTS: tl.constexpr,
):  # fmt: skip
    """Computes the share of `SPLIT_SIZE` columns of A x for the ranks of all parts. Grid: tiles, tiles of ranks,
    splits."""
    tile, split = tl.program_id(0), tl.program_id(2)
    slot = tl.load(slots + tile).to(tl.int64)
    if slot < 0:
        return
    lanes = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row = tl.load(rows + lanes).to(tl.int64)
    ranks = tl.program_id(1) * TILE_RANKS + tl.arange(0, TILE_RANKS)
    source, matrix = inputs + row[:, None] * input_stride, a + (slot * NUM_RANKS + ranks[None, :]) * size
    sums = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
    for start in range(split * SPLIT_SIZE, tl.minimum(split * SPLIT_SIZE + SPLIT_SIZE, size), TILE_INPUTS):
        columns = start + tl.arange(0, TILE_INPUTS)
        is_column = columns < size
        values = tl.load(source + columns[None, :], mask=(row >= 0)[:, None] & is_column[None, :], other=0.0)
        weights = tl.load(matrix + columns[:, None], mask=is_column[:, None], other=0.0)
        sums = tl.dot(values, weights, sums, input_precision="ieee")
    share = split * tl.num_programs(0) * TILE_ROWS
    tl.store(partials + (share + lanes)[:, None].to(tl.int64) * NUM_RANKS + ranks[None, :], sums)


@triton.jit
def expand_kernel(
    partials,  # as in `shrink_kernel`
    b,  # [slots, outputs of all parts, RANK], times the adapter's scale
    rows, slots,
    outputs,  # [rows, outputs of all parts]
    output_stride, num_outputs, first_width, other_width,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_RANKS: tl.constexpr, TILE_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Adds B (A x) to the outputs. Grid: tiles, tiles of the widest part's outputs, parts. The first part has
    `first_width` outputs, each other one `other_width`."""
    tile, part = tl.program_id(0), tl.program_id(2)
    slot = tl.load(slots + tile).to(tl.int64)
    width = tl.where(part == 0, first_width, other_width)
    if (slot < 0) | (tl.program_id(1) * TILE_OUTPUTS >= width):
        return
    lanes = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row = tl.load(rows + lanes).to(tl.int64)
    columns = tl.program_id(1) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_column = columns < width
    columns += tl.where(part == 0, 0, first_width + (part - 1) * other_width)
    matrix = b + (slot * num_outputs + columns[None, :]) * RANK
    num_lanes = tl.num_programs(0) * TILE_ROWS
    sums = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    for start in range(0, RANK, TILE_RANKS):
        ranks = start + tl.arange(0, TILE_RANKS)
        source = partials + lanes[:, None].to(tl.int64) * NUM_RANKS + part * RANK + ranks[None, :]
        shrunk = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            shrunk += tl.load(source + split * num_lanes.to(tl.int64) * NUM_RANKS)
        weights = tl.load(matrix + ranks[:, None], mask=is_column[None, :], other=0.0)
        sums = tl.dot(shrunk.to(weights.dtype), weights, sums, input_precision="ieee")
    target = outputs + row[:, None] * output_stride + columns[None, :]
    mask = (row >= 0)[:, None] & is_column[None, :]
    total = tl.load(target, mask=mask, other=0.0).to(tl.float32) + sums
    tl.store(target, total.to(outputs.dtype.element_ty), mask=mask)
