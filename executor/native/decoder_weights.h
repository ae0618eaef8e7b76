// The weights of a decoder in the layout of its products, in one contiguous memory.

#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "arena.h"
#include "decoder.h"
#include "product.h"

namespace inflight {

// Argument of `pack`. Matrices are `[columns, depth]` of the element type, of which the columns are those of this rank,
// and the embedding is `[vocabulary_size, columns]` of them. The rest is float32, and whole except the QKV bias.
enum Packed {
    PACK_EMBEDDING,
    PACK_HEAD,
    PACK_FINAL_NORM,
    PACK_QKV,
    PACK_OUTPUT,
    PACK_GATE_UP,
    PACK_DOWN,
    PACK_INPUT_NORM,
    PACK_POST_ATTENTION_NORM,
    PACK_QUERY_NORM,
    PACK_KEY_NORM,
    PACK_QKV_BIAS,
    PACK_OUTPUT_BIAS,
    PACK_ATTENTION_OUTPUT_NORM,
    PACK_FEED_FORWARD_OUTPUT_NORM,
    PACK_ROUTER,
    PACK_EXPERT_GATE_UP,  // of the expert `layer % num_experts` of a layer, `layer / num_experts`
    PACK_EXPERT_DOWN,
};

template <class Factor>
struct FeedForward {
    Matrix<Factor> gate_up, down;
};

// Vectors that a model has not are null, and matrices empty: a layer has a feed-forward layer, or a router
// `[num_experts, width]` and experts. The norms are those before and after attention, and before and after the
// feed-forward layer.
template <class Factor>
struct Layer : FeedForward<Factor> {
    Matrix<Factor> qkv, output;
    std::vector<FeedForward<Factor>> experts;
    float* router = nullptr;
    float *input_norm, *attention_output_norm, *post_attention_norm, *feed_forward_output_norm;
    float *query_norm, *key_norm, *qkv_bias, *output_bias;
};

constexpr int64_t HEAD_BLOCKS = 4;  // of the output layer in one task
// Of gate and up each in one task: as many as make whole steps of the next product's depth, for int8.
template <class Factor>
constexpr int64_t GATE_BLOCKS = IS_INT8<Factor> ? STEP_DEPTH<Factor> / BLOCK_COLUMNS : 1;

// Weights are given as Elements and multiplied as Factors.
template <class Element, class Factor>
class PackedWeights {
    using Number = typename Element::Number;

  public:
    PackedWeights(const DecoderShape& shape, WeightStream stream)
        : stream(stream),
          head_blocks(round_up(shape.head_dim, BLOCK_COLUMNS) / BLOCK_COLUMNS),
          layers(shape.num_layers),
          shape_(shape) {
        Cursor count(nullptr);
        place(count);
        arena_ = std::make_unique<Arena>(count.used());
        Cursor cursor(arena_->data());
        place(cursor);
    }

    int64_t matrix_bytes() const {
        int64_t num_bytes = head.num_blocks * head.block_bytes;
        auto add = [&](const Matrix<Factor>& matrix) { num_bytes += matrix.num_blocks * matrix.block_bytes; };
        for (const Layer<Factor>& layer : layers) {
            for (const Matrix<Factor>* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) add(*matrix);
            for (const FeedForward<Factor>& expert : layer.experts) add(expert.gate_up), add(expert.down);
        }
        return num_bytes;
    }

    void pack(int64_t layer, int64_t part, const void* numbers) {
        const int64_t hidden = shape_.hidden_size, heads = shape_.num_heads + 2 * shape_.num_kv_heads;
        const int64_t dim = shape_.head_dim, inner = shape_.intermediate_size;
        const int64_t columns = shape_.hidden_columns().count;
        auto plain = [](int64_t column) { return column; };
        switch (part) {
            case PACK_EMBEDDING:
                std::memcpy(embedding, numbers, shape_.vocabulary_size * columns * sizeof(Number));
                break;
            case PACK_HEAD: pack_matrix(head, numbers, shape_.vocabulary_columns().count, hidden, plain); break;
            case PACK_QKV:
                // Each head begins a new block.
                pack_matrix(layers[layer].qkv, numbers, heads * dim, hidden, [&](int64_t column) {
                    return column / dim * head_blocks * BLOCK_COLUMNS + column % dim;
                });
                break;
            case PACK_OUTPUT:
                pack_matrix(layers[layer].output, numbers, columns, shape_.attention_depth(), plain);
                break;
            case PACK_GATE_UP: pack_gate_up(layers[layer].gate_up, numbers); break;
            case PACK_DOWN: pack_matrix(layers[layer].down, numbers, columns, inner, plain); break;
            case PACK_ROUTER:
                for (int64_t expert = 0; expert < shape_.num_experts; ++expert)
                    std::memcpy(layers[layer].router + expert * round_up(hidden, LANES),
                                static_cast<const float*>(numbers) + expert * hidden, hidden * sizeof(float));
                break;
            case PACK_EXPERT_GATE_UP: pack_gate_up(expert_of(layer).gate_up, numbers); break;
            case PACK_EXPERT_DOWN: pack_matrix(expert_of(layer).down, numbers, columns, inner, plain); break;
            default: {
                const auto [vector, size] = vector_of(layer, part);
                std::memcpy(vector, numbers, size * sizeof(float));
            }
        }
    }

