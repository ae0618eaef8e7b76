// A product of all rows of a step with a matrix, distributed over threads.

#pragma once

#include "arena.h"
#include "codes.h"
#include "matmul.h"
#include "pool.h"

namespace inflight {

// How threads read packed weights; streams.py's `WeightStream`. The results are the same bit by bit.
struct WeightStream {
    bool is_interleaved;         // panels are interleaved by unit
    int64_t prefetch_from_rows;  // with so many rows, the next piece of a block is prefetched while one is multiplied

    Panels panels() const { return is_interleaved ? INTERLEAVED : APART; }
};

// One thread's memory for products.
struct ProductScratch {
    static constexpr int64_t TILE_NUMBERS = 64 << 10;

    // `unpacked_bytes` are the most of a matrix that is multiplied.
    explicit ProductScratch(int64_t unpacked_bytes) { unpacked.reserve(unpacked_bytes); }

    alignas(64) float tile[TILE_NUMBERS];  // sums of a task
    ThreadBuffer unpacked;                 // a block with codes that has become a plain one
};

// Rows as the parts of a matrix with codes read them. The first row of a product is `first_row` of them.
template <class Element>
struct PreparedRows {
    const ViewedRows<Element>* rows = nullptr;
    const std::vector<RowView>* views = nullptr;
    int64_t first_row = 0;
};

// Takes memory for a matrix and for rows. That of rows must be zero. With a mixture, blocks are as it describes them.
template <class Element>
Matrix<Element> take_matrix(Cursor& cursor, int64_t columns, int64_t depth, int64_t blocks_at_once, Panels panels,
                            Mixture* mixture = nullptr) {
    Matrix<Element> matrix;
    matrix.panels = panels;
    matrix.num_blocks = round_up(columns, blocks_at_once * BLOCK_COLUMNS) / BLOCK_COLUMNS;
    matrix.num_steps = padded_depth<Element>(depth) / STEP_DEPTH<Element>;
    matrix.blocks_at_once = blocks_at_once;
    matrix.block_bytes = matrix.num_steps * matrix.WHOLE_STEP_BYTES;
    if (mixture == nullptr) {
        matrix.num_bytes = matrix.num_blocks * matrix.block_bytes;
        matrix.blocks = cursor.take<char>(matrix.num_bytes);
    } else {
        matrix.num_bytes = mixture->take(cursor, matrix.block_bytes);
        matrix.mixture = mixture;
        matrix.mixed = mixture->blocks();
    }
    return matrix;
}

// The memory of a task of many rows for a block that it unpacks.
template <class Element>
int64_t unpacked_bytes(const Matrix<Element>& matrix) {
    return ROUNDS_WEIGHTS<Element> && matrix.mixed != nullptr ? matrix.block_bytes : 0;
}

template <class Element>
Rows<Element> take_rows(Cursor& cursor, int64_t num_rows, int64_t depth) {
    Rows<Element> rows;
    // 64 bytes more than the depth: with a power of two all rows would share a few cache sets.
    rows.stride = padded_depth<Element>(depth) + STEP_DEPTH<Element>;
    rows.numbers = cursor.take<typename Element::Number>((num_rows + TILE_ROWS) * rows.stride);
    if constexpr (IS_INT8<Element>)
        rows.scales = cursor.take<GroupScale>((num_rows + TILE_ROWS) * rows.scale_stride());
    return rows;
}

// What a product does before it computes a tile whose results need no memory that other threads wrote.
struct PrepareNothing {
    void operator()(int64_t, int64_t, int) const {}
};

// rows · matrix, in passes over the columns. A pass has as many rows as stay in the second-level cache meanwhile. A
// task has some blocks of columns and some rows of a pass: so few that all threads end a product at about the same
// time. The tasks of a column are neighbours, so that its blocks come from memory once.
//
// A task multiplies all its blocks with a tile of rows before the next tile, so that the sums are still in the
// first-level cache when `finish` reads them. A deep block is multiplied in pieces, each as long as may be prefetched
// at once. With AMX, which is faster than the second-level cache, a task of several tiles multiplies a piece that fits
// the first-level cache with all of them instead, and unpacks codes once. `finish` then takes a tile after its last
// piece, while what `prepare` has asked for comes during the products.
template <class Element>
class Product {
  public:
    // `after` is the matrix of the next product, or null. A matrix with codes needs `prepared`.
    Product(const Matrix<Element>& matrix, const Rows<Element>& rows, int64_t num_rows, int num_threads,
            const WeightStream& stream, const Blocks* after, const PreparedRows<Element>& prepared = {})
        : matrix_(matrix),
          rows_(rows),
          prepared_(prepared),
          blocks_at_once_(matrix.blocks_at_once),
          stride_(blocks_at_once_ * BLOCK_COLUMNS),
          num_rows_(num_rows),
          num_columns_(matrix.num_blocks / blocks_at_once_),
          num_passes_(std::max<int64_t>(1, (num_rows + most_rows_of_pass() - 1) / most_rows_of_pass())),
          rows_of_pass_(rows_of_part(num_rows, num_passes_)),
          rows_of_task_(rows_of_part(rows_of_pass_, tasks_of_column(num_threads))),
          tasks_of_column_((rows_of_pass_ + rows_of_task_ - 1) / rows_of_task_),
          num_threads_(num_threads),
          prefetches_(num_rows >= stream.prefetch_from_rows),
          after_(after),
          num_tasks(num_rows == 0 ? 0 : num_passes_ * num_columns_ * tasks_of_column_) {}

