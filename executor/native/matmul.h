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
// Weights and rows may be int8 (int8.h). A step is then a group of the depth, and is followed by the scales of its 32
// columns: 2,176 bytes.

#pragma once

#include <algorithm>

#include "int8.h"
#include "vectors.h"

namespace inflight {

constexpr int BLOCK_COLUMNS = 32;
constexpr int TILE_ROWS = 32;
constexpr int UNITS = 16;             // units of a step
constexpr int64_t STEP_BYTES = 2048;  // of a block, without scales
static_assert(GROUP == UNITS * Int8::PAIR);

template <class Element>
constexpr int64_t STEP_DEPTH = UNITS * Element::PAIR;

template <class Element>
constexpr int64_t padded_depth(int64_t depth) {
    return round_up(depth, STEP_DEPTH<Element>);
}

// Rows of activations. `stride` counts numbers and is a whole number of steps; there is space for whole tiles of rows.
// Rows of int8 have a scale for each step.
template <class Element>
struct Rows {
    typename Element::Number* numbers = nullptr;
    int64_t stride = 0;
    GroupScale* scales = nullptr;

    typename Element::Number* row(int64_t index) const { return numbers + index * stride; }
    int64_t row_bytes() const { return stride * sizeof *numbers; }
    int64_t scale_stride() const { return stride / STEP_DEPTH<Element>; }
    // The same rows from a row and step on.
    Rows from(int64_t first, int64_t step) const {
        GroupScale* const of_step = IS_INT8<Element> ? scales + first * scale_stride() + step : nullptr;
        return {row(first) + step * STEP_DEPTH<Element>, stride, of_step};
    }

    // Copies a whole row of rows of the same depth.
    void copy_row(int64_t index, const Rows& from, int64_t from_index) const {
        std::memcpy(row(index), from.row(from_index), row_bytes());
        if constexpr (IS_INT8<Element>)
            std::memcpy(scales + index * scale_stride(), from.scales + from_index * scale_stride(),
                        scale_stride() * sizeof *scales);
    }

    // Bytes of `count` numbers with their scales, as `copy_part` and `put_part` have them. int8 comes in whole groups,
    // because each number of a group depends on all of them (int8.h).
    static int64_t part_bytes(int64_t count) {
        if constexpr (IS_INT8<Element>) return (count + GROUP - 1) / GROUP * (GROUP + (int64_t)sizeof(GroupScale));
        return count * sizeof(typename Element::Number);
    }

    // Copies `count` numbers of a row out of it, from the begin of a step on.
    void copy_part(int64_t index, int64_t first, int64_t count, char* to) const {
        if constexpr (IS_INT8<Element>) {
            const int64_t num_groups = (count + GROUP - 1) / GROUP;
            std::memcpy(to, row(index) + first, num_groups * GROUP);
            std::memcpy(to + num_groups * GROUP, scales + index * scale_stride() + first / GROUP,
                        num_groups * sizeof *scales);
        } else {
            std::memcpy(to, row(index) + first, count * sizeof *numbers);
        }
    }

    // Copies into a row what `copy_part` has copied out of another rank's.
    void put_part(int64_t index, int64_t first, int64_t count, const char* from) const {
        if constexpr (IS_INT8<Element>) {
            const int64_t num_groups = (count + GROUP - 1) / GROUP;
            std::memcpy(row(index) + first, from, num_groups * GROUP);
            std::memcpy(scales + index * scale_stride() + first / GROUP, from + num_groups * GROUP,
                        num_groups * sizeof *scales);
        } else {
            std::memcpy(row(index) + first, from, count * sizeof *numbers);
        }
    }

    // Writes `count` numbers of a row, a multiple of 16, from the begin of a step on.
    void put(int64_t index, int64_t first, const float* from, int64_t count) const {
        typename Element::Number* to = row(index) + first;
        if constexpr (IS_INT8<Element>) {
            GroupScale* scale = scales + index * scale_stride() + first / GROUP;
            for (; count >= GROUP; count -= GROUP, from += GROUP, to += GROUP) *scale++ = round_group(from, to);
            if (count == 0) return;
            alignas(64) float last[GROUP] = {};
            std::memcpy(last, from, count * sizeof *from);
            *scale = round_group(last, to);
        } else {
            int64_t i = 0;
            for (; i + 2 * WIDTH <= count; i += 2 * WIDTH)
                Element::put_two(to + i, load(from + i), load(from + i + WIDTH));
            for (; i < count; i += WIDTH) Element::put(to + i, load(from + i));
        }
    }
};

// Bytes from a unit of a panel to the next, and from a panel of a step to the other.
struct Panels {
    int64_t unit_bytes, panel_bytes;
};
constexpr Panels APART{64, STEP_BYTES / 2}, INTERLEAVED{128, 64};

// A block of a matrix whose blocks differ (codes.h). Without a format it is a plain one.
struct CodeFormat;
struct MixedBlock {
    char* data;
    const CodeFormat* format;
};
class Mixture;

// The memory of a matrix.
struct Blocks {
    char* blocks = nullptr;
    int64_t num_blocks = 0, block_bytes = 0, num_bytes = 0;
    int64_t blocks_at_once = 1;         // in one task
    const Mixture* mixture = nullptr;   // null: all blocks are plain
    const MixedBlock* mixed = nullptr;  // its blocks

