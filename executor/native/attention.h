// Paged attention: writing the KV of new tokens, and attending over the context of a sequence.
//
// The KV of a layer is kept in groups of 16 tokens, so that one vector holds one number of 16 tokens and no sum runs
// across a vector. DIM is the head size rounded up to 16; the rest is zero.
//
//     K  [group, kv_head, DIM / PAIR, 16 tokens, PAIR]      scores of 16 tokens at once, summed over the head
//     V  [group, kv_head, 16 / PAIR, DIM, PAIR]             16 numbers of the output at once, summed over tokens
//
// KV may be kept in int8, in the same order, each group and head followed by the float32 scales of its 16 tokens. A
// token is rounded when it is written, and always read in int8, by the queries of the same step too. Its scales are
// applied to the scores and to the weights. With float32 the numbers are widened to float32. With bfloat16 they are
// multiplied as integers: queries, and the weights of a chunk, are rounded to 16 bits with a scale for each row. Sums
// of integers are exact, and no scale depends on keys that the row does not see, so a row's result depends neither on
// its batch nor on the chunks of its prompt.
//
// A work item is some query rows of one sequence that share a KV head: heads of the group, then tokens. It processes
// the context CHUNK tokens at a time with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022): running
// maximum, running sum, and output rescaled when the maximum grows. All sums are float32. The products are computed
// with vectors, or with AMX where available (attention_tiles.h).
//
// Invariants: groups are filled from their first token on. V, or its scales, is cleared at that point, so that a NaN
// left in a group is never multiplied by a weight of zero. Masked scores are a large finite number, and maximums begin
// at half of it, so that a chunk of which a row sees nothing has weights of zero.

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
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
constexpr float MIN_SCALE = 1e-30f;  // smaller numbers do not matter, and denormal ones are zero
#ifdef INFLIGHT_AMX
constexpr int MAX_ROWS = 128;
constexpr int VALUE_COLUMNS = 32;  // numbers of a token's value that are computed at once
#else
constexpr int MAX_ROWS = 24;
#endif

// The KV of a layer: elements, or int8 with scales.
struct LayerKv {
    void *keys = nullptr, *values = nullptr;
    int64_t num_kv_heads = 0, head_dim = 0;
    bool is_int8 = false;

    int64_t dim() const { return round_up(head_dim, LANES); }
    // Numbers from a head of a group to the next.
    template <class Stored>
    int64_t head_stride() const {
        return LANES * dim() + (sizeof(Stored) == 1 ? LANES * sizeof(float) : 0);
    }
    template <class Stored>
    Stored* group(void* cache, int64_t index, int64_t head) const {
        return static_cast<Stored*>(cache) + (index * num_kv_heads + head) * head_stride<Stored>();
    }
    // The scales of the 16 tokens of a group in int8.
    float* scales(void* cache, int64_t index, int64_t head) const {
        return reinterpret_cast<float*>(group<int8_t>(cache, index, head) + LANES * dim());
    }
};

// Clears the values of a group whose first token is about to be written. Of int8 only the scales can be NaN.
template <class Element>
void clear_values(const LayerKv& kv, int64_t slot) {
    using Number = typename Element::Number;
    const int64_t index = slot / LANES;
    if (!kv.is_int8) {
        std::memset(kv.group<Number>(kv.values, index, 0), 0,
                    kv.num_kv_heads * kv.head_stride<Number>() * sizeof(Number));
        return;
    }
    for (int64_t head = 0; head < kv.num_kv_heads; ++head)
        std::memset(kv.scales(kv.values, index, head), 0, LANES * sizeof(float));
}

// Stores numbers `[head_dim]` of a key. `to` is its group.
template <int PAIR, class Stored>
void scatter_key(const LayerKv& kv, Stored* to, int64_t lane, const Stored* key) {
    to += lane * PAIR;
    for (int64_t d = 0; d + PAIR <= kv.head_dim; d += PAIR) std::memcpy(to + d * LANES, key + d, PAIR * sizeof *key);
    for (int64_t d = kv.head_dim / PAIR * PAIR; d < kv.head_dim; ++d) to[d / PAIR * LANES * PAIR + d % PAIR] = key[d];
}

template <int PAIR, class Stored>
void scatter_value(const LayerKv& kv, Stored* to, int64_t lane, const Stored* value) {
    to += lane / PAIR * kv.dim() * PAIR + lane % PAIR;
    for (int64_t d = 0; d < kv.head_dim; ++d) to[d * PAIR] = value[d];
}

