"""Products with a matrix of codes in Triton, as a checkpoint has it: a tile is decoded and multiplied at once.

`decoded_tile` is the decoder of all formats. What differs is how codes become numbers (`KIND`), the type of the scales
(`SCALE_KIND`), and what is added. It takes any rows and columns, so a product of experts can use it as well.

The numbers of a tile are rounded to the type of the activations before they are multiplied. So a product has the
numbers of the dense matrix in that type, and its sums are in float32.
"""

import triton
import triton.language as tl

# Kinds of codes: whole numbers of 4 and 8 bits, e4m3 and e2m1. Codes of 4 bits are in pairs, the even column in the low
# half of a byte.
INT4, INT8, FP8, FP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
# Kinds of scales: of a type of Triton, or bits of e4m3 or of an exponent of 2.
NUMBER, E4M3, E8M0 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# What follows a scale: nothing, a code that stands for 0, or a number that is added.
NOTHING, ZERO, OFFSET = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# e4m3 has 3 bits of mantissa and float16 has 10, and their exponents differ by 8; for e2m1 by 14.
FP8_FACTOR, FP4_FACTOR = tl.constexpr(256.0), tl.constexpr(16384.0)


@triton.jit
def from_e4m3(bits):
    """Returns the numbers of e4m3, none of which is NaN, in float32. The bits are shifted to those of a float16, also
    subnormal ones, so GPUs without a conversion have it as well."""
    wide = bits.to(tl.uint16)
    halves = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * FP8_FACTOR


@triton.jit
def from_e2m1(bits):
    """Returns the numbers of e2m1 in float32."""
    wide = bits.to(tl.uint16)
    halves = ((wide & 8) << 12) | ((wide & 7) << 9)
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * FP4_FACTOR


@triton.jit
def scale_numbers(stored, SCALE_KIND: tl.constexpr):
    """Returns scales in float32."""
    if SCALE_KIND == E4M3:
        scales = from_e4m3(stored)
    elif SCALE_KIND == E8M0:
        exponent = stored.to(tl.int32)
        # The least one is subnormal.
        scales = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    else:
        scales = stored.to(tl.float32)
    return scales


