// Matrix products with weights that are packed once.
//
// A weight `[columns, depth]` (as in nn.Linear) is kept in blocks of 32 columns, and a block in steps along the depth,
// so that a block is read as one stream of memory. A step is 64 bytes of depth: 16 units of PAIR numbers. Its two
// panels of 16 columns are interleaved unit by unit, or one after the other:
//
//     [block, step, 16 units, 2 panels, 16 columns, PAIR]     2 KB a step
//     [block, step, 2 panels, 16 units, 16 columns, PAIR]
//
// Both are layouts of AMX's right-hand tiles (a panel of a step is one tile) and of a vector unit that broadcasts the
// left-hand side. A vector unit reads interleaved panels in the order of memory, which some processors' prefetchers
// need (docs/design/cpu-kernels.md). Activations are plain rows, in consecutive pieces of 64 bytes of depth. Depth and
// columns are padded with zeros. A product is computed in tiles of up to 32 rows, in float32, and passed to the
// caller's function while in cache. Every sum has the same order whatever the layout and the number of rows.
//
// A weight may be kept in int8 with a scale for each column, with four of a column's numbers in a lane. A block is then
// widened once for all rows of a task, into panels one after the other. Every int8 is a bfloat16 exactly, and the scale
// is applied to the sums.

#pragma once

#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace inflight {

constexpr int BLOCK_COLUMNS = 32;
constexpr int TILE_ROWS = 32;
constexpr int UNITS = 16;             // units of a step
constexpr int64_t STEP_BYTES = 2048;  // of a block
constexpr int NARROW_PAIR = 4;        // int8 numbers of a lane

// Rows of activations. `stride` counts numbers and is a whole number of steps; there is space for whole tiles of rows.
template <class Element>
struct Rows {
    typename Element::Number* numbers = nullptr;
    int64_t stride = 0;

    typename Element::Number* row(int64_t index) const { return numbers + index * stride; }
    int64_t row_bytes() const { return stride * sizeof *numbers; }
};

template <class Element>
constexpr int64_t padded_depth(int64_t depth) {
    return round_up(depth, UNITS * Element::PAIR);
}

// Bytes from a unit of a panel to the next, and from a panel of a step to the other.
struct Panels {
    int64_t unit_bytes, panel_bytes;
};
constexpr Panels APART{64, STEP_BYTES / 2}, INTERLEAVED{128, 64};

template <class Element>
struct Matrix {
    static constexpr int64_t STEP_NUMBERS = STEP_BYTES / sizeof(typename Element::Number);

    Panels panels = APART;
    char* blocks = nullptr;
    int64_t num_blocks = 0, num_steps = 0;
    int64_t blocks_at_once = 1;
    float* scales = nullptr;  // [num_blocks * 32], only for int8

    bool is_narrow() const { return scales != nullptr; }
    static int64_t block_bytes(int64_t num_steps, bool is_narrow) {
        return num_steps * (is_narrow ? STEP_NUMBERS : STEP_BYTES);
    }
    int64_t block_bytes() const { return block_bytes(num_steps, is_narrow()); }
    char* block(int64_t index) const { return blocks + index * block_bytes(); }
};

// Index within a block of the number at depth `index` of a column.
template <class Element>
constexpr int64_t place_in_block(const Panels& panels, int column, int64_t index) {
    const int64_t unit = index / Element::PAIR;
    const int64_t bytes_in_step = unit % UNITS * panels.unit_bytes + column / LANES * panels.panel_bytes;
    return (unit / UNITS * STEP_BYTES + bytes_in_step) / sizeof(typename Element::Number) + column % LANES * Element::PAIR + index % Element::PAIR;
}

// The same in a block of int8, whose panels are one after the other.
template <class Element>
constexpr int64_t place_in_narrow_block(int column, int64_t index) {
    constexpr int ROWS = UNITS * Element::PAIR / NARROW_PAIR;  // of a panel in a step
    const int64_t unit = index / NARROW_PAIR;
    const int64_t row = unit / ROWS * 2 * ROWS + column / LANES * ROWS + unit % ROWS;
    return (row * LANES + column % LANES) * NARROW_PAIR + index % NARROW_PAIR;
}

// Packs a column of `depth` numbers; in int8 its largest number becomes 127.
template <class Element>
void pack_column(const Matrix<Element>& matrix, int64_t column, const typename Element::Number* from, int64_t depth) {
    char* block = matrix.block(column / BLOCK_COLUMNS);
    const int within = (int)(column % BLOCK_COLUMNS);
    if (!matrix.is_narrow()) {
        auto* to = reinterpret_cast<typename Element::Number*>(block);
        for (int64_t i = 0; i < depth; ++i) to[place_in_block<Element>(matrix.panels, within, i)] = from[i];
        return;
    }
    float largest = 0;
    for (int64_t i = 0; i < depth; ++i) largest = std::max(largest, std::fabs(Element::get(from[i])));
    const float scale = largest / 127.0f;
    matrix.scales[column] = scale;
    auto* to = reinterpret_cast<int8_t*>(block);
    for (int64_t i = 0; i < depth; ++i)
        to[place_in_narrow_block<Element>(within, i)] =
            scale > 0 ? (int8_t)std::lrint(Element::get(from[i]) / scale) : (int8_t)0;
}