// Rounds numbers to int8, the largest to 127, and returns the scale. Not a number and infinity make the scale so, and
// the numbers 0. The reference does the same bit by bit (executor/attention/quantized.py).
template <class Element>
float quantize(const typename Element::Number* numbers, int64_t count, int8_t* to) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; ++i) {
        const float number = Element::get(numbers[i]);
        uint32_t bits;
        std::memcpy(&bits, &number, sizeof bits);
        largest = std::max(largest, bits & 0x7fffffffu);
    }
    float scale = as_float(largest) / 127.0f;
    if (scale < MIN_SCALE) scale = 0;
    const bool is_usable = scale > 0 && scale < INFINITY;
    for (int64_t i = 0; i < count; ++i) {
        const float ratio = is_usable ? Element::get(numbers[i]) / scale : 0.0f;
        to[i] = (int8_t)std::nearbyint(std::min(std::max(ratio, -127.0f), 127.0f));
    }
    return scale;
}

template <class Element>
void write_key(const LayerKv& kv, int64_t slot, int64_t head, const typename Element::Number* key) {
    const int64_t index = slot / LANES, lane = slot % LANES;
    if (!kv.is_int8)
        return scatter_key<Element::PAIR>(kv, kv.group<typename Element::Number>(kv.keys, index, head), lane, key);
    int8_t numbers[MAX_DIM];
    kv.scales(kv.keys, index, head)[lane] = quantize<Element>(key, kv.head_dim, numbers);
    scatter_key<Element::PAIR>(kv, kv.group<int8_t>(kv.keys, index, head), lane, (const int8_t*)numbers);
}

template <class Element>
void write_value(const LayerKv& kv, int64_t slot, int64_t head, const typename Element::Number* value) {
    const int64_t index = slot / LANES, lane = slot % LANES;
    if (!kv.is_int8)
        return scatter_value<Element::PAIR>(kv, kv.group<typename Element::Number>(kv.values, index, head), lane,
                                            value);
    int8_t numbers[MAX_DIM];
    kv.scales(kv.values, index, head)[lane] = quantize<Element>(value, kv.head_dim, numbers);
    scatter_value<Element::PAIR>(kv, kv.group<int8_t>(kv.values, index, head), lane, (const int8_t*)numbers);
}

// How many of `count` tokens from the first on are in one group, in the order of its tokens.
inline int64_t tokens_of_group(const int64_t* slots, int64_t count) {
    const int64_t most = std::min<int64_t>(count, LANES - slots[0] % LANES);
    int64_t num = 1;
    while (num < most && slots[num] == slots[0] + num) ++num;
    return num;
}

#if defined(__AVX512F__)
// Exchanges rows and columns.
ALWAYS_INLINE void transpose(__m512i (&x)[16]) {
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (int i = 0; i < 4; ++i) {
        const __m512i first = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
        const __m512i second = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
        const __m512i third = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
        const __m512i fourth = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
        y[i] = _mm512_shuffle_i32x4(first, second, 0x88);
        y[8 + i] = _mm512_shuffle_i32x4(first, second, 0xdd);
        y[4 + i] = _mm512_shuffle_i32x4(third, fourth, 0x88);
        y[12 + i] = _mm512_shuffle_i32x4(third, fourth, 0xdd);
    }
    for (int i = 0; i < 16; ++i) x[i] = y[i];
}
#endif

// Writes the keys of tokens of one group: rows of `stride` numbers.
template <class Element>
void write_keys_of_group(const LayerKv& kv, const int64_t* slots, int64_t count, int64_t head,
                         const typename Element::Number* keys, int64_t stride) {
#if defined(__AVX512F__)
    constexpr int64_t NUM_UNITS = LANES;  // of a key at once
    if (Element::PAIR == 2 && !kv.is_int8 && kv.head_dim % (NUM_UNITS * Element::PAIR) == 0 && count > 1) {
        const int64_t lane = slots[0] % LANES;
        auto* to = kv.group<typename Element::Number>(kv.keys, slots[0] / LANES, head);
        const auto lanes = (__mmask16)(((1 << count) - 1) << lane);
        for (int64_t d = 0; d < kv.head_dim; d += NUM_UNITS * Element::PAIR) {
            __m512i units[LANES];
            for (int i = 0; i < LANES; ++i)
                units[i] = _mm512_loadu_si512(keys + std::clamp<int64_t>(i - lane, 0, count - 1) * stride + d);
            transpose(units);
            for (int i = 0; i < NUM_UNITS; ++i)
                _mm512_mask_storeu_epi32(to + (d / Element::PAIR + i) * LANES * Element::PAIR, lanes, units[i]);
        }
        return;
    }
#endif
    for (int64_t i = 0; i < count; ++i) write_key<Element>(kv, slots[i], head, keys + i * stride);
}

