// Paged attention: writing the KV of new tokens, and attending over the context of a sequence.
//
// The KV of a layer is kept in groups of 16 tokens, so that one vector holds one number of 16 tokens and no sum runs
// across a vector. DIM is the head size rounded up to 16; the rest is zero.
//
//     K  [group, kv_head, DIM / PAIR, 16 tokens, PAIR]      scores of 16 tokens at once, summed over the head
//     V  [group, kv_head, 16 / PAIR, DIM, PAIR]             16 numbers of the output at once, summed over tokens
//
// A work item is some query rows of one sequence that share a KV head: heads of the group, then tokens. It processes
// the context CHUNK tokens at a time with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022): running
// maximum, running sum, and output rescaled when the maximum grows. All sums are float32. The products are computed
// with vectors, or with AMX where available (attention_tiles.h).
//
// Invariants: groups are filled from their first token on. V is cleared at that point, so that a NaN left in a group is
// never multiplied by a weight of zero. Masked scores are a large finite number: their contribution before the first
// real score is rescaled to 0.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "matmul.h"
#include "pool.h"
#include "vectors.h"

namespace inflight {

constexpr int MAX_DIM = 512;
constexpr int ROW_STRIDE = MAX_DIM + 2 * LANES;  // not a power of two, so that rows do not share cache sets
constexpr int CHUNK = 128;
constexpr int CHUNK_GROUPS = CHUNK / LANES;
constexpr float MASKED = -1e30f;  // stays finite when scaled
#ifdef INFLIGHT_AMX
constexpr int MAX_ROWS = 128;
#else
constexpr int MAX_ROWS = 24;
#endif

// The KV of a layer.
struct LayerKv {
    void *keys = nullptr, *values = nullptr;
    int64_t num_kv_heads = 0, head_dim = 0;

