"""Recurrent layers in Triton: the causal convolution of short convolutions, gated delta nets and Mamba 2, the gated
delta rule, which Mamba 2 has without its correction, and the gated norms behind it.

The formulas are those of `executor/recurrent`. A step has for each sequence a row of `ROW_WORDS` int32 words: its slot,
or -1 for padding; the boundary of the slot; how many checkpoints it saves, and then position and checkpoint of each.
Memory of a layer is part of tensors of all layers, so slots and checkpoints have strides.

Each position is computed by the same operations on tiles of the same shapes, whatever else is new, so its numbers are
the same bits in a decode, in a chunk, in a draft and when they are computed again. What a launch writes to a slot, no
other program of it reads.
"""

import triton
import triton.language as tl

# Words of a row: slot, boundary, number of checkpoints, and two for each of these. They are the ends of six messages
# at most (`state_positions`), a branch and the end of what is computed.
MAX_SAVES = tl.constexpr(8)
ROW_WORDS = tl.constexpr(3 + 2 * 8)
# Positions of a tile: the least rows of a matrix instruction.
TILE = tl.constexpr(16)
NORM_EPSILON = tl.constexpr(1e-6)  # of the norms of queries and keys
# Products of float32 numbers by three products of tensor cores, nearly as exact.
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def span_of(state_rows, query_starts, context_lengths, sequence):
    """Returns the row of a sequence, its slot, its first new position and the one behind its last, and what is to be
    added to a new position for its token."""
    row = state_rows + sequence * ROW_WORDS
    first, end = tl.load(query_starts + sequence), tl.load(context_lengths + sequence)
    start = end - (tl.load(query_starts + sequence + 1) - first)
    return row, tl.load(row).to(tl.int64), start, end, first - start


@triton.jit
def boundary_after(start, end, GRID: tl.constexpr):
    """Returns the boundary that a slot has after a step. A row that verifies drafts has at most GRID + 1 positions, the
    first of which is known, so a state up to its end less GRID depends on no draft."""
    return tl.maximum(start, end - GRID) // GRID * GRID


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def conv_inputs(projected, tokens, token_stride, columns, mask, FACTOR: tl.constexpr):
    """Returns inputs of a convolution in their type: columns of `projected`, times those that are `FACTOR` behind."""
    at = projected + tokens.to(tl.int64) * token_stride + columns
    inputs = tl.load(at, mask=mask, other=0.0)
    if FACTOR > 0:
        factors = tl.load(at + FACTOR, mask=mask, other=0.0)
        inputs = (inputs.to(tl.float32) * factors.to(tl.float32)).to(inputs.dtype)
    return inputs


