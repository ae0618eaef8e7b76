// The weights of a decoder in the layout of its products, in one contiguous memory.

#pragma once

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "arena.h"
#include "decoder.h"
#include "product.h"

namespace inflight {

// Argument of `pack`. Matrices are `[columns, depth]` of the element type, of which the columns are those of this rank,
// and the embedding is `[vocabulary_size, columns]` of them. The rest is float32, and whole except the QKV bias and what
// belongs to heads or channels of a mixer.
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
    PACK_MIXER,  // `MixerVectors`. The projections of a mixer are QKV and output.
    PACK_ROUTER_CORRECTION,
    PACK_SHARED_GATE,
    PACK_ROUTER_BIAS,
    PACK_EXPERT_GATE_UP_BIAS,  // of all experts of a layer
    PACK_EXPERT_DOWN_BIAS,
    PACK_SINKS,
};

template <class Factor>
struct FeedForward {
    Matrix<Factor> gate_up, down;
};

// Vectors that a model has not are null, and matrices empty: a layer has a feed-forward layer, or none, or a router
// `[num_experts, width]` and experts; then its feed-forward layer, if there is one, is the expert that all rows share.
// The norms are those before and after attention, and before and after the
// feed-forward layer.
template <class Factor>
struct Layer : FeedForward<Factor> {
    Matrix<Factor> qkv, output;  // the projections before and after attention or a mixer
    std::vector<FeedForward<Factor>> experts;
    float *router = nullptr, *router_correction = nullptr, *shared_gate = nullptr, *router_bias = nullptr;
    float *gate_up_bias = nullptr, *down_bias = nullptr;  // [num_experts, 2, padded_inner()], [num_experts, width]
    float* sinks = nullptr;
    float *input_norm, *attention_output_norm, *post_attention_norm, *feed_forward_output_norm;
    float *query_norm, *key_norm, *qkv_bias, *output_bias;
    float* mixer = nullptr;
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
          shape_(shape),
          is_recurrent_(shape.is_recurrent, shape.is_recurrent + shape.num_layers),
          has_experts_(shape.has_experts, shape.has_experts + shape.num_layers),
          is_bare_(shape.is_bare, shape.is_bare + shape.num_layers) {}

    // Announces a part of a matrix that has codes, before memory is allocated.
    void declare(int64_t layer, int64_t part, const CodedPart& coded) {
        const int64_t num_blocks = num_blocks_of(layer, part);
        Mixture& mixture = mixtures_[{layer, part}];
        mixture.add<Element>(coded, num_blocks,
                             [&](int64_t column) { return placed(layer, part, column) / BLOCK_COLUMNS; });
        viewed_size.include(mixture.views());
    }

    // Allocates memory for all weights, once. It fills while they are packed and their sources are freed.
    void allocate() {
        Cursor count(nullptr);
        place(count);
        arena_ = std::make_unique<Arena>(count.used(), false);
        Cursor cursor(arena_->data());
        place(cursor);
    }

    int64_t matrix_bytes() const {
        int64_t num_bytes = head.num_bytes;
        auto add = [&](const Matrix<Factor>& matrix) { num_bytes += matrix.num_bytes; };
        for (const Layer<Factor>& layer : layers) {
            for (const Matrix<Factor>* matrix : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) add(*matrix);
            for (const FeedForward<Factor>& expert : layer.experts) add(expert.gate_up), add(expert.down);
        }
        return num_bytes;
    }

