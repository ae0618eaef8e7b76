// Paged attention for CPUs, called through ctypes: one function writes the KV of new tokens, one attends.
//
// The KV of a layer is kept in groups of 16 tokens, so that one vector holds one number of 16 tokens and no sum ever runs
// across a vector. An element type says how many numbers make a unit: 1 for float32, 2 for bfloat16, whose dot-product
// instruction takes pairs. DIM is the head size rounded up to 16; the rest is zero.
//
//     K  [group, kv_head, DIM / PAIR, 16 tokens, PAIR]      scores of 16 tokens at once, summed over the head
//     V  [group, kv_head, 16 / PAIR, DIM, PAIR]             16 numbers of the output at once, summed over tokens
//
// A work item is up to MAX_ROWS query rows of one sequence that share a KV head: heads of the group, then tokens. It goes
// through the context CHUNK tokens at a time with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022): running
// maximum, running sum, and output rescaled when the maximum grows. All sums are float32.
//
// Invariants: groups are filled from their first token on; V is cleared then, so that what a group held before never meets
// a weight of zero as NaN. Masked scores are a large finite number: what they add before the first real one is rescaled to 0.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512F__) && !defined(INFLIGHT_PLAIN)
#include <immintrin.h>
#define INFLIGHT_DPBF16 1
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;
constexpr int MAX_ROWS = 24;
constexpr int MAX_DIM = 512;
constexpr int ROW_STRIDE = MAX_DIM + LANES;  // not a power of two, so that rows do not share cache sets
constexpr int CHUNK = 128;
constexpr int CHUNK_GROUPS = CHUNK / LANES;
constexpr float MASKED = -1e30f;

// GCC's vector types: sixteen lanes on any target, split into what the machine has.
typedef float Floats __attribute__((vector_size(64)));
typedef float UnalignedFloats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint32_t UnalignedWords __attribute__((vector_size(64), aligned(2), may_alias));

ALWAYS_INLINE Floats load(const float* from) { return *reinterpret_cast<const UnalignedFloats*>(from); }
ALWAYS_INLINE void store(float* to, Floats value) { *reinterpret_cast<UnalignedFloats*>(to) = value; }
ALWAYS_INLINE Floats all(float value) { return value - Floats{}; }
ALWAYS_INLINE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Round to nearest even; a NaN stays one.
ALWAYS_INLINE Words round_to_bfloat16(Floats value) {
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (value == value) ? rounded : (bits >> 16) | 0x40u;
}

struct Float32 {
    using Number = float;
    using Unit = float;
    using Vector = Floats;
    static constexpr int PAIR = 1;
    static ALWAYS_INLINE Vector load_units(const Number* from) { return load(from); }
    static ALWAYS_INLINE Floats multiply_add(Floats sum, Unit unit, Vector units) { return sum + unit * units; }
    static ALWAYS_INLINE void put(Number* to, Floats value) { store(to, value); }
};

struct BFloat16 {
    using Number = uint16_t;
    using Unit = uint32_t;  // two numbers, the first in the low half
    using Vector = Words;
    static constexpr int PAIR = 2;
    static ALWAYS_INLINE Vector load_units(const Number* from) {
        return *reinterpret_cast<const UnalignedWords*>(from);
    }
    static ALWAYS_INLINE Floats multiply_add(Floats sum, Unit unit, Vector units) {
#ifdef INFLIGHT_DPBF16
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)unit), (__m512bh)units);
#else
        const Floats low = (Floats)(units << 16), high = (Floats)(units & 0xffff0000u);
        return sum + as_float(unit << 16) * low + as_float(unit & 0xffff0000u) * high;
#endif
    }
    static ALWAYS_INLINE void put(Number* to, Floats value) {
#ifdef INFLIGHT_DPBF16
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
        const Words words = round_to_bfloat16(value);
        for (int lane = 0; lane < LANES; ++lane) to[lane] = (Number)words[lane];
#endif
    }
};

