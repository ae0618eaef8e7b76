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

    static constexpr int64_t PIECE_BYTES = 16 << 10;  // of codes, in the first-level cache besides rows that pass

    alignas(64) float tile[TILE_NUMBERS];  // sums of a task
    alignas(64) char unpacked[PIECE_BYTES];
};

// Rows as the parts of a matrix with codes read them.
template <class Element>
struct PreparedRows {
    const ViewedRows<Element>* rows = nullptr;
    const std::vector<RowView>* views = nullptr;
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

// rows · matrix. A task has some blocks of columns and as many rows as stay in the second-level cache while the
// columns pass. A block is multiplied in pieces. With many rows, a piece stays in the first-level cache until all rows
// have passed; with few rows, it is as long as may be prefetched at once.
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
          rows_of_task_(fitting_rows()),
          num_columns_(matrix.num_blocks / blocks_at_once_),
          num_threads_(num_threads),
          prefetches_(num_rows >= stream.prefetch_from_rows),
          after_(after),
          num_tasks((num_rows + rows_of_task_ - 1) / rows_of_task_ * num_columns_) {}

    // Calls `finish(first_block, first_row, num_rows, tile)` with tiles of `blocks_at_once * 32` columns.
    template <class Finish>
    void compute(int64_t task, ProductScratch& scratch, const Finish& finish) const {
        const int64_t first_block = task % num_columns_ * blocks_at_once_, start = task / num_columns_ * rows_of_task_;
        const int64_t end = std::min(num_rows_, start + rows_of_task_);
        for (int64_t i = 0; i < blocks_at_once_; ++i) {
            const char* next = i + 1 < blocks_at_once_ ? matrix_.block(first_block + i + 1) : probably_next(task);
            float* const out = scratch.tile + i * BLOCK_COLUMNS;
            if constexpr (!IS_INT8<Element>)
                if (matrix_.mixed != nullptr && matrix_.mixed[first_block + i].format != nullptr) {
                    multiply_codes_of_block(matrix_.mixed[first_block + i], next, start, end, scratch, out);
                    continue;
                }
            multiply_block(matrix_.block(first_block + i), prefetches_ ? next : nullptr, start, end, out);
        }
        for (int64_t row = start; row < end; row += TILE_ROWS)
            finish(first_block, row, rows_of_tile(row, end), scratch.tile + (row - start) * stride_);
    }

  private:
    static constexpr int64_t CACHED_BYTES = 768 << 10;  // of activations, in the second-level cache
    static constexpr int64_t CACHED_STEPS = 9;          // of a piece in the first-level cache, besides rows that pass
    static constexpr int64_t AHEAD_STEPS = 64;          // of a piece that is prefetched

    int64_t fitting_rows() const {
        const int64_t fitting = std::min(CACHED_BYTES / rows_.row_bytes(), ProductScratch::TILE_NUMBERS / stride_);
        return std::max<int64_t>(fitting / TILE_ROWS * TILE_ROWS, TILE_ROWS);
    }

    static int rows_of_tile(int64_t row, int64_t end) { return (int)std::min<int64_t>(TILE_ROWS, end - row); }

    // The first block of the task that this thread gets next if tasks take equally long.
    const char* probably_next(int64_t task) const {
        const int64_t next = task + num_threads_;
        if (next < num_tasks) return matrix_.block(next % num_columns_ * blocks_at_once_);
        if (after_ == nullptr) return nullptr;
        return after_->block(std::min((next - num_tasks) * after_->blocks_at_once, after_->num_blocks - 1));
    }

    void multiply_block(const char* block, const char* next, int64_t start, int64_t end, float* out) const {
        const int64_t most_steps = end - start > TILE_ROWS ? CACHED_STEPS : AHEAD_STEPS;
        const int64_t num_pieces = (matrix_.num_steps + most_steps - 1) / most_steps;
        for (int64_t piece = 0; piece < num_pieces; ++piece) {
            const int64_t first = piece * matrix_.num_steps / num_pieces;
            const int64_t last = (piece + 1) * matrix_.num_steps / num_pieces;
            const char* following = piece + 1 < num_pieces ? block + last * matrix_.WHOLE_STEP_BYTES : next;
            for (int64_t row = start; row < end; row += TILE_ROWS)
                multiply<Element>(matrix_.panels, block + first * matrix_.WHOLE_STEP_BYTES,
                                  row + TILE_ROWS < end || next == nullptr ? nullptr : following, last - first,
                                  rows_.from(row, first), rows_of_tile(row, end), piece > 0,
                                  out + (row - start) * stride_, stride_);
        }
    }

    // With many rows, codes of 8 bits are unpacked once for all of them; those of 4 bits take two instructions for 32
    // numbers. The next block is always prefetched.
    void multiply_codes_of_block(const MixedBlock& block, const char* next, int64_t start, int64_t end,
                                 ProductScratch& scratch, float* out) const {
        const CodeFormat& format = *block.format;
        const Rows<Element>& rows = prepared_.rows->rows(*prepared_.views, format.view, rows_);
        const float* sums = prepared_.rows->sums(format.view);
        const bool has_many_rows = end - start > TILE_ROWS, unpacks = has_many_rows && format.bits == 8;
        const int64_t unpacked_bytes = format.group_size * BLOCK_COLUMNS * (int64_t)sizeof(typename Element::Number);
        const int64_t piece_bytes = unpacks ? unpacked_bytes : format.group_bytes();
        const int64_t most_groups = has_many_rows ? ProductScratch::PIECE_BYTES / piece_bytes : format.num_groups;
        for (int64_t first = 0; first < format.num_groups; first += most_groups) {
            CodedPiece piece{format, block.data, first, std::min(most_groups, format.num_groups - first)};
            if (unpacks) piece.unpacked = unpack_codes<Element>(piece, scratch.unpacked);
            for (int64_t row = start; row < end; row += TILE_ROWS) {
                Rows<Element> some = rows.from(row, 0);
                some.numbers += first * format.group_size;
                const bool is_last = row + TILE_ROWS >= end;
                multiply_coded<Element>(piece, next != nullptr && is_last ? next + first * format.group_bytes() : nullptr,
                                        some, sums == nullptr ? nullptr : sums + row * format.num_groups + first,
                                        rows_of_tile(row, end), first > 0, out + (row - start) * stride_, stride_);
            }
        }
    }

    const Matrix<Element>& matrix_;
    const Rows<Element> rows_;
    const PreparedRows<Element> prepared_;
    const int64_t blocks_at_once_, stride_, num_rows_, rows_of_task_, num_columns_;
    const int num_threads_;
    const bool prefetches_;
    const Blocks* const after_;

  public:
    const int64_t num_tasks;
};

}  // namespace inflight
