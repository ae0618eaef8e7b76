"""Paged attention in Triton: a kernel for prefill chunks and drafts to verify, one for decodes, and one that combines a
decode's splits.

KV layout: `[num_blocks, num_kv_heads, block_size, head_dim]` for keys and for values. FP8 keys and values have scales
`[num_blocks, num_kv_heads, block_size]` in float32. They become the queries' dtype, which represents e4m3 exactly;
scales multiply scores and weights in float32. Without FP8 the pointers of scales are unused. With `HAS_SINKS` the
softmax of each head has one more score, `sinks[heads]`, which belongs to no key.

A tile has query rows of one sequence and one KV head. Rows are packed: the `GROUP` query heads that share the KV head
are adjacent, so a decode fills a matrix instruction's 16 rows as far as it can.

    row r of a tile      token `first + r // GROUP`, head `kv_head * GROUP + r % GROUP`
    its keys             positions `[position - WINDOW + 1, position]`, from 0 where WINDOW is 0

Keys are read in tiles of their own size, whatever the size of a block. The keys of a decode are distributed over
`NUM_SPLITS` splits in spans of `SPAN_KEYS` positions: split s has the spans s, s + NUM_SPLITS and so on. Each split
with a span stores a normalised partial result and the base-2 logarithm of its weight.

A decode's programs share the spans of all sequences evenly, each a run of whole splits. They find out on the device
which, so that no program is started for a split without a span, and a long context among short ones still occupies as
many programs as it has splits. A grid depends only on numbers of tokens and sequences, never on the content of a device
tensor, and a split has the same bits whichever program computes it.

A captured step has padding (`IS_PADDED`): more tokens and sequences than are computed, and the host does not know which
sequences are decodes. Both launches are for every sequence, and leave out those without tokens and those of the other
launch.

A row's result depends on its query, its keys and values, and constants of the model alone. It does not depend on the
other sequences, on the row's place in a tile, or on how a prompt is cut into chunks: a tile without a visible key
leaves a row as it is, bit for bit.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


# Numbers that differ from step to step are not specialised, because each kind would be compiled at its first use.
@triton.jit(do_not_specialize=["first_sequence", "num_sequences"])
def attend_kernel(
    queries, keys, values, key_scales, value_scales, sinks, outputs,
    query_starts, context_lengths, block_tables, table_rows,
    query_token_stride, query_head_stride, output_token_stride, output_head_stride,
    block_stride, kv_head_stride, slot_stride, table_stride,
    first_sequence, num_sequences, scale, softcap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr, IS_CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_PADDED: tl.constexpr,
):  # fmt: skip
    """Attends for sequences with any number of new tokens. Grid: row tiles, KV heads."""
    TILE_QUERIES: tl.constexpr = TILE_ROWS // GROUP
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, first, first_token, num_new = locate(query_starts, tile, first_sequence, num_sequences, TILE_QUERIES)
    if IS_PADDED:
        num_new = tl.where(is_decode(query_starts, sequence), 0, num_new)
    if first >= num_new:
        return
    context = tl.load(context_lengths + sequence)
    first_position, num_queries = context - num_new + first, tl.minimum(num_new - first, TILE_QUERIES)
    table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride

    rows, dims = tl.arange(0, TILE_ROWS), tl.arange(0, PADDED_DIM)
    tokens, heads = first_token + rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = rows < num_queries * GROUP
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_offsets = tokens[:, None].to(tl.int64) * query_token_stride + heads[:, None] * query_head_stride
    query_tile = tl.load(queries + query_offsets + dims[None, :], mask=mask, other=0.0)

    kv_offset = kv_head.to(tl.int64) * kv_head_stride
    keys, values = keys + kv_offset, values + kv_offset
    key_scales, value_scales = key_scales + kv_offset // HEAD_DIM, value_scales + kv_offset // HEAD_DIM
    positions, context_end = first_position + rows // GROUP, first_position + num_queries
    largest, total = before_keys(sinks + heads, is_row, TILE_ROWS, HAS_SINKS)
    result = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    largest, total, result = attend_to_all(
        largest, total, result, query_tile, keys, values, key_scales, value_scales,
        table, positions, first_position, context_end,
        block_stride, slot_stride, scale, softcap, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, WINDOW, IS_CAPPED,
    )  # fmt: skip
    result, _ = normalised(largest, total, result)
    offsets = tokens[:, None].to(tl.int64) * output_token_stride + heads[:, None] * output_head_stride
    tl.store(outputs + offsets + dims[None, :], result.to(outputs.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_sequences"])
def attend_decodes_kernel(
    queries, keys, values, key_scales, value_scales, sinks, outputs,
    partials,  # [tokens, heads, NUM_SPLITS, HEAD_DIM] float32; unused with one split
    log_weights,  # [tokens, heads, NUM_SPLITS] float32; unused with one split
    query_starts, context_lengths, block_tables, table_rows,
    query_token_stride, query_head_stride, output_token_stride, output_head_stride,
    block_stride, kv_head_stride, slot_stride, table_stride,
    num_sequences, scale, softcap,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, WINDOW: tl.constexpr, IS_CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr, NUM_SPLITS: tl.constexpr, SPAN_KEYS: tl.constexpr, IS_PADDED: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Attends for decodes: sequence i has one new token, the i-th of the batch. Grid: programs, KV heads."""
    kv_head = tl.program_id(1)
    sequence, place, begin, end = own_spans(
        query_starts, context_lengths, num_sequences, WINDOW, SPAN_KEYS, IS_PADDED, SEQUENCES
    )
    if begin == end:
        return

    rows, dims = tl.arange(0, TILE_ROWS), tl.arange(0, PADDED_DIM)
    heads, is_row = kv_head * GROUP + rows % GROUP, rows < GROUP
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    kv_offset = kv_head.to(tl.int64) * kv_head_stride
    keys, values = keys + kv_offset, values + kv_offset
    key_scales, value_scales = key_scales + kv_offset // HEAD_DIM, value_scales + kv_offset // HEAD_DIM

    # The sequence's splits are counted from that of its first visible span.
    index = 0
    while place < end:
        context = tl.load(context_lengths + sequence)
        first_visible, num_visible = visible_spans(context, WINDOW, SPAN_KEYS)
        num_own = tl.cdiv(num_visible - index, NUM_SPLITS)
        if place >= begin:
            first_span, token = first_visible + index, sequence.to(tl.int64)
            table = block_tables + tl.load(table_rows + sequence).to(tl.int64) * table_stride
            query_offsets = token * query_token_stride + heads[:, None] * query_head_stride
            query_tile = tl.load(queries + query_offsets + dims[None, :], mask=mask, other=0.0)
            largest, total = before_keys(sinks + heads, is_row, TILE_ROWS, HAS_SINKS and NUM_SPLITS == 1)
            result = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
            largest, total, result = attend_to(
                largest, total, result, query_tile, keys, values, key_scales, value_scales,
                table, rows * 0 + context - 1, context, first_span * SPAN_KEYS,
                tiles_of_split(context, first_span, num_own, TILE_KEYS, NUM_SPLITS, SPAN_KEYS),
                block_stride, slot_stride, scale, softcap, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS, WINDOW,
                IS_CAPPED, SPAN_KEYS, NUM_SPLITS * SPAN_KEYS, True,
            )  # fmt: skip
            result, log_weight = normalised(largest, total, result)
            if NUM_SPLITS == 1:
                offsets = token * output_token_stride + heads[:, None] * output_head_stride
                tl.store(outputs + offsets + dims[None, :], result.to(outputs.dtype.element_ty), mask=mask)
            else:
                parts = (token * tl.num_programs(1) * GROUP + heads) * NUM_SPLITS + first_span % NUM_SPLITS
                tl.store(partials + parts[:, None] * HEAD_DIM + dims[None, :], result, mask=mask)
                tl.store(log_weights + parts, log_weight, mask=is_row)
        place += num_own
        is_last = index + 1 >= tl.minimum(num_visible, NUM_SPLITS)
        sequence, index = sequence + is_last.to(tl.int32), tl.where(is_last, 0, index + 1)


