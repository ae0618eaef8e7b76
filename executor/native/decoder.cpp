#include "decoder.h"

#include "adapters.h"
#include "decoder_weights.h"
#include "greedy.h"
#include "row_ops.h"

namespace inflight {

class Decoder {
  public:
    virtual ~Decoder() = default;
    virtual int64_t matrix_bytes() const = 0;
    virtual void pack(int64_t layer, int64_t part, const void* numbers) = 0;
    virtual void step(Pool& pool, const DecoderStep& step) = 0;
    virtual int64_t adapter_slot_bytes(int64_t max_rank) const = 0;
    virtual void reserve_adapters(int64_t num_slots, int64_t max_rank) = 0;
    virtual bool load_adapter(int64_t slot, const AdapterMatrix* matrices) = 0;
};

template <class Element, class Factor = Element>
class DecoderOf final : public Decoder {
    using Number = typename Element::Number;

  public:
    DecoderOf(const DecoderShape& shape, WeightStream stream)
        : shape_(shape),
          windows_(shape.sliding_windows, shape.sliding_windows + shape.num_layers),
          frequencies_(shape.inverse_frequencies, shape.inverse_frequencies + shape.head_dim / 2),
          weights_(shape, stream),
          adapters_(shape) {}

    int64_t matrix_bytes() const override { return weights_.matrix_bytes(); }

    void pack(int64_t layer, int64_t part, const void* numbers) override { weights_.pack(layer, part, numbers); }

    void step(Pool& pool, const DecoderStep& step) override {
        activations_.reserve(shape_, step.num_tokens);
        adapted_.begin(shape_, adapters_, step.adapter_slots, step.query_starts, step.num_sequences);
        const auto items =
            attention_items(step.query_starts, step.num_sequences, shape_.num_heads, shape_.num_kv_heads,
                            pool.num_threads());
        while ((int)scratch_.size() < pool.num_threads()) scratch_.push_back(std::make_unique<Scratch>());
        if (step.greedy_ids != nullptr) choice_.begin(step, shape_.vocabulary_size, pool.num_threads());
        pool.run([&](Team& team) {
            const TilesInUse tiles;
            Run(*this, step, items, team).through_layers();
        });
    }

    int64_t adapter_slot_bytes(int64_t max_rank) const override { return adapters_.slot_bytes(max_rank); }

    void reserve_adapters(int64_t num_slots, int64_t max_rank) override { adapters_.reserve(num_slots, max_rank); }

    bool load_adapter(int64_t slot, const AdapterMatrix* matrices) override { return adapters_.load(slot, matrices); }

  private:
    static_assert(ProductScratch::TILE_NUMBERS >= TILE_ROWS * MAX_DIM);

    struct Scratch {
        Workspace<Element> attention;
        ProductScratch product;
    };

    // One thread's part of a step.
    class Run {
      public:
        Run(DecoderOf& decoder, const DecoderStep& step, const std::vector<Item>& items, Team& team)
            : decoder_(decoder),
              shape_(decoder.shape_),
              activations_(decoder.activations_),
              adapted_(decoder.adapted_),
              step_(step),
              items_(items),
              team_(team),
              scratch_(*decoder.scratch_[team.thread]),
              last_(Clock::now()) {}

        void through_layers() {
            embed();
            for (int64_t index = 0; index < shape_.num_layers; ++index) {
                const Layer<Factor>& layer = decoder_.weights_.layers[index];
                const LayerKv kv{step_.keys[index], step_.values[index], shape_.num_kv_heads, shape_.head_dim,
                                 step_.is_int8[index] != 0};
                norm(layer.input_norm, &kv);
                shrink(QKV, QKV_PRODUCT, index, normed_elements());
                project_qkv(layer, kv, index);
                attend_all(kv, decoder_.windows_[index]);
                if constexpr (!std::is_same_v<Element, Factor>) round_attended();
                shrink(OUTPUT, OUTPUT_PRODUCT, index, activations_.attended);
                add_product(OUTPUT, layer.output, activations_.heads, layer.output_bias, ADAPT_OUTPUT, index,
                            &layer.gate_up);
                norm(layer.post_attention_norm, nullptr);
                shrink(GATE_UP, GATE_UP_PRODUCT, index, normed_elements());
                gate_up(layer, index);
                shrink(DOWN, DOWN_PRODUCT, index, hidden_elements());
                add_product(DOWN, layer.down, activations_.hidden, nullptr, ADAPT_DOWN, index,
                            index + 1 < shape_.num_layers ? static_cast<const Blocks*>(&(&layer)[1].qkv)
                                                          : &decoder_.weights_.head);
            }
            head();
        }