// e^x to about one unit in the last place for |x| < 87, 0 below: x = n ln 2 + r, a polynomial in r, n into the exponent.
ALWAYS_INLINE Floats exponential(Floats x) {
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    const Floats shifted = x * 1.44269504f + to_integer;
    const Floats n = shifted - to_integer;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats sum = all(1.0f / 720);
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const Ints exponent = ((Ints)shifted - (Ints)all(to_integer) + 127) << 23;
    return (x < -87.0f) ? Floats{} : sum * (Floats)exponent;
}

ALWAYS_INLINE Floats soft_capped(Floats x, float cap) {
    const Floats ratio = x / cap;
    const Floats e = exponential((ratio > 0.0f) ? -2.0f * ratio : 2.0f * ratio);
    const Floats magnitude = cap * (1.0f - e) / (1.0f + e);
    return (ratio > 0.0f) ? magnitude : -magnitude;
}

ALWAYS_INLINE int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

extern "C" {

// The fields of cpu.py's structures, in the same order. Strides count numbers; the last dimension is contiguous.
struct WriteCall {
    const void *keys, *values;        // [num_tokens, num_kv_heads, head_dim]
    void *cached_keys, *cached_values;
    const int64_t* slots;             // [num_tokens]
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t num_tokens, num_kv_heads, head_dim, num_threads;
};

struct AttendCall {
    const void* queries;              // [num_tokens, num_heads, head_dim]
    void* outputs;                    // the same, contiguous
    const void *cached_keys, *cached_values;
    const int32_t *query_starts, *context_lengths, *block_tables;
    const int32_t* table_rows;        // row i of the batch has block_tables[table_rows[i]]
    int64_t query_token_stride, query_head_stride, table_stride;
    int64_t num_sequences, num_heads, num_kv_heads, head_dim, block_size, num_threads;
    int64_t sliding_window;           // 0: none
    float scale, softcap;             // softcap 0: none
};

}  // extern "C"

namespace {

template <class Element>
void write_kv(const WriteCall& call) {
    using Number = typename Element::Number;
    constexpr int PAIR = Element::PAIR;
    const int64_t dim = round_up((int)call.head_dim, LANES), head_numbers = LANES * dim;
    auto place = [&](void* cache, int64_t slot, int64_t head) {
        return static_cast<Number*>(cache) + (slot / LANES * call.num_kv_heads + head) * head_numbers;
    };
    const bool parallel = call.num_tokens * call.num_kv_heads > 256;
#pragma omp parallel num_threads(call.num_threads) if (parallel)
    {
        // Every group is cleared before any token is written to it, whichever threads do so.
#pragma omp for
        for (int64_t token = 0; token < call.num_tokens; ++token)
            if (call.slots[token] % LANES == 0)
                std::memset(place(call.cached_values, call.slots[token], 0), 0,
                            call.num_kv_heads * head_numbers * sizeof(Number));
#pragma omp for
        for (int64_t token = 0; token < call.num_tokens; ++token) {
            const int64_t slot = call.slots[token], lane = slot % LANES;
            for (int64_t head = 0; head < call.num_kv_heads; ++head) {
                const Number* key = static_cast<const Number*>(call.keys) + token * call.key_token_stride +
                                    head * call.key_head_stride;
                const Number* value = static_cast<const Number*>(call.values) + token * call.value_token_stride +
                                      head * call.value_head_stride;
                Number* keys = place(call.cached_keys, slot, head) + lane * PAIR;
                Number* values = place(call.cached_values, slot, head) + lane / PAIR * dim * PAIR + lane % PAIR;
                for (int64_t d = 0; d < call.head_dim; ++d) {
                    keys[d / PAIR * LANES * PAIR + d % PAIR] = key[d];
                    values[d * PAIR] = value[d];
                }
            }
        }
    }
}

// What one work item keeps while it goes through the context.
template <class Element>
struct Workspace {
    alignas(64) typename Element::Number query[MAX_ROWS][ROW_STRIDE];
    alignas(64) typename Element::Number weight[MAX_ROWS][CHUNK];
    alignas(64) float score[MAX_ROWS][CHUNK];
    alignas(64) float output[MAX_ROWS][ROW_STRIDE];
    float maximum[MAX_ROWS], sum[MAX_ROWS], rescale[MAX_ROWS];
};

template <class Element>
ALWAYS_INLINE typename Element::Unit unit_at(const typename Element::Number* numbers, int index) {
    typename Element::Unit unit;
    std::memcpy(&unit, numbers + index * Element::PAIR, sizeof unit);
    return unit;
}

// Scores of ROWS query rows against GROUPS groups of 16 keys.
template <class Element, int ROWS, int GROUPS>
ALWAYS_INLINE void score_tile(Workspace<Element>& work, int row, const typename Element::Number* const* keys, int group,
                              int num_units) {
    Floats sums[ROWS][GROUPS] = {};
    for (int unit = 0; unit < num_units; ++unit) {
        typename Element::Vector loaded[GROUPS];
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; ++g)
            loaded[g] = Element::load_units(keys[group + g] + unit * LANES * Element::PAIR);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; ++r) {
            const auto query = unit_at<Element>(work.query[row + r], unit);
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; ++g) sums[r][g] = Element::multiply_add(sums[r][g], query, loaded[g]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; ++g) store(&work.score[row + r][(group + g) * LANES], sums[r][g]);
}