    int64_t dim() const { return round_up(head_dim, LANES); }
    template <class Element>
    typename Element::Number* group(void* cache, int64_t index, int64_t head) const {
        return static_cast<typename Element::Number*>(cache) + (index * num_kv_heads + head) * LANES * dim();
    }
};

// Clears the values of a group whose first token is about to be written.
template <class Element>
void clear_values(const LayerKv& kv, int64_t slot) {
    std::memset(kv.group<Element>(kv.values, slot / LANES, 0), 0,
                kv.num_kv_heads * LANES * kv.dim() * sizeof(typename Element::Number));
}

template <class Element>
void write_key(const LayerKv& kv, int64_t slot, int64_t head, const typename Element::Number* key) {
    using Unit = typename Element::Unit;
    constexpr int PAIR = Element::PAIR;
    auto* to = kv.group<Element>(kv.keys, slot / LANES, head) + slot % LANES * PAIR;
    for (int64_t d = 0; d + PAIR <= kv.head_dim; d += PAIR) {
        const Unit unit = unit_at<Element>(key, d / PAIR);
        std::memcpy(to + d * LANES, &unit, sizeof unit);
    }
    for (int64_t d = kv.head_dim / PAIR * PAIR; d < kv.head_dim; ++d) to[d / PAIR * LANES * PAIR + d % PAIR] = key[d];
}

template <class Element>
void write_value(const LayerKv& kv, int64_t slot, int64_t head, const typename Element::Number* value) {
    constexpr int PAIR = Element::PAIR;
    const int64_t lane = slot % LANES;
    auto* to = kv.group<Element>(kv.values, slot / LANES, head) + lane / PAIR * kv.dim() * PAIR + lane % PAIR;
    for (int64_t d = 0; d < kv.head_dim; ++d) to[d * PAIR] = value[d];
}

// Arguments of attention in one layer. Strides count numbers; the last dimension is contiguous.
struct Attention {
    LayerKv kv;
    const void* queries;  // [num_tokens, num_heads, head_dim]
    int64_t query_token_stride, query_head_stride;
    void* outputs;        // the same shape
    int64_t output_token_stride;
    const int32_t *query_starts, *context_lengths;
    const int32_t *block_tables, *table_rows;  // sequence i has row table_rows[i]
    int64_t table_stride, num_sequences, num_heads, block_size;
    int64_t sliding_window;  // 0: none
    float scale, softcap;    // softcap 0: none
};

// Rows [first_row, first_row + num_rows) of a sequence for each of some KV heads; row = token * heads per KV head +
// head.
struct Item {
    int sequence, first_row, num_rows, kv_head, num_kv_heads;
};

// Returns the items of a step, those with the most work first. The KV heads of a token are adjacent in memory: if there
// are enough sequences for all threads, one item of a decode covers all heads, and so reads long contiguous memory.
inline std::vector<Item> attention_items(const int32_t* query_starts, int64_t num_sequences, int64_t num_heads,
                                         int64_t num_kv_heads, int num_threads) {
    const bool may_join = num_sequences >= 4 * num_threads && num_heads <= MAX_ROWS;
    const int group_heads = (int)(num_heads / num_kv_heads);
    std::vector<Item> items;
    for (int sequence = (int)num_sequences - 1; sequence >= 0; --sequence) {
        const int num_rows = (query_starts[sequence + 1] - query_starts[sequence]) * group_heads;
        const int at_once = may_join && num_rows == group_heads ? (int)num_kv_heads : 1;
        for (int row = (num_rows - 1) / MAX_ROWS * MAX_ROWS; row >= 0; row -= MAX_ROWS)
            for (int head = 0; head < num_kv_heads; head += at_once)
                items.push_back({sequence, row, std::min(MAX_ROWS, num_rows - row), head, at_once});
    }
    return items;
}

// Buffers of one thread for the context of an item.
template <class Element>
struct Workspace {
    alignas(64) typename Element::Number query[MAX_ROWS][ROW_STRIDE];
    alignas(64) typename Element::Number weight[MAX_ROWS][CHUNK];
    alignas(64) float score[MAX_ROWS][CHUNK];
    alignas(64) float output[MAX_ROWS][ROW_STRIDE];
#ifdef INFLIGHT_AMX
    alignas(64) typename Element::Number values[CHUNK * MAX_DIM];
    TileConfiguration tiles;
#endif
    float maximum[MAX_ROWS], sum[MAX_ROWS], rescale[MAX_ROWS];
    // Rows of an item that the tiles are configured for; 0 if they are configured for something else.
    int tile_rows = 0;
};

// Rows and vectors that fit the registers together.
#if defined(__AVX512F__)
constexpr int QUERY_ROWS = 6;
#else
constexpr int QUERY_ROWS = 3;
#endif
constexpr int ROW_VECTORS = 4;

// Computes scores of ROWS query rows against `COUNT * WIDTH` keys, from vector `first` of the chunk on.
template <class Element, int ROWS, int COUNT>
ALWAYS_INLINE void score_tile(Workspace<Element>& work, int row, const typename Element::Number* const* keys,
                              int64_t offset, int first, int num_units) {
    Floats sums[ROWS][COUNT] = {};
    for (int unit = 0; unit < num_units; ++unit) {
        typename Element::Vector loaded[COUNT];
#pragma GCC unroll 4
        for (int v = 0; v < COUNT; ++v)
            loaded[v] = Element::load_units(keys[(first + v) / VECTORS] + offset +
                                            (unit * LANES + (first + v) % VECTORS * WIDTH) * Element::PAIR);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const auto query = unit_at<Element>(work.query[row + r], unit);
#pragma GCC unroll 4
            for (int v = 0; v < COUNT; ++v) sums[r][v] = Element::multiply_add(sums[r][v], query, loaded[v]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < COUNT; ++v) store(&work.score[row + r][(first + v) * WIDTH], sums[r][v]);
}

// Adds the weighted values of a chunk to `COUNT * WIDTH` numbers of the output of ROWS rows.
template <class Element, int ROWS, int COUNT>
ALWAYS_INLINE void value_tile(Workspace<Element>& work, int row, const typename Element::Number* const* values,
                              int64_t offset, int num_groups, int first, int dim) {
    constexpr int UNITS = LANES / Element::PAIR;
    Floats sums[ROWS][COUNT];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < COUNT; ++v)
            sums[r][v] = load(&work.output[row + r][first + v * WIDTH]) * work.rescale[row + r];
    for (int group = 0; group < num_groups; ++group) {
        const typename Element::Number* numbers = values[group] + offset + first * Element::PAIR;
        for (int unit = 0; unit < UNITS; ++unit, numbers += dim * Element::PAIR) {
            typename Element::Vector loaded[COUNT];
#pragma GCC unroll 4
            for (int v = 0; v < COUNT; ++v) loaded[v] = Element::load_units(numbers + v * WIDTH * Element::PAIR);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) {
                const auto weight = unit_at<Element>(work.weight[row + r], group * UNITS + unit);
#pragma GCC unroll 4
                for (int v = 0; v < COUNT; ++v) sums[r][v] = Element::multiply_add(sums[r][v], weight, loaded[v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < COUNT; ++v) store(&work.output[row + r][first + v * WIDTH], sums[r][v]);
}

template <class Element, int ROWS>
void score_rows(Workspace<Element>& work, int row, const typename Element::Number* const* keys, int64_t offset,
                int num_groups, int dim) {
    constexpr int COUNT = ROW_VECTORS;
    int first = 0;
    for (; first + COUNT <= num_groups * VECTORS; first += COUNT)
        score_tile<Element, ROWS, COUNT>(work, row, keys, offset, first, dim / Element::PAIR);
    for (; first < num_groups * VECTORS; ++first)
        score_tile<Element, ROWS, 1>(work, row, keys, offset, first, dim / Element::PAIR);
}

template <class Element, int ROWS>
void value_rows(Workspace<Element>& work, int row, const typename Element::Number* const* values, int64_t offset,
                int num_groups, int dim) {
    constexpr int COUNT = ROW_VECTORS;
    int first = 0;
    for (; first + COUNT * WIDTH <= dim; first += COUNT * WIDTH)
        value_tile<Element, ROWS, COUNT>(work, row, values, offset, num_groups, first, dim);
    for (; first < dim; first += WIDTH) value_tile<Element, ROWS, 1>(work, row, values, offset, num_groups, first, dim);
}

// Calls `rows(row, std::integral_constant<int, count>)` for as many rows at a time as fit the registers.
template <int COUNT = QUERY_ROWS, class Rows>
ALWAYS_INLINE void some_at_a_time(int num_rows, const Rows& rows) {
    int row = 0;
    for (; row + COUNT <= num_rows; row += COUNT) rows(row, std::integral_constant<int, COUNT>{});
    if constexpr (COUNT > 1)
        if (row < num_rows)
            some_at_a_time<COUNT - 1>(num_rows - row,
                                      [&](int next, auto count) { rows(row + next, count); });
}

// Turns the scores of a row into weights and updates its maximum and sum. Keys [first_key, last_key] are visible to it.
// Scores are exponents of two, which saves a multiplication each.
template <class Element>
void weigh_row(Workspace<Element>& work, int row, int num_groups, int chunk_start, int first_key, int last_key,
               const Attention& call) {
    const int num_keys = num_groups * LANES;
    float* scores = work.score[row];
    float factor = call.scale * LOG2_E;
    if (call.softcap > 0) {
        for (int key = 0; key < num_keys; key += WIDTH)
            store(scores + key, soft_capped(load(scores + key) * call.scale, call.softcap));
        factor = LOG2_E;
    }
    if (chunk_start < first_key || chunk_start + num_keys - 1 > last_key)
        for (int key = 0; key < num_keys; ++key)
            if (chunk_start + key < first_key || chunk_start + key > last_key) scores[key] = MASKED;
    Floats maximums = all(MASKED);
    for (int key = 0; key < num_keys; key += WIDTH) {
        const Floats x = load(scores + key);
        maximums = (x > maximums) ? x : maximums;
    }
    const float maximum = std::max(work.maximum[row], largest_of(maximums) * factor);
    Floats sums = {};
    for (int key = 0; key < num_keys; key += WIDTH) {
        const Floats weights = power_of_two<Element>(load(scores + key) * factor - maximum);
        sums += weights;
        Element::put(&work.weight[row][key], weights);
    }
    work.rescale[row] = maximum == work.maximum[row] ? 1.0f : power_of_two(all(work.maximum[row] - maximum))[0];
    work.sum[row] = work.sum[row] * work.rescale[row] + sum_of(sums);
    work.maximum[row] = maximum;
}

// Prefetches explicitly, since the blocks of a sequence are scattered and the processor cannot predict the next one.
ALWAYS_INLINE void prefetch(const void* from, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

}  // namespace inflight

#include "attention_tiles.h"

namespace inflight {

// Addresses of a sequence's groups for one KV head.
template <class Element>
class Context {
  public:
    using Number = typename Element::Number;

    Context(const Attention& call, const Item& item)
        : kv_(call.kv),
          table_(call.block_tables + call.table_rows[item.sequence] * call.table_stride),
          groups_per_block_((int)call.block_size / LANES),
          kv_head_(item.kv_head),
          num_numbers_(item.num_kv_heads * LANES * kv_.dim()) {}

    const Number* keys(int index) const { return group(kv_.keys, index); }
    const Number* values(int index) const { return group(kv_.values, index); }

    void prefetch_keys(int start, int end) const {
        for (int i = start; i < end; ++i) prefetch(keys(i), num_numbers_ * sizeof(Number));
    }
    void prefetch_values(int start, int end) const {
        for (int i = start; i < end; ++i) prefetch(values(i), num_numbers_ * sizeof(Number));
    }

  private:
    const Number* group(void* cache, int index) const {
        const int64_t block = table_[index / groups_per_block_];
        return kv_.group<Element>(cache, block * groups_per_block_ + index % groups_per_block_, kv_head_);
    }

    const LayerKv& kv_;
    const int32_t* table_;
    const int groups_per_block_, kv_head_;
    const int64_t num_numbers_;  // of a group, for all heads of the item
};

// Groups that the rows of an item see: [first, end).
struct GroupRange {
    int first, end;
};

inline GroupRange groups_of(const Attention& call, const Item& item) {
    const int group_heads = (int)(call.num_heads / call.kv.num_kv_heads);
    const int num_new = call.query_starts[item.sequence + 1] - call.query_starts[item.sequence];
    const int first_position = call.context_lengths[item.sequence] - num_new;
    const int first = first_position + item.first_row / group_heads;
    const int last = first_position + (item.first_row + item.num_rows - 1) / group_heads;
    return {call.sliding_window ? std::max(0, first + 1 - (int)call.sliding_window) / LANES : 0, last / LANES + 1};
}

// Computes one item. `next` is the item that this thread will probably process next, or null: its first keys are
// prefetched while the last values of this one are added.
template <class Element>
void attend(const Attention& call, const Item& item, const Item* next, Workspace<Element>& work) {
    using Number = typename Element::Number;
    const LayerKv& kv = call.kv;
    const int dim = (int)kv.dim(), group_heads = (int)(call.num_heads / kv.num_kv_heads);
    const int first_token = call.query_starts[item.sequence];
    const int num_new = call.query_starts[item.sequence + 1] - first_token;
    const int first_position = call.context_lengths[item.sequence] - num_new;
    const int num_rows = item.num_rows, all_rows = num_rows * item.num_kv_heads;
    auto token_of = [&](int row) { return (item.first_row + row % num_rows) / group_heads; };
    auto head_of = [&](int row) {
        return (item.kv_head + row / num_rows) * group_heads + (item.first_row + row % num_rows) % group_heads;
    };
    auto first_key_of = [&](int row) {
        const int position = first_position + token_of(row);
        return call.sliding_window ? std::max(0, position + 1 - (int)call.sliding_window) : 0;
    };

    for (int row = 0; row < all_rows; ++row) {
        const Number* query = static_cast<const Number*>(call.queries) +
                              (first_token + token_of(row)) * call.query_token_stride +
                              head_of(row) * call.query_head_stride;
        std::memset(work.query[row], 0, round_up(dim, 2 * LANES) * sizeof(Number));
        std::memcpy(work.query[row], query, kv.head_dim * sizeof(Number));
        std::memset(work.output[row], 0, dim * sizeof(float));
        work.maximum[row] = MASKED;
        work.sum[row] = 0;
    }

    const Context<Element> context(call, item);
    const GroupRange range = groups_of(call, item);
    const bool by_tiles = can_use_tiles<Element>(dim);
    if (by_tiles) set_up_tiles(work, num_rows);
    for (int start = range.first; start < range.end; start += CHUNK_GROUPS) {
        const int num_groups = std::min(CHUNK_GROUPS, range.end - start);
        const Number *keys[CHUNK_GROUPS], *values[CHUNK_GROUPS];
        for (int i = 0; i < num_groups; ++i) {
            keys[i] = context.keys(start + i);
            values[i] = context.values(start + i);
        }
        context.prefetch_values(start, start + num_groups);
        for (int head = 0; head < item.num_kv_heads; ++head) {
            const int64_t offset = head * LANES * dim;
            if (by_tiles)
                score_by_tiles<Element>(work, head * num_rows, num_rows, keys, offset, num_groups, dim);
            else
                some_at_a_time(num_rows, [&](int row, auto count) {
                    score_rows<Element, count>(work, head * num_rows + row, keys, offset, num_groups, dim);
                });
        }
        for (int row = 0; row < all_rows; ++row)
            weigh_row<Element>(work, row, num_groups, start * LANES, first_key_of(row), first_position + token_of(row),
                               call);
        if (start + num_groups < range.end) {
            context.prefetch_keys(start + num_groups, std::min(start + 2 * CHUNK_GROUPS, range.end));
        } else if (next != nullptr) {
            const GroupRange after = groups_of(call, *next);
            Context<Element>(call, *next).prefetch_keys(after.first, std::min(after.first + CHUNK_GROUPS, after.end));
        }
        for (int head = 0; head < item.num_kv_heads; ++head) {
            const int64_t offset = head * LANES * dim;
            if (by_tiles)
                weigh_values_by_tiles<Element>(work, head * num_rows, num_rows, values, offset, num_groups, dim);
            else
                some_at_a_time(num_rows, [&](int row, auto count) {
                    value_rows<Element, count>(work, head * num_rows + row, values, offset, num_groups, dim);
                });
        }
    }

    for (int row = 0; row < all_rows; ++row) {
        Number* output = static_cast<Number*>(call.outputs) + (first_token + token_of(row)) * call.output_token_stride +
                         head_of(row) * kv.head_dim;
        for (int d = 0; d < dim; d += WIDTH)
            Element::put(&work.query[row][d], load(&work.output[row][d]) / work.sum[row]);
        std::memcpy(output, work.query[row], kv.head_dim * sizeof(Number));
    }
}

}  // namespace inflight