// Writes keys of tokens: rows of `stride` numbers.
template <class Element>
void write_keys(const LayerKv& kv, const int64_t* slots, int64_t count, int64_t head,
                const typename Element::Number* keys, int64_t stride) {
    for (int64_t i = 0, num; i < count; i += num) {
        num = tokens_of_group(slots + i, count - i);
        write_keys_of_group<Element>(kv, slots + i, num, head, keys + i * stride, stride);
    }
}

// Writes the values of two tokens that share the lanes of a group.
template <class Element>
void write_two_values(const LayerKv& kv, int64_t slot, int64_t head, const typename Element::Number* first,
                      const typename Element::Number* second) {
    typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
    auto* to = kv.group<typename Element::Number>(kv.values, slot / LANES, head) + slot % LANES * kv.dim();
    int64_t d = 0;
    for (; d + WIDTH <= kv.head_dim; d += WIDTH) {
        Halves low, high;
        std::memcpy(&low, first + d, sizeof low);
        std::memcpy(&high, second + d, sizeof high);
        const Words both = __builtin_convertvector(low, Words) | __builtin_convertvector(high, Words) << 16;
        std::memcpy(to + 2 * d, &both, sizeof both);
    }
    for (; d < kv.head_dim; ++d) to[2 * d] = first[d], to[2 * d + 1] = second[d];
}

// Writes values of tokens: rows of `stride` numbers.
template <class Element>
void write_values(const LayerKv& kv, const int64_t* slots, int64_t count, int64_t head,
                  const typename Element::Number* values, int64_t stride) {
    for (int64_t i = 0, num; i < count; i += num) {
        const auto* const value = values + i * stride;
        num = 1;
        if constexpr (Element::PAIR == 2)
            if (!kv.is_int8 && slots[i] % 2 == 0 && tokens_of_group(slots + i, std::min<int64_t>(2, count - i)) == 2)
                num = 2;
        if (num == 1)
            write_value<Element>(kv, slots[i], head, value);
        else if constexpr (Element::PAIR == 2)
            write_two_values<Element>(kv, slots[i], head, value, value + stride);
    }
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
    const float* sinks;      // [num_heads]: a score of each head that belongs to no key; null: none
};

// Rows [first_row, first_row + num_rows) of a sequence for each of some KV heads; row = token * heads per KV head +
// head.
struct Item {
    int sequence, first_row, num_rows, kv_head, num_kv_heads;
};

// The KV heads of a token are adjacent in memory: if there are enough sequences for all threads, one item of a decode
// covers all heads, and so reads long contiguous memory. Tiles of more than 16 rows are those of one head alone.
class AttentionItems {
  public:
    AttentionItems(int64_t num_heads, int64_t num_kv_heads, int64_t num_sequences, int num_threads)
        : group_heads_((int)(num_heads / num_kv_heads)),
          num_kv_heads_((int)num_kv_heads),
          may_join_(num_sequences >= 4 * num_threads && num_heads <= MAX_ROWS && group_heads_ <= LANES) {}

    // Appends the items of new tokens [first, end) of a sequence, those with the most work first.
    void of_tokens(std::vector<Item>& items, int sequence, int first, int end) const {
        const int first_row = first * group_heads_, num_rows = (end - first) * group_heads_;
        const int at_once = may_join_ && num_rows == group_heads_ ? num_kv_heads_ : 1;
        for (int row = (num_rows - 1) / MAX_ROWS * MAX_ROWS; row >= 0; row -= MAX_ROWS)
            for (int head = 0; head < num_kv_heads_; head += at_once)
                items.push_back({sequence, first_row + row, std::min(MAX_ROWS, num_rows - row), head, at_once});
    }

  private:
    const int group_heads_, num_kv_heads_;
    const bool may_join_;
};

