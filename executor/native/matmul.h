// Matrix products with weights that are laid out once.
//
// A weight `[columns, depth]` (as in nn.Linear) is kept in blocks of 32 columns, and a block in steps along the depth, so that a
// block is one stream of memory. A step is 64 bytes of depth: 16 units of PAIR numbers.
//
//     [block, step, 2 panels, 16 units, 16 columns, PAIR]     2 KB a step
//
// That is at once what AMX wants of its right-hand tiles (a panel of a step is one) and what a vector unit that broadcasts the
// left-hand side wants. Activations are plain rows, 64 bytes of depth after the other. Depth and columns are filled up with
// zeros. A product is made in tiles of up to 32 rows and 32 columns, in float32, and handed to whoever asked while in cache.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace inflight {

constexpr int BLOCK_COLUMNS = 32;
constexpr int TILE_ROWS = 32;
constexpr int UNITS = 16;             // units of a step
constexpr int64_t STEP_BYTES = 2048;  // of a block

// Rows of activations of one element type. `stride` counts numbers and is a whole number of steps; there is room for whole
// tiles of rows. `scales[row]` belongs to int8 alone.
template <class Element>
struct Rows {
    typename Element::Number* numbers = nullptr;
    int64_t stride = 0;
    float* scales = nullptr;

    typename Element::Number* row(int64_t index) const { return numbers + index * stride; }
};

template <class Element>
constexpr int64_t padded_depth(int64_t depth) {
    return round_up(depth, UNITS * Element::PAIR);
}

template <class Element>
struct Matrix {
    const char* blocks = nullptr;
    int64_t num_blocks = 0, num_steps = 0;
    const float* scales = nullptr;  // [columns], int8 alone

    const char* block(int64_t index) const { return blocks + index * num_steps * STEP_BYTES; }
};

template <class Element>
int64_t matrix_bytes(int64_t columns, int64_t depth) {
    return round_up(columns, BLOCK_COLUMNS) / BLOCK_COLUMNS * padded_depth<Element>(depth) / (UNITS * Element::PAIR) *
           STEP_BYTES;
}

// Lays out one column of a block; `from` has `depth` numbers, or is null for a column of zeros.
template <class Element>
void pack_column(char* block, int column, const typename Element::Number* from, int64_t depth) {
    using Number = typename Element::Number;
    constexpr int PAIR = Element::PAIR;
    Number* to = reinterpret_cast<Number*>(block) + column / LANES * UNITS * LANES * PAIR + column % LANES * PAIR;
    const int64_t num_units = padded_depth<Element>(depth) / PAIR;
    for (int64_t unit = 0; unit < num_units; ++unit) {
        Number* numbers = to + (unit / UNITS * 2 * UNITS + unit % UNITS) * LANES * PAIR;
        for (int i = 0; i < PAIR; ++i) {
            const int64_t index = unit * PAIR + i;
            numbers[i] = from != nullptr && index < depth ? from[index] : Number{};
        }
    }
}

#ifdef INFLIGHT_AMX

// Tiles 0-3 sum, 4-5 are rows of activations, 6-7 panels of weights; all are 16 rows of 64 bytes.
struct TileConfiguration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

class MatrixTiles {
  public:
    MatrixTiles() {
        // Static, because GCC takes only its first bytes for read.
        static const TileConfiguration configuration;
        _tile_loadconfig(&configuration);
    }
};

// While it lives, the thread's tiles are set up for products.
class TilesInUse {
  public:
    ~TilesInUse() { _tile_release(); }

  private:
    MatrixTiles tiles_;
};

// The intrinsics want literal tile numbers, so this cannot be a function.
#define MULTIPLY_TILES(SUM, LEFT, RIGHT)                                              \
    do {                                                                              \
        if constexpr (Element::PAIR == 2) _tile_dpbf16ps(SUM, LEFT, RIGHT);           \
        if constexpr (Element::PAIR == 4) _tile_dpbssd(SUM, LEFT, RIGHT);             \
    } while (false)

template <class Element, bool HAS_SECOND_ROWS>
void multiply_by_tiles(const char* block, int64_t num_steps, const typename Element::Number* rows, int64_t stride,
                       float* out, int64_t out_stride) {
    const int64_t row_bytes = stride * sizeof *rows;
    const char* left = reinterpret_cast<const char*>(rows);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < num_steps; ++step, left += 64, block += STEP_BYTES) {
        _tile_loadd(6, block, 64);
        _tile_loadd(7, block + STEP_BYTES / 2, 64);
        _tile_loadd(4, left, row_bytes);
        MULTIPLY_TILES(0, 4, 6);
        MULTIPLY_TILES(1, 4, 7);
        if constexpr (HAS_SECOND_ROWS) {
            _tile_loadd(5, left + 16 * row_bytes, row_bytes);
            MULTIPLY_TILES(2, 5, 6);
            MULTIPLY_TILES(3, 5, 7);
        }
    }
    const int64_t out_bytes = out_stride * sizeof(float);
    _tile_stored(0, out, out_bytes);
    _tile_stored(1, out + LANES, out_bytes);
    if constexpr (HAS_SECOND_ROWS) {
        _tile_stored(2, out + 16 * out_stride, out_bytes);
        _tile_stored(3, out + 16 * out_stride + LANES, out_bytes);
    }
}

