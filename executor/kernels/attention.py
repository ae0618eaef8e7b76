"""Paged attention in Triton: a kernel for decodes, prefill chunks and drafts to verify, and one that combines splits.

KV layout: `[num_blocks, num_kv_heads, block_size, head_dim]` for keys and for values.

A program computes a tile of query rows of one sequence and one KV head. Rows are packed: the `GROUP` query heads that
share the KV head are adjacent, so a decode fills a matrix instruction's 16 rows as far as it can.

    row r of a tile      token `first + r // GROUP`, head `kv_head * GROUP + r % GROUP`
    its keys             positions `[position - WINDOW + 1, position]`, from 0 where WINDOW is 0

Keys are read in tiles of their own size, whatever the size of a block. The key tiles of a row tile may be distributed
over `NUM_SPLITS` programs. Each then stores a normalised partial result and the base-2 logarithm of its weight, -inf
where it had no key. The grid depends only on numbers of tokens and sequences, never on the content of a device tensor.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


# Numbers that differ from step to step are not specialised, because each kind would be compiled at its first use.
@triton.jit(do_not_specialize=["first_sequence", "num_sequences"])
def attend_kernel(
    queries, keys, values, outputs,
    partials,  # [tokens, heads, NUM_SPLITS, HEAD_DIM] float32; unused with one split
    log_weights,  # [tokens, heads, NUM_SPLITS] float32; unused with one split
    query_starts, context_lengths, block_tables, table_rows,
    query_token_stride, query_head_stride, output_token_stride, output_head_stride,
    block_stride, kv_head_stride, slot_stride, table_stride,
    first_sequence, num_sequences, scale, softcap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr, IS_DECODE: tl.constexpr,
    IS_CAPPED: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid: row tiles, KV heads, splits. `IS_DECODE`: sequence i has one new token, the i-th of the batch."""
    TILE_QUERIES: tl.constexpr = TILE_ROWS // GROUP
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if IS_DECODE:
        sequence, first, first_token, num_new = tile, 0, tile, 1
    else:
        sequence, first, first_token, num_new = locate(query_starts, tile, first_sequence, num_sequences, TILE_QUERIES)
    if first >= num_new:
        return
    context = tl.load(context_lengths + sequence)
    first_position = context - num_new + first
    num_queries = tl.minimum(num_new - first, TILE_QUERIES)
    table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride

    rows = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = rows < num_queries * GROUP
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = tokens[:, None].to(tl.int64) * query_token_stride + heads[:, None] * query_head_stride
    query_tile = tl.load(queries + query_offsets + dims[None, :], mask=mask, other=0.0)

    begin, end = share_of_keys(first_position, num_queries, split, TILE_KEYS, WINDOW, NUM_SPLITS)
    kv_offset = kv_head.to(tl.int64) * kv_head_stride
    result, log_weight = attend_to(
        query_tile, keys + kv_offset, values + kv_offset, table, first_position + rows // GROUP,
        first_position + num_queries, begin, end, block_stride, slot_stride, scale, softcap,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_ROWS, TILE_KEYS, WINDOW, IS_CAPPED,
    )  # fmt: skip

    if NUM_SPLITS == 1:
        output_offsets = tokens[:, None].to(tl.int64) * output_token_stride + heads[:, None] * output_head_stride
        tl.store(outputs + output_offsets + dims[None, :], result.to(outputs.dtype.element_ty), mask=mask)
    else:
        parts = (tokens.to(tl.int64) * tl.num_programs(1) * GROUP + heads) * NUM_SPLITS + split
        tl.store(partials + parts[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
        tl.store(log_weights + parts, log_weight, mask=is_row)


@triton.jit
def locate(query_starts, tile, first_sequence, num_sequences, TILE_QUERIES: tl.constexpr):
    """Returns the sequence of a row tile, the tile's first query among its new tokens and in the batch, and how many
    are new.

    Sequence i, counted from `first_sequence`, has the tiles from `tokens before it // TILE_QUERIES + i` on. That is
    enough for each and lets a tile find its sequence by bisection; a tile past a sequence's last query is empty.
    """
    before = tl.load(query_starts + first_sequence)
    low, high = 0, num_sequences - first_sequence
    while low < high:
        middle = (low + high) // 2
        start = (tl.load(query_starts + first_sequence + middle) - before) // TILE_QUERIES + middle
        if start <= tile:
            low = middle + 1
        else:
            high = middle
    index = low - 1
    start = tl.load(query_starts + first_sequence + index)
    num_new = tl.load(query_starts + first_sequence + index + 1) - start
    first = (tile - (start - before) // TILE_QUERIES - index) * TILE_QUERIES
    return first_sequence + index, first, start + first, num_new


@triton.jit
def share_of_keys(
    first_position,
    num_queries,
    split,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """Returns the positions `[begin, end)` of a split, both multiples of `TILE_KEYS`; `end <= begin` where it has
    none."""
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(first_position - WINDOW + 1, 0) // TILE_KEYS
    last_tile = (first_position + num_queries + TILE_KEYS - 1) // TILE_KEYS
    num_tiles = (last_tile - first_tile + NUM_SPLITS - 1) // NUM_SPLITS
    begin = first_tile + split * num_tiles
    return begin * TILE_KEYS, tl.minimum(begin + num_tiles, last_tile) * TILE_KEYS


@triton.jit
def attend_to(
    query_tile, keys, values, table, positions, context_end, begin, end, block_stride, slot_stride, scale, softcap,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr, IS_CAPPED: tl.constexpr,
):  # fmt: skip
    """Returns the softmax-weighted values of the keys in `[begin, end)`, and the base-2 logarithm of the sum of their
    weights."""
    # float32 is multiplied as float32, not in the shorter format of the matrix units.
    PRECISION: tl.constexpr = "ieee" if query_tile.dtype == tl.float32 else "tf32"
    dims = tl.arange(0, PADDED_DIM)
    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    result = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    for start in range(begin, end, TILE_KEYS):
        slots = start + tl.arange(0, TILE_KEYS)
        # Slots past the context may hold anything, even NaN, which a weight of zero does not neutralise.
        exists = slots < context_end
        blocks = tl.load(table + slots // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        offsets = blocks * block_stride + (slots % BLOCK_SIZE) * slot_stride
        mask = exists[:, None] & (dims < HEAD_DIM)[None, :]
        key_tile = tl.load(keys + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION) * scale
        if IS_CAPPED:
            scores = softcap * tanh(scores / softcap)
        distance = positions[:, None] - slots[None, :]
        is_visible = distance >= 0
        if WINDOW > 0:
            is_visible = is_visible & (distance < WINDOW)
        scores = tl.where(is_visible, scores * LOG2_E, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has not seen a key yet: -inf minus -inf would be NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(weights, 1)
        value_tile = tl.load(values + offsets[:, None] + dims[None, :], mask=mask, other=0.0)
        products = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision=PRECISION)
        result = result * decay[:, None] + products
        largest = new_largest
    has_seen = total > 0.0
    divisor = tl.where(has_seen, total, 1.0)
    log_weight = tl.where(has_seen, largest + tl.log2(divisor), float("-inf"))
    return result / divisor[:, None], log_weight


@triton.jit
def tanh(x):
    """Computes tanh by exp; the result is 1 where exp overflows."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def combine_kernel(
    partials, log_weights, outputs, output_token_stride, output_head_stride,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Computes the weighted mean of the splits of one token and head. Grid: tokens, heads."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, PADDED_DIM)
    first_part = (token * tl.num_programs(1) + head) * NUM_SPLITS
    logs = tl.load(log_weights + first_part + splits)
    # Every token sees at least its own key, so one split has a weight.
    weights = tl.exp2(logs - tl.max(logs, 0))
    mask = (logs > float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partials + (first_part + splits)[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    offset = token * output_token_stride + head * output_head_stride
    tl.store(outputs + offset + dims, result.to(outputs.dtype.element_ty), mask=dims < HEAD_DIM)