      private:
        using Clock = std::chrono::steady_clock;

        template <class Work>
        void phase(Part part, int64_t num_tasks, const Work& work) {
            team_.each(num_tasks, work);
            if (team_.thread == 0 && step_.part_seconds != nullptr) {
                const auto now = Clock::now();
                step_.part_seconds[part] += std::chrono::duration<double>(now - last_).count();
                last_ = now;
            }
        }

        // A few rows at a time: few enough that every thread gets some, enough that distributing them costs little.
        template <class Work>
        void each_row(Part part, int64_t num_rows, const Work& work) {
            const int64_t at_once = std::clamp<int64_t>(num_rows / (4 * team_.num_threads), 1, 16);
            phase(part, (num_rows + at_once - 1) / at_once, [&](int64_t task) {
                for (int64_t row = task * at_once; row < std::min(num_rows, (task + 1) * at_once); ++row) work(row);
            });
        }

        // rows · matrix; see `Product`. `after` is the matrix of the next product.
        template <class Type, class Finish>
        void product(Part part, const Matrix<Type>& matrix, const Rows<Type>& rows, int64_t num_rows,
                     const Blocks* after, const Finish& finish) {
            const Product<Type> product(matrix, rows, num_rows, team_.num_threads, decoder_.weights_.stream, after);
            phase(part, product.num_tasks, [&](int64_t task) { product.compute(task, scratch_.product, finish); });
        }

        bool has_adapter(int64_t row) const { return !adapted_.is_empty() && adapted_.slot_of(row) >= 0; }

        const AdapterLayer<Element>& adapter_layer(int32_t slot, int64_t index) const {
            return decoder_.adapters_[slot].layers[index];
        }

        const Rows<Element>& normed_elements() const {
            if constexpr (std::is_same_v<Element, Factor>) return activations_.normed;
            else return adapted_.normed;
        }

        const Rows<Element>& hidden_elements() const {
            if constexpr (std::is_same_v<Element, Factor>) return activations_.hidden;
            else return adapted_.hidden;
        }

        // Computes x · Aᵀ · scale of the rows that have an adapter, for the product that follows.
        void shrink(Part part, AdaptedProduct product, int64_t index, const Rows<Element>& rows) {
            if (adapted_.is_empty()) return;
            phase(part, adapted_.num_tasks(product), [&](int64_t task) {
                const auto& group = adapted_.group(product, task);
                const auto& shrink = adapter_layer(group.slot, index).shrinks[product];
                const int64_t panel = adapted_.panel(product, task);
                if (panel < shrink.num_panels)
                    shrink_group<Element>(shrink, panel, rows, adapted_.rows(group), group.count, adapted_.low);
            });
        }

        // Adds the adapter's part of `count` columns of a matrix, from column `first` on, to a row's sums.
        void add_adapter(int64_t row, int64_t index, int matrix, int64_t first, int64_t count, float* sums) {
            const auto& expand = adapter_layer(adapted_.slot_of(row), index).expands[matrix];
            add_expanded<Element>(expand, first / LANES, count / LANES, adapted_.low.row(row), sums);
        }

        void embed() {
            const int64_t half = shape_.head_dim / 2, hidden = shape_.hidden_size;
            each_row(EMBED, step_.num_tokens, [&](int64_t row) {
                float* residual = activations_.residual + row * activations_.width;
                const Number* embedding = decoder_.weights_.embedding + step_.token_ids[row] * hidden;
                for (int64_t i = 0; i < hidden; ++i) residual[i] = Element::get(embedding[i]);
                for (int64_t i = 0; i < half; ++i) {
                    const float angle = (float)step_.positions[row] * decoder_.frequencies_[i];
                    activations_.cosines[row * half + i] = std::cos(angle) * shape_.rope_scaling;
                    activations_.sines[row * half + i] = std::sin(angle) * shape_.rope_scaling;
                }
            });
        }

