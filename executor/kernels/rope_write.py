"""Writes of new keys and values to their blocks, in Triton: unchanged, or directly from the fused projection.

KV layout: `[num_blocks, num_kv_heads, block_size, head_dim]`; a slot is `block * block_size + offset`. If keys and
values are FP8, they are rounded after conversion to the model's dtype, and have scales `[num_blocks, num_kv_heads,
block_size]`. Without FP8 the pointers of scales are unused.
"""

import triton
import triton.language as tl

from inflight.executor.kernels.fp8 import magnitudes, scale_of, scaled_sums, to_fp8


@triton.jit
def rope_write_kernel(
    qkv,  # [tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * 2 * HALF_DIM]; the queries are rotated in place
    row_scales, column_scales,  # [tokens] and [columns of qkv] float32, if qkv is the sums of a product in FP8
    query_norm, key_norm, positions, slots,
    rotations,  # [positions, 2 * HALF_ROTARY] float32: cosines, then sines
    keys, values, key_scales, value_scales, qkv_token_stride, block_stride, kv_head_stride, slot_stride, epsilon,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF_DIM: tl.constexpr, PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE_HEADS: tl.constexpr, HAS_NORMS: tl.constexpr, HAS_SCALES: tl.constexpr,
    HALF_ROTARY: tl.constexpr,
):  # fmt: skip
    """Applies the norms of heads, if any, and the rotary embedding, and writes the KV. Grid: tokens, tiles of heads of
    all kinds. The first 2 * HALF_ROTARY numbers of a head are rotated."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    halves = tl.arange(0, PADDED_HALF)
    is_half = halves < HALF_DIM
    is_rotated = halves < HALF_ROTARY
    low_dims, high_dims = dims_of(halves, is_rotated, HALF_DIM, HALF_ROTARY)
    first_columns = heads[:, None] * (2 * HALF_DIM)
    source = qkv + token * qkv_token_stride + first_columns
    mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_half[None, :]
    row_scale, column_scales = row_scales + token, column_scales + first_columns
    low = load_half(source, row_scale, column_scales, low_dims[None, :], mask, HAS_SCALES)
    high = load_half(source, row_scale, column_scales, high_dims[None, :], mask, HAS_SCALES)

    is_query, is_value = heads < NUM_HEADS, heads >= NUM_HEADS + NUM_KV_HEADS
    new_low, new_high = low, high
    if HAS_NORMS:
        mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF_DIM)
        scale = 1.0 / tl.sqrt(mean + epsilon)
        new_low = low * scale[:, None] * of_kind(query_norm, key_norm, low_dims, is_query, is_half)
        new_high = high * scale[:, None] * of_kind(query_norm, key_norm, high_dims, is_query, is_half)
    angles = rotations + tl.load(positions + token).to(tl.int64) * (2 * HALF_ROTARY) + halves
    # The angle 0 leaves numbers as they are.
    cosine = tl.load(angles, mask=is_rotated, other=1.0)[None, :]
    sine = tl.load(angles + HALF_ROTARY, mask=is_rotated, other=0.0)[None, :]
    rotated_low = new_low * cosine - new_high * sine
    rotated_high = new_high * cosine + new_low * sine
    low = tl.where(is_value[:, None], low, rotated_low)
    high = tl.where(is_value[:, None], high, rotated_high)

    low, high = low.to(qkv.dtype.element_ty), high.to(qkv.dtype.element_ty)
    store_halves(source, low_dims, high_dims, low, high, mask & is_query[:, None])
    slot = tl.load(slots + token).to(tl.int64)
    kv_heads = heads - tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS)
    target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    offsets = target + kv_heads[:, None] * kv_head_stride
    if keys.dtype.element_ty == tl.float8e4nv:
        low, high = low.to(tl.float32), high.to(tl.float32)
        scales = scale_of(tl.max(tl.maximum(magnitudes(low), magnitudes(high)), 1))
        low, high = to_fp8(low, scales[:, None]), to_fp8(high, scales[:, None])
        scale_offsets = (target + kv_heads * kv_head_stride) // (2 * HALF_DIM)
        tl.store(key_scales + scale_offsets, scales, mask=~is_query & ~is_value)
        tl.store(value_scales + scale_offsets, scales, mask=is_value & (heads < NUM_HEADS + 2 * NUM_KV_HEADS))
    store_halves(keys + offsets, low_dims, high_dims, low, high, mask & (~is_query & ~is_value)[:, None])
    store_halves(values + offsets, low_dims, high_dims, low, high, mask & is_value[:, None])


@triton.jit
def dims_of(halves, is_rotated, HALF_DIM: tl.constexpr, HALF_ROTARY: tl.constexpr):
    """Returns the numbers of a head in its two halves, which are rotated in pairs. Each half begins with one of the
    rotated numbers, and the rest of the head follows."""
    if HALF_ROTARY == HALF_DIM:
        return halves, halves + HALF_DIM
    return halves + tl.where(is_rotated, 0, HALF_ROTARY), halves + tl.where(is_rotated, HALF_ROTARY, HALF_DIM)


@triton.jit
def load_half(source, row_scale, column_scales, dims, mask, HAS_SCALES: tl.constexpr):
    """Returns some numbers of each head of a tile, in float32. `source` and `column_scales` are those of the heads."""
    half = tl.load(source + dims, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        half = scaled_sums(half, tl.load(row_scale), column_scales, dims, mask, source.dtype.element_ty)
    return half


@triton.jit
def store_halves(target, low_dims, high_dims, low, high, mask):
    """Stores both halves of the heads of a tile, which begin at `target`."""
    tl.store(target + low_dims[None, :], low, mask=mask)
    tl.store(target + high_dims[None, :], high, mask=mask)


@triton.jit
def of_kind(query_norm, key_norm, dims, is_query, is_dim):
    """Returns the norm's weight for each head of a tile, the queries' or the keys'."""
    of_query = tl.load(query_norm + dims, mask=is_dim, other=0.0).to(tl.float32)
    of_key = tl.load(key_norm + dims, mask=is_dim, other=0.0).to(tl.float32)
    return tl.where(is_query[:, None], of_query[None, :], of_key[None, :])


