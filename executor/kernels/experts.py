"""Products of a layer with experts, in Triton, for pairs of rows and experts in tiles (`routing`), and their sums.

The sizes of tiles, except their rows, depend on the model alone, and so does the order of every sum. A pair's result
does not depend on its place in a tile or on the other pairs.
"""

import triton
import triton.language as tl

from inflight.executor.kernels.coded import decoded_tile
from inflight.executor.kernels.norms import activated, clamped, squared_relu


@triton.jit
def grouped_kernel(
    inputs,  # [rows, size]
    matrices,  # [experts, outputs, size]: num_outputs, or with HAS_GATE as many gates and then what they gate
    scales, beside, factors,  # with KIND, `matrices` are the codes [experts * outputs, …] of `decoded_tile`
    orders,  # [experts, size] int32: column j of the matrix multiplies input `orders[j]`; unused without HAS_ORDER
    biases,  # [experts, outputs]; unused without HAS_BIAS
    pairs, tile_experts,  # see `routing`; with BY_PAIR `tile_experts` are the experts of pairs, and `pairs` is unused
    pair_weights,  # [pairs] float32; unused with an activation
    outputs,  # [pairs, num_outputs]
    input_stride, size, num_outputs, num_rows, num_scales,
    KIND: tl.constexpr, SCALE_KIND: tl.constexpr, BESIDE: tl.constexpr, HAS_FACTORS: tl.constexpr,
    GROUP: tl.constexpr, ROW_BLOCK: tl.constexpr, HAS_ORDER: tl.constexpr, HAS_BIAS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr, BY_PAIR: tl.constexpr, HAS_GATE: tl.constexpr, HAS_GELU: tl.constexpr,
    IS_SQUARED: tl.constexpr, GATE_FACTOR: tl.constexpr, GATE_LIMIT: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_OUTPUTS: tl.constexpr, TILE_SIZE: tl.constexpr,
):  # fmt: skip
    """Multiplies each pair's row by its expert's matrix, of `num_rows` in all, and adds its bias; the outputs are
    activation(gate) * up, with a GATE_LIMIT clamped, with IS_SQUARED the squares of ReLU, or the products times the
    pair's weight. Grid: tiles, tiles of outputs. With BY_PAIR a tile has one pair. Pair p reads row
    `p // PAIRS_PER_ROW`. Without codes KIND is None."""
    tile, lanes = tl.program_id(0), tl.arange(0, TILE_ROWS)
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    pair = tl.where(lanes == 0, tile, -1) if BY_PAIR else tl.load(pairs + tile * TILE_ROWS + lanes)
    has_pair = pair >= 0
    source = inputs + (pair // PAIRS_PER_ROW)[:, None].to(tl.int64) * input_stride
    first = tl.program_id(1) * TILE_OUTPUTS
    TILE_COLUMNS: tl.constexpr = 2 * TILE_OUTPUTS if HAS_GATE else TILE_OUTPUTS
    matrix_rows = rows_of_tile(expert, first, num_outputs, num_rows, TILE_COLUMNS, HAS_GATE)
    is_column = matrix_rows < num_rows
    sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in range(0, size, TILE_SIZE):
        depth = start + tl.arange(0, TILE_SIZE)
        is_depth = depth < size
        places = tl.load(orders + expert * size + depth, mask=is_depth, other=0) if HAS_ORDER else depth
        values = tl.load(source + places[None, :], mask=has_pair[:, None] & is_depth[None, :], other=0.0)
        if KIND is None:
            matrix = matrices + matrix_rows[None, :] * size
            weights = tl.load(matrix + depth[:, None], mask=is_depth[:, None] & is_column[None, :], other=0.0)
        else:
            decoded = decoded_tile(
                matrices, scales, beside, factors, matrix_rows, start, num_rows, size, num_scales,
                KIND, SCALE_KIND, BESIDE, HAS_FACTORS, GROUP, ROW_BLOCK, TILE_COLUMNS, TILE_SIZE,
            )  # fmt: skip
            weights = tl.trans(decoded.to(values.dtype))
        sums = tl.dot(values, weights, sums, input_precision="ieee")
    if HAS_BIAS:
        sums += tl.load(biases + matrix_rows, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_GATE or IS_SQUARED:
        # Rounded as a product of its own would be.
        sums = sums.to(outputs.dtype.element_ty).to(tl.float32)
        results = squared_relu(sums) if IS_SQUARED else gated_sums(sums, HAS_GELU, GATE_FACTOR, GATE_LIMIT)
    else:
        results = sums * tl.load(pair_weights + pair, mask=has_pair, other=0.0)[:, None]
    output_columns = first + tl.arange(0, TILE_OUTPUTS)
    target = outputs + pair[:, None].to(tl.int64) * num_outputs + output_columns[None, :]
    mask = has_pair[:, None] & (output_columns < num_outputs)[None, :]
    tl.store(target, results.to(outputs.dtype.element_ty), mask=mask)


@triton.jit
def gated_sums(sums, HAS_GELU: tl.constexpr, FACTOR: tl.constexpr, LIMIT: tl.constexpr):
    """Returns activation(gate) * up of rows in which gates and what they gate alternate."""
    gate, up = tl.split(tl.reshape(sums, [sums.shape[0], sums.shape[1] // 2, 2]))
    return activated(gate, up, HAS_GELU) if LIMIT is None else clamped(gate, up, FACTOR, LIMIT)


@triton.jit
def rows_of_tile(expert, first, num_outputs, num_rows, TILE_COLUMNS: tl.constexpr, HAS_GATE: tl.constexpr):
    """Returns the rows of all experts' matrices that a tile of outputs multiplies, `num_rows` where there is none.
    Gates and what they gate alternate."""
    columns = tl.arange(0, TILE_COLUMNS)
    if HAS_GATE:
        is_column = first + columns // 2 < num_outputs
        rows = expert * 2 * num_outputs + first + columns // 2 + (columns % 2) * num_outputs
    else:
        is_column = first + columns < num_outputs
        rows = expert * num_outputs + first + columns
    return tl.where(is_column, rows, num_rows)


@triton.jit
def add_experts_kernel(
    products,  # [rows * NUM_CHOSEN, size]
    shared,  # [rows, size], what a shared expert yields; unused without HAS_SHARED
    scores,  # [rows, num_scores] float32, with HAS_GATE that of the shared expert last
    outputs,  # [rows, size]
    size, num_scores,
    NUM_CHOSEN: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds what the experts of each row yield, in the order in which they were chosen, and the shared expert, times the
    sigmoid of its score. Grid: rows, tiles of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < size
    total = tl.zeros([TILE], tl.float32)
    for k in range(NUM_CHOSEN):
        total += tl.load(products + (row * NUM_CHOSEN + k) * size + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_SHARED:
        addend = tl.load(shared + row * size + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            addend = addend / (1.0 + tl.exp(-tl.load(scores + row * num_scores + num_scores - 1)))
        total += addend
    tl.store(outputs + row * size + columns, total.to(outputs.dtype.element_ty), mask=mask)