    // Calls `finish(first_block, first_row, num_rows, tile)` with tiles of `blocks_at_once * 32` columns. Some time
    // before, calls `prepare(first_block, first_row, num_rows)`.
    template <class Prepare, class Finish>
    void compute(int64_t task, ProductScratch& scratch, const Prepare& prepare, const Finish& finish) const {
        const int64_t first_block = column_of(task) * blocks_at_once_;
        const int64_t first_row = task / (num_columns_ * tasks_of_column_) * rows_of_pass_;
        const int64_t start = first_row + task % tasks_of_column_ * rows_of_task_;
        const int64_t end = std::min({num_rows_, first_row + rows_of_pass_, start + rows_of_task_});
        const char* const next_task = probably_next(task);
        if constexpr (HAS_TILES<Element>)
            if (end - start > TILE_ROWS && !has_rounded_rows())
                return compute_many(first_block, start, end, next_task, scratch, prepare, finish);
        const int64_t rows_of_tile = rows_of_part(end - start, (end - start + TILE_ROWS - 1) / TILE_ROWS);
        for (int64_t row = start; row < end; row += rows_of_tile) {
            const int num_rows = (int)std::min(rows_of_tile, end - row);
            prepare(first_block, row, num_rows);
            for (int64_t i = 0; i < blocks_at_once_; ++i) {
                const CodeFormat* const format = format_of(first_block + i);
                const char* next = nullptr;
                if (end - start <= TILE_ROWS && i + 1 < blocks_at_once_)
                    next = matrix_.block(first_block + i + 1);
                else if (row + rows_of_tile >= end && next_task != nullptr)
                    // With several tiles, the blocks of this task have been read already.
                    next = next_task + (end - start <= TILE_ROWS ? 0 : i * bytes_of(format));
                float* const out = scratch.tile + i * BLOCK_COLUMNS;
                if (format == nullptr)
                    multiply_block(matrix_.block(first_block + i), prefetches_ ? next : nullptr, row, num_rows, out);
                else
                    multiply_codes_of_block(matrix_.block(first_block + i), *format, next, row, num_rows, out);
            }
            finish(first_block, row, num_rows, scratch.tile);
        }
    }

  private:
    // Of activations, in the second-level cache. Processors with AMX have one of 2 MB.
    static constexpr int64_t CACHED_BYTES = HAS_TILES<Element> ? 1 << 20 : 768 << 10;
    static constexpr int64_t AHEAD_STEPS = 64;          // of a piece that is prefetched
    static constexpr int64_t NEAR_STEPS = 18;           // of a piece that stays in the first-level cache
    static constexpr int64_t TASKS_OF_THREAD = 32;      // in a product of many rows
    static constexpr int64_t LEAST_TILES = 2;           // of a task, if there are several of a column