@triton.jit
def write_kernel(
    new_keys, new_values, slots, keys, values, key_scales, value_scales,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride, block_stride, kv_head_stride, slot_stride,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_HEADS: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes keys and values of one token. Grid: tokens."""
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED_DIM)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM)
    slot = tl.load(slots + token).to(tl.int64)
    target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + heads * kv_head_stride
    key_tile = tl.load(new_keys + token * key_token_stride + heads * key_head_stride + dims, mask=mask, other=0.0)
    write_heads(key_tile, keys, key_scales, target, heads < NUM_KV_HEADS, dims, HEAD_DIM)
    value_tile = tl.load(
        new_values + token * value_token_stride + heads * value_head_stride + dims, mask=mask, other=0.0
    )
    write_heads(value_tile, values, value_scales, target, heads < NUM_KV_HEADS, dims, HEAD_DIM)


@triton.jit
def write_heads(tile, cached, scales, target, is_head, dims, HEAD_DIM: tl.constexpr):
    """Writes keys or values `[heads, dims]` of one token, whose heads begin at `target[heads, 1]`."""
    if cached.dtype.element_ty == tl.float8e4nv:
        tile = tile.to(tl.float32)
        scale = scale_of(tl.max(magnitudes(tile), 1, keep_dims=True))
        tl.store(scales + target // HEAD_DIM, scale, mask=is_head)
        tl.store(cached + target + dims, to_fp8(tile, scale), mask=is_head & (dims < HEAD_DIM))
    else:
        tl.store(cached + target + dims, tile, mask=is_head & (dims < HEAD_DIM))