#else
struct MatrixTiles {
    MatrixTiles() {}
};
struct TilesInUse {
    TilesInUse() {}
};
#endif

// Rows that fit the registers together with the columns of a block: sums, a vector of weights, the broadcast.
#if defined(__AVX512F__)
constexpr int REGISTER_ROWS = 12;
#else
constexpr int REGISTER_ROWS = 6;
#endif
// Vectors of columns that a pass over a block takes: all 32 columns, or the 16 that 16 registers have room for.
constexpr int PASS_VECTORS = 2;
constexpr int NUM_PASSES = BLOCK_COLUMNS / WIDTH / PASS_VECTORS;
// Steps of a block that stay in the first-level cache while all rows pass.
constexpr int64_t STEPS_AT_ONCE = 12;

// Adds to `sums[row, 32 columns]`, for the columns of one pass.
template <class Element, int ROWS>
void multiply_by_vectors(const char* block, int pass, int64_t num_steps, const typename Element::Number* rows,
                         int64_t stride, typename Element::Sum (*sums)[BLOCK_COLUMNS / WIDTH]) {
    using Number = typename Element::Number;
    typename Element::Sum sum[ROWS][PASS_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < PASS_VECTORS; ++v) sum[r][v] = sums[r][pass * PASS_VECTORS + v];
    const char* columns[PASS_VECTORS];
    for (int v = 0; v < PASS_VECTORS; ++v) {
        const int vector = pass * PASS_VECTORS + v;
        columns[v] = block + vector / VECTORS * (STEP_BYTES / 2) + vector % VECTORS * 4 * WIDTH;
    }
    for (int64_t step = 0; step < num_steps; ++step, rows += UNITS * Element::PAIR) {
        for (int unit = 0; unit < UNITS; ++unit) {
            typename Element::Vector loaded[PASS_VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < PASS_VECTORS; ++v)
                loaded[v] =
                    Element::load_units(reinterpret_cast<const Number*>(columns[v] + step * STEP_BYTES + unit * 64));
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) {
                const auto left = unit_at<Element>(rows + r * stride, unit);
#pragma GCC unroll 2
                for (int v = 0; v < PASS_VECTORS; ++v)
                    sum[r][v] = Element::multiply_add(sum[r][v], left, loaded[v]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < PASS_VECTORS; ++v) sums[r][pass * PASS_VECTORS + v] = sum[r][v];
}

// Calls `multiply_by_vectors` with the number of rows as a constant.
template <class Element, int ROWS = REGISTER_ROWS>
void multiply_some(int num_rows, const char* block, int pass, int64_t num_steps, const typename Element::Number* rows,
                   int64_t stride, typename Element::Sum (*sums)[BLOCK_COLUMNS / WIDTH]) {
    if constexpr (ROWS > 1)
        if (num_rows < ROWS)
            return multiply_some<Element, ROWS - 1>(num_rows, block, pass, num_steps, rows, stride, sums);
    multiply_by_vectors<Element, ROWS>(block, pass, num_steps, rows, stride, sums);
}

// `out[r, 0..32) = rows[r] · block`, for up to 32 rows; whatever lies behind the last row of `out` may be overwritten.
template <class Element>
void multiply(const Matrix<Element>& matrix, int64_t block_index, const Rows<Element>& rows, int64_t first_row,
              int num_rows, float* out, int64_t out_stride) {
    const char* block = matrix.block(block_index);
    const auto* left = rows.row(first_row);
#ifdef INFLIGHT_AMX
    if constexpr (Element::PAIR > 1) {
        if (num_rows > 16)
            multiply_by_tiles<Element, true>(block, matrix.num_steps, left, rows.stride, out, out_stride);
        else
            multiply_by_tiles<Element, false>(block, matrix.num_steps, left, rows.stride, out, out_stride);
    } else
#endif
    {
        typename Element::Sum sums[TILE_ROWS][BLOCK_COLUMNS / WIDTH] = {};
        for (int64_t step = 0; step < matrix.num_steps; step += STEPS_AT_ONCE)
            for (int pass = 0; pass < NUM_PASSES; ++pass)
                for (int row = 0; row < num_rows; row += REGISTER_ROWS)
                    multiply_some<Element>(std::min(REGISTER_ROWS, num_rows - row), block + step * STEP_BYTES, pass,
                                           std::min(STEPS_AT_ONCE, matrix.num_steps - step),
                                           left + row * rows.stride + step * UNITS * Element::PAIR, rows.stride,
                                           sums + row);
        for (int row = 0; row < num_rows; ++row)
            for (int v = 0; v < BLOCK_COLUMNS / WIDTH; ++v)
                store(out + row * out_stride + v * WIDTH, (Floats)sums[row][v]);
    }
    if constexpr (Element::PAIR == 4) {
        // What lies in `out` are the bits of integers.
        const float* scales = matrix.scales + block_index * BLOCK_COLUMNS;
        for (int row = 0; row < num_rows; ++row)
            for (int column = 0; column < BLOCK_COLUMNS; column += WIDTH) {
                float* to = out + row * out_stride + column;
                const Floats sums = __builtin_convertvector((Ints)load(to), Floats);
                store(to, sums * load(scales + column) * rows.scales[first_row + row]);
            }
    }
}

}  // namespace inflight