    int64_t most_rows_of_pass() const {
        return std::max<int64_t>(CACHED_BYTES / rows_.row_bytes() / TILE_ROWS * TILE_ROWS, TILE_ROWS);
    }

    // As many tasks as give each thread enough of them, each of at least some tiles.
    int64_t tasks_of_column(int num_threads) const {
        const int64_t wanted = TASKS_OF_THREAD * num_threads / std::max<int64_t>(1, num_passes_ * num_columns_) + 1;
        return std::clamp<int64_t>(rows_of_pass_ / (LEAST_TILES * TILE_ROWS), 1, wanted);
    }

    // Returns the rows of one of `count` parts of about the same size. A part of few rows would take nearly as long as
    // one of many: it waits for its own sums, and for the blocks that the last tile prefetches.
    int64_t rows_of_part(int64_t num_rows, int64_t count) const {
        if (num_rows <= 0) return 1;
        return round_up((num_rows + count - 1) / count, PART_ROWS<Element>);
    }

    int64_t column_of(int64_t task) const { return task / tasks_of_column_ % num_columns_; }

    // The first block of the task that this thread gets next if tasks take equally long; null if it has been read.
    const char* probably_next(int64_t task) const {
        const int64_t next = task + num_threads_;
        if (next < num_tasks)
            return column_of(next) == column_of(task) ? nullptr : matrix_.block(column_of(next) * blocks_at_once_);
        if (after_ == nullptr) return nullptr;
        return after_->block(std::min((next - num_tasks) * after_->blocks_at_once, after_->num_blocks - 1));
    }

    // `compute` by tiles, for several of them.
    template <class Prepare, class Finish>
    void compute_many(int64_t first_block, int64_t start, int64_t end, const char* next_task, ProductScratch& scratch,
                      const Prepare& prepare, const Finish& finish) const {
        const int64_t rows_at_once = ProductScratch::TILE_NUMBERS / stride_ / TILE_ROWS * TILE_ROWS;
        for (int64_t first = start; first < end; first += rows_at_once) {
            const int64_t last = std::min(end, first + rows_at_once);
            for (int64_t i = 0; i < blocks_at_once_; ++i) {
                const bool is_last = i + 1 == blocks_at_once_;
                const int64_t num_bytes = bytes_of(format_of(first_block + i));
                multiply_many(
                    first_block + i, last == end && next_task != nullptr ? next_task + i * num_bytes : nullptr,
                    num_bytes, first, last, scratch, scratch.tile + i * BLOCK_COLUMNS,
                    [&](int64_t row, int num_rows) {
                        if (is_last) prepare(first_block, row, num_rows);
                    },
                    [&](int64_t row, int num_rows) {
                        if (is_last) finish(first_block, row, num_rows, scratch.tile + (row - first) * stride_);
                    });
            }
        }
    }