// Returns the items of a step.
inline std::vector<Item> attention_items(const int32_t* query_starts, int64_t num_sequences, int64_t num_heads,
                                         int64_t num_kv_heads, int num_threads) {
    const AttentionItems add(num_heads, num_kv_heads, num_sequences, num_threads);
    std::vector<Item> items;
    for (int sequence = (int)num_sequences - 1; sequence >= 0; --sequence)
        add.of_tokens(items, sequence, 0, query_starts[sequence + 1] - query_starts[sequence]);
    return items;
}

constexpr int ROW_VALUES = (MAX_ROWS + LANES - 1) / LANES * LANES;

// Buffers of one thread for the context of an item.
template <class Number>
struct Buffers {
    alignas(64) Number query[MAX_ROWS][ROW_STRIDE];
    alignas(64) Number weight[MAX_ROWS][CHUNK];
    alignas(64) float score[MAX_ROWS][CHUNK];
    alignas(64) float output[MAX_ROWS][ROW_STRIDE];
#ifdef INFLIGHT_AMX
    alignas(64) Number values[CHUNK * MAX_DIM];  // of a chunk's tokens
    TileConfiguration tiles;
#endif
    alignas(64) float key_scale[CHUNK], value_scale[CHUNK];  // of int8 KV, for one KV head
    Floats sum[MAX_ROWS];  // of the weights of each row, those of every WIDTH-th key in a lane
    // Of each row, in whole vectors: largest score, factor of what is summed already, and a chunk's largest score.
    float maximum[ROW_VALUES] = {}, rescale[ROW_VALUES] = {}, largest[ROW_VALUES] = {};
    float query_scale[MAX_ROWS], weight_scale[MAX_ROWS];  // of queries and weights in integers
    int first_key[MAX_ROWS], last_key[MAX_ROWS];  // that a row sees
    // Rows of an item that the tiles are configured for; 0 if they are configured for something else.
    int tile_rows = 0;
};

template <class Element>
using Workspace = Buffers<typename Element::Number>;

// Rows and vectors that fit the registers together.
#if defined(__AVX512F__)
constexpr int QUERY_ROWS = 6;
#else
constexpr int QUERY_ROWS = 3;
#endif
constexpr int ROW_VECTORS = 4;