    const WeightStream stream;
    const int64_t head_blocks;  // of an attention head
    Number* embedding = nullptr;
    Matrix<Element> head;
    float* final_norm = nullptr;
    std::vector<Layer<Factor>> layers;

  private:
    void place(Cursor& cursor) {
        const int64_t hidden = shape_.hidden_size, width = round_up(hidden, BLOCK_COLUMNS), dim = shape_.head_dim;
        const int64_t heads = shape_.num_heads + 2 * shape_.num_kv_heads;
        const int64_t columns = shape_.hidden_columns().count;
        embedding = cursor.take<Number>(shape_.vocabulary_size * columns);
        head = take_matrix<Element>(cursor, shape_.vocabulary_columns().count, hidden, HEAD_BLOCKS, stream.panels());
        final_norm = cursor.take<float>(width);
        for (Layer<Factor>& layer : layers) {
            layer.qkv = place_matrix(cursor, heads * head_blocks * BLOCK_COLUMNS, hidden, head_blocks);
            layer.output = place_matrix(cursor, columns, shape_.attention_depth());
            layer.experts.resize(shape_.num_experts);
            for (FeedForward<Factor>& expert : layer.experts) place_feed_forward(cursor, expert);
            if (shape_.num_experts == 0) place_feed_forward(cursor, layer);
            auto vector = [&](bool has, int64_t size) { return has ? cursor.take<float>(size) : nullptr; };
            layer.input_norm = vector(shape_.has_input_norms, width);
            layer.attention_output_norm = vector(shape_.has_output_norms, width);
            layer.post_attention_norm = vector(shape_.has_input_norms, width);
            layer.feed_forward_output_norm = vector(shape_.has_output_norms, width);
            layer.query_norm = vector(shape_.head_norms != NO_HEAD_NORMS, head_norm_size(shape_.num_heads));
            layer.key_norm = vector(shape_.head_norms != NO_HEAD_NORMS, head_norm_size(shape_.num_kv_heads));
            layer.qkv_bias = vector(shape_.has_qkv_bias, heads * dim);
            layer.output_bias = vector(shape_.has_output_bias, width);
            layer.router = vector(shape_.num_experts > 0, shape_.num_experts * round_up(hidden, LANES));
        }
    }

    int64_t head_norm_size(int64_t num_heads) const {
        return (shape_.head_norms == NORMS_OF_ALL_HEADS ? num_heads : 1) * shape_.head_dim;
    }

    Matrix<Factor> place_matrix(Cursor& cursor, int64_t columns, int64_t depth, int64_t blocks_at_once = 1) {
        return take_matrix<Factor>(cursor, columns, depth, blocks_at_once, stream.panels());
    }

    void place_feed_forward(Cursor& cursor, FeedForward<Factor>& layer) {
        const int64_t columns = 2 * round_up(shape_.inner_columns().count, GATE_BLOCKS<Factor> * BLOCK_COLUMNS);
        layer.gate_up = place_matrix(cursor, columns, shape_.hidden_size, 2 * GATE_BLOCKS<Factor>);
        layer.down = place_matrix(cursor, shape_.hidden_columns().count, shape_.intermediate_size);
    }

    const FeedForward<Factor>& expert_of(int64_t index) const {
        return layers[index / shape_.num_experts].experts[index % shape_.num_experts];
    }

    // Blocks of the gate and of the up projection alternate.
    void pack_gate_up(const Matrix<Factor>& matrix, const void* numbers) {
        const int64_t inner = shape_.inner_columns().count;
        pack_matrix(matrix, numbers, 2 * inner, shape_.hidden_size, [&](int64_t column) {
            const int64_t index = column % inner;
            return (2 * (index / BLOCK_COLUMNS) + column / inner) * BLOCK_COLUMNS + index % BLOCK_COLUMNS;
        });
    }

    template <class Product, class Place>
    void pack_matrix(const Matrix<Product>& matrix, const void* numbers, int64_t columns, int64_t depth,
                     const Place& place) {
        for (int64_t column = 0; column < columns; ++column)
            pack_column<Product, Element>(matrix, place(column), static_cast<const Number*>(numbers) + column * depth,
                                         depth);
    }

    std::pair<float*, int64_t> vector_of(int64_t index, int64_t part) const {
        const int64_t hidden = shape_.hidden_size, dim = shape_.head_dim;
        if (part == PACK_FINAL_NORM) return {final_norm, hidden};
        const Layer<Factor>& layer = layers[index];
        switch (part) {
            case PACK_INPUT_NORM: return {layer.input_norm, hidden};
            case PACK_POST_ATTENTION_NORM: return {layer.post_attention_norm, hidden};
            case PACK_ATTENTION_OUTPUT_NORM: return {layer.attention_output_norm, hidden};
            case PACK_FEED_FORWARD_OUTPUT_NORM: return {layer.feed_forward_output_norm, hidden};
            case PACK_QUERY_NORM: return {layer.query_norm, head_norm_size(shape_.num_heads)};
            case PACK_KEY_NORM: return {layer.key_norm, head_norm_size(shape_.num_kv_heads)};
            case PACK_QKV_BIAS: return {layer.qkv_bias, (shape_.num_heads + 2 * shape_.num_kv_heads) * dim};
            default: return {layer.output_bias, hidden};
        }
    }

    const DecoderShape shape_;
    std::unique_ptr<Arena> arena_;
};

}  // namespace inflight