// Adds the weighted values of a chunk to VECTORS * 16 numbers of the output of ROWS rows.
template <class Element, int ROWS, int VECTORS>
ALWAYS_INLINE void value_tile(Workspace<Element>& work, int row, const typename Element::Number* const* values,
                              int num_groups, int first, int dim) {
    constexpr int UNITS = LANES / Element::PAIR;
    Floats sums[ROWS][VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            sums[r][v] = load(&work.output[row + r][first + v * LANES]) * work.rescale[row + r];
    for (int group = 0; group < num_groups; ++group) {
        const typename Element::Number* numbers = values[group] + first * Element::PAIR;
        for (int unit = 0; unit < UNITS; ++unit, numbers += dim * Element::PAIR) {
            typename Element::Vector loaded[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) loaded[v] = Element::load_units(numbers + v * LANES * Element::PAIR);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; ++r) {
                const auto weight = unit_at<Element>(work.weight[row + r], group * UNITS + unit);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; ++v) sums[r][v] = Element::multiply_add(sums[r][v], weight, loaded[v]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) store(&work.output[row + r][first + v * LANES], sums[r][v]);
}

template <class Element, int ROWS>
void score_rows(Workspace<Element>& work, int row, const typename Element::Number* const* keys, int num_groups,
                int dim) {
    int group = 0;
    for (; group + 4 <= num_groups; group += 4) score_tile<Element, ROWS, 4>(work, row, keys, group, dim / Element::PAIR);
    for (; group < num_groups; ++group) score_tile<Element, ROWS, 1>(work, row, keys, group, dim / Element::PAIR);
}

template <class Element, int ROWS>
void value_rows(Workspace<Element>& work, int row, const typename Element::Number* const* values, int num_groups,
                int dim) {
    int first = 0;
    for (; first + 4 * LANES <= dim; first += 4 * LANES)
        value_tile<Element, ROWS, 4>(work, row, values, num_groups, first, dim);
    for (; first < dim; first += LANES) value_tile<Element, ROWS, 1>(work, row, values, num_groups, first, dim);
}

// Six rows at a time: with four vectors each they fill 24 of the 32 registers of AVX-512.
template <class Element>
void score_chunk(Workspace<Element>& work, int num_rows, const typename Element::Number* const* keys, int num_groups,
                 int dim) {
    for (int row = 0; row < num_rows; row += 6) switch (std::min(6, num_rows - row)) {
            case 1: score_rows<Element, 1>(work, row, keys, num_groups, dim); break;
            case 2: score_rows<Element, 2>(work, row, keys, num_groups, dim); break;
            case 3: score_rows<Element, 3>(work, row, keys, num_groups, dim); break;
            case 4: score_rows<Element, 4>(work, row, keys, num_groups, dim); break;
            case 5: score_rows<Element, 5>(work, row, keys, num_groups, dim); break;
            default: score_rows<Element, 6>(work, row, keys, num_groups, dim);
        }
}

template <class Element>
void value_chunk(Workspace<Element>& work, int num_rows, const typename Element::Number* const* values, int num_groups,
                 int dim) {
    for (int row = 0; row < num_rows; row += 6) switch (std::min(6, num_rows - row)) {
            case 1: value_rows<Element, 1>(work, row, values, num_groups, dim); break;
            case 2: value_rows<Element, 2>(work, row, values, num_groups, dim); break;
            case 3: value_rows<Element, 3>(work, row, values, num_groups, dim); break;
            case 4: value_rows<Element, 4>(work, row, values, num_groups, dim); break;
            case 5: value_rows<Element, 5>(work, row, values, num_groups, dim); break;
            default: value_rows<Element, 6>(work, row, values, num_groups, dim);
        }
}

// Turns the scores of a row into weights and moves its maximum and sum on. Keys [first_key, last_key] are visible to it.
template <class Element>
void weigh_row(Workspace<Element>& work, int row, int num_groups, int chunk_start, int first_key, int last_key,
               const AttendCall& call) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const bool masks = chunk_start < first_key || chunk_start + num_groups * LANES - 1 > last_key;
    float* scores = work.score[row];
    Floats maximums = all(MASKED);
    for (int group = 0; group < num_groups; ++group) {
        Floats x = load(scores + group * LANES) * call.scale;
        if (call.softcap > 0) x = soft_capped(x, call.softcap);
        if (masks) {
            const Ints key = lane + (chunk_start + group * LANES);
            x = ((key >= first_key) & (key <= last_key)) ? x : all(MASKED);
        }
        store(scores + group * LANES, x);
        maximums = (x > maximums) ? x : maximums;
    }
    float maximum = work.maximum[row];
    for (int i = 0; i < LANES; ++i) maximum = std::max(maximum, maximums[i]);
    Floats sums = {};
    for (int group = 0; group < num_groups; ++group) {
        const Floats weights = exponential(load(scores + group * LANES) - maximum);
        sums += weights;
        Element::put(&work.weight[row][group * LANES], weights);
    }
    float sum = 0;
    for (int i = 0; i < LANES; ++i) sum += sums[i];
    work.rescale[row] = std::exp(work.maximum[row] - maximum);
    work.sum[row] = work.sum[row] * work.rescale[row] + sum;
    work.maximum[row] = maximum;
}

// The values of a chunk are fetched while its scores are computed; the blocks of a sequence lie anywhere in memory.
ALWAYS_INLINE void prefetch(const void* from, size_t num_bytes) {
    for (size_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// Rows [first_row, first_row + num_rows) of a sequence for one KV head; row = token * heads per KV head + head.
struct Item {
    int sequence, first_row, num_rows;
};

template <class Element>
void attend_item(const AttendCall& call, const Item& item, int kv_head, Workspace<Element>& work) {
    using Number = typename Element::Number;
    const int dim = round_up((int)call.head_dim, LANES), group_heads = (int)(call.num_heads / call.num_kv_heads);
    const int first_token = call.query_starts[item.sequence];
    const int num_new = call.query_starts[item.sequence + 1] - first_token;
    const int first_position = call.context_lengths[item.sequence] - num_new;
    auto token_of = [&](int row) { return (item.first_row + row) / group_heads; };
    auto head_of = [&](int row) { return kv_head * group_heads + (item.first_row + row) % group_heads; };
    auto first_key_of = [&](int row) {
        const int position = first_position + token_of(row);
        return call.sliding_window ? std::max(0, position + 1 - (int)call.sliding_window) : 0;
    };

    for (int row = 0; row < item.num_rows; ++row) {
        const Number* query = static_cast<const Number*>(call.queries) +
                              (first_token + token_of(row)) * call.query_token_stride +
                              head_of(row) * call.query_head_stride;
        std::memset(work.query[row], 0, dim * sizeof(Number));
        std::memcpy(work.query[row], query, call.head_dim * sizeof(Number));
        std::memset(work.output[row], 0, dim * sizeof(float));
        work.maximum[row] = MASKED;
        work.sum[row] = 0;
    }

    const int32_t* table = call.block_tables + call.table_rows[item.sequence] * call.table_stride;
    const int groups_per_block = (int)call.block_size / LANES;
    auto offset_of = [&](int index) {
        const int64_t group = (int64_t)table[index / groups_per_block] * groups_per_block + index % groups_per_block;
        return (group * call.num_kv_heads + kv_head) * LANES * dim;
    };
    const Number *cached_keys = static_cast<const Number*>(call.cached_keys),
                 *cached_values = static_cast<const Number*>(call.cached_values);
    const size_t group_bytes = LANES * dim * sizeof(Number);
    const int end = (first_position + token_of(item.num_rows - 1)) / LANES + 1;
    for (int start = first_key_of(0) / LANES; start < end; start += CHUNK_GROUPS) {
        const int num_groups = std::min(CHUNK_GROUPS, end - start);
        const Number *keys[CHUNK_GROUPS], *values[CHUNK_GROUPS];
        for (int i = 0; i < num_groups; ++i) {
            keys[i] = cached_keys + offset_of(start + i);
            values[i] = cached_values + offset_of(start + i);
            prefetch(values[i], group_bytes);
        }
        score_chunk<Element>(work, item.num_rows, keys, num_groups, dim);
        for (int row = 0; row < item.num_rows; ++row)
            weigh_row<Element>(work, row, num_groups, start * LANES, first_key_of(row), first_position + token_of(row),
                               call);
        value_chunk<Element>(work, item.num_rows, values, num_groups, dim);
    }

    for (int row = 0; row < item.num_rows; ++row) {
        Number* output = static_cast<Number*>(call.outputs) +
                         ((first_token + token_of(row)) * call.num_heads + head_of(row)) * call.head_dim;
        for (int d = 0; d < dim; d += LANES)
            Element::put(&work.query[row][d], load(&work.output[row][d]) / work.sum[row]);
        std::memcpy(output, work.query[row], call.head_dim * sizeof(Number));
    }
}

template <class Element>
void attend(const AttendCall& call) {
    const int group_heads = (int)(call.num_heads / call.num_kv_heads);
    std::vector<Item> items;
    for (int sequence = 0; sequence < call.num_sequences; ++sequence) {
        const int num_rows = (call.query_starts[sequence + 1] - call.query_starts[sequence]) * group_heads;
        for (int row = 0; row < num_rows; row += MAX_ROWS)
            items.push_back({sequence, row, std::min(MAX_ROWS, num_rows - row)});
    }
    const int64_t num_items = (int64_t)items.size() * call.num_kv_heads;
#pragma omp parallel num_threads(call.num_threads)
    {
        Workspace<Element> work;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < num_items; ++i)
            attend_item<Element>(call, items[i / call.num_kv_heads], (int)(i % call.num_kv_heads), work);
    }
}

}  // namespace

extern "C" {

void inflight_write_kv_float32(const WriteCall* call) { write_kv<Float32>(*call); }
void inflight_write_kv_bfloat16(const WriteCall* call) { write_kv<BFloat16>(*call); }
void inflight_attend_float32(const AttendCall* call) { attend<Float32>(*call); }
void inflight_attend_bfloat16(const AttendCall* call) { attend<BFloat16>(*call); }

// Largest head size, and whether bfloat16 runs on the dot-product instruction.
int64_t inflight_max_head_dim() { return MAX_DIM; }
int64_t inflight_has_bfloat16_instructions() {
#ifdef INFLIGHT_DPBF16
    return 1;
#else
    return 0;
#endif
}

}  // extern "C"
