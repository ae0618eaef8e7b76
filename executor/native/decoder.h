// A forward pass of the decoder families of decoder_weights.py as one call.
//
// All threads process the layers together, phase by phase: norm, projections with rotary embedding and KV write,
// attention, output with residual, norm, gate and up with activation, down with residual. Where a sublayer's result is
// normed, it is kept in `delta`, and the next phase of norms adds it to the residual. A phase is a list of tasks, each
// some columns of a weight for some rows, so that a weight is read once per step. The residual stream is float32. Rows
// that are multiplied with weights of layers are Factors, as these weights are: Elements or int8. The last norm's rows,
// the output layer, queries, keys, values and what attention yields are Elements. A step allocates memory only if it is
// larger than all steps before it.
//
// Of several ranks each has a part of the columns of every matrix, and of the heads. A product needs whole rows, so the
// ranks exchange what they have computed before the next one: after the embedding, attention or a mixer, both projections
// into the residual stream, and the activation; and before norms that cover all heads: queries and keys, and what Mamba 2
// yields. No sum is split between ranks, so every number has the same bits as with one.

#pragma once

#include <chrono>
#include <memory>

#include "arena.h"
#include "attention.h"
#include "experts.h"
#include "logits.h"
#include "matmul.h"
#include "pool.h"
#include "product.h"
#include "recurrent.h"