    // Packs `count` columns of a matrix, from `first` on; or a vector, the embedding or a router as a whole.
    void pack(int64_t layer, int64_t part, const void* numbers, int64_t first, int64_t count) {
        const int64_t hidden = shape_.hidden_size, columns = shape_.hidden_columns().count;
        auto pack_into = [&](const auto& matrix) { pack_matrix(matrix, layer, part, numbers, first, count); };
        switch (part) {
            case PACK_EMBEDDING:
                std::memcpy(embedding, numbers, shape_.vocabulary_size * columns * sizeof(Number));
                break;
            case PACK_HEAD: pack_into(head); break;
            case PACK_QKV: pack_into(layers[layer].qkv); break;
            case PACK_OUTPUT: pack_into(layers[layer].output); break;
            case PACK_GATE_UP: pack_into(layers[layer].gate_up); break;
            case PACK_DOWN: pack_into(layers[layer].down); break;
            case PACK_ROUTER:
                copy_rows(layers[layer].router, round_up(hidden, LANES), numbers, shape_.num_experts, hidden);
                break;
            case PACK_EXPERT_GATE_UP_BIAS:
                copy_rows(layers[layer].gate_up_bias, padded_inner(), numbers, 2 * shape_.num_experts,
                          shape_.intermediate_size);
                break;
            case PACK_EXPERT_DOWN_BIAS:
                copy_rows(layers[layer].down_bias, round_up(hidden, BLOCK_COLUMNS), numbers, shape_.num_experts, hidden);
                break;
            case PACK_EXPERT_GATE_UP: pack_into(expert_of(layer).gate_up); break;
            case PACK_EXPERT_DOWN: pack_into(expert_of(layer).down); break;
            default: {
                const auto [vector, size] = vector_of(layer, part);
                std::memcpy(vector, numbers, size * sizeof(float));
            }
        }
    }

    // Packs a part that was declared.
    void pack_codes(int64_t layer, int64_t part, const CodedPart& coded) {
        const Mixture& mixture = mixtures_.at({layer, part});
        for (int64_t i = 0; i < coded.num_columns; ++i)
            mixture.pack_column(coded, i, placed(layer, part, coded.first_column + i));
    }

    // The views of a matrix's rows.
    const std::vector<RowView>& views(const Blocks& matrix) const {
        static const std::vector<RowView> none;
        return matrix.mixture == nullptr ? none : matrix.mixture->views();
    }

    // Numbers of a bias of gate or up, in whole tasks.
    int64_t padded_inner() const { return round_up(shape_.intermediate_size, GATE_BLOCKS<Factor> * BLOCK_COLUMNS); }

    const WeightStream stream;
    const int64_t head_blocks;  // of an attention head
    typename ViewedRows<Element>::Size viewed_size;
    int64_t most_unpacked_bytes = 0;  // of a matrix
    Number* embedding = nullptr;
    Matrix<Element> head;
    float* final_norm = nullptr;
    std::vector<Layer<Factor>> layers;

  private:
    void place(Cursor& cursor) {
        const int64_t hidden = shape_.hidden_size, width = round_up(hidden, BLOCK_COLUMNS);
        embedding = cursor.take<Number>(shape_.vocabulary_size * shape_.hidden_columns().count);
        head = place_matrix<Element>(cursor, 0, PACK_HEAD);
        final_norm = cursor.take<float>(width);
        for (int64_t index = 0; index < shape_.num_layers; ++index) {
            Layer<Factor>& layer = layers[index];
            layer.qkv = place_matrix<Factor>(cursor, index, PACK_QKV);
            layer.output = place_matrix<Factor>(cursor, index, PACK_OUTPUT);
            layer.experts.resize(num_experts(index));
            for (int64_t i = 0; i < num_experts(index); ++i) {
                const int64_t expert = index * shape_.num_experts + i;
                layer.experts[i].gate_up = place_matrix<Factor>(cursor, expert, PACK_EXPERT_GATE_UP);
                layer.experts[i].down = place_matrix<Factor>(cursor, expert, PACK_EXPERT_DOWN);
            }
            if (inner_size(index, PACK_GATE_UP) > 0) {
                layer.gate_up = place_matrix<Factor>(cursor, index, PACK_GATE_UP);
                layer.down = place_matrix<Factor>(cursor, index, PACK_DOWN);
            }
            auto vector = [&](bool has, int64_t size) { return has ? cursor.take<float>(size) : nullptr; };
            layer.input_norm = vector(shape_.has_input_norms, width);
            layer.attention_output_norm = vector(shape_.has_output_norms, width);
            layer.post_attention_norm = vector(shape_.has_input_norms, width);
            layer.feed_forward_output_norm = vector(shape_.has_output_norms, width);
            layer.query_norm =
                vector(shape_.head_norms != NO_HEAD_NORMS, head_norm_size(shape_.num_ranks * shape_.num_heads));
            layer.key_norm = vector(shape_.head_norms != NO_HEAD_NORMS, head_norm_size(shape_.all_kv_heads));
            layer.qkv_bias = vector(shape_.has_qkv_bias, round_up(qkv_columns(index), BLOCK_COLUMNS));
            layer.output_bias = vector(shape_.has_output_bias, width);
            // Vectors of a mixer are read in whole lanes.
            layer.mixer = vector(is_recurrent(index), shape_.mixer.vector_numbers() + LANES);
            const bool has_experts = num_experts(index) > 0;
            layer.router = vector(has_experts, shape_.num_experts * round_up(hidden, LANES));
            layer.router_correction = vector(has_experts && shape_.has_router_correction, shape_.num_experts);
            layer.shared_gate = vector(has_experts && shape_.has_shared_gate, width);
            layer.router_bias = vector(has_experts && shape_.has_router_bias, shape_.num_experts);
            const bool has_biases = has_experts && shape_.has_expert_biases;
            layer.gate_up_bias = vector(has_biases, shape_.num_experts * 2 * padded_inner());
            layer.down_bias = vector(has_biases, shape_.num_experts * width);
            layer.sinks = vector(shape_.has_sinks, shape_.num_heads);
        }
    }

