// The products and the attention of AMX with tiles that are emulated in scalar code, for processors without AMX
// (test_emulated_tiles.py, test_coded_products.py, test_attention_kernels.py). Sums have the order of the instructions'
// own.

#include "vectors.h"

#ifdef INFLIGHT_AMX
// Computes `sums[16, 16] += rows[16, 32] · columns[16, 16, 2]` by the processor.
extern "C" void add_by_processor(const void* configuration, float* sums, const void* rows, const void* columns) {
    _tile_loadconfig(configuration);
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, rows, 64);
    _tile_loadd(2, columns, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, sums, 64);
    _tile_release();
}
#else
#define INFLIGHT_AMX 1
#endif
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd

namespace {

// What a thread's tiles are configured to; the operand of LDTILECFG.
struct Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

thread_local Configuration configuration;
thread_local uint32_t tiles[8][16][16];

void tile_zero(int tile) { std::memset(tiles[tile], 0, sizeof tiles[tile]); }
void tile_loadconfig(const void* from) {
    std::memcpy(&configuration, from, sizeof configuration);
    std::memset(tiles, 0, sizeof tiles);
}
void tile_release() {}
void tile_loadd(int tile, const void* from, int64_t stride) {
    tile_zero(tile);
    for (int row = 0; row < configuration.rows[tile]; ++row)
        std::memcpy(tiles[tile][row], static_cast<const char*>(from) + row * stride, configuration.row_bytes[tile]);
}
void tile_stored(int tile, void* to, int64_t stride) {
    for (int row = 0; row < configuration.rows[tile]; ++row)
        std::memcpy(static_cast<char*>(to) + row * stride, tiles[tile][row], configuration.row_bytes[tile]);
}
// The even and the odd numbers of the depth are summed apart, from zero, and both sums are added to the tile. A product
// of two bfloat16 is exact in float32.
void tile_dpbf16ps(int to, int left, int right) {
    for (int row = 0; row < configuration.rows[to]; ++row) {
        float even[16] = {}, odd[16] = {}, sums[16];
        for (int unit = 0; unit < configuration.row_bytes[left] / 4; ++unit)
            for (int column = 0; column < 16; ++column) {
                const uint32_t a = tiles[left][row][unit], b = tiles[right][unit][column];
                even[column] += inflight::as_float(a << 16) * inflight::as_float(b << 16);
                odd[column] += inflight::as_float(a & 0xffff0000u) * inflight::as_float(b & 0xffff0000u);
            }
        std::memcpy(sums, tiles[to][row], sizeof sums);
        for (int column = 0; column < 16; ++column) sums[column] += even[column] + odd[column];
        std::memcpy(tiles[to][row], sums, sizeof sums);
    }
}

void tile_dpbssd(int to, int left, int right) {
    for (int row = 0; row < configuration.rows[to]; ++row)
        for (int unit = 0; unit < configuration.row_bytes[left] / 4; ++unit)
            for (int column = 0; column < 16; ++column)
                for (int byte = 0; byte < 32; byte += 8)
                    tiles[to][row][column] += (uint32_t)(int8_t)(tiles[left][row][unit] >> byte) *
                                              (uint32_t)(int8_t)(tiles[right][unit][column] >> byte);
}

}  // namespace

#define _tile_loadconfig tile_loadconfig
#define _tile_release tile_release
#define _tile_zero tile_zero
#define _tile_loadd tile_loadd
#define _tile_stream_loadd tile_loadd
#define _tile_stored tile_stored
#define _tile_dpbf16ps tile_dpbf16ps
#define _tile_dpbssd tile_dpbssd

#include <vector>

#include "arena.h"
#include "attention.cpp"
#include "pool.cpp"
#include "product.h"

using namespace inflight;

namespace {

template <class Factor>
void compute(const uint16_t* weights, const uint16_t* numbers, int64_t num_rows, int64_t columns, int64_t depth,
             const WeightStream& stream, float* out) {
    Matrix<Factor> matrix;
    Rows<Factor> rows;
    const auto place = [&](Cursor& cursor) {
        matrix = take_matrix<Factor>(cursor, columns, depth, 1, stream.panels());
        rows = take_rows<Factor>(cursor, num_rows, depth);
    };
    Cursor count(nullptr);
    place(count);
    Arena arena(count.used());
    Cursor cursor(arena.data());
    place(cursor);
    for (int64_t column = 0; column < columns; ++column)
        pack_column<Factor, BFloat16>(matrix, column, weights + column * depth, depth);
    std::vector<float> floats(depth);
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t i = 0; i < depth; ++i) floats[i] = BFloat16::get(numbers[row * depth + i]);
        rows.put(row, 0, floats.data(), depth);
    }
    const TilesInUse in_use;
    const auto scratch = std::make_unique<ProductScratch>(unpacked_bytes(matrix));
    const Product<Factor> product(matrix, rows, num_rows, 1, stream, nullptr);
    const auto finish = [&](int64_t block, int64_t first_row, int count, const float* tile) {
        for (int row = 0; row < count; ++row)
            std::memcpy(out + (first_row + row) * columns + block * BLOCK_COLUMNS, tile + row * BLOCK_COLUMNS,
                        BLOCK_COLUMNS * sizeof(float));
    };
    for (int64_t task = 0; task < product.num_tasks; ++task)
        product.compute(task, *scratch, PrepareNothing{}, finish);
}

}  // namespace

// Computes `out[num_rows, columns] = rows[num_rows, depth] · weights[columns, depth]` with bfloat16 numbers, or both
// rounded to int8. `columns` is a multiple of 32, `depth` of 16.
extern "C" void emulated_product(const uint16_t* weights, const uint16_t* numbers, int64_t num_rows, int64_t columns,
                                 int64_t depth, int64_t is_int8, int64_t is_interleaved, int64_t prefetch_from_rows,
                                 float* out) {
    const WeightStream stream{is_interleaved != 0, prefetch_from_rows};
    const auto product = is_int8 ? compute<Int8> : compute<BFloat16>;
    product(weights, numbers, num_rows, columns, depth, stream, out);
}

// Computes what `add_by_processor` does in the emulation.
extern "C" void add_by_emulation(const void* of_tiles, float* sums, const void* rows, const void* columns) {
    _tile_loadconfig(of_tiles);
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, rows, 64);
    _tile_loadd(2, columns, 64);
    _tile_dpbf16ps(0, 1, 2);
    _tile_stored(0, sums, 64);
}

#include "coded_products.cpp"