        // Norms the residual. Before keys and values are written, clears the groups that begin in this step.
        void norm(const float* weight, const LayerKv* kv) {
            each_row(NORM, step_.num_tokens, [&](int64_t row) {
                norm_residual(activations_.normed, row, weight, row);
                if constexpr (!std::is_same_v<Element, Factor>)
                    if (has_adapter(row)) adapted_.normed.put(row, 0, scratch_.product.tile, activations_.width);
                if (kv != nullptr && step_.slots[row] % LANES == 0) clear_values<Element>(*kv, step_.slots[row]);
            });
        }

        template <class Type>
        void norm_residual(const Rows<Type>& to, int64_t row, const float* weight, int64_t to_row) {
            float* normed = scratch_.product.tile;
            norm_row(activations_.residual + row * activations_.width, weight, shape_.hidden_size,
                     shape_.norm_epsilon, [&](int64_t i, Floats x) { store(normed + i, x); });
            to.put(to_row, 0, normed, activations_.width);
        }

        void project_qkv(const Layer<Factor>& layer, const LayerKv& kv, int64_t index) {
            const int64_t blocks = decoder_.weights_.head_blocks, stride = blocks * BLOCK_COLUMNS;
            product(QKV, layer.qkv, activations_.normed, step_.num_tokens, &layer.output,
                    [&](int64_t block, int64_t row, int num_rows, float* tile) {
                        for (int i = 0; i < num_rows; ++i) {
                            if (has_adapter(row + i)) adapt_head(index, block / blocks, row + i, tile + i * stride);
                            finish_head(layer, kv, block / blocks, row + i, tile + i * stride);
                        }
                    });
        }

        void adapt_head(int64_t index, int64_t head, int64_t row, float* sums) {
            const int64_t dim = shape_.head_dim, kv_head = head - shape_.num_heads;
            if (kv_head < 0)
                add_adapter(row, index, ADAPT_QUERY, head * dim, dim, sums);
            else if (kv_head < shape_.num_kv_heads)
                add_adapter(row, index, ADAPT_KEY, kv_head * dim, dim, sums);
            else
                add_adapter(row, index, ADAPT_VALUE, (kv_head - shape_.num_kv_heads) * dim, dim, sums);
        }

        // Adds bias, norm and rotation to a new query, key or value, and stores it.
        void finish_head(const Layer<Factor>& layer, const LayerKv& kv, int64_t head, int64_t row, float* x) {
            const int64_t dim = shape_.head_dim;
            const int64_t kv_head = head - shape_.num_heads, value_head = kv_head - shape_.num_kv_heads;
            if (layer.qkv_bias != nullptr)
                for (int64_t d = 0; d < dim; ++d) x[d] += layer.qkv_bias[head * dim + d];
            if (value_head < 0) {
                const float* weight = kv_head < 0 ? layer.query_norm : layer.key_norm;
                if (weight != nullptr)
                    norm_row(x, weight, dim, shape_.norm_epsilon, [&](int64_t i, Floats y) { store(x + i, y); });
                rotate_row(x, activations_.cosines + row * dim / 2, activations_.sines + row * dim / 2, dim / 2);
            }
            Number numbers[MAX_DIM];
            Number* to = kv_head < 0 ? activations_.queries.row(row) + head * dim : numbers;
            for (int64_t d = 0; d < dim; d += WIDTH) Element::put(to + d, load(x + d));
            if (kv_head < 0) return;
            if (value_head < 0)
                write_key<Element>(kv, step_.slots[row], kv_head, numbers);
            else
                write_value<Element>(kv, step_.slots[row], value_head, numbers);
        }

        void attend_all(const LayerKv& kv, int64_t window) {
            const Attention call{kv,
                                 activations_.queries.numbers,
                                 activations_.queries.stride,
                                 shape_.head_dim,
                                 activations_.attended.numbers,
                                 activations_.attended.stride,
                                 step_.query_starts,
                                 step_.context_lengths,
                                 step_.block_tables,
                                 step_.table_rows,
                                 step_.table_stride,
                                 step_.num_sequences,
                                 shape_.num_heads,
                                 step_.block_size,
                                 window,
                                 shape_.attention_scale,
                                 0.0f};
            scratch_.attention.tile_rows = 0;
            const int64_t num_items = (int64_t)items_.size();
            phase(ATTENTION, num_items, [&](int64_t task) {
                const int64_t next = task + team_.num_threads;
                attend<Element>(call, items_[task], next < num_items ? &items_[next] : nullptr, scratch_.attention);
            });
            const MatrixTiles tiles_again;
        }