    bool is_recurrent(int64_t layer) const { return is_recurrent_[layer] != 0; }
    int64_t num_experts(int64_t layer) const { return has_experts_[layer] ? shape_.num_experts : 0; }

    // Of a feed-forward layer, or of an expert.
    int64_t inner_size(int64_t layer, int64_t part) const {
        if (part == PACK_EXPERT_GATE_UP || part == PACK_EXPERT_DOWN) return shape_.intermediate_size;
        if (is_bare_[layer]) return 0;
        if (shape_.num_experts == 0) return shape_.intermediate_size;
        return has_experts_[layer] ? shape_.shared_size : shape_.dense_size;
    }

    int64_t qkv_columns(int64_t layer) const {
        return is_recurrent(layer) ? shape_.mixer.columns() : shape_.qkv_heads() * shape_.head_dim;
    }

    int64_t head_norm_size(int64_t num_heads) const {
        return (shape_.head_norms == NORMS_OF_ALL_HEADS ? num_heads : 1) * shape_.head_dim;
    }

    // Columns of a matrix in blocks, its depth, and the blocks of a task.
    struct MatrixSize {
        int64_t columns, depth, blocks_at_once;
    };

    // Of the columns that this rank has.
    MatrixSize size_of(int64_t layer, int64_t part) const {
        const int64_t hidden = shape_.hidden_size, columns = shape_.hidden_columns().count;
        switch (part) {
            case PACK_HEAD: return {shape_.vocabulary_columns().count, hidden, HEAD_BLOCKS};
            case PACK_QKV:
                if (is_recurrent(layer)) return {qkv_columns(layer), hidden, 1};
                return {shape_.qkv_heads() * head_blocks * BLOCK_COLUMNS, hidden, head_blocks};
            case PACK_OUTPUT:
                return {columns, is_recurrent(layer) ? shape_.mixer.whole_depth() : shape_.attention_depth(), 1};
            case PACK_GATE_UP:
            case PACK_EXPERT_GATE_UP:
                return {shape_.num_gate_up() * round_up(shape_.inner_columns(inner_size(layer, part)).count,
                                                        GATE_BLOCKS<Factor> * BLOCK_COLUMNS),
                        hidden, shape_.num_gate_up() * GATE_BLOCKS<Factor>};
            default: return {columns, inner_size(layer, part), 1};
        }
    }

    int64_t num_blocks_of(int64_t layer, int64_t part) const {
        const MatrixSize size = size_of(layer, part);
        return round_up(size.columns, size.blocks_at_once * BLOCK_COLUMNS) / BLOCK_COLUMNS;
    }