    char* block(int64_t index) const { return mixed == nullptr ? blocks + index * block_bytes : mixed[index].data; }
};

template <class Element>
struct Matrix : Blocks {
    // With the scales of the step's columns.
    static constexpr int64_t WHOLE_STEP_BYTES = STEP_BYTES + (IS_INT8<Element> ? BLOCK_COLUMNS * sizeof(float) : 0);

    Panels panels = APART;
    int64_t num_steps = 0;
};

// Index within a block of the number at depth `index` of a column.
template <class Element>
constexpr int64_t place_in_block(const Panels& panels, int column, int64_t index) {
    const int64_t unit = index / Element::PAIR;
    const int64_t bytes_in_step = unit % UNITS * panels.unit_bytes + column / LANES * panels.panel_bytes;
    const int64_t bytes = unit / UNITS * Matrix<Element>::WHOLE_STEP_BYTES + bytes_in_step;
    return bytes / sizeof(typename Element::Number) + column % LANES * Element::PAIR + index % Element::PAIR;
}

// Packs a column of `depth` numbers of another element type, or of the same.
template <class Element, class Source>
void pack_column(const Matrix<Element>& matrix, int64_t column, const typename Source::Number* from, int64_t depth) {
    char* block = matrix.block(column / BLOCK_COLUMNS);
    const int within = (int)(column % BLOCK_COLUMNS);
    if constexpr (IS_INT8<Element>) {
        auto* to = reinterpret_cast<uint8_t*>(block);
        for (int64_t first = 0; first < depth; first += GROUP) {
            alignas(64) float numbers[GROUP] = {};
            alignas(64) int8_t rounded[GROUP];
            const int64_t count = std::min<int64_t>(GROUP, depth - first);
            for (int64_t i = 0; i < count; ++i) numbers[i] = Source::get(from[first + i]);
            const float scale = round_group(numbers, rounded).scale / GROUP;
            for (int64_t i = 0; i < GROUP; ++i)
                to[place_in_block<Element>(matrix.panels, within, first + i)] = (uint8_t)(rounded[i] + STORED_ZERO);
            char* scales = block + first / GROUP * matrix.WHOLE_STEP_BYTES + STEP_BYTES;
            reinterpret_cast<float*>(scales)[within] = scale;
        }
    } else {
        auto* to = reinterpret_cast<typename Element::Number*>(block);
        for (int64_t i = 0; i < depth; ++i) to[place_in_block<Element>(matrix.panels, within, i)] = from[i];
    }
}

// Prefetches the cache line at `from` into the second-level cache. GCC drops calls of functions that do nothing but
// prefetch, as they have no effect that it knows; the empty instruction is one.
ALWAYS_INLINE void prefetch_line(const char* from) {
    __builtin_prefetch(from, 0, 2);
    asm volatile("");
}

// What a thread will probably multiply with next: `lines_per_step` cache lines are prefetched during each step.
struct Ahead {
    const char* from = nullptr;
    int64_t lines_per_step = 0;