// Blocks of a sequence are scattered, so the processor cannot predict the next one, and reading a decode's KV from
// memory takes longer than computing with it. With AHEAD a line of `ahead`, the groups that are read next, is therefore
// prefetched for each line that is computed with: many at once would hold up the products.
//
// Computes scores of ROWS query rows against `COUNT * WIDTH` keys, from vector `first` of the chunk on.
template <class Element, bool IS_INT8, bool AHEAD, int ROWS, int COUNT, class Stored>
ALWAYS_INLINE void score_tile(Workspace<Element>& work, int row, const Stored* const* keys, const Stored* const* ahead,
                              int64_t offset, int first, int num_units) {
    typename Element::Sum sums[ROWS][COUNT] = {};
    for (int unit = 0; unit < num_units; ++unit) {
        typename Element::Vector loaded[COUNT];
#pragma GCC unroll 4
        for (int v = 0; v < COUNT; ++v) {
            const int group = (first + v) / VECTORS;
            const int64_t place = offset + (unit * LANES + (first + v) % VECTORS * WIDTH) * Element::PAIR;
            loaded[v] = Element::load_units(keys[group] + place);
            if constexpr (AHEAD) prefetch_line(reinterpret_cast<const char*>(ahead[group] + place));
        }
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
        for (int v = 0; v < COUNT; ++v) {
            Floats scores = as_floats(sums[r][v]);
            if constexpr (IS_INT8) scores *= load(&work.key_scale[(first + v) * WIDTH]) * work.query_scale[row + r];
            store(&work.score[row + r][(first + v) * WIDTH], scores);
        }
}

// Adds the weighted values of a chunk to `COUNT * WIDTH` numbers of the output of ROWS rows.
template <class Element, bool AHEAD, int ROWS, int COUNT, class Stored>
ALWAYS_INLINE void value_tile(Workspace<Element>& work, int row, const Stored* const* values,
                              const Stored* const* ahead, int64_t offset, int num_groups, int first, int dim) {
    constexpr int UNITS = LANES / Element::PAIR;
    constexpr bool ADDS_TO_OUTPUT = std::is_same_v<typename Element::Sum, Floats>;
    typename Element::Sum sums[ROWS][COUNT] = {};
    if constexpr (ADDS_TO_OUTPUT)
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < COUNT; ++v)
                sums[r][v] = load(&work.output[row + r][first + v * WIDTH]) * work.rescale[row + r];
    for (int group = 0; group < num_groups; ++group) {
        int64_t place = offset + first * Element::PAIR;
        for (int unit = 0; unit < UNITS; ++unit, place += dim * Element::PAIR) {
            typename Element::Vector loaded[COUNT];
#pragma GCC unroll 4
            for (int v = 0; v < COUNT; ++v) {
                const int64_t at = place + v * WIDTH * Element::PAIR;
                loaded[v] = Element::load_units(values[group] + at);
                if constexpr (AHEAD) prefetch_line(reinterpret_cast<const char*>(ahead[group] + at));
            }
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
        for (int v = 0; v < COUNT; ++v) {
            float* output = &work.output[row + r][first + v * WIDTH];
            if constexpr (ADDS_TO_OUTPUT)
                store(output, sums[r][v]);
            else
                store(output, fused_add(as_floats(sums[r][v]) * work.weight_scale[row + r], load(output),
                                        all(work.rescale[row + r])));
        }
}

template <class Element, bool IS_INT8, bool AHEAD, int ROWS, class Stored>
void score_rows(Workspace<Element>& work, int row, const Stored* const* keys, const Stored* const* ahead,
                int64_t offset, int num_groups, int dim) {
    constexpr int COUNT = ROW_VECTORS;
    int first = 0;
    for (; first + COUNT <= num_groups * VECTORS; first += COUNT)
        score_tile<Element, IS_INT8, AHEAD, ROWS, COUNT>(work, row, keys, ahead, offset, first, dim / Element::PAIR);
    for (; first + COUNT / 2 <= num_groups * VECTORS; first += COUNT / 2)
        score_tile<Element, IS_INT8, AHEAD, ROWS, COUNT / 2>(work, row, keys, ahead, offset, first,
                                                             dim / Element::PAIR);
    for (; first < num_groups * VECTORS; ++first)
        score_tile<Element, IS_INT8, AHEAD, ROWS, 1>(work, row, keys, ahead, offset, first, dim / Element::PAIR);
}

template <class Element, bool AHEAD, int ROWS, class Stored>
void value_rows(Workspace<Element>& work, int row, const Stored* const* values, const Stored* const* ahead,
                int64_t offset, int num_groups, int dim) {
    constexpr int COUNT = ROW_VECTORS;
    int first = 0;
    for (; first + COUNT * WIDTH <= dim; first += COUNT * WIDTH)
        value_tile<Element, AHEAD, ROWS, COUNT>(work, row, values, ahead, offset, num_groups, first, dim);
    for (; first < dim; first += WIDTH)
        value_tile<Element, AHEAD, ROWS, 1>(work, row, values, ahead, offset, num_groups, first, dim);
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

// Returns the factor that makes numbers with these largest magnitudes integers, and the scale that reverses it. Numbers
// that are too small to matter become 0; NaN and infinity make the scale so.
template <class Element>
ALWAYS_INLINE float to_integers(Ints largest, float& scale) {
    const float magnitude = as_float((uint32_t)largest_of(largest));
    scale = magnitude / Element::LARGEST;
    return magnitude > MIN_SCALE && magnitude < INFINITY ? Element::LARGEST / magnitude : 0.0f;
}

// Copies a query `[head_dim]` to a row of the workspace, followed by zeros up to a whole tile.
template <class Element>
void take_query(Workspace<Element>& work, int row, const typename Element::Number* query, int64_t head_dim) {
    typename Element::Number* to = work.query[row];
    int64_t d = 0;
    for (; d + LANES <= head_dim; d += LANES) std::memcpy(to + d, query + d, LANES * sizeof *to);
    for (; d < head_dim; ++d) to[d] = query[d];
    for (const int64_t end = round_up(head_dim, 2 * LANES); d < end; ++d) to[d] = 0;
    work.query_scale[row] = 1;
}

template <>
inline void take_query<Int16>(Workspace<Int16>& work, int row, const uint16_t* query, int64_t head_dim) {
    alignas(64) float numbers[MAX_DIM];
    std::memset(numbers, 0, round_up(head_dim, WIDTH) * sizeof *numbers);
    for (int64_t d = 0; d < head_dim; ++d) numbers[d] = BFloat16::get(query[d]);
    Ints largest = {};
    for (int64_t d = 0; d < head_dim; d += WIDTH) {
        const Ints some = magnitudes(load(numbers + d));
        largest = (some > largest) ? some : largest;
    }
    const float inverse = to_integers<Int16>(largest, work.query_scale[row]);
    for (int64_t d = 0; d < head_dim; d += WIDTH) Int16::put(&work.query[row][d], load(numbers + d) * inverse);
    for (int64_t d = round_up(head_dim, WIDTH); d < round_up(head_dim, 2 * LANES); ++d) work.query[row][d] = 0;
}

// The maximum of a row that has seen no key: far below every score, and far above masked ones.
constexpr float unseen_maximum(float factor) { return MASKED * factor / 2; }

// Caps the scores of a row, and masks them beyond keys [first_key, last_key] of the chunk, which are visible to it.
ALWAYS_INLINE void mask_scores(float* scores, int num_keys, int first_key, int last_key, const Attention& call) {
    if (call.softcap > 0)
        for (int key = 0; key < num_keys; key += WIDTH)
            store(scores + key, soft_capped(load(scores + key) * call.scale, call.softcap));
    if (first_key <= 0 && last_key >= num_keys - 1) return;
    Ints keys;
    for (int lane = 0; lane < WIDTH; ++lane) keys[lane] = lane;
    for (int key = 0; key < num_keys; key += WIDTH, keys += WIDTH) {
        const Floats seen = (keys < first_key) ? all(MASKED) : load(scores + key);
        store(scores + key, (keys > last_key) ? all(MASKED) : seen);
    }
}

// Updates the maximums of all rows by the scores of a chunk, and computes the factors of their sums.
template <class Element>
void raise_maximums(const Attention& call, Workspace<Element>& work, int num_rows, int first_key, int num_keys,
                    float factor) {
    for (int row = 0; row < num_rows; ++row) {
        float* const scores = work.score[row];
        mask_scores(scores, num_keys, work.first_key[row] - first_key, work.last_key[row] - first_key, call);
        Floats largest = all(MASKED);
        for (int key = 0; key < num_keys; key += WIDTH) largest = larger(load(scores + key), largest);
        work.largest[row] = largest_of(largest);
    }
    for (int row = 0; row < num_rows; row += WIDTH) {
        const Floats before = load(work.maximum + row), largest = load(work.largest + row) * factor;
        const Floats maximum = larger(largest, before);
        store(work.rescale + row, power_of_two(before - maximum));
        store(work.maximum + row, maximum);
    }
}

// Turns the scores of a row into weights and adds them to its sum. Scores are exponents of two, which saves a
// multiplication each. With int8 KV, scores and weights get the scales of keys and values, so that the products
// multiply integers alone.
template <class Element, bool IS_INT8>
void weigh_row(Workspace<Element>& work, int row, int num_keys, float factor) {
    constexpr bool IS_INTEGER = !std::is_same_v<typename Element::Sum, Floats>;
    float* scores = work.score[row];
    const Floats lowered = all(-work.maximum[row]), factors = all(factor);
    Floats sums = work.sum[row] * work.rescale[row];
    Ints largest = {};
    for (int key = 0; key < num_keys; key += WIDTH) {
        Floats weights = power_of_two<Element>(fused_add(lowered, load(scores + key), factors));
        sums += weights;
        if constexpr (IS_INT8) weights *= load(work.value_scale + key);
        if constexpr (IS_INTEGER) {
            store(scores + key, weights);
            largest = (magnitudes(weights) > largest) ? magnitudes(weights) : largest;
        } else {
            Element::put(&work.weight[row][key], weights);
        }
    }
    if constexpr (IS_INTEGER) {
        const float inverse = to_integers<Element>(largest, work.weight_scale[row]);
        for (int key = 0; key < num_keys; key += WIDTH)
            Element::put(&work.weight[row][key], load(scores + key) * inverse);
    }
    work.sum[row] = sums;
}

// Copies the scales of a chunk; `offset` leads from a group to those of a head.
inline void gather_scales(float* to, const int8_t* const* groups, int64_t offset, int num_groups) {
    for (int group = 0; group < num_groups; ++group)
        std::memcpy(to + group * LANES, groups[group] + offset, LANES * sizeof(float));
}

}  // namespace inflight

#include "attention_tiles.h"

namespace inflight {

// Addresses of a sequence's groups for one KV head.
template <class Number>
class Context {
  public:
    Context(const Attention& call, const Item& item)
        : kv_(call.kv),
          table_(call.block_tables + call.table_rows[item.sequence] * call.table_stride),
          groups_per_block_((int)call.block_size / LANES),
          kv_head_(item.kv_head) {}

    const Number* keys(int index) const { return group(kv_.keys, index); }
    const Number* values(int index) const { return group(kv_.values, index); }

  private:
    const Number* group(void* cache, int index) const {
        const int64_t block = table_[index / groups_per_block_];
        return kv_.group<Number>(cache, block * groups_per_block_ + index % groups_per_block_, kv_head_);
    }

    const LayerKv& kv_;
    const int32_t* table_;
    const int groups_per_block_, kv_head_;
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

// Returns the end of the chunk that contains `group`. Chunks lie on one grid, so that a row's chunks do not depend on
// where the window of its item's first row begins.
inline int end_of_chunk(int group, const GroupRange& range) {
    return std::min((group / CHUNK_GROUPS + 1) * CHUNK_GROUPS, range.end);
}

// Prefetches the queries of an item. Those of a token are contiguous for the heads of a KV head.
template <class Number>
void prefetch_queries(const Attention& call, const Item& item) {
    const int64_t group_heads = call.num_heads / call.kv.num_kv_heads;
    const int64_t start = call.query_starts[item.sequence] + item.first_row / group_heads;
    const int64_t last = call.query_starts[item.sequence] + (item.first_row + item.num_rows - 1) / group_heads;
    const int64_t num_bytes = item.num_kv_heads * group_heads * call.query_head_stride * sizeof(Number);
    for (int64_t token = start; token <= last; ++token) {
        const Number* const queries = static_cast<const Number*>(call.queries) + token * call.query_token_stride +
                                      item.kv_head * group_heads * call.query_head_stride;
        for (int64_t byte = 0; byte < num_bytes; byte += 64)
            prefetch_line(reinterpret_cast<const char*>(queries) + byte);
    }
}

// Calls `work(row, token, head)` for each row of an item.
template <class Work>
ALWAYS_INLINE void each_row_of(const Item& item, int group_heads, const Work& work) {
    int row = 0;
    for (int kv_head = item.kv_head; kv_head < item.kv_head + item.num_kv_heads; ++kv_head) {
        int token = item.first_row / group_heads, head = item.first_row % group_heads;
        for (int i = 0; i < item.num_rows; ++i) {
            work(row++, token, kv_head * group_heads + head);
            if (++head == group_heads) head = 0, ++token;
        }
    }
}

// Computes one item. `next` is the item that this thread will probably process next, or null: its first keys are
// read ahead while the last values of this one are added. The KV is stored as it is computed with, or as int8.
template <class Output, class Element, class Stored>
void attend_to(const Attention& call, const Item& item, const Item* next, Workspace<Element>& work) {
    using Number = typename Element::Number;
    constexpr bool IS_INT8 = std::is_same_v<Stored, int8_t>, HAS_TILES = std::is_same_v<Element, BFloat16>;
    const LayerKv& kv = call.kv;
    const int64_t head_stride = kv.head_stride<Stored>();
    const int dim = (int)kv.dim(), group_heads = (int)(call.num_heads / kv.num_kv_heads);
    const int first_token = call.query_starts[item.sequence];
    const int num_new = call.query_starts[item.sequence + 1] - first_token;
    const int first_position = call.context_lengths[item.sequence] - num_new;
    const int num_rows = item.num_rows, all_rows = num_rows * item.num_kv_heads;
    const float factor = (call.softcap > 0 ? 1.0f : call.scale) * LOG2_E;
    each_row_of(item, group_heads, [&](int row, int token, int head) {
        const int position = first_position + token;
        take_query<Element>(work, row,
                            static_cast<const Number*>(call.queries) +
                                (first_token + token) * call.query_token_stride + head * call.query_head_stride,
                            kv.head_dim);
        for (int d = 0; d < dim; d += WIDTH) store(&work.output[row][d], Floats{});
        work.maximum[row] = unseen_maximum(factor);
        work.sum[row] = Floats{};
        work.first_key[row] = call.sliding_window ? std::max(0, position + 1 - (int)call.sliding_window) : 0;
        work.last_key[row] = position;
    });

    const Context<Stored> context(call, item);
    const GroupRange range = groups_of(call, item);
    const bool by_tiles = HAS_TILES && can_use_tiles<Element>(dim);
    if (by_tiles) set_up_tiles<Element>(work, num_rows);
    for (int start = range.first, end; start < range.end; start = end) {
        end = end_of_chunk(start, range);
        const int num_groups = end - start;
        const Stored *keys[CHUNK_GROUPS], *values[CHUNK_GROUPS], *ahead[CHUNK_GROUPS];
        for (int i = 0; i < num_groups; ++i) {
            keys[i] = context.keys(start + i);
            values[i] = context.values(start + i);
        }
        if constexpr (HAS_TILES)
            if (by_tiles && num_rows > FEW_ROWS) {
                add_chunk_by_tiles<Element>(call, work, num_rows, keys, values, start, num_groups, dim, factor);
                continue;
            }
        for (int head = 0; head < item.num_kv_heads; ++head) {
            const int64_t offset = head * head_stride;
            if constexpr (HAS_TILES)
                if (by_tiles) {
                    score_by_tiles<Element>(work, head * num_rows, keys, offset, num_groups, dim);
                    continue;
                }
            if constexpr (IS_INT8) gather_scales(work.key_scale, keys, offset + LANES * dim, num_groups);
            some_at_a_time(num_rows, [&](int row, auto count) {
                const auto score = row == 0 ? score_rows<Element, IS_INT8, true, count, Stored>
                                            : score_rows<Element, IS_INT8, false, count, Stored>;
                score(work, head * num_rows + row, keys, values, offset, num_groups, dim);
            });
        }
        const int first_key = start * LANES, num_keys = num_groups * LANES;
        if constexpr (HAS_TILES)
            for (int row = 0; by_tiles && row < all_rows; ++row)
                weigh_row_for_tiles<Element>(call, work, row, row, first_key, num_keys, dim, factor);
        if (!by_tiles) {
            // Step by step for all rows, because the operations of different rows overlap, and those of one hardly do.
            raise_maximums<Element>(call, work, all_rows, first_key, num_keys, factor);
            for (int row = 0; row < all_rows; ++row) {
                if constexpr (IS_INT8)
                    if (row % num_rows == 0)
                        gather_scales(work.value_scale, values, row / num_rows * head_stride + LANES * dim, num_groups);
                weigh_row<Element, IS_INT8>(work, row, num_keys, factor);
            }
        }
        // The keys that are read after these values: of the next chunk, or of the next item's first one. Groups that
        // have no equal in this chunk are not prefetched.
        if (end < range.end) {
            for (int i = 0; i < num_groups; ++i) ahead[i] = context.keys(std::min(end + i, range.end - 1));
        } else if (next != nullptr) {
            const GroupRange after = groups_of(call, *next);
            const Context<Stored> of_next(call, *next);
            for (int i = 0; i < num_groups; ++i) ahead[i] = of_next.keys(std::min(after.first + i, after.end - 1));
            prefetch_queries<Number>(call, *next);
        } else {
            std::copy_n(values, num_groups, ahead);
        }
        for (int head = 0; head < item.num_kv_heads; ++head) {
            const int64_t offset = head * head_stride;
            if constexpr (HAS_TILES)
                if (by_tiles) {
                    weigh_values_by_tiles<Element>(work, head * num_rows, values, offset, start, num_groups, dim);
                    continue;
                }
            some_at_a_time(num_rows, [&](int row, auto count) {
                const auto weigh = row == 0 ? value_rows<Element, true, count, Stored>
                                            : value_rows<Element, false, count, Stored>;
                weigh(work, head * num_rows + row, values, ahead, offset, num_groups, dim);
            });
        }
    }

    each_row_of(item, group_heads, [&](int row, int token, int head) {
        Number* output = static_cast<Number*>(call.outputs) + (first_token + token) * call.output_token_stride +
                         head * kv.head_dim;
        Number* to = dim == kv.head_dim ? output : work.query[row];
        float total = sum_of(work.sum[row]);
        if (call.sinks != nullptr) total += std::exp2(call.sinks[head] * LOG2_E - work.maximum[row]);
        const float inverse = 1.0f / total;
        for (int d = 0; d < dim; d += WIDTH) Output::put(to + d, load(&work.output[row][d]) * inverse);
        if (dim != kv.head_dim) std::memcpy(output, to, kv.head_dim * sizeof(Number));
    });
}

template <class Element>
void attend(const Attention& call, const Item& item, const Item* next, Workspace<Element>& work) {
    using Integers = std::conditional_t<Element::PAIR == 1, Element, Int16>;
    if (call.kv.is_int8)
        attend_to<Element, Integers, int8_t>(call, item, next, work);
    else
        attend_to<Element, Element, typename Element::Number>(call, item, next, work);
}

}  // namespace inflight