@triton.jit
def spread(of_groups, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr, GROUP: tl.constexpr):
    """Returns the numbers of groups `[TILE_OUT, groups]` for each column of a tile."""
    if GROUP >= TILE_IN:
        of_columns = of_groups
    else:
        wide = tl.broadcast_to(of_groups[:, :, None], (TILE_OUT, TILE_IN // GROUP, GROUP))
        of_columns = tl.reshape(wide, (TILE_OUT, TILE_IN))
    return of_columns


@triton.jit
def decoded_tile(
    codes,
    scales,
    beside,
    factors,
    rows,
    first_column,
    num_rows,
    num_columns,
    num_scales,
    KIND: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    BESIDE: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Returns the numbers `[TILE_OUT, TILE_IN]` of a matrix in float32, of the rows `rows` and the columns from
    `first_column` on. Those outside the matrix are finite.

    `codes` is uint8 `[num_rows, num_columns]`, or half as many columns for pairs. `scales` and `beside` are `[groups,
    num_scales]`, a row for each `GROUP` columns and a column for each `ROW_BLOCK` rows. `GROUP` and `TILE_IN` are
    powers of two, and `first_column` is a multiple of `TILE_IN`.
    """
    is_row = rows < num_rows
    wide_rows = rows.to(tl.int64)[:, None]
    if KIND == INT8 or KIND == FP8:  # noqa: SIM109 - constants of Triton
        columns = first_column + tl.arange(0, TILE_IN)[None, :]
        mask = is_row[:, None] & (columns < num_columns)
        stored = tl.load(codes + wide_rows * num_columns + columns, mask=mask, other=0)
    else:
        num_bytes = num_columns // 2
        places = first_column // 2 + tl.arange(0, TILE_IN // 2)[None, :]
        mask = is_row[:, None] & (places < num_bytes)
        pairs = tl.load(codes + wide_rows * num_bytes + places, mask=mask, other=0)
        stored = tl.reshape(tl.join(pairs & 15, pairs >> 4), (TILE_OUT, TILE_IN))
    NUM_GROUPS: tl.constexpr = TILE_IN // GROUP if GROUP < TILE_IN else 1
    groups = first_column // GROUP + tl.arange(0, NUM_GROUPS)[None, :]
    num_groups = (num_columns + GROUP - 1) // GROUP
    offsets = groups * num_scales + rows[:, None] // ROW_BLOCK
    has_scale = is_row[:, None] & (groups < num_groups)
    scale = scale_numbers(tl.load(scales + offsets, mask=has_scale, other=0), SCALE_KIND)
    if HAS_FACTORS:
        scale = scale * tl.load(factors + rows, mask=is_row, other=0.0)[:, None]
    scale = spread(scale, TILE_OUT, TILE_IN, GROUP)
    if KIND == FP8:
        numbers = from_e4m3(stored) * scale
    elif KIND == FP4:
        numbers = from_e2m1(stored) * scale
    elif BESIDE == ZERO:
        zero = tl.load(beside + offsets, mask=has_scale, other=0).to(tl.float32)
        numbers = (stored.to(tl.float32) - spread(zero, TILE_OUT, TILE_IN, GROUP)) * scale
    else:
        offset = tl.load(beside + offsets, mask=has_scale, other=0.0)
        numbers = stored.to(tl.float32) * scale + spread(offset, TILE_OUT, TILE_IN, GROUP)
    return numbers


# Numbers of tokens are not specialised, because each kind would be compiled at its first use.
@triton.jit(do_not_specialize=["num_tokens"])
def coded_product_kernel(
    inputs,
    codes,
    scales,
    beside,
    factors,
    outputs,
    num_tokens,
    num_rows,
    num_columns,
    num_scales,
    input_stride,
    output_stride,
    split_stride,
    columns_per_split,
    KIND: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    BESIDE: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Computes `inputs @ matrix.T`. Grid: tiles of tokens, tiles of the matrix' rows, splits of its columns.

    `inputs[num_tokens, num_columns]`, `outputs[splits, num_tokens, num_rows]`. A split is `columns_per_split` columns,
    a multiple of `TILE_IN`. See `decoded_tile` for the matrix.
    """
    tokens = tl.program_id(0) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    rows = tl.program_id(1) * TILE_OUT + tl.arange(0, TILE_OUT)
    start = tl.program_id(2) * columns_per_split
    is_token = tokens < num_tokens
    wide_tokens = tokens.to(tl.int64)[:, None]
    sums = tl.zeros((TILE_TOKENS, TILE_OUT), tl.float32)
    for first in range(start, tl.minimum(start + columns_per_split, num_columns), TILE_IN):
        columns = first + tl.arange(0, TILE_IN)
        mask = is_token[:, None] & (columns < num_columns)[None, :]
        left = tl.load(inputs + wide_tokens * input_stride + columns[None, :], mask=mask, other=0.0)
        tile = decoded_tile(
            codes, scales, beside, factors, rows, first, num_rows, num_columns, num_scales,
            KIND, SCALE_KIND, BESIDE, HAS_FACTORS, GROUP, ROW_BLOCK, TILE_OUT, TILE_IN,
        )  # fmt: skip
        sums = tl.dot(left, tl.trans(tile.to(left.dtype)), sums, input_precision="ieee")
    places = tl.program_id(2).to(tl.int64) * split_stride + wide_tokens * output_stride + rows[None, :]
    mask = is_token[:, None] & (rows < num_rows)[None, :]
    tl.store(outputs + places, sums.to(outputs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def add_splits_kernel(
    parts, outputs, num_tokens, num_rows, output_stride, NUM_SPLITS: tl.constexpr, TILE: tl.constexpr
):
    """Adds `parts[NUM_SPLITS, num_tokens, num_rows]` in float32 in their order, and rounds to the type of
    `outputs[num_tokens, num_rows]`. Grid: tokens, tiles of rows."""
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = rows < num_rows
    sums = tl.zeros((TILE,), tl.float32)
    for split in range(NUM_SPLITS):
        sums += tl.load(parts + (split * num_tokens + token) * num_rows + rows, mask=mask, other=0.0)
    tl.store(outputs + token * output_stride + rows, sums.to(outputs.dtype.element_ty), mask=mask)


@triton.jit
def decode_kernel(
    codes,
    scales,
    beside,
    factors,
    outputs,
    first_row,
    num_rows,
    num_columns,
    num_scales,
    KIND: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    BESIDE: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    GROUP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Writes the matrix from `first_row` on, a multiple of `TILE_OUT`, to `outputs[rows, num_columns]`. Grid: tiles of
    rows, tiles of columns."""
    places = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    rows = first_row + places
    first = tl.program_id(1) * TILE_IN
    tile = decoded_tile(
        codes, scales, beside, factors, rows, first, num_rows, num_columns, num_scales,
        KIND, SCALE_KIND, BESIDE, HAS_FACTORS, GROUP, ROW_BLOCK, TILE_OUT, TILE_IN,
    )  # fmt: skip
    columns = first + tl.arange(0, TILE_IN)
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    wide = places.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(outputs + wide, tile.to(outputs.dtype.element_ty), mask=mask)