    ALWAYS_INLINE void prefetch() {
        for (const char* const end = from + lines_per_step * 64; from < end; from += 64) prefetch_line(from);
    }
    // What follows after some steps.
    Ahead after(int64_t num_steps) const { return {from + num_steps * lines_per_step * 64, lines_per_step}; }
};

// Adds a step's products, scaled, to `sums`: in one order of operations wherever it is computed.
ALWAYS_INLINE Floats add_scaled(Floats sums, Ints products, Floats column_scales, float row_scale) {
    return fused_add(sums, as_floats(products), column_scales * row_scale);
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

// How many rows a tile of a product has: up to 16, up to 32, or 32 of more. Many pass through the first-level cache
// without staying there, so that the block stays.
enum TileHeight { FEW, SOME, MANY };

// Adds the products of a step to tiles 0 to 3.
template <class Element, TileHeight HEIGHT>
ALWAYS_INLINE void add_step_of_tiles(const Panels& panels, const char* block, const char* left, int64_t row_bytes) {
    constexpr bool HAS_SECOND_ROWS = HEIGHT != FEW;
    _tile_loadd(6, block, panels.unit_bytes);
    _tile_loadd(7, block + panels.panel_bytes, panels.unit_bytes);
    if constexpr (HEIGHT == MANY) {
        _tile_stream_loadd(4, left, row_bytes);
        _tile_stream_loadd(5, left + 16 * row_bytes, row_bytes);
    } else {
        _tile_loadd(4, left, row_bytes);
        if constexpr (HAS_SECOND_ROWS) _tile_loadd(5, left + 16 * row_bytes, row_bytes);
    }
    if constexpr (IS_INT8<Element>) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
        if constexpr (HAS_SECOND_ROWS) {
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (HAS_SECOND_ROWS) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

ALWAYS_INLINE void clear_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

template <TileHeight HEIGHT, class Sum>
ALWAYS_INLINE void store_tiles(Sum* out, int64_t stride) {
    constexpr bool HAS_SECOND_ROWS = HEIGHT != FEW;
    const int64_t num_bytes = stride * sizeof *out;
    _tile_stored(0, out, num_bytes);
    _tile_stored(1, out + LANES, num_bytes);
    if constexpr (HAS_SECOND_ROWS) {
        _tile_stored(2, out + 16 * stride, num_bytes);
        _tile_stored(3, out + 16 * stride + LANES, num_bytes);
    }
}

template <class Element, TileHeight HEIGHT>
void multiply_by_tiles(const Panels& panels, const char* block, Ahead next, int64_t num_steps,
                       const Rows<Element>& rows, bool adds, float* out, int64_t out_stride) {
    const int64_t out_bytes = out_stride * sizeof(float);
    const char* left = reinterpret_cast<const char*>(rows.numbers);
    clear_tiles();
    if (adds) {
        _tile_loadd(0, out, out_bytes);
        _tile_loadd(1, out + LANES, out_bytes);
        if constexpr (HEIGHT != FEW) {
            _tile_loadd(2, out + 16 * out_stride, out_bytes);
            _tile_loadd(3, out + 16 * out_stride + LANES, out_bytes);
        }
    }
    for (int64_t step = 0; step < num_steps; ++step, left += 64, block += STEP_BYTES) {
        next.prefetch();
        add_step_of_tiles<Element, HEIGHT>(panels, block, left, rows.row_bytes());
    }
    store_tiles<HEIGHT>(out, out_stride);
}

// The products of a step leave the tiles, and vectors scale them while the tiles multiply the next step.
template <TileHeight HEIGHT>
void multiply_int8_by_tiles(const Panels& panels, const char* block, Ahead next, int64_t num_steps,
                            const Rows<Int8>& rows, int num_rows, bool adds, float* out, int64_t out_stride) {
    constexpr int64_t WHOLE_STEP_BYTES = Matrix<Int8>::WHOLE_STEP_BYTES;
    alignas(64) int32_t products[2][TILE_ROWS][BLOCK_COLUMNS];
    if (!adds)
        for (int row = 0; row < num_rows; ++row) std::memset(out + row * out_stride, 0, BLOCK_COLUMNS * sizeof *out);
    const auto add_products = [&](int64_t step) {
        const auto* scales = reinterpret_cast<const float*>(block + step * WHOLE_STEP_BYTES + STEP_BYTES);
        Floats column_scales[BLOCK_COLUMNS / WIDTH];
        for (int v = 0; v < BLOCK_COLUMNS / WIDTH; ++v) column_scales[v] = load(scales + v * WIDTH);
        for (int row = 0; row < num_rows; ++row) {
            const float row_scale = rows.scales[row * rows.scale_stride() + step].scale;
            for (int v = 0; v < BLOCK_COLUMNS / WIDTH; ++v) {
                Ints sums;
                std::memcpy(&sums, &products[step % 2][row][v * WIDTH], sizeof sums);
                float* const to = out + row * out_stride + v * WIDTH;
                store(to, add_scaled(load(to), sums, column_scales[v], row_scale));
            }
        }
    };
    const char* const left = reinterpret_cast<const char*>(rows.numbers);
    for (int64_t step = 0; step < num_steps; ++step) {
        next.prefetch();
        clear_tiles();
        add_step_of_tiles<Int8, HEIGHT>(panels, block + step * WHOLE_STEP_BYTES, left + step * 64, rows.row_bytes());
        if (step > 0) add_products(step - 1);
        store_tiles<HEIGHT>(products[step % 2][0], BLOCK_COLUMNS);
    }
    add_products(num_steps - 1);
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
// Adds the products of a step to the columns of a pass. Prefetches LINES cache lines for each unit of the block: those
// at `next` of every 128 bytes.
template <class Element, int LINES, int ROWS>
ALWAYS_INLINE void add_step(const char* const* columns, int64_t unit_bytes, int64_t offset, const char*& next,
                            const typename Element::Number* rows, int64_t stride,
                            typename Element::Sum (&sum)[ROWS][PASS_VECTORS]) {
    using Number = typename Element::Number;
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
            for (int v = 0; v < PASS_VECTORS; ++v) sum[r][v] = Element::multiply_add(sum[r][v], left, loaded[v]);
        }
    }
}

// Computes `out[row, 32 columns]` for the columns of one pass, or with `adds` adds to it.
template <class Element, int LINES, int ROWS>
void multiply_by_vectors(const Panels& panels, const char* block, const char* next, int pass, int64_t num_steps,
                         const Rows<Element>& rows, bool adds, float* out, int64_t out_stride) {
    constexpr int64_t WHOLE_STEP_BYTES = Matrix<Element>::WHOLE_STEP_BYTES;
    out += pass * PASS_VECTORS * WIDTH;
    typename Element::Sum sum[ROWS][PASS_VECTORS] = {};
    if constexpr (IS_INT8<Element>) {
        if (!adds)
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                for (int v = 0; v < PASS_VECTORS; ++v) store(out + r * out_stride + v * WIDTH, Floats{});
    } else if (adds) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < PASS_VECTORS; ++v) sum[r][v] = load(out + r * out_stride + v * WIDTH);
    }
    const char* columns[PASS_VECTORS];
    for (int v = 0; v < PASS_VECTORS; ++v) {
        const int vector = pass * PASS_VECTORS + v;
        columns[v] = block + vector / VECTORS * panels.panel_bytes + vector % VECTORS * 4 * WIDTH;
    }
    const int64_t unit_bytes = panels.unit_bytes, stride = rows.stride, scale_stride = rows.scale_stride();
    const typename Element::Number* numbers = rows.numbers;
    for (int64_t step = 0; step < num_steps; ++step, numbers += STEP_DEPTH<Element>) {
        const GroupScale* const row_scales = IS_INT8<Element> ? rows.scales + step : nullptr;
        if constexpr (IS_INT8<Element>) {
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                for (int v = 0; v < PASS_VECTORS; ++v) sum[r][v] = row_scales[r * scale_stride].offset - Ints{};
        }
        add_step<Element, LINES, ROWS>(columns, unit_bytes, step * WHOLE_STEP_BYTES, next, numbers, stride, sum);
        if constexpr (IS_INT8<Element>) {
            if constexpr (LINES > 0) prefetch_line(next);
            if constexpr (LINES > 1) prefetch_line(next + 64);
            if constexpr (LINES > 0) next += WHOLE_STEP_BYTES - STEP_BYTES;
            const auto* scales = reinterpret_cast<const float*>(block + step * WHOLE_STEP_BYTES + STEP_BYTES);
            Floats column_scales[PASS_VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < PASS_VECTORS; ++v) column_scales[v] = load(scales + (pass * PASS_VECTORS + v) * WIDTH);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) {
                const float row_scale = row_scales[r * scale_stride].scale;
#pragma GCC unroll 2
                for (int v = 0; v < PASS_VECTORS; ++v) {
                    float* const to = out + r * out_stride + v * WIDTH;
                    store(to, add_scaled(load(to), sum[r][v], column_scales[v], row_scale));
                }
            }
        }
    }
    if constexpr (!IS_INT8<Element>) {
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < PASS_VECTORS; ++v) store(out + r * out_stride + v * WIDTH, sum[r][v]);
    }
}

