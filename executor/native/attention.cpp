// Paged attention with a C interface (executor/attention/cpu.py), for models whose forward pass is transformers'.

#include "attention.h"

using namespace inflight;

extern "C" {

// The fields of cpu.py's structures, in the same order. Strides count numbers; the last dimension is contiguous.
struct WriteCall {
    const void *keys, *values;  // [num_tokens, num_kv_heads, head_dim]
    void *cached_keys, *cached_values;
    const int64_t* slots;       // [num_tokens]
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t num_tokens, num_kv_heads, head_dim;
    int64_t is_int8;  // the cache is int8 with scales
};

struct AttendCall {
    const void* queries;  // [num_tokens, num_heads, head_dim]
    void* outputs;        // the same, contiguous
    void *cached_keys, *cached_values;
    const int32_t *query_starts, *context_lengths, *block_tables;
    const int32_t* table_rows;  // row i of the batch has block_tables[table_rows[i]]
    const float* sinks;         // [num_heads], or null
    int64_t query_token_stride, query_head_stride, table_stride;
    int64_t num_sequences, num_heads, num_kv_heads, head_dim, block_size;
    int64_t sliding_window;  // 0: none
    int64_t is_int8;
    float scale, softcap;  // softcap 0: none
};

}  // extern "C"

namespace {

// Fewer keys and values than this are written before other threads would be awake.
constexpr int64_t MIN_SHARED_HEADS = 256;
constexpr int64_t TOKENS_AT_ONCE = 16;

template <class Element>
void write_kv(Pool& pool, const WriteCall& call) {
    using Number = typename Element::Number;
    const LayerKv kv{call.cached_keys, call.cached_values, call.num_kv_heads, call.head_dim, call.is_int8 != 0};
    auto write_token = [&](int64_t token) {
        for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
            write_key<Element>(kv, call.slots[token], head,
                               static_cast<const Number*>(call.keys) + token * call.key_token_stride +
                                   head * call.key_head_stride);
            write_value<Element>(kv, call.slots[token], head,
                                 static_cast<const Number*>(call.values) + token * call.value_token_stride +
                                     head * call.value_head_stride);
        }
    };
    auto clear_token = [&](int64_t token) {
        if (call.slots[token] % LANES == 0) clear_values<Element>(kv, call.slots[token]);
    };
    run_on(call.num_tokens * kv.num_kv_heads >= MIN_SHARED_HEADS ? &pool : nullptr, [&](Team& team) {
        auto each_token = [&](const auto& work) {
            team.each((call.num_tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE, [&](int64_t some) {
                const int64_t end = std::min(call.num_tokens, (some + 1) * TOKENS_AT_ONCE);
                for (int64_t token = some * TOKENS_AT_ONCE; token < end; ++token) work(token);
            });
        };
        // Every group is cleared before any token is written to it, whichever threads write.
        each_token(clear_token);
        each_token(write_token);
    });
}

template <class Element>
void attend_all(Pool& pool, const AttendCall& call) {
    Attention attention{};
    attention.kv = {call.cached_keys, call.cached_values, call.num_kv_heads, call.head_dim, call.is_int8 != 0};
    attention.queries = call.queries;
    attention.query_token_stride = call.query_token_stride;
    attention.query_head_stride = call.query_head_stride;
    attention.outputs = call.outputs;
    attention.output_token_stride = call.num_heads * call.head_dim;
    attention.query_starts = call.query_starts;
    attention.context_lengths = call.context_lengths;
    attention.block_tables = call.block_tables;
    attention.table_rows = call.table_rows;
    attention.table_stride = call.table_stride;
    attention.num_sequences = call.num_sequences;
    attention.num_heads = call.num_heads;
    attention.block_size = call.block_size;
    attention.sliding_window = call.sliding_window;
    attention.scale = call.scale;
    attention.softcap = call.softcap;
    attention.sinks = call.sinks;

    const auto items = attention_items(call.query_starts, call.num_sequences, call.num_heads, call.num_kv_heads,
                                       pool.num_threads());
    const auto num_items = (int64_t)items.size();
    pool.reserve(sizeof(Workspace<Element>));
    run_on(num_items > 1 ? &pool : nullptr, [&](Team& team) {
        const TilesInUse tiles;
        Workspace<Element>& work = *new (pool.buffer(team.thread)) Workspace<Element>;
        team.each(num_items, [&](int64_t index) {
            const int64_t next = index + team.num_threads;
            attend<Element>(attention, items[index], next < num_items ? &items[next] : nullptr, work);
        });
    });
}

Pool& pool_of(void* pool) { return *static_cast<Pool*>(pool); }

}  // namespace

extern "C" {

// These return 0, or 1 if there is not enough memory.
int64_t inflight_write_kv_float32(void* pool, const WriteCall* call) {
    return or_out_of_memory([&] { write_kv<Float32>(pool_of(pool), *call); });
}
int64_t inflight_write_kv_bfloat16(void* pool, const WriteCall* call) {
    return or_out_of_memory([&] { write_kv<BFloat16>(pool_of(pool), *call); });
}
int64_t inflight_attend_float32(void* pool, const AttendCall* call) {
    return or_out_of_memory([&] { attend_all<Float32>(pool_of(pool), *call); });
}
int64_t inflight_attend_bfloat16(void* pool, const AttendCall* call) {
    return or_out_of_memory([&] { attend_all<BFloat16>(pool_of(pool), *call); });
}

// Returns the largest head size.
int64_t inflight_max_head_dim() { return MAX_DIM; }

}  // extern "C"
