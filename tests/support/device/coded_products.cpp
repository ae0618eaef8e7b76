// Products with matrices that have codes, alone (test_coded_products.py).

#include <vector>

#include "arena.h"
#include "product.h"

using namespace inflight;

namespace {

template <class Element>
void compute(const CodedPart* parts, int64_t num_parts, const typename Element::Number* plain, int64_t columns,
             int64_t depth, const typename Element::Number* numbers, int64_t num_rows, float* out) {
    const WeightStream stream{true, 1};
    const auto block_of = [](int64_t column) { return column / BLOCK_COLUMNS; };
    Mixture mixture;
    for (int64_t i = 0; i < num_parts; ++i) mixture.add<Element>(parts[i], columns / BLOCK_COLUMNS, block_of);
    Matrix<Element> matrix;
    Rows<Element> rows;
    const auto place = [&](Cursor& cursor) {
        matrix = take_matrix<Element>(cursor, columns, depth, 1, stream.panels(), &mixture);
        rows = take_rows<Element>(cursor, num_rows, depth);
    };
    Cursor count(nullptr);
    place(count);
    Arena arena(count.used());
    Cursor cursor(arena.data());
    place(cursor);
    for (int64_t column = 0; column < columns; ++column)
        if (matrix.mixed[block_of(column)].format == nullptr)
            pack_column<Element, Element>(matrix, column, plain + column * depth, depth);
    for (int64_t i = 0; i < num_parts; ++i)
        for (int64_t column = 0; column < parts[i].num_columns; ++column)
            mixture.pack_column(parts[i], column, parts[i].first_column + column);
    ViewedRows<Element> viewed;
    typename ViewedRows<Element>::Size size;
    size.include(mixture.views());
    viewed.reserve(size, num_rows);
    for (int64_t row = 0; row < num_rows; ++row) {
        std::memcpy(rows.row(row), numbers + row * depth, depth * sizeof *numbers);
        viewed.put(mixture.views(), rows, row);
    }
    const TilesInUse tiles;
    const auto scratch = std::make_unique<ProductScratch>(unpacked_bytes(matrix));
    const Product<Element> product(matrix, rows, num_rows, 1, stream, nullptr, {&viewed, &mixture.views()});
    for (int64_t task = 0; task < product.num_tasks; ++task)
        product.compute(task, *scratch, PrepareNothing{},
                        [&](int64_t block, int64_t first_row, int count, const float* tile) {
                            for (int row = 0; row < count; ++row)
                                std::memcpy(out + (first_row + row) * columns + block * BLOCK_COLUMNS,
                                            tile + row * BLOCK_COLUMNS, BLOCK_COLUMNS * sizeof(float));
                        });
}

}  // namespace

// Computes `out[num_rows, columns] = numbers[num_rows, depth] · matrix`. The matrix is plain where no part is. Numbers
// are bfloat16 or float32. Parts begin at multiples of 32 columns.
extern "C" void coded_product(const CodedPart* parts, int64_t num_parts, const void* plain, int64_t columns,
                              int64_t depth, const void* numbers, int64_t num_rows, int64_t is_bfloat16, float* out) {
    if (is_bfloat16)
        compute<BFloat16>(parts, num_parts, static_cast<const uint16_t*>(plain), columns, depth,
                          static_cast<const uint16_t*>(numbers), num_rows, out);
    else
        compute<Float32>(parts, num_parts, static_cast<const float*>(plain), columns, depth,
                         static_cast<const float*>(numbers), num_rows, out);
}