        void round_attended() {
            const int64_t depth = shape_.num_heads * shape_.head_dim;
            each_row(ATTENTION, step_.num_tokens, [&](int64_t row) {
                const Number* from = activations_.attended.row(row);
                float* numbers = scratch_.product.tile;
                for (int64_t i = 0; i < depth; ++i) numbers[i] = Element::get(from[i]);
                activations_.heads.put(row, 0, numbers, depth);
            });
        }

        // residual += rows · matrix + bias
        void add_product(Part part, const Matrix<Factor>& matrix, const Rows<Factor>& rows, const float* bias,
                         AdaptedMatrix adapted, int64_t index, const Blocks* after) {
            const int64_t num_tokens = step_.num_tokens;
            product(part, matrix, rows, num_tokens, after, [&](int64_t block, int64_t row, int num_rows, float* tile) {
                const int64_t first = block * BLOCK_COLUMNS;
                const int64_t columns = std::min<int64_t>(BLOCK_COLUMNS, activations_.width - first);
                for (int i = 0; i < num_rows; ++i) {
                    if (has_adapter(row + i))
                        add_adapter(row + i, index, adapted, first, BLOCK_COLUMNS, tile + i * BLOCK_COLUMNS);
                    float* to = activations_.residual + (row + i) * activations_.width + first;
                    for (int64_t c = 0; c < columns; c += WIDTH) {
                        Floats sum = load(to + c) + load(tile + i * BLOCK_COLUMNS + c);
                        if (bias != nullptr) sum += load(bias + first + c);
                        store(to + c, sum);
                    }
                }
            });
        }

        void gate_up(const Layer<Factor>& layer, int64_t index) {
            constexpr int64_t COLUMNS = GATE_BLOCKS<Factor> * BLOCK_COLUMNS;
            product(GATE_UP, layer.gate_up, activations_.normed, step_.num_tokens, &layer.down,
                    [&](int64_t block, int64_t row, int num_rows, float* tile) {
                        for (int i = 0; i < num_rows; ++i) {
                            alignas(64) float hidden[COLUMNS];
                            float* const gate = tile + i * 2 * COLUMNS;
                            const bool is_adapted = has_adapter(row + i);
                            if (is_adapted) adapt_gate_up(index, block / 2 * BLOCK_COLUMNS, COLUMNS, row + i, gate);
                            for (int c = 0; c < COLUMNS; c += WIDTH) {
                                const float* both = gate + c / BLOCK_COLUMNS * 2 * BLOCK_COLUMNS + c % BLOCK_COLUMNS;
                                store(hidden + c, gated<Element>(load(both), load(both + BLOCK_COLUMNS)));
                            }
                            activations_.hidden.put(row + i, block / 2 * BLOCK_COLUMNS, hidden, COLUMNS);
                            if constexpr (!std::is_same_v<Element, Factor>)
                                if (is_adapted)
                                    adapted_.hidden.put(row + i, block / 2 * BLOCK_COLUMNS, hidden, COLUMNS);
                        }
                    });
        }

        // `sums` are blocks of the gate and of the up projection in turn, from column `first` of both on.
        void adapt_gate_up(int64_t index, int64_t first, int64_t count, int64_t row, float* sums) {
            for (int64_t c = 0; c < count; c += BLOCK_COLUMNS, sums += 2 * BLOCK_COLUMNS) {
                add_adapter(row, index, ADAPT_GATE, first + c, BLOCK_COLUMNS, sums);
                add_adapter(row, index, ADAPT_UP, first + c, BLOCK_COLUMNS, sums + BLOCK_COLUMNS);
            }
        }

        void head() {
            GreedyChoice* const choice = step_.greedy_ids == nullptr ? nullptr : &decoder_.choice_;
            each_row(NORM, step_.num_logits, [&](int64_t row) {
                norm_residual(activations_.last, step_.logit_rows[row], decoder_.weights_.final_norm, row);
                if (choice != nullptr) choice->mark(row);
            });
            product(HEAD, decoder_.weights_.head, activations_.last, step_.num_logits, nullptr,
                    [&](int64_t block, int64_t row, int num_rows, float* tile) {
                        for (int i = 0; i < num_rows; ++i)
                            take_logits(choice, row + i, block / HEAD_BLOCKS, tile + i * GreedyChoice::GROUP_COLUMNS);
                    });
            if (choice != nullptr)
                each_row(HEAD, step_.num_logits, [&](int64_t row) { choice->choose(team_.thread, row); });
        }