@triton.jit
def conv_tile(
    projected, taps, ring, slot, begin, start, end, origin, token_stride, columns, is_column, CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Returns the sums `[TILE, columns]` of the inputs up to each of the new positions from `start + begin` on, the
    tokens of these `[TILE, 1]`, and which of the sums there are."""
    offsets = begin + tl.arange(0, TILE)
    sums = tl.zeros([TILE, columns.shape[0]], tl.float32)
    for tap in tl.static_range(WIDTH):
        back = offsets - (WIDTH - 1 - tap)
        positions = start + back
        is_row = positions < end
        is_old = is_row & (back < 0) & (positions >= 0) & (slot >= 0)
        is_new = is_row & (back >= 0)
        new = conv_inputs(
            projected, (origin + positions)[:, None], token_stride, columns[None, :],
            is_new[:, None] & is_column[None, :], FACTOR,
        )  # fmt: skip
        places = tl.where(is_old, positions, 0) % PLACES
        old = tl.load(
            ring + places[:, None] * CHANNELS + columns[None, :], mask=is_old[:, None] & is_column[None, :], other=0.0
        )
        weights = tl.load(taps + tap * CHANNELS + columns, mask=is_column, other=0.0)
        sums += tl.where(is_new[:, None], new, old).to(tl.float32) * weights[None, :]
    tokens = (origin + start + offsets).to(tl.int64)[:, None]
    return sums, tokens, (start + offsets < end)[:, None] & is_column[None, :]


@triton.jit
def keep_inputs(
    projected, ring, saved, row, start, end, origin, token_stride, saved_stride, columns, is_column,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, PADDED_PLACES: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """Saves the inputs before checkpoints, and then stores the last new ones in the slot."""
    for index in range(tl.load(row + 2)):
        first = tl.load(row + 3 + 2 * index) - (WIDTH - 1)
        target = saved + tl.load(row + 4 + 2 * index).to(tl.int64) * saved_stride
        for place in tl.static_range(WIDTH - 1):
            position = first + place
            is_new = is_column & (position >= start)
            new = conv_inputs(projected, origin + position, token_stride, columns, is_new, FACTOR)
            is_old = is_column & (position < start) & (position >= 0)
            old = tl.load(ring + tl.maximum(position, 0) % PLACES * CHANNELS + columns, mask=is_old, other=0.0)
            tl.store(target + place * CHANNELS + columns, tl.where(is_new, new, old), mask=is_column)
    # Other threads have read what is overwritten.
    tl.debug_barrier()
    back = tl.arange(0, PADDED_PLACES)
    positions = end - 1 - back
    is_kept = (back < PLACES) & (positions >= start)
    mask = is_kept[:, None] & is_column[None, :]
    new = conv_inputs(projected, (origin + positions)[:, None], token_stride, columns[None, :], mask, FACTOR)
    places = tl.where(is_kept, positions, 0) % PLACES
    tl.store(ring + places[:, None] * CHANNELS + columns[None, :], new, mask=mask)


@triton.jit
def short_conv_kernel(
    projected,  # [tokens, 3 * CHANNELS]: B, C, x
    taps, bias,  # [WIDTH, CHANNELS], the oldest first, and [CHANNELS], float32
    state_rows, query_starts, context_lengths, ring, saved, outputs,  # [tokens, CHANNELS]
    token_stride, slot_stride, saved_stride,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, PADDED_PLACES: tl.constexpr,
    NUM_SPLITS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes C * (convolution of B * x). Grid: sequences, tiles of channels, splits of a sequence's tiles."""
    sequence, split = tl.program_id(0), tl.program_id(2)
    columns = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    is_column = columns < CHANNELS
    row, slot, start, end, origin = span_of(state_rows, query_starts, context_lengths, sequence)
    ring += slot * slot_stride
    biases = tl.load(bias + columns, mask=is_column, other=0.0)
    for begin in range(split * TILE, end - start, NUM_SPLITS * TILE):
        sums, tokens, mask = conv_tile(
            projected, taps, ring, slot, begin, start, end, origin, token_stride, columns, is_column,
            CHANNELS, WIDTH, PLACES, 2 * CHANNELS,
        )  # fmt: skip
        after = tl.load(projected + tokens * token_stride + CHANNELS + columns[None, :], mask=mask, other=0.0)
        mixed = (sums + biases[None, :]).to(after.dtype).to(tl.float32)
        result = tl.where(slot >= 0, after.to(tl.float32) * mixed, 0.0)
        tl.store(outputs + tokens * CHANNELS + columns[None, :], result.to(outputs.dtype.element_ty), mask=mask)
    if (split == 0) & (slot >= 0):
        keep_inputs(
            projected, ring, saved, row, start, end, origin, token_stride, saved_stride, columns, is_column,
            CHANNELS, WIDTH, PLACES, PADDED_PLACES, 2 * CHANNELS,
        )  # fmt: skip


@triton.jit
def delta_inputs_kernel(
    projected,  # [tokens, columns]: queries, keys, values, z, b and a
    taps,  # [WIDTH, CHANNELS] float32, the oldest first
    rates, gate_bias,  # [NUM_HEADS] float32
    state_rows, query_starts, context_lengths, ring, saved,
    mixed,  # [tokens, CHANNELS] float32: queries and keys with their norms, and values
    gates,  # [tokens, 2, NUM_HEADS] float32: g and beta
    token_stride, slot_stride, saved_stride,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, PADDED_PLACES: tl.constexpr,
    NUM_SPLITS: tl.constexpr, TILE_COLUMNS: tl.constexpr, PADDED_HEADS: tl.constexpr, QUERY_SCALE: tl.constexpr,
):  # fmt: skip
    """Computes what the delta rule reads. Grid: sequences, heads of queries, keys and values and one more for the
    gates, splits of a sequence's tiles."""
    sequence, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, slot, start, end, origin = span_of(state_rows, query_starts, context_lengths, sequence)
    if slot < 0:
        return
    if block == 2 * NUM_KEY_HEADS + NUM_HEADS:
        heads = tl.arange(0, PADDED_HEADS)
        is_head = heads < NUM_HEADS
        rate = tl.load(rates + heads, mask=is_head, other=0.0)
        bias = tl.load(gate_bias + heads, mask=is_head, other=0.0)
        for begin in range(split * TILE, end - start, NUM_SPLITS * TILE):
            positions = start + begin + tl.arange(0, TILE)
            tokens = (origin + positions).to(tl.int64)[:, None]
            mask = (positions < end)[:, None] & is_head[None, :]
            source = projected + tokens * token_stride + CHANNELS + NUM_HEADS * VALUE_DIM + heads[None, :]
            b = tl.load(source, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(source + NUM_HEADS, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
            target = gates + tokens * (2 * NUM_HEADS) + heads[None, :]
            tl.store(target, rate[None, :] * softplus(x), mask=mask)
            tl.store(target + NUM_HEADS, sigmoid(b), mask=mask)
    else:
        is_key = block < 2 * NUM_KEY_HEADS
        dims = tl.arange(0, TILE_COLUMNS)
        of_values = 2 * NUM_KEY_HEADS * KEY_DIM + (block - 2 * NUM_KEY_HEADS) * VALUE_DIM
        columns = tl.where(is_key, block * KEY_DIM, of_values) + dims
        is_column = dims < tl.where(is_key, KEY_DIM, VALUE_DIM)
        ring += slot * slot_stride
        factor = tl.where(block < NUM_KEY_HEADS, QUERY_SCALE, 1.0)
        for begin in range(split * TILE, end - start, NUM_SPLITS * TILE):
            sums, tokens, mask = conv_tile(
                projected, taps, ring, slot, begin, start, end, origin, token_stride, columns, is_column,
                CHANNELS, WIDTH, PLACES, 0,
            )  # fmt: skip
            # Rounded as transformers does, which has these numbers in the type of the activations.
            numbers = (sums * sigmoid(sums)).to(projected.dtype.element_ty).to(tl.float32)
            squares = tl.sum(numbers * numbers, 1)
            scales = tl.where(is_key, factor / tl.sqrt(squares + NORM_EPSILON), 1.0)
            tl.store(mixed + tokens * CHANNELS + columns[None, :], numbers * scales[:, None], mask=mask)
        if split == 0:
            keep_inputs(
                projected, ring, saved, row, start, end, origin, token_stride, saved_stride, columns, is_column,
                CHANNELS, WIDTH, PLACES, PADDED_PLACES, 0,
            )  # fmt: skip


@triton.jit
def mamba2_inputs_kernel(
    projected,  # [tokens, columns]: z, x, B, C and dt
    taps, bias,  # [WIDTH, CHANNELS], the oldest first, and [CHANNELS], float32
    rates, gate_bias, limits,  # [NUM_HEADS] float32, and the least and the largest dt
    state_rows, query_starts, context_lengths, ring, saved,
    mixed,  # [tokens, CHANNELS] float32: x, B and C
    gates,  # [tokens, 2, NUM_HEADS] float32: g and dt
    token_stride, slot_stride, saved_stride,
    NUM_HEADS: tl.constexpr, DEPTH: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr,
    PADDED_PLACES: tl.constexpr, NUM_SPLITS: tl.constexpr, TILE_COLUMNS: tl.constexpr, PADDED_HEADS: tl.constexpr,
):  # fmt: skip
    """Computes what the rule of Mamba 2 reads. Grid: sequences, tiles of channels and one more for the gates, splits of
    a sequence's tiles."""
    sequence, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, slot, start, end, origin = span_of(state_rows, query_starts, context_lengths, sequence)
    if slot < 0:
        return
    inputs = projected + DEPTH
    if block * TILE_COLUMNS >= CHANNELS:
        heads = tl.arange(0, PADDED_HEADS)
        is_head = heads < NUM_HEADS
        rate = tl.load(rates + heads, mask=is_head, other=0.0)
        of_gates = tl.load(gate_bias + heads, mask=is_head, other=0.0)
        least, most = tl.load(limits), tl.load(limits + 1)
        for begin in range(split * TILE, end - start, NUM_SPLITS * TILE):
            positions = start + begin + tl.arange(0, TILE)
            tokens = (origin + positions).to(tl.int64)[:, None]
            mask = (positions < end)[:, None] & is_head[None, :]
            source = inputs + tokens * token_stride + CHANNELS + heads[None, :]
            x = tl.load(source, mask=mask, other=0.0).to(tl.float32) + of_gates[None, :]
            steps = tl.minimum(tl.maximum(softplus(x), least), most)
            target = gates + tokens * (2 * NUM_HEADS) + heads[None, :]
            tl.store(target, rate[None, :] * steps, mask=mask)
            tl.store(target + NUM_HEADS, steps, mask=mask)
    else:
        columns = block * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        is_column = columns < CHANNELS
        ring += slot * slot_stride
        biases = tl.load(bias + columns, mask=is_column, other=0.0)
        for begin in range(split * TILE, end - start, NUM_SPLITS * TILE):
            sums, tokens, mask = conv_tile(
                inputs, taps, ring, slot, begin, start, end, origin, token_stride, columns, is_column,
                CHANNELS, WIDTH, PLACES, 0,
            )  # fmt: skip
            sums += biases[None, :]
            # Rounded as transformers does, which has these numbers in the type of the activations.
            numbers = (sums * sigmoid(sums)).to(projected.dtype.element_ty).to(tl.float32)
            tl.store(mixed + tokens * CHANNELS + columns[None, :], numbers, mask=mask)
        if split == 0:
            keep_inputs(
                inputs, ring, saved, row, start, end, origin, token_stride, saved_stride, columns, is_column,
                CHANNELS, WIDTH, PLACES, PADDED_PLACES, 0,
            )  # fmt: skip


@triton.jit
def softplus(x):
    """Returns log(1 + e^x) without losing a small e^x; x above 20."""
    grown = tl.exp(tl.minimum(x, 20.0))
    one_more = 1.0 + grown
    lost = one_more - 1.0
    exact = tl.where(lost == 0.0, grown, tl.log(one_more) * (grown / tl.where(lost == 0.0, 1.0, lost)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def load_keys(
    new_keys, old_keys, positions, start, end, origin, dims, is_dim, CHANNELS: tl.constexpr, KEY_DIM: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Returns the keys of some positions `[positions, dims]`, 0 from `end` on."""
    is_new = (positions >= start) & (positions < end)
    new = tl.load(
        new_keys + (origin + positions).to(tl.int64)[:, None] * CHANNELS + dims[None, :],
        mask=is_new[:, None] & is_dim[None, :],
        other=0.0,
    )
    old = tl.load(
        old_keys + (positions % PLACES)[:, None] * KEY_DIM + dims[None, :],
        mask=(positions < start)[:, None] & is_dim[None, :],
        other=0.0,
    )
    return tl.where(is_new[:, None], new, old)


@triton.jit
def at_places(numbers, places, SIZE: tl.constexpr):
    """Returns `numbers[places]`."""
    return tl.sum(tl.where(tl.arange(0, SIZE)[None, :] == places[:, None], numbers[None, :], 0.0), 1)


@triton.jit
def load_rows(rows, places, values, is_row, is_value, SIZE: tl.constexpr):
    """Returns some rows `[rows, values]` of a matrix of rows of `SIZE` numbers."""
    return tl.load(rows + places[:, None] * SIZE + values[None, :], mask=is_row[:, None] & is_value[None, :], other=0.0)


@triton.jit
def advance(
    source, target, chunk, sums, new_keys, own_keys, own_updates, values, is_value, start, end, origin,
    CHANNELS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SLICE: tl.constexpr, GRID: tl.constexpr,
    PLACES: tl.constexpr,
):  # fmt: skip
    """Writes the state at the end of a chunk, exp(G) * S + sum over j of exp(G - G[j]) * k[j] u[j]ᵀ with G at the end
    and `source` at the begin. Both may be the same memory."""
    rows = tl.arange(0, TILE)
    last = tl.sum(tl.where(tl.arange(0, GRID) == GRID - 1, sums, 0.0), 0)
    for first in range(0, KEY_DIM, SLICE):
        dims = first + tl.arange(0, SLICE)
        is_dim = dims < KEY_DIM
        # At position 0 the state is zero, whatever the slot has.
        state = load_rows(source, dims, values, is_dim & (chunk > 0), is_value, VALUE_DIM) * tl.exp(last)
        for before in range(chunk, chunk + GRID, TILE):
            others = before + rows
            keys = load_keys(new_keys, own_keys, others, start, end, origin, dims, is_dim, CHANNELS, KEY_DIM, PLACES)
            updates = load_rows(own_updates, others % PLACES, values, others < end, is_value, VALUE_DIM)
            weighted = keys * tl.exp(last - at_places(sums, others - chunk, GRID))[:, None]
            state = tl.dot(tl.trans(weighted), updates, state, input_precision=PRECISION)
        # Other threads have read what is overwritten.
        tl.debug_barrier()
        tl.store(target + dims[:, None] * VALUE_DIM + values[None, :], state, mask=is_dim[:, None] & is_value[None, :])


@triton.jit
def tile_and_state(
    new_queries, new_keys, own_keys, source, positions, tokens, is_new, has_state, values, is_value, start, end, origin,
    CHANNELS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SLICE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Returns the products of the keys and of the queries of a tile with a state, and with the tile's keys."""
    of_keys = tl.zeros([TILE, values.shape[0]], tl.float32)
    of_queries = tl.zeros([TILE, values.shape[0]], tl.float32)
    likeness = tl.zeros([TILE, TILE], tl.float32)
    attended = tl.zeros([TILE, TILE], tl.float32)
    for first in range(0, KEY_DIM, SLICE):
        dims = first + tl.arange(0, SLICE)
        is_dim = dims < KEY_DIM
        keys = load_keys(new_keys, own_keys, positions, start, end, origin, dims, is_dim, CHANNELS, KEY_DIM, PLACES)
        queries = load_rows(new_queries, tokens, dims, is_new, is_dim, CHANNELS)
        state = load_rows(source, dims, values, is_dim & has_state, is_value, VALUE_DIM)
        of_keys = tl.dot(keys, state, of_keys, input_precision=PRECISION)
        of_queries = tl.dot(queries, state, of_queries, input_precision=PRECISION)
        likeness = tl.dot(keys, tl.trans(keys), likeness, input_precision=PRECISION)
        attended = tl.dot(queries, tl.trans(keys), attended, input_precision=PRECISION)
    return of_keys, of_queries, likeness, attended


@triton.jit
def tile_and_tile(
    new_queries, new_keys, own_keys, positions, tokens, is_new, others, start, end, origin,
    CHANNELS: tl.constexpr, KEY_DIM: tl.constexpr, SLICE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Returns the products of the keys and of the queries of a tile with the keys of another one."""
    of_keys = tl.zeros([TILE, TILE], tl.float32)
    of_queries = tl.zeros([TILE, TILE], tl.float32)
    for first in range(0, KEY_DIM, SLICE):
        dims = first + tl.arange(0, SLICE)
        is_dim = dims < KEY_DIM
        keys = load_keys(new_keys, own_keys, positions, start, end, origin, dims, is_dim, CHANNELS, KEY_DIM, PLACES)
        queries = load_rows(new_queries, tokens, dims, is_new, is_dim, CHANNELS)
        other = load_keys(new_keys, own_keys, others, start, end, origin, dims, is_dim, CHANNELS, KEY_DIM, PLACES)
        of_keys = tl.dot(keys, tl.trans(other), of_keys, input_precision=PRECISION)
        of_queries = tl.dot(queries, tl.trans(other), of_queries, input_precision=PRECISION)
    return of_keys, of_queries


@triton.jit
def compute_tile(
    new_queries, new_keys, new_values, own_gates, own_keys, own_updates, own_outputs, source, sums, chunk, tile, values,
    is_value, start, end, origin, NUM_HEADS: tl.constexpr, CHANNELS: tl.constexpr, KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, SLICE: tl.constexpr, GRID: tl.constexpr, PLACES: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Computes outputs and updates of the new positions of a tile, and stores them. Without a correction an update is
    the value times the second gate."""
    rows = tl.arange(0, TILE)
    positions = tile + rows
    is_new = (positions >= start) & (positions < end)
    tokens = (origin + positions).to(tl.int64)
    tile_sums = at_places(sums, positions - chunk, GRID)
    known, result, likeness, attended = tile_and_state(
        new_queries, new_keys, own_keys, source, positions, tokens, is_new, chunk > 0, values, is_value, start, end,
        origin, CHANNELS, KEY_DIM, VALUE_DIM, SLICE, PLACES,
    )  # fmt: skip
    grown = tl.exp(tile_sums)[:, None]
    known, result = known * grown, result * grown
    for before in range(chunk, tile, TILE):
        others = before + rows
        of_keys, of_queries = tile_and_tile(
            new_queries, new_keys, own_keys, positions, tokens, is_new, others, start, end, origin,
            CHANNELS, KEY_DIM, SLICE, PLACES,
        )  # fmt: skip
        updates = load_rows(own_updates, others % PLACES, values, others < end, is_value, VALUE_DIM)
        factors = tl.exp(tile_sums[:, None] - at_places(sums, others - chunk, GRID)[None, :])
        known = tl.dot(of_keys * factors, updates, known, input_precision=PRECISION)
        result = tl.dot(of_queries * factors, updates, result, input_precision=PRECISION)
    distances = tl.where(rows[:, None] >= rows[None, :], tile_sums[:, None] - tile_sums[None, :], float("-inf"))
    weights = tl.exp(distances)
    likeness = tl.where(rows[:, None] > rows[None, :], likeness * weights, 0.0)
    new = load_rows(new_values, tokens, values, is_new, is_value, CHANNELS)
    betas = tl.load(own_gates + NUM_HEADS + tokens * (2 * NUM_HEADS), mask=is_new, other=0.0)
    solved = load_rows(own_updates, positions % PLACES, values, positions < start, is_value, VALUE_DIM)
    if CORRECTS:
        # Each update depends on those before it in the tile.
        for index in range(tl.maximum(start - tile, 0), tl.minimum(end - tile, TILE)):
            of_row = tl.sum(tl.where(rows[:, None] == index, likeness, 0.0), 0)
            seen = tl.sum(of_row[:, None] * solved, 0)
            update = betas[:, None] * (new - known - seen[None, :])
            solved = tl.where(rows[:, None] == index, update, solved)
    else:
        solved = tl.where(is_new[:, None], betas[:, None] * new, solved)
    result = tl.dot(attended * weights, solved, result, input_precision=PRECISION)
    mask = is_new[:, None] & is_value[None, :]
    tl.store(own_outputs + tokens[:, None] * (NUM_HEADS * VALUE_DIM) + values[None, :], result, mask=mask)
    tl.store(own_updates + (positions % PLACES)[:, None] * VALUE_DIM + values[None, :], solved, mask=mask)


@triton.jit
def sums_of_gates(
    own_gates, own_decays, chunk, start, end, origin, NUM_HEADS: tl.constexpr, GRID: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """Returns G of each position of a chunk."""
    positions = chunk + tl.arange(0, GRID)
    is_new = (positions >= start) & (positions < end)
    new = tl.load(own_gates + (origin + positions).to(tl.int64) * (2 * NUM_HEADS), mask=is_new, other=0.0)
    old = tl.load(own_decays + positions % PLACES, mask=positions < start, other=0.0)
    return tl.cumsum(tl.where(is_new, new, old), 0)


@triton.jit
def go_on(
    row, source, target, saved, saved_stride, chunk, sums, new_keys, own_keys, own_updates, values, is_value,
    start, end, origin, CHANNELS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, SLICE: tl.constexpr,
    GRID: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Saves the state at the end of a chunk that is complete, if it is to be saved, and writes it to `target` if there
    are positions behind it."""
    behind = chunk + GRID
    if behind <= end:
        for index in range(tl.load(row + 2)):
            if tl.load(row + 3 + 2 * index) == behind:
                checkpoint = saved + tl.load(row + 4 + 2 * index).to(tl.int64) * saved_stride
                advance(
                    source, checkpoint, chunk, sums, new_keys, own_keys, own_updates, values, is_value, start, end,
                    origin, CHANNELS, KEY_DIM, VALUE_DIM, SLICE, GRID, PLACES,
                )  # fmt: skip
    if behind < end:
        advance(
            source, target, chunk, sums, new_keys, own_keys, own_updates, values, is_value, start, end, origin,
            CHANNELS, KEY_DIM, VALUE_DIM, SLICE, GRID, PLACES,
        )  # fmt: skip
        tl.debug_barrier()


@triton.jit
def delta_rule_kernel(
    mixed, gates,  # as `delta_inputs_kernel` or `mamba2_inputs_kernel` writes them
    state_rows, query_starts, context_lengths,
    states, saved,  # [slots or checkpoints, NUM_HEADS, KEY_DIM, VALUE_DIM] float32
    beyond,  # [sequences, NUM_HEADS, KEY_DIM, VALUE_DIM] float32; unused if each sequence has one token
    keys,  # [slots, NUM_KEY_HEADS, PLACES, KEY_DIM] float32
    updates,  # [slots, NUM_HEADS, PLACES, VALUE_DIM] float32
    decays,  # [slots, NUM_HEADS, PLACES] float32: g
    outputs,  # [tokens, NUM_HEADS, VALUE_DIM] float32
    state_stride, saved_stride, key_stride, update_stride, decay_stride,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, SLICE: tl.constexpr, TILE_VALUES: tl.constexpr, GRID: tl.constexpr,
    PLACES: tl.constexpr, CORRECTS: tl.constexpr,
):  # fmt: skip
    """Computes outputs and updates of the new positions, and advances the state of the slot to the boundary that it
    has after the step. The state beyond that is in `beyond`. Grid: sequences, heads, tiles of values.

    States and keys are read in slices of `SLICE` rows of a state, since whole ones would not fit in registers."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    row, slot, start, end, origin = span_of(state_rows, query_starts, context_lengths, sequence)
    if slot < 0:
        return
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    values = tl.program_id(2) * TILE_VALUES + tl.arange(0, TILE_VALUES)
    is_value = values < VALUE_DIM
    boundary, kept = tl.where(start > 0, tl.load(row + 1), 0), boundary_after(start, end, GRID)
    of_head = head * (KEY_DIM * VALUE_DIM)
    own_state, saved = states + slot * state_stride + of_head, saved + of_head
    own_beyond = beyond + sequence.to(tl.int64) * (NUM_HEADS * KEY_DIM * VALUE_DIM) + of_head
    new_queries, new_values = mixed + key_head * KEY_DIM, mixed + head * VALUE_DIM
    new_keys = new_queries + NUM_KEY_HEADS * KEY_DIM
    if CORRECTS:
        new_values += 2 * NUM_KEY_HEADS * KEY_DIM
    else:
        new_keys = new_queries + NUM_HEADS * VALUE_DIM
        new_queries = new_keys + NUM_KEY_HEADS * KEY_DIM
    own_keys = keys + slot * key_stride + key_head * (PLACES * KEY_DIM)
    own_updates = updates + slot * update_stride + head * (PLACES * VALUE_DIM)
    own_decays = decays + slot * decay_stride + head * PLACES
    own_gates, own_outputs = gates + head, outputs + head * VALUE_DIM
    for chunk in range(boundary, end, GRID):
        source = own_state
        if chunk > kept:
            source = own_beyond
        sums = sums_of_gates(own_gates, own_decays, chunk, start, end, origin, NUM_HEADS, GRID, PLACES)
        for tile in range(tl.maximum(chunk, start // TILE * TILE), tl.minimum(chunk + GRID, end), TILE):
            compute_tile(
                new_queries, new_keys, new_values, own_gates, own_keys, own_updates, own_outputs, source, sums, chunk,
                tile, values, is_value, start, end, origin, NUM_HEADS, CHANNELS, KEY_DIM, VALUE_DIM, SLICE, GRID,
                PLACES, CORRECTS,
            )  # fmt: skip
            # Other threads read the updates for the next tiles, and have read what is overwritten.
            tl.debug_barrier()
        target = own_state
        if chunk + GRID > kept:
            target = own_beyond
        go_on(
            row, source, target, saved, saved_stride, chunk, sums, new_keys, own_keys, own_updates, values, is_value,
            start, end, origin, CHANNELS, KEY_DIM, VALUE_DIM, SLICE, GRID, PLACES,
        )  # fmt: skip


@triton.jit
def gated_norm_kernel(
    unnormed,  # [tokens, NUM_HEADS, VALUE_DIM] float32
    projected, mixed, gates,  # as in `delta_inputs_kernel`
    norm,  # [VALUE_DIM] float32
    state_rows, query_starts, context_lengths, keys, decays,  # as in `delta_rule_kernel`
    outputs,  # [tokens, NUM_HEADS * VALUE_DIM]
    token_stride, key_stride, decay_stride, epsilon,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, PADDED_KEY: tl.constexpr, PADDED_VALUES: tl.constexpr, GRID: tl.constexpr,
    PLACES: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Computes RMSNorm(unnormed) * SiLU(z), and stores keys and g behind the boundary in the slot. Grid: sequences,
    heads, splits of a sequence's tiles."""
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _row, slot, start, end, origin = span_of(state_rows, query_starts, context_lengths, sequence)
    values = tl.arange(0, PADDED_VALUES)
    is_value = values < VALUE_DIM
    weights = tl.load(norm + values, mask=is_value, other=0.0)
    for begin in range(split * TILE, end - start, NUM_SPLITS * TILE):
        positions = start + begin + tl.arange(0, TILE)
        tokens = (origin + positions).to(tl.int64)[:, None]
        mask = (positions < end)[:, None] & is_value[None, :]
        columns = head * VALUE_DIM + values[None, :]
        # Of a padding sequence nothing was computed; it yields zeros.
        of_slot = mask & (slot >= 0)
        numbers = tl.load(unnormed + tokens * (NUM_HEADS * VALUE_DIM) + columns, mask=of_slot, other=0.0)
        z = tl.load(projected + tokens * token_stride + CHANNELS + columns, mask=of_slot, other=0.0).to(tl.float32)
        scales = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 1) / VALUE_DIM + epsilon)
        result = numbers * scales[:, None] * weights[None, :] * (z * sigmoid(z))
        target = outputs + tokens * (NUM_HEADS * VALUE_DIM) + columns
        tl.store(target, result.to(outputs.dtype.element_ty), mask=mask)
    if (split == 0) & (slot >= 0):
        group: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
        key_head, dims = head // group, tl.arange(0, PADDED_KEY)
        own_keys = keys + slot * key_stride + key_head * (PLACES * KEY_DIM)
        own_decays = decays + slot * decay_stride + head * PLACES
        is_dim = (dims < KEY_DIM) & (head % group == 0)
        new_keys = mixed + (NUM_KEY_HEADS + key_head) * KEY_DIM
        for begin in range(tl.maximum(start, boundary_after(start, end, GRID)), end, TILE):
            positions = begin + tl.arange(0, TILE)
            is_new, tokens = positions < end, (origin + positions).to(tl.int64)
            mask = is_new[:, None] & is_dim[None, :]
            new = tl.load(new_keys + tokens[:, None] * CHANNELS + dims[None, :], mask=mask, other=0.0)
            tl.store(own_keys + (positions % PLACES)[:, None] * KEY_DIM + dims[None, :], new, mask=mask)
            new_decays = tl.load(gates + tokens * (2 * NUM_HEADS) + head, mask=is_new, other=0.0)
            tl.store(own_decays + positions % PLACES, new_decays, mask=is_new)


@triton.jit
def mamba2_norm_kernel(
    unnormed,  # [tokens, DEPTH] float32
    projected, mixed, gates,  # as in `mamba2_inputs_kernel`
    skips, norm,  # [NUM_HEADS] and [DEPTH] float32
    state_rows, query_starts, context_lengths, keys, decays,  # as in `delta_rule_kernel`
    outputs,  # [tokens, DEPTH]
    token_stride, key_stride, decay_stride, epsilon,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    CHANNELS: tl.constexpr, PADDED_KEY: tl.constexpr, PADDED_GROUP: tl.constexpr, PADDED_HEADS: tl.constexpr,
    GRID: tl.constexpr, PLACES: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Computes RMSNorm((unnormed + D * x) * SiLU(z)) over the heads of a head of keys, and stores keys and g behind the
    boundary in the slot. Grid: sequences, heads of keys, splits of a sequence's positions."""
    DEPTH: tl.constexpr = NUM_HEADS * VALUE_DIM
    HEADS: tl.constexpr = NUM_HEADS // NUM_KEY_HEADS
    GROUP: tl.constexpr = HEADS * VALUE_DIM
    sequence, key_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _row, slot, start, end, origin = span_of(state_rows, query_starts, context_lengths, sequence)
    values = tl.arange(0, PADDED_GROUP)
    is_value, columns = values < GROUP, key_head * GROUP + values
    weights = tl.load(norm + columns, mask=is_value, other=0.0)
    skip = tl.load(skips + columns // VALUE_DIM, mask=is_value, other=0.0)
    # Of a padding sequence nothing was computed; it yields zeros.
    of_slot = is_value & (slot >= 0)
    for position in range(start + split, end, NUM_SPLITS):
        token = (origin + position).to(tl.int64)
        numbers = tl.load(unnormed + token * DEPTH + columns, mask=of_slot, other=0.0)
        x = tl.load(mixed + token * CHANNELS + columns, mask=of_slot, other=0.0)
        z = tl.load(projected + token * token_stride + columns, mask=of_slot, other=0.0).to(tl.float32)
        gated = (numbers + skip * x) * (z * sigmoid(z))
        scale = 1.0 / tl.sqrt(tl.sum(gated * gated, 0) / GROUP + epsilon)
        result = gated * scale * weights
        tl.store(outputs + token * DEPTH + columns, result.to(outputs.dtype.element_ty), mask=is_value)
    if (split == 0) & (slot >= 0):
        dims, heads = tl.arange(0, PADDED_KEY), tl.arange(0, PADDED_HEADS)
        is_dim, is_head = dims < KEY_DIM, heads < HEADS
        own_keys = keys + slot * key_stride + key_head * (PLACES * KEY_DIM)
        own_decays = decays + slot * decay_stride + (key_head * HEADS + heads)[None, :] * PLACES
        new_keys = mixed + DEPTH + key_head * KEY_DIM
        for begin in range(tl.maximum(start, boundary_after(start, end, GRID)), end, TILE):
            positions = begin + tl.arange(0, TILE)
            is_new, tokens = positions < end, (origin + positions).to(tl.int64)[:, None]
            places = (positions % PLACES)[:, None]
            mask = is_new[:, None] & is_dim[None, :]
            new = tl.load(new_keys + tokens * CHANNELS + dims[None, :], mask=mask, other=0.0)
            tl.store(own_keys + places * KEY_DIM + dims[None, :], new, mask=mask)
            mask = is_new[:, None] & is_head[None, :]
            of_heads = gates + tokens * (2 * NUM_HEADS) + (key_head * HEADS + heads)[None, :]
            tl.store(own_decays + places, tl.load(of_heads, mask=mask, other=0.0), mask=mask)
