// Times of products with weights that come from memory, to choose how they are read (executor/cpu/streams.py).

#include <atomic>
#include <memory>
#include <vector>

#include "arena.h"
#include "product.h"

namespace inflight {

// Equal matrices that are multiplied one after the other, as the layers of a model are.
class Trial {
  public:
    virtual ~Trial() = default;
    // Processor seconds per thread.
    virtual double seconds(Pool& pool, int64_t num_rows, WeightStream stream) = 0;
    virtual double read_seconds(Pool& pool) = 0;
};

// The fields of streams.py's structure, in the same order.
struct TrialShape {
    int64_t num_matrices, columns, depth, blocks_at_once, most_rows, is_bfloat16, is_int8;
    int64_t bits, group_size, has_shifts, has_rounded_rows, is_float;  // of codes; 0 bits: no codes
};

template <class Element>
class TrialOf final : public Trial {
  public:
    explicit TrialOf(const TrialShape& shape) : matrices_(shape.num_matrices), mixtures_(shape.num_matrices) {
        if (shape.bits > 0)
            for (Mixture& mixture : mixtures_) declare(shape, mixture);
        Cursor count(nullptr);
        place(shape, count);
        arena_ = std::make_unique<Arena>(count.used());
        std::memset(arena_->data(), SOME_BYTE, count.used());
        Cursor cursor(arena_->data());
        place(shape, cursor);
    }

    double seconds(Pool& pool, int64_t num_rows, WeightStream stream) override {
        for (Matrix<Element>& matrix : matrices_)
            matrix.panels = stream.panels();
        while ((int)scratch_.size() < pool.num_threads())
            scratch_.push_back(std::make_unique<ProductScratch>(unpacked_bytes(matrices_[0])));
        std::vector<Product<Element>> products;
        for (size_t i = 0; i < matrices_.size(); ++i)
            products.emplace_back(matrices_[i], rows_, num_rows, pool.num_threads(), stream,
                                  &matrices_[(i + 1) % matrices_.size()], prepared(i));
        const int64_t num_tasks = products[0].num_tasks, num_all = num_tasks * (int64_t)products.size();
        return processor_seconds(pool, num_all, [&](int64_t task, int thread) {
            products[task / num_tasks].compute(task % num_tasks, *scratch_[thread], PrepareNothing{},
                                               [](int64_t, int64_t, int, const float*) {});
        });
    }

    double read_seconds(Pool& pool) override {
        std::atomic<int64_t> sink{0};
        const int64_t num_blocks = matrices_[0].num_blocks;
        return processor_seconds(pool, num_blocks * (int64_t)matrices_.size(), [&](int64_t task, int) {
            const Matrix<Element>& matrix = matrices_[task / num_blocks];
            const auto* from = reinterpret_cast<const float*>(matrix.block(task % num_blocks));
            Ints sums[SUMS] = {};
            for (int64_t i = 0; i < matrix.num_bytes / num_blocks / 4; i += SUMS * WIDTH)
                for (int k = 0; k < SUMS; ++k) sums[k] += (Ints)load(from + i + k * WIDTH);
            for (const Ints& some : sums) sink += some[0];
        });
    }

  private:
    static constexpr int SUMS = 8;

    // Calls `work(task, thread)` for every task, without the waiting at the end that `Team::each` has.
    template <class Work>
    static double processor_seconds(Pool& pool, int64_t num_tasks, const Work& work) {
        std::atomic<int64_t> next{0}, nanoseconds{0};
        pool.run([&](Team& team) {
            const TilesInUse tiles;
            const int64_t began = processor_nanoseconds();
            for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < num_tasks;)
                work(task, team.thread);
            nanoseconds += processor_nanoseconds() - began;
        });
        return 1e-9 * (double)nanoseconds / pool.num_threads();
    }

    static constexpr int SOME_BYTE = 0x3c;  // small numbers in every type

    void place(const TrialShape& shape, Cursor& cursor) {
        for (size_t i = 0; i < matrices_.size(); ++i)
            matrices_[i] = take_matrix<Element>(cursor, shape.columns, shape.depth, shape.blocks_at_once, APART,
                                                shape.bits > 0 ? &mixtures_[i] : nullptr);
        rows_ = take_rows<Element>(cursor, shape.most_rows, shape.depth);
    }

    void declare(const TrialShape& shape, Mixture& mixture) {
        CodedPart part{};
        part.shifts = shape.has_shifts ? this : nullptr;
        part.num_columns = shape.columns, part.depth = shape.depth, part.bits = shape.bits;
        part.group_size = shape.group_size, part.num_groups = shape.depth / shape.group_size, part.scale_size = 2;
        part.has_rounded_rows = shape.has_rounded_rows, part.is_float = shape.is_float;
        mixture.add<Element>(part, round_up(shape.columns, shape.blocks_at_once * BLOCK_COLUMNS) / BLOCK_COLUMNS,
                             [](int64_t column) { return column / BLOCK_COLUMNS; });
        if constexpr (!IS_INT8<Element>) {
            typename ViewedRows<Element>::Size size;
            size.include(mixture.views());
            viewed_.reserve(size, shape.most_rows);
        }
    }

    PreparedRows<Element> prepared(size_t index) const {
        if constexpr (IS_INT8<Element>) return {};
        else return {&viewed_, &mixtures_[index].views()};
    }

    std::vector<Matrix<Element>> matrices_;
    std::vector<Mixture> mixtures_;
    ViewedRows<Element> viewed_;
    Rows<Element> rows_;
    std::unique_ptr<Arena> arena_;
    std::vector<std::unique_ptr<ProductScratch>> scratch_;
};

}  // namespace inflight

using namespace inflight;

extern "C" {

// Returns null if there is not enough memory.
void* inflight_trial_new(const TrialShape* shape) {
    try {
        if (shape->is_int8) return static_cast<Trial*>(new TrialOf<Int8>(*shape));
        if (shape->is_bfloat16) return static_cast<Trial*>(new TrialOf<BFloat16>(*shape));
        return static_cast<Trial*>(new TrialOf<Float32>(*shape));
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void inflight_trial_free(void* trial) { delete static_cast<Trial*>(trial); }

// Returns the processor seconds per thread that the products of `num_rows` rows with all matrices take.
double inflight_trial_seconds(void* trial, void* pool, int64_t num_rows, int64_t is_interleaved,
                              int64_t prefetch_from_rows) {
    return static_cast<Trial*>(trial)->seconds(*static_cast<Pool*>(pool), num_rows,
                                               {is_interleaved != 0, prefetch_from_rows});
}

// Returns the processor seconds per thread that reading all matrices takes.
double inflight_trial_read_seconds(void* trial, void* pool) {
    return static_cast<Trial*>(trial)->read_seconds(*static_cast<Pool*>(pool));
}

}  // extern "C"