// Calls `multiply_by_vectors` with the number of rows as a constant.
template <class Element, int LINES, int ROWS = REGISTER_ROWS>
void multiply_some(int num_rows, const Panels& panels, const char* block, const char* next, int pass, int64_t num_steps,
                   const Rows<Element>& rows, bool adds, float* out, int64_t out_stride) {
    if constexpr (ROWS > 1)
        if (num_rows < ROWS)
            return multiply_some<Element, LINES, ROWS - 1>(num_rows, panels, block, next, pass, num_steps, rows, adds,
                                                           out, out_stride);
    multiply_by_vectors<Element, LINES, ROWS>(panels, block, next, pass, num_steps, rows, adds, out, out_stride);
}

// Splits rows into groups of about the same size, as each reads the block once. A group of few rows would wait for its
// own sums, because there are too few to hide the latency of an operation.
constexpr int rows_of_group(int num_rows) {
    const int num_groups = (num_rows + REGISTER_ROWS - 1) / REGISTER_ROWS;
    return (num_rows + num_groups - 1) / num_groups;
}

// Whether products are computed by tiles of AMX.
#ifdef INFLIGHT_AMX
template <class Element>
constexpr bool HAS_TILES = Element::PAIR > 1;
#else
template <class Element>
constexpr bool HAS_TILES = false;
#endif