        void take_logits(GreedyChoice* choice, int64_t row, int64_t group, float* logits) {
            const int64_t first = group * GreedyChoice::GROUP_COLUMNS;
            const int64_t count = std::min(shape_.vocabulary_size - first, GreedyChoice::GROUP_COLUMNS);
            if (choice != nullptr)
                choice->take(team_.thread, row, group, logits, count);
            else
                std::memcpy(step_.logits + row * shape_.vocabulary_size + first, logits, count * sizeof(float));
        }

        DecoderOf& decoder_;
        const DecoderShape& shape_;
        const Activations<Element, Factor>& activations_;
        const AdaptedRows<Element, Factor>& adapted_;
        const DecoderStep& step_;
        const std::vector<Item>& items_;
        Team& team_;
        Scratch& scratch_;
        Clock::time_point last_;
    };

    const DecoderShape shape_;
    const std::vector<int64_t> windows_;
    const std::vector<float> frequencies_;
    PackedWeights<Element, Factor> weights_;
    AdapterSlots<Element> adapters_;
    Activations<Element, Factor> activations_;
    AdaptedRows<Element, Factor> adapted_;
    GreedyChoice choice_;
    std::vector<std::unique_ptr<Scratch>> scratch_;
};

std::unique_ptr<Decoder> make_decoder(const DecoderShape& shape, int64_t is_bfloat16, int64_t has_int8_weights,
                                      WeightStream stream) {
    if (is_bfloat16 && has_int8_weights) return std::make_unique<DecoderOf<BFloat16, Int8>>(shape, stream);
    if (has_int8_weights) return std::make_unique<DecoderOf<Float32, Int8>>(shape, stream);
    if (is_bfloat16) return std::make_unique<DecoderOf<BFloat16>>(shape, stream);
    return std::make_unique<DecoderOf<Float32>>(shape, stream);
}

}  // namespace inflight

extern "C" {

// Returns null if there is not enough memory.
void* inflight_decoder_new(const inflight::DecoderShape* shape, int64_t is_bfloat16, int64_t has_int8_weights,
                           int64_t is_interleaved, int64_t prefetch_from_rows) {
    try {
        return inflight::make_decoder(*shape, is_bfloat16, has_int8_weights, {is_interleaved != 0, prefetch_from_rows})
            .release();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void inflight_decoder_free(void* decoder) { delete static_cast<inflight::Decoder*>(decoder); }

void inflight_decoder_pack(void* decoder, int64_t layer, int64_t part, const void* numbers) {
    static_cast<inflight::Decoder*>(decoder)->pack(layer, part, numbers);
}

// Returns the bytes of the weights that a step multiplies with.
int64_t inflight_decoder_matrix_bytes(void* decoder) {
    return static_cast<inflight::Decoder*>(decoder)->matrix_bytes();
}

// Returns the bytes of an adapter slot for ranks up to `max_rank`.
int64_t inflight_decoder_adapter_slot_bytes(void* decoder, int64_t max_rank) {
    return static_cast<inflight::Decoder*>(decoder)->adapter_slot_bytes(max_rank);
}

// Makes the adapter slots, once. Returns 0, or 1 if there is not enough memory.
int64_t inflight_decoder_reserve_adapters(void* decoder, int64_t num_slots, int64_t max_rank) {
    return inflight::or_out_of_memory(
        [&] { static_cast<inflight::Decoder*>(decoder)->reserve_adapters(num_slots, max_rank); });
}

// Loads an adapter into a slot that no step uses: a matrix for each layer and adapted matrix. Returns 0, or 1 if it does
// not fit the slot. Other slots may be in use meanwhile.
int64_t inflight_decoder_load_adapter(void* decoder, int64_t slot, const inflight::AdapterMatrix* matrices) {
    return static_cast<inflight::Decoder*>(decoder)->load_adapter(slot, matrices) ? 0 : 1;
}

// Returns 0, or 1 if there is not enough memory for the step's tokens.
int64_t inflight_decoder_step(void* decoder, void* pool, const inflight::DecoderStep* step) {
    return inflight::or_out_of_memory(
        [&] { static_cast<inflight::Decoder*>(decoder)->step(*static_cast<inflight::Pool*>(pool), *step); });
}

}  // extern "C"