@triton.jit
def visible_spans(context, WINDOW: tl.constexpr, SPAN_KEYS: tl.constexpr):
    """Returns the first span that a decode sees some of, and the number of such spans."""
    first = context * 0
    if WINDOW > 0:
        first = tl.maximum(context - WINDOW, 0) // SPAN_KEYS
    return first, tl.cdiv(context, SPAN_KEYS) - first


@triton.jit
def spans_of(
    query_starts, context_lengths, num_sequences, first, WINDOW: tl.constexpr, SPAN_KEYS: tl.constexpr,
    IS_PADDED: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Returns the numbers of spans of some decodes, from the `first` on; 0 for sequences that are none."""
    sequences = first + tl.arange(0, SEQUENCES)
    exists = sequences < num_sequences
    if IS_PADDED:
        start = tl.load(query_starts + sequences, mask=exists, other=-1)
        end = tl.load(query_starts + sequences + 1, mask=exists, other=-1)
        exists = (start == sequences) & (end == sequences + 1)
    _, number = visible_spans(tl.load(context_lengths + sequences, mask=exists, other=0), WINDOW, SPAN_KEYS)
    return tl.where(exists, number, 0)


@triton.jit
def own_spans(
    query_starts, context_lengths, num_sequences, WINDOW: tl.constexpr, SPAN_KEYS: tl.constexpr,
    IS_PADDED: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Returns the sequence of a program's first span, the number of spans before that sequence, and the program's part
    `[begin, end)` of all spans, of which it computes the splits that begin there.

    The spans of all sequences are in one order: by sequence, by split, by position.
    """
    total = 0
    for first in range(0, num_sequences, SEQUENCES):
        spans = spans_of(query_starts, context_lengths, num_sequences, first, WINDOW, SPAN_KEYS, IS_PADDED, SEQUENCES)
        total += tl.sum(spans, 0)
    program, num_programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    begin = (program * total // num_programs).to(tl.int32)
    end = ((program + 1) * total // num_programs).to(tl.int32)

    sequence, before, total = 0, 0, 0
    for first in range(0, num_sequences, SEQUENCES):
        spans = spans_of(query_starts, context_lengths, num_sequences, first, WINDOW, SPAN_KEYS, IS_PADDED, SEQUENCES)
        ends = total + tl.cumsum(spans, 0)
        is_before = (ends <= begin) & (spans > 0)
        sequence += tl.sum(is_before.to(tl.int32), 0)
        before += tl.sum(tl.where(is_before, spans, 0), 0)
        total += tl.sum(spans, 0)
    return sequence, before, begin, end


@triton.jit
def tiles_of_split(
    context, first_span, num_spans, TILE_KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr, SPAN_KEYS: tl.constexpr
):  # fmt: skip
    """Returns the number of tiles in a split's spans."""
    last_start = (first_span + (num_spans - 1) * NUM_SPLITS) * SPAN_KEYS
    num_in_last = tl.minimum(SPAN_KEYS // TILE_KEYS, tl.cdiv(context - last_start, TILE_KEYS))
    return (num_spans - 1) * (SPAN_KEYS // TILE_KEYS) + num_in_last


@triton.jit
def normalised(largest, total, result):
    """Returns the softmax-weighted values, and the base-2 logarithm of the sum of their weights."""
    # A NaN counts as seen: it must not be dropped as a row without a key is.
    has_seen = total != 0.0
    divisor = tl.where(has_seen, total, 1.0)
    log_weight = tl.where(has_seen, largest + tl.log2(divisor), float("-inf"))
    return result / divisor[:, None], log_weight


@triton.jit
def before_keys(sinks, is_row, TILE_ROWS: tl.constexpr, HAS_SINKS: tl.constexpr):
    """Returns the largest score of each row in base 2, and the sum of the weights, before it has seen a key. Sinks of
    splits are added by `combine_kernel`."""
    largest = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_SINKS:
        largest = tl.load(sinks, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    return largest, total


@triton.jit
def is_decode(query_starts, sequence):
    """Returns whether a sequence and all before it have one new token each: then it has the token of its own index."""
    return (tl.load(query_starts + sequence) == sequence) & (tl.load(query_starts + sequence + 1) == sequence + 1)


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
def attend_to_all(
    largest, total, result, query_tile, keys, values, key_scales, value_scales,
    table, positions, first_position, context_end,
    block_stride, slot_stride, scale, softcap,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, IS_CAPPED: tl.constexpr,
):  # fmt: skip
    """Adds every tile that a row of the tile sees, from `first_position` on, to the running softmax."""
    # Tiles whose keys are visible to every row need no mask: [whole, diagonal) of [first, last).
    first, last = 0, tl.cdiv(context_end, TILE_KEYS)
    whole, diagonal = 0, (first_position + 1) // TILE_KEYS
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // TILE_KEYS
        whole = tl.cdiv(tl.maximum(context_end - WINDOW, 0), TILE_KEYS)
        diagonal = tl.maximum(whole, diagonal)
        largest, total, result = attend_to(
            largest, total, result, query_tile, keys, values, key_scales, value_scales,
            table, positions, context_end, first * TILE_KEYS,
            tl.minimum(whole, last) - first, block_stride, slot_stride, scale, softcap, HEAD_DIM, PADDED_DIM,
            BLOCK_SIZE, TILE_KEYS, WINDOW, IS_CAPPED, TILE_KEYS, TILE_KEYS, True,
        )  # fmt: skip
    largest, total, result = attend_to(
        largest, total, result, query_tile, keys, values, key_scales, value_scales,
        table, positions, context_end, whole * TILE_KEYS,
        diagonal - whole, block_stride, slot_stride, scale, softcap, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS,
        WINDOW, IS_CAPPED, TILE_KEYS, TILE_KEYS, False,
    )  # fmt: skip
    largest, total, result = attend_to(
        largest, total, result, query_tile, keys, values, key_scales, value_scales,
        table, positions, context_end, diagonal * TILE_KEYS,
        last - diagonal, block_stride, slot_stride, scale, softcap, HEAD_DIM, PADDED_DIM, BLOCK_SIZE, TILE_KEYS,
        WINDOW, IS_CAPPED, TILE_KEYS, TILE_KEYS, True,
    )  # fmt: skip
    return largest, total, result


@triton.jit
def attend_to(
    largest, total, result, query_tile, keys, values, key_scales, value_scales,
    table, positions, context_end, begin, num_tiles,
    block_stride, slot_stride, scale, softcap,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr, IS_CAPPED: tl.constexpr, SPAN_KEYS: tl.constexpr, SPAN_STRIDE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Adds `num_tiles` tiles of keys to the running softmax: the largest score in base 2, the sum of the weights and
    that of the weighted values.

    Spans of `SPAN_KEYS` keys begin every `SPAN_STRIDE` positions from `begin` on. Without `IS_MASKED` every row sees
    every key.
    """
    # float32 is multiplied as float32, not in the shorter format of the matrix units.
    PRECISION: tl.constexpr = "ieee" if query_tile.dtype == tl.float32 else "tf32"
    IS_FP8: tl.constexpr = keys.dtype.element_ty == tl.float8e4nv
    TILES: tl.constexpr = SPAN_KEYS // TILE_KEYS
    dims = tl.arange(0, PADDED_DIM)
    # Scores become powers of two in one fused operation, the same with and without a mask.
    factor = LOG2_E if IS_CAPPED else scale * LOG2_E
    slots = begin + tl.arange(0, TILE_KEYS)
    # Slots past the context may hold anything, even NaN, which a weight of zero does not neutralise.
    exists = (slots < context_end) & (num_tiles > 0)
    blocks = tl.load(table + slots // BLOCK_SIZE, mask=exists, other=0)
    for index in range(num_tiles):
        offsets = blocks.to(tl.int64) * block_stride + (slots % BLOCK_SIZE) * slot_stride
        mask, is_stored = (dims < HEAD_DIM)[None, :], slots >= 0
        if IS_MASKED:
            is_stored = slots < context_end
            mask = mask & is_stored[:, None]
        # The next tile's blocks are loaded a tile ahead, so that its keys and values can be loaded ahead too.
        following = index + 1
        next_slots = begin + (following // TILES) * SPAN_STRIDE + (following % TILES) * TILE_KEYS
        next_slots = next_slots + tl.arange(0, TILE_KEYS)
        exists = (next_slots < context_end) & (following < num_tiles)
        next_blocks = tl.load(table + next_slots // BLOCK_SIZE, mask=exists, other=0)
        key_tile = tl.load(keys + offsets[:, None] + dims[None, :], mask=mask, other=0.0).to(query_tile.dtype)
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
        if IS_FP8:
            scale_offsets = offsets // HEAD_DIM
            scores *= tl.load(key_scales + scale_offsets, mask=is_stored, other=0.0)[None, :]
        if IS_CAPPED:
            scores = softcap * tanh(scores * scale / softcap)
        if IS_MASKED:
            scores = tl.where(sees(positions, slots, WINDOW), scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1) * factor)
        # A row that has not seen a key yet: -inf minus -inf would be NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores * factor - base[:, None])
        decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(weights, 1)
        if IS_FP8:
            weights *= tl.load(value_scales + scale_offsets, mask=is_stored, other=0.0)[None, :]
        value_tile = tl.load(values + offsets[:, None] + dims[None, :], mask=mask, other=0.0).to(query_tile.dtype)
        products = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision=PRECISION)
        result = result * decay[:, None] + products
        largest, slots, blocks = new_largest, next_slots, next_blocks
    return largest, total, result


@triton.jit
def sees(positions, slots, WINDOW: tl.constexpr):
    """Returns whether the token at each position sees the key in each slot."""
    distance = positions[:, None] - slots[None, :]
    is_visible = distance >= 0
    if WINDOW > 0:
        is_visible = is_visible & (distance < WINDOW)
    return is_visible


@triton.jit
def tanh(x):
    """Computes tanh by exp; the result is 1 where exp overflows."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def combine_kernel(
    partials, log_weights, sinks, outputs, query_starts, context_lengths, output_token_stride, output_head_stride,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, SPAN_KEYS: tl.constexpr, IS_PADDED: tl.constexpr,
):  # fmt: skip
    """Computes the weighted mean of the splits of one decode and head. A sink has a weight and no value. Grid: tokens,
    heads."""
    if IS_PADDED:  # noqa: SIM102 - decided at compilation
        if not is_decode(query_starts, tl.program_id(0)):
            return
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits, dims = tl.arange(0, NUM_SPLITS), tl.arange(0, PADDED_DIM)
    first_part = (token * tl.num_programs(1) + head) * NUM_SPLITS
    first_visible, num_visible = visible_spans(tl.load(context_lengths + token), WINDOW, SPAN_KEYS)
    is_used = (splits - first_visible % NUM_SPLITS + NUM_SPLITS) % NUM_SPLITS < num_visible
    logs = tl.load(log_weights + first_part + splits, mask=is_used, other=float("-inf"))
    # Every token sees at least its own key, so one split has a weight. It may be NaN, which the result is then, too.
    largest = tl.max(logs, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(logs - base)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    mask = (logs != float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
    parts = tl.load(partials + (first_part + splits)[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / total
    offset = token * output_token_stride + head * output_head_stride
    tl.store(outputs + offset + dims, result.to(outputs.dtype.element_ty), mask=dims < HEAD_DIM)