namespace inflight {

extern "C" {

// What norms of queries and keys cover: one head, or all heads of a token.
enum HeadNorms { NO_HEAD_NORMS, NORMS_OF_ONE_HEAD, NORMS_OF_ALL_HEADS };

struct ColumnRange {
    int64_t first, count;
};

constexpr int64_t PART_COLUMNS = 32;        // a rank's part of a matrix's columns is a multiple of this,
constexpr int64_t PART_INNER_COLUMNS = 64;  // of the columns of gate and up of this

// decoder.py's `_Shape`, in the same order. Heads are those of this rank; `all_kv_heads` and other sizes are those of
// the whole model.
struct DecoderShape {
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, intermediate_size, vocabulary_size;
    int64_t rotary_dim, num_experts, num_experts_per_token, normalizes_experts, num_ropes;
    int64_t has_qkv_bias, has_output_bias, has_input_norms, has_output_norms, has_gelu;
    int64_t head_norms;                 // HeadNorms
    int64_t num_ranks, rank, all_kv_heads;
    // Of the layers without experts, and of the expert that all rows of a layer use; 0 without such.
    int64_t dense_size, shared_size;
    int64_t has_sigmoid_router, has_router_correction, has_shared_gate;
    int64_t has_output_gate;            // each query has a gate behind it, for what its head yields
    int64_t has_sinks;                  // a score of each head that belongs to no key
    int64_t has_router_bias, has_expert_biases;
    int64_t has_clamped_gates;          // the activation is `clamped`
    int64_t has_squared_relu;           // the activation is that of one projection, without gates
    MixerShape mixer;                   // of the recurrent layers
    float norm_epsilon, attention_scale, softcap, embedding_scale, residual_scale, logit_scale, logit_softcap;
    float router_epsilon, router_scale;
    float gate_factor, gate_limit;      // of clamped gates
    const int64_t* sliding_windows;     // [num_layers], 0: none
    const int64_t* layer_ropes;         // [num_layers]
    const int64_t* has_experts;         // [num_layers], whether a layer has experts, if the model has
    const int64_t* is_recurrent;        // [num_layers], whether a layer has a mixer in place of attention
    const int64_t* is_bare;             // [num_layers], whether a layer has no feed-forward layer
    const float* inverse_frequencies;   // [num_ropes, rotary_dim / 2]
    const float* rope_scalings;         // [num_ropes]

    // Projections in front of an activation: of the gate and of what it gates, or one.
    int64_t num_gate_up() const { return has_squared_relu ? 1 : 2; }

    bool changes_logits() const { return logit_scale != 1.0f || logit_softcap > 0; }

    // Numbers of a row of all heads, those of other ranks included.
    int64_t attention_depth() const { return num_ranks * num_heads * head_dim; }

    // Queries and keys of a token, on all ranks.
    int64_t all_normed_heads() const { return num_ranks * num_heads + all_kv_heads; }

    // Where a query or key of a rank is among them. Several ranks may have the same key.
    int64_t normed_head(int64_t of_rank, int64_t head) const {
        if (head < num_heads) return of_rank * num_heads + head;
        return num_ranks * num_heads + of_rank * all_kv_heads / num_ranks + head - num_heads;
    }

    // What the first projection of a layer with attention yields, and of one with a mixer.
    int64_t qkv_heads() const { return (1 + (has_output_gate != 0)) * num_heads + 2 * num_kv_heads; }
    int64_t mixer_columns() const { return mixer.kind == NO_MIXER ? 0 : mixer.columns(); }
    // Numbers of a row of `projected`: those of a mixer, or the gates of all heads.
    int64_t projected_numbers() const {
        return std::max(mixer_columns(), has_output_gate ? num_heads * head_dim : 0);
    }

    // Of the feed-forward layers that are not of experts: all if there are none, else 0 for none.
    int64_t feed_forward_size() const { return num_experts == 0 ? intermediate_size : std::max(dense_size, shared_size); }

    // Columns of a matrix that a rank computes. All parts are equal, except that the last ones may be smaller or empty.
    ColumnRange columns_of(int64_t of_rank, int64_t columns, int64_t multiple = PART_COLUMNS) const {
        const int64_t part = part_of(columns, multiple), first = std::min(columns, of_rank * part);
        return {first, std::min(part, columns - first)};
    }
    int64_t part_of(int64_t columns, int64_t multiple = PART_COLUMNS) const {
        return num_ranks == 1 ? columns : round_up((columns + num_ranks - 1) / num_ranks, multiple);
    }
    ColumnRange hidden_columns() const { return columns_of(rank, hidden_size); }
    ColumnRange inner_columns(int64_t size) const { return columns_of(rank, size, PART_INNER_COLUMNS); }
    ColumnRange vocabulary_columns() const { return columns_of(rank, vocabulary_size); }
};

// Gives every rank all parts: `parts` are as many parts of `num_bytes` as there are ranks, of which this rank has
// filled its own. Returns 0, or another number if the other ranks cannot be reached.
using AllGather = int64_t (*)(char* parts, int64_t num_bytes);

struct SharedParts;  // exchange.h

// decoder.py's `_Step`, in the same order.
struct DecoderStep {
    const int64_t *token_ids, *positions;          // [num_tokens]
    const int64_t* const* slots;                   // [num_layers], each [num_tokens]
    const int32_t *query_starts, *context_lengths;
    const int32_t* const* block_tables;            // [num_layers], all with the same stride
    const int32_t* table_rows;
    const int64_t* logit_rows;                     // [num_logits + num_hidden]
    void *const *keys, *const *values;             // [num_layers]
    const int64_t* is_int8;                        // [num_layers], whether the KV is
    float* logits;                                 // [num_logits, columns of this rank], or null
    int64_t* greedy_ids;                           // [num_logits], or null; one of the two is not
    float* greedy_logits;                          // [num_logits], those of `greedy_ids`; or null
    float* hidden;                                 // [num_hidden, hidden_size], normed; or null if there are none
    const LogitsRow* const* processed;             // [num_logits], for a greedy step; or null, each and all
    const int32_t *banned_ids, *banned_starts;     // of row i: [banned_starts[i], banned_starts[i + 1]); or null
    const int32_t* adapter_slots;                  // [num_sequences], -1: no adapter; or null, none has one
    double* part_seconds;                          // [NUM_PARTS], added to, or null
    // [NUM_PARTS], added to, or null: processor seconds that all threads together spent in tasks, without waiting.
    double* processor_seconds;
    AllGather all_gather;                          // with several ranks this or `shared_parts`, else null
    SharedParts* shared_parts;                     // of ranks on one machine
    const StepStates* states;                      // of recurrent layers; null without them
    int64_t num_tokens, num_sequences, num_logits, table_stride, block_size, num_hidden;
};

}  // extern "C"

// The parts of a step that are timed separately.
enum Part { EMBED, NORM, QKV, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, EXCHANGE, NUM_PARTS };

// Rows of activations of a step, with space for `capacity` tokens.
template <class Element, class Factor>
struct Activations {
    int64_t capacity = 0;
    std::unique_ptr<Arena> arena;
    int64_t width = 0;          // of the residual
    float* residual = nullptr;  // [capacity, width]
    // [capacity, width], what a sublayer yields before its norm; or [capacity * num_experts_per_token, width], what
    // experts yield; or null
    float* delta = nullptr;
    float *cosines = nullptr, *sines = nullptr;  // [num_ropes, capacity, rotary_dim / 2]
    float* unnormed = nullptr;  // [capacity, all_normed_heads() * head_dim], with norms of all heads
    Rows<Element> queries, attended, last;  // `last` are the rows that yield logits
    Rows<Factor> normed, heads, hidden;  // `heads` are `attended` as factors
    float* projected = nullptr;  // [capacity, projected_stride], what a mixer or the gate of attention reads
    int64_t projected_stride = 0;
    float* gated = nullptr;      // [capacity, whole_depth()], what Mamba 2 yields before its norm on several ranks
    Rows<Element> mixed;         // what a mixer yields,
    Rows<Factor> mixed_factors;  // and the same as factors
    Routing routing;
    Rows<Factor> gathered, expert_hidden;  // `normed` and `hidden` by expert