// Returns the four bytes of each lane as floats.
ALWAYS_INLINE void split_bytes(Ints lanes, Floats (&floats)[NARROW_PAIR]) {
#pragma GCC unroll 4
    for (int byte = 0; byte < NARROW_PAIR; ++byte)
        floats[byte] = __builtin_convertvector((lanes << (24 - 8 * byte)) >> 24, Floats);
}

// Asks for the cache line at `from` in the second-level cache.
ALWAYS_INLINE void prefetch_line(const char* from) { __builtin_prefetch(from, 0, 2); }

// Widens a block of int8 into `to`. `next` is what the thread will probably read after it, or null.
template <class Element>
void widen(const Matrix<Element>& matrix, int64_t index, const char* next, char* to) {
    constexpr int PAIR = Element::PAIR;
    const char* from = matrix.block(index);
    const int64_t ahead = next == nullptr ? 0 : next - from;
    const int64_t num_rows = matrix.num_steps * 2 * UNITS * PAIR / NARROW_PAIR;
    for (int64_t row = 0; row < num_rows; ++row, from += 64, to += 64 * NARROW_PAIR / PAIR) {
        if (next != nullptr) prefetch_line(from + ahead);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            Floats floats[NARROW_PAIR];
            split_bytes((Ints)load(reinterpret_cast<const float*>(from) + v * WIDTH), floats);
#pragma GCC unroll 4
            for (int unit = 0; unit < NARROW_PAIR / PAIR; ++unit) {
                Floats out = floats[unit * PAIR];
                // The lower half of a float that was a byte is zero: its upper half is the bfloat16.
                if constexpr (PAIR == 2) out = (Floats)(((Words)out >> 16) | (Words)floats[unit * PAIR + 1]);
                store(reinterpret_cast<float*>(to + unit * 64) + v * WIDTH, out);
            }
        }
    }
}

#ifdef INFLIGHT_AMX

// Tiles 0-3 hold sums, 4-5 rows of activations, 6-7 panels of weights; all are 16 rows of 64 bytes.
struct TileConfiguration {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

class MatrixTiles {
  public:
    MatrixTiles() {
        // Static, because GCC treats only its first bytes as read.
        static const TileConfiguration configuration;
        _tile_loadconfig(&configuration);
    }
};

// Configures the thread's tiles for products during its lifetime.
class TilesInUse {
  public:
    ~TilesInUse() { _tile_release(); }