    // Where a column of a matrix is among those of its blocks.
    int64_t placed(int64_t layer, int64_t part, int64_t column) const {
        const int64_t dim = shape_.head_dim;
        switch (part) {
            // Each head begins a new block.
            case PACK_QKV:
                if (is_recurrent(layer)) return column;
                return column / dim * head_blocks * BLOCK_COLUMNS + column % dim;
            // Blocks of the gate and of the up projection alternate.
            case PACK_GATE_UP:
            case PACK_EXPERT_GATE_UP: {
                if (shape_.num_gate_up() == 1) return column;
                const int64_t inner = shape_.inner_columns(inner_size(layer, part)).count, index = column % inner;
                return (2 * (index / BLOCK_COLUMNS) + column / inner) * BLOCK_COLUMNS + index % BLOCK_COLUMNS;
            }
            default: return column;
        }
    }

    template <class Type>
    Matrix<Type> place_matrix(Cursor& cursor, int64_t layer, int64_t part) {
        const MatrixSize size = size_of(layer, part);
        const auto mixture = mixtures_.find({layer, part});
        Mixture* const mixed = mixture == mixtures_.end() ? nullptr : &mixture->second;
        const auto matrix =
            take_matrix<Type>(cursor, size.columns, size.depth, size.blocks_at_once, stream.panels(), mixed);
        most_unpacked_bytes = std::max(most_unpacked_bytes, unpacked_bytes(matrix));
        return matrix;
    }

    const FeedForward<Factor>& expert_of(int64_t index) const {
        return layers[index / shape_.num_experts].experts[index % shape_.num_experts];
    }

    template <class Product>
    void pack_matrix(const Matrix<Product>& matrix, int64_t layer, int64_t part, const void* numbers, int64_t first,
                     int64_t count) {
        const int64_t depth = size_of(layer, part).depth;
        for (int64_t i = 0; i < count; ++i)
            pack_column<Product, Element>(matrix, placed(layer, part, first + i),
                                          static_cast<const Number*>(numbers) + i * depth, depth);
    }

    static void copy_rows(float* to, int64_t stride, const void* from, int64_t num_rows, int64_t count) {
        for (int64_t row = 0; row < num_rows; ++row)
            std::memcpy(to + row * stride, static_cast<const float*>(from) + row * count, count * sizeof(float));
    }

    std::pair<float*, int64_t> vector_of(int64_t index, int64_t part) const {
        const int64_t hidden = shape_.hidden_size;
        if (part == PACK_FINAL_NORM) return {final_norm, hidden};
        const Layer<Factor>& layer = layers[index];
        switch (part) {
            case PACK_INPUT_NORM: return {layer.input_norm, hidden};
            case PACK_POST_ATTENTION_NORM: return {layer.post_attention_norm, hidden};
            case PACK_ATTENTION_OUTPUT_NORM: return {layer.attention_output_norm, hidden};
            case PACK_FEED_FORWARD_OUTPUT_NORM: return {layer.feed_forward_output_norm, hidden};
            case PACK_QUERY_NORM: return {layer.query_norm, head_norm_size(shape_.num_ranks * shape_.num_heads)};
            case PACK_KEY_NORM: return {layer.key_norm, head_norm_size(shape_.all_kv_heads)};
            case PACK_QKV_BIAS: return {layer.qkv_bias, qkv_columns(index)};
            case PACK_ROUTER_CORRECTION: return {layer.router_correction, shape_.num_experts};
            case PACK_SHARED_GATE: return {layer.shared_gate, hidden};
            case PACK_ROUTER_BIAS: return {layer.router_bias, shape_.num_experts};
            case PACK_SINKS: return {layer.sinks, shape_.num_heads};
            case PACK_MIXER: return {layer.mixer, shape_.mixer.vector_numbers()};
            default: return {layer.output_bias, hidden};
        }
    }

    const DecoderShape shape_;
    const std::vector<int64_t> is_recurrent_, has_experts_, is_bare_;
    std::map<std::pair<int64_t, int64_t>, Mixture> mixtures_;  // by layer and part
    std::unique_ptr<Arena> arena_;
};

}  // namespace inflight
