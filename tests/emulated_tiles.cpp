// Products by AMX whose tiles are emulated in scalar code, for processors without AMX (test_emulated_tiles.py).

#include "vectors.h"

#define INFLIGHT_AMX 1
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps

namespace {

uint32_t tiles[8][16][16];

void tile_loadconfig(const void*) {}
void tile_release() {}
void tile_zero(int tile) { std::memset(tiles[tile], 0, sizeof tiles[tile]); }
void tile_loadd(int tile, const void* from, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride, 64);
}
void tile_stored(int tile, void* to, int64_t stride) {
    for (int row = 0; row < 16; ++row) std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], 64);
}
void tile_dpbf16ps(int to, int left, int right) {
    for (int row = 0; row < 16; ++row)
        for (int unit = 0; unit < 16; ++unit)
            for (int column = 0; column < 16; ++column) {
                const uint32_t a = tiles[left][row][unit], b = tiles[right][unit][column];
                float sum;
                std::memcpy(&sum, &tiles[to][row][column], sizeof sum);
                sum += inflight::as_float(a << 16) * inflight::as_float(b << 16);
                sum += inflight::as_float(a & 0xffff0000u) * inflight::as_float(b & 0xffff0000u);
                std::memcpy(&tiles[to][row][column], &sum, sizeof sum);
            }
}

}  // namespace

#define _tile_loadconfig tile_loadconfig
#define _tile_release tile_release
#define _tile_zero tile_zero
#define _tile_loadd tile_loadd
#define _tile_stored tile_stored
#define _tile_dpbf16ps tile_dpbf16ps

#include "arena.h"
#include "product.h"

using namespace inflight;

// Computes `out[num_rows, columns] = rows[num_rows, depth] · weights[columns, depth]` with bfloat16 numbers, `columns` a
// multiple of 32.
extern "C" void emulated_product(const uint16_t* weights, const uint16_t* numbers, int64_t num_rows, int64_t columns,
                                 int64_t depth, int64_t is_int8, int64_t is_interleaved, int64_t prefetch_from_rows,
                                 float* out) {
    const WeightStream stream{is_interleaved != 0, prefetch_from_rows};
    Matrix<BFloat16> matrix;
    matrix.num_blocks = columns / BLOCK_COLUMNS;
    matrix.num_steps = padded_depth<BFloat16>(depth) / 32;
    matrix.panels = stream.panels(is_int8);
    Rows<BFloat16> rows;
    rows.stride = padded_depth<BFloat16>(depth);
    Arena arena(columns * (rows.stride * 2 + 4) + (num_rows + TILE_ROWS) * rows.stride * 2 + 4096);
    Cursor cursor(arena.data());
    if (is_int8) matrix.scales = cursor.take<float>(columns);
    matrix.blocks = cursor.take<char>(matrix.num_blocks * matrix.block_bytes());
    rows.numbers = cursor.take<uint16_t>((num_rows + TILE_ROWS) * rows.stride);
    for (int64_t column = 0; column < columns; ++column) pack_column(matrix, column, weights + column * depth, depth);
    for (int64_t row = 0; row < num_rows; ++row) std::memcpy(rows.row(row), numbers + row * depth, depth * 2);
    const auto scratch = std::make_unique<ProductScratch>();
    scratch->wide.reserve(matrix.num_steps * STEP_BYTES);
    const Product<BFloat16> product(matrix, rows, num_rows, 1, stream, nullptr);
    for (int64_t task = 0; task < product.num_tasks; ++task)
        product.compute(task, *scratch, [&](int64_t block, int64_t first_row, int count, const float* tile) {
            for (int row = 0; row < count; ++row)
                std::memcpy(out + (first_row + row) * columns + block * BLOCK_COLUMNS, tile + row * BLOCK_COLUMNS,
                            BLOCK_COLUMNS * sizeof(float));
        });
}