    // Multiplies a block with rows [first, last), and prefetches `next_bytes` of the next one: spread over the tiles of
    // rows, except the first one, whose time the block itself needs to come from memory. That takes few instructions,
    // so a stream without prefetching has it too. Calls `before(row, num_rows)` before a tile of rows gets its last
    // products, and `after` then.
    template <class Before, class After>
    void multiply_many(int64_t index, const char* next, int64_t next_bytes, int64_t first, int64_t last,
                       ProductScratch& scratch, float* out, const Before& before, const After& after) const {
        const char* block = matrix_.block(index);
        Panels panels = matrix_.panels;
        Rows<Element> rows = rows_;
        if constexpr (ROUNDS_WEIGHTS<Element>)
            if (const CodeFormat* const format = format_of(index); format != nullptr) {
                unpack_block(*format, block, matrix_.num_steps, scratch.unpacked.data());
                block = scratch.unpacked.data(), panels = APART;
                rows = viewed(*format);
            }
        const int64_t num_pieces = (matrix_.num_steps + NEAR_STEPS - 1) / NEAR_STEPS;
        const int64_t ahead_steps = std::max<int64_t>(1, (last - first - 1) / TILE_ROWS) * matrix_.num_steps;
        Ahead ahead{next, next == nullptr ? 0 : (next_bytes + 64 * ahead_steps - 1) / (64 * ahead_steps)};
        for (int64_t piece = 0; piece < num_pieces; ++piece) {
            const int64_t step = piece * matrix_.num_steps / num_pieces;
            const int64_t num_steps = (piece + 1) * matrix_.num_steps / num_pieces - step;
            for (int64_t row = first; row < last; row += TILE_ROWS) {
                const int num_rows = (int)std::min<int64_t>(TILE_ROWS, last - row);
                if (piece + 1 == num_pieces) before(row, num_rows);
                multiply_some_of_many<Element>(panels, block + step * matrix_.WHOLE_STEP_BYTES,
                                               row > first ? ahead : Ahead{}, num_steps, rows.from(row, step),
                                               num_rows, piece > 0, out + (row - first) * stride_, stride_);
                if (row > first) ahead = ahead.after(num_steps);
                if (piece + 1 == num_pieces) after(row, num_rows);
            }
        }
    }

    void multiply_block(const char* block, const char* next, int64_t row, int num_rows, float* out) const {
        const int64_t num_pieces = (matrix_.num_steps + AHEAD_STEPS - 1) / AHEAD_STEPS;
        for (int64_t piece = 0; piece < num_pieces; ++piece) {
            const int64_t first = piece * matrix_.num_steps / num_pieces;
            const int64_t last = (piece + 1) * matrix_.num_steps / num_pieces;
            const char* following = piece + 1 < num_pieces ? block + last * matrix_.WHOLE_STEP_BYTES : next;
            multiply<Element>(matrix_.panels, block + first * matrix_.WHOLE_STEP_BYTES,
                              next == nullptr ? nullptr : following, last - first, rows_.from(row, first), num_rows,
                              piece > 0, out, stride_);
        }
    }

    bool has_rounded_rows() const { return matrix_.mixture != nullptr && matrix_.mixture->has_rounded_rows(); }

    // Of a block with codes, or null.
    const CodeFormat* format_of(int64_t block) const {
        return matrix_.mixed == nullptr ? nullptr : matrix_.mixed[block].format;
    }

    int64_t bytes_of(const CodeFormat* format) const {
        return format == nullptr ? matrix_.block_bytes : format->block_bytes();
    }

    // The rows as the codes of a format multiply them.
    Rows<Element> viewed(const CodeFormat& format) const {
        if constexpr (IS_INT8<Element>)
            return rows_;
        else
            return prepared_.rows->rows(*prepared_.views, format.view, rows_, prepared_.first_row);
    }

    // The next block is always prefetched.
    void multiply_codes_of_block(const char* block, const CodeFormat& format, const char* next, int64_t row,
                                 int num_rows, float* out) const {
        if constexpr (!IS_INT8<Element>) {
            const float* sums = prepared_.rows->sums(format.view);
            if (format.has_rounded_rows)
                return multiply_rounded_rows(format, block, next, prepared_.rows->rounded(format.view).from(row),
                                             num_rows, out, stride_);
            multiply_coded<Element>(format, block, next, matrix_.num_steps, viewed(format).from(row, 0),
                                    sums == nullptr ? nullptr : sums + (prepared_.first_row + row) * format.num_groups,
                                    num_rows, out, stride_);
        }
    }

    const Matrix<Element>& matrix_;
    const Rows<Element> rows_;
    const PreparedRows<Element> prepared_;
    const int64_t blocks_at_once_, stride_, num_rows_, num_columns_;
    const int64_t num_passes_, rows_of_pass_, rows_of_task_, tasks_of_column_;
    const int num_threads_;
    const bool prefetches_;
    const Blocks* const after_;

  public:
    const int64_t num_tasks;
};

}  // namespace inflight