// The parts of a product's rows are multiples of this: tiles are computed as a whole.
template <class Element>
constexpr int PART_ROWS = HAS_TILES<Element> ? TILE_ROWS : 1;

#ifdef INFLIGHT_AMX
template <class Element, TileHeight HEIGHT>
void multiply_by_height(const Panels& panels, const char* block, const Ahead& next, int64_t num_steps,
                        const Rows<Element>& rows, int num_rows, bool adds, float* out, int64_t out_stride) {
    if constexpr (IS_INT8<Element>)
        multiply_int8_by_tiles<HEIGHT>(panels, block, next, num_steps, rows, num_rows, adds, out, out_stride);
    else
        multiply_by_tiles<Element, HEIGHT>(panels, block, next, num_steps, rows, adds, out, out_stride);
}
#endif

// Computes `out[r, 0..32) = rows[r] · block` for up to 32 rows of many that the block multiplies, or with `adds` adds
// that to `out`. Memory behind the last row of `out` may be overwritten.
template <class Element>
void multiply_some_of_many(const Panels& panels, const char* block, const Ahead& next, int64_t num_steps,
                           const Rows<Element>& rows, int num_rows, bool adds, float* out, int64_t out_stride) {
#ifdef INFLIGHT_AMX
    if constexpr (Element::PAIR > 1)
        multiply_by_height<Element, MANY>(panels, block, next, num_steps, rows, num_rows, adds, out, out_stride);
#endif
}

// Computes `out[r, 0..32) = rows[r] · block` for up to 32 rows, or with `adds` adds that to `out`. Memory behind the
// last row of `out` may be overwritten. `next` is what this thread will probably multiply with after the block, or
// null: as much of it is prefetched into the second-level cache.
template <class Element>
void multiply(const Panels& panels, const char* block, const char* next, int64_t num_steps,
              const Rows<Element>& rows, int num_rows, bool adds, float* out, int64_t out_stride) {
#ifdef INFLIGHT_AMX
    if constexpr (Element::PAIR > 1) {
        const auto by_height = num_rows > 16 ? multiply_by_height<Element, SOME> : multiply_by_height<Element, FEW>;
        const Ahead ahead{next, next == nullptr ? 0 : Matrix<Element>::WHOLE_STEP_BYTES / 64};
        return by_height(panels, block, ahead, num_steps, rows, num_rows, adds, out, out_stride);
    }
#endif
    const int group_rows = rows_of_group(num_rows), num_groups = (num_rows + group_rows - 1) / group_rows;
    // The last two turns prefetch, half of the lines each: the block itself is in cache by then.
    int turns_left = NUM_PASSES * num_groups;
    for (int pass = 0; pass < NUM_PASSES; ++pass)
        for (int row = 0; row < num_rows; row += group_rows, --turns_left) {
            const int count = std::min(group_rows, num_rows - row);
            const Rows<Element> some = rows.from(row, 0);
            float* const to = out + row * out_stride;
            if (next == nullptr || turns_left > 2)
                multiply_some<Element, 0>(count, panels, block, nullptr, pass, num_steps, some, adds, to, out_stride);
            else if (NUM_PASSES * num_groups > 1)
                multiply_some<Element, 1>(count, panels, block, next + 64 * (turns_left - 1), pass, num_steps, some,
                                          adds, to, out_stride);
            else
                multiply_some<Element, 2>(count, panels, block, next, pass, num_steps, some, adds, to, out_stride);
        }
}

}  // namespace inflight