    void reserve(const DecoderShape& shape, int64_t num_tokens) {
        if (num_tokens <= capacity) return;
        capacity = round_up(std::max<int64_t>(num_tokens, 64), 64);
        Cursor count(nullptr);
        place(shape, count);
        arena = std::make_unique<Arena>(count.used());
        Cursor cursor(arena->data());
        place(shape, cursor);
    }

  private:
    void place(const DecoderShape& shape, Cursor& cursor) {
        const int64_t attention_depth = shape.attention_depth();
        width = round_up(shape.hidden_size, LANES);
        residual = cursor.take<float>(capacity * width);
        const int64_t num_hidden = capacity * std::max<int64_t>(1, shape.num_experts_per_token);
        const bool keeps_delta = shape.has_output_norms || shape.num_experts > 0;
        delta = keeps_delta ? cursor.take<float>(num_hidden * width) : nullptr;
        cosines = cursor.take<float>(shape.num_ropes * capacity * shape.rotary_dim / 2);
        sines = cursor.take<float>(shape.num_ropes * capacity * shape.rotary_dim / 2);
        if (shape.head_norms == NORMS_OF_ALL_HEADS)
            unnormed = cursor.take<float>(capacity * shape.all_normed_heads() * shape.head_dim);
        queries = take_rows<Element>(cursor, capacity, shape.num_heads * shape.head_dim);
        attended = take_rows<Element>(cursor, capacity, attention_depth);
        normed = take_rows<Factor>(cursor, capacity, shape.hidden_size);
        if constexpr (std::is_same_v<Element, Factor>) {
            heads = attended;
            last = normed;
        } else {
            heads = take_rows<Factor>(cursor, capacity, attention_depth);
            last = take_rows<Element>(cursor, capacity, shape.hidden_size);
        }
        if (shape.projected_numbers() > 0) place_projected(shape, cursor);
        hidden = take_rows<Factor>(cursor, capacity, shape.feed_forward_size());
        if (shape.num_experts == 0) return;
        gathered = take_rows<Factor>(cursor, num_hidden, shape.hidden_size);
        expert_hidden = take_rows<Factor>(cursor, num_hidden, shape.intermediate_size);
        routing.place(cursor, capacity, shape.num_experts_per_token);
    }

    void place_projected(const DecoderShape& shape, Cursor& cursor) {
        projected_stride = round_up(shape.projected_numbers(), BLOCK_COLUMNS);
        // Vectors may reach behind the last row.
        projected = cursor.take<float>(capacity * projected_stride + BLOCK_COLUMNS);
        if (shape.mixer.kind == NO_MIXER) return;
        const int64_t depth = shape.mixer.whole_depth();
        if (shape.mixer.kind == MAMBA2 && shape.num_ranks > 1) gated = cursor.take<float>(capacity * depth);
        mixed = take_rows<Element>(cursor, capacity, depth);
        if constexpr (std::is_same_v<Element, Factor>)
            mixed_factors = mixed;
        else
            mixed_factors = take_rows<Factor>(cursor, capacity, depth);
    }
};

}  // namespace inflight