  private:
    MatrixTiles tiles_;
};

template <bool HAS_SECOND_ROWS>
void multiply_by_tiles(const Panels& panels, const char* block, const char* next, int64_t num_steps,
                       const uint16_t* rows, int64_t stride, bool adds, float* out, int64_t out_stride) {
    const int64_t row_bytes = stride * sizeof *rows, out_bytes = out_stride * sizeof(float);
    const char* left = reinterpret_cast<const char*>(rows);
    if (adds) {
        _tile_loadd(0, out, out_bytes);
        _tile_loadd(1, out + LANES, out_bytes);
        if constexpr (HAS_SECOND_ROWS) {
            _tile_loadd(2, out + 16 * out_stride, out_bytes);
            _tile_loadd(3, out + 16 * out_stride + LANES, out_bytes);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t step = 0; step < num_steps; ++step, left += 64, block += STEP_BYTES) {
        if (next != nullptr)
            for (int64_t byte = 0; byte < STEP_BYTES; byte += 64) prefetch_line(next + step * STEP_BYTES + byte);
        _tile_loadd(6, block, panels.unit_bytes);
        _tile_loadd(7, block + panels.panel_bytes, panels.unit_bytes);
        _tile_loadd(4, left, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (HAS_SECOND_ROWS) {
            _tile_loadd(5, left + 16 * row_bytes, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
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
// Vectors of columns in a pass over a block: all 32 columns, or 16 with 16 registers.
constexpr int PASS_VECTORS = 2;
constexpr int NUM_PASSES = BLOCK_COLUMNS / WIDTH / PASS_VECTORS;
// Adds to `sums[row, 32 columns]`, for the columns of one pass. Prefetches LINES cache lines for each unit of the
// block: those at `next` of every 128 bytes.
template <class Element, int LINES, int ROWS>
void multiply_by_vectors(const Panels& panels, const char* block, const char* next, int pass, int64_t num_steps,
                         const typename Element::Number* rows, int64_t stride, Floats (*sums)[BLOCK_COLUMNS / WIDTH]) {
    using Number = typename Element::Number;
    Floats sum[ROWS][PASS_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < PASS_VECTORS; ++v) sum[r][v] = sums[r][pass * PASS_VECTORS + v];
    const char* columns[PASS_VECTORS];
    for (int v = 0; v < PASS_VECTORS; ++v) {
        const int vector = pass * PASS_VECTORS + v;
        columns[v] = block + vector / VECTORS * panels.panel_bytes + vector % VECTORS * 4 * WIDTH;
    }
    const int64_t unit_bytes = panels.unit_bytes;
    for (int64_t step = 0; step < num_steps; ++step, rows += UNITS * Element::PAIR) {
        int64_t offset = step * STEP_BYTES;
        for (int unit = 0; unit < UNITS; ++unit, offset += unit_bytes) {
            typename Element::Vector loaded[PASS_VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < PASS_VECTORS; ++v)
                loaded[v] = Element::load_units(reinterpret_cast<const Number*>(columns[v] + offset));
            if constexpr (LINES > 0) prefetch_line(next);
            if constexpr (LINES > 1) prefetch_line(next + 64);
            if constexpr (LINES > 0) next += STEP_BYTES / UNITS;
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
template <class Element, int LINES, int ROWS = REGISTER_ROWS>
void multiply_some(int num_rows, const Panels& panels, const char* block, const char* next, int pass, int64_t num_steps,
                   const typename Element::Number* rows, int64_t stride, Floats (*sums)[BLOCK_COLUMNS / WIDTH]) {
    if constexpr (ROWS > 1)
        if (num_rows < ROWS)
            return multiply_some<Element, LINES, ROWS - 1>(num_rows, panels, block, next, pass, num_steps, rows,
                                                           stride, sums);
    multiply_by_vectors<Element, LINES, ROWS>(panels, block, next, pass, num_steps, rows, stride, sums);
}

// Splits rows into groups of about the same size, as each reads the block once.
constexpr int rows_of_group(int num_rows) {
    const int num_groups = (num_rows + REGISTER_ROWS - 1) / REGISTER_ROWS;
    return (int)round_up((num_rows + num_groups - 1) / num_groups, REGISTER_ROWS / 3);
}

// Computes `out[r, 0..32) = rows[r] · block` for up to 32 rows, or with `adds` adds that to `out`. Memory behind the
// last row of `out` may be overwritten. `next` is what this thread will probably multiply with after the block, or
// null: as much of it is prefetched into the second-level cache.
template <class Element>
void multiply(const Panels& panels, const char* block, const char* next, int64_t num_steps,
              const typename Element::Number* rows, int64_t stride, int num_rows, bool adds, float* out,
              int64_t out_stride) {
#ifdef INFLIGHT_AMX
    if constexpr (Element::PAIR == 2) {
        if (num_rows > 16)
            multiply_by_tiles<true>(panels, block, next, num_steps, rows, stride, adds, out, out_stride);
        else
            multiply_by_tiles<false>(panels, block, next, num_steps, rows, stride, adds, out, out_stride);
        return;
    }
#endif
    Floats sums[TILE_ROWS][BLOCK_COLUMNS / WIDTH] = {};
    for (int row = 0; adds && row < num_rows; ++row)
        for (int v = 0; v < BLOCK_COLUMNS / WIDTH; ++v) sums[row][v] = load(out + row * out_stride + v * WIDTH);
    const int group_rows = rows_of_group(num_rows), num_groups = (num_rows + group_rows - 1) / group_rows;
    // The last two turns prefetch, half of the lines each: the block itself is in cache by then.
    int turns_left = NUM_PASSES * num_groups;
    for (int pass = 0; pass < NUM_PASSES; ++pass)
        for (int row = 0; row < num_rows; row += group_rows, --turns_left) {
            const int count = std::min(group_rows, num_rows - row);
            const auto* some = rows + row * stride;
            if (next == nullptr || turns_left > 2)
                multiply_some<Element, 0>(count, panels, block, nullptr, pass, num_steps, some, stride, sums + row);
            else if (NUM_PASSES * num_groups > 1)
                multiply_some<Element, 1>(count, panels, block, next + 64 * (turns_left - 1), pass, num_steps, some,
                                          stride, sums + row);
            else
                multiply_some<Element, 2>(count, panels, block, next, pass, num_steps, some, stride, sums + row);
        }
    for (int row = 0; row < num_rows; ++row)
        for (int v = 0; v < BLOCK_COLUMNS / WIDTH; ++v) store(out + row * out_stride + v * WIDTH, sums[row][v]);
}

// Multiplies the columns of a block that was kept in int8 by their scales.
inline void scale_columns(const float* scales, int num_rows, float* out, int64_t out_stride) {
    for (int row = 0; row < num_rows; ++row)
        for (int column = 0; column < BLOCK_COLUMNS; column += WIDTH) {
            float* to = out + row * out_stride + column;
            store(to, load(to) * load(scales + column));
        }
}

}  // namespace inflight
