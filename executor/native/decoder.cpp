#include "decoder.h"

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
};

template <class Element>
class DecoderOf final : public Decoder {
    using Number = typename Element::Number;

  public:
    DecoderOf(const DecoderShape& shape, bool has_int8_weights, WeightStream stream)
        : shape_(shape),
          windows_(shape.sliding_windows, shape.sliding_windows + shape.num_layers),
          frequencies_(shape.inverse_frequencies, shape.inverse_frequencies + shape.head_dim / 2),
          weights_(shape, has_int8_weights, stream),
          wide_bytes_(has_int8_weights ? weights_.most_steps() * STEP_BYTES : 0) {}

    int64_t matrix_bytes() const override { return weights_.matrix_bytes(); }

    void pack(int64_t layer, int64_t part, const void* numbers) override { weights_.pack(layer, part, numbers); }

    void step(Pool& pool, const DecoderStep& step) override {
        activations_.reserve(shape_, step.num_tokens);
        const auto items =
            attention_items(step.query_starts, step.num_sequences, shape_.num_heads, shape_.num_kv_heads,
                            pool.num_threads());
        while ((int)scratch_.size() < pool.num_threads()) scratch_.push_back(std::make_unique<Scratch>());
        for (auto& scratch : scratch_) scratch->product.wide.reserve(wide_bytes_);
        if (step.greedy_ids != nullptr) choice_.begin(step, shape_.vocabulary_size, pool.num_threads());
        pool.run([&](Team& team) {
            const TilesInUse tiles;
            Run(*this, step, items, team).through_layers();
        });
    }

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
              step_(step),
              items_(items),
              team_(team),
              scratch_(*decoder.scratch_[team.thread]),
              last_(Clock::now()) {}

        void through_layers() {
            embed();
            for (int64_t index = 0; index < shape_.num_layers; ++index) {
                const Layer<Element>& layer = decoder_.weights_.layers[index];
                const LayerKv kv{step_.keys[index], step_.values[index], shape_.num_kv_heads, shape_.head_dim,
                                 step_.is_int8[index] != 0};
                norm(layer.input_norm, &kv);
                project_qkv(layer, kv);
                attend_all(kv, decoder_.windows_[index]);
                add_product(OUTPUT, layer.output, activations_.attended, layer.output_bias, &layer.gate_up);
                norm(layer.post_attention_norm, nullptr);
                gate_up(layer);
                add_product(DOWN, layer.down, activations_.hidden, nullptr,
                            index + 1 < shape_.num_layers ? &(&layer)[1].qkv : &decoder_.weights_.head);
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
        template <class Finish>
        void product(Part part, const Matrix<Element>& matrix, const Rows<Element>& rows, int64_t num_rows,
                     const Matrix<Element>* after, const Finish& finish) {
            const Product<Element> product(matrix, rows, num_rows, team_.num_threads,
                                           decoder_.weights_.stream, after);
            phase(part, product.num_tasks, [&](int64_t task) { product.compute(task, scratch_.product, finish); });
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
                norm_residual(row, weight, row);
                if (kv != nullptr && step_.slots[row] % LANES == 0) clear_values<Element>(*kv, step_.slots[row]);
            });
        }

        void norm_residual(int64_t row, const float* weight, int64_t to_row) {
            Number* to = activations_.normed.row(to_row);
            norm_row(activations_.residual + row * activations_.width, weight, shape_.hidden_size,
                     shape_.norm_epsilon, [&](int64_t i, Floats x) { Element::put(to + i, x); });
        }

        void project_qkv(const Layer<Element>& layer, const LayerKv& kv) {
            const int64_t blocks = decoder_.weights_.head_blocks, stride = blocks * BLOCK_COLUMNS;
            product(QKV, layer.qkv, activations_.normed, step_.num_tokens, &layer.output,
                    [&](int64_t block, int64_t row, int num_rows, float* tile) {
                        for (int i = 0; i < num_rows; ++i)
                            finish_head(layer, kv, block / blocks, row + i, tile + i * stride);
                    });
        }

        // Adds bias, norm and rotation to a new query, key or value, and stores it.
        void finish_head(const Layer<Element>& layer, const LayerKv& kv, int64_t head, int64_t row, float* x) {
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

        // residual += rows · matrix + bias
        void add_product(Part part, const Matrix<Element>& matrix, const Rows<Element>& rows, const float* bias,
                         const Matrix<Element>* after) {
            const int64_t num_tokens = step_.num_tokens;
            product(part, matrix, rows, num_tokens, after, [&](int64_t block, int64_t row, int num_rows, float* tile) {
                const int64_t first = block * BLOCK_COLUMNS;
                const int64_t columns = std::min<int64_t>(BLOCK_COLUMNS, activations_.width - first);
                for (int i = 0; i < num_rows; ++i) {
                    float* to = activations_.residual + (row + i) * activations_.width + first;
                    for (int64_t c = 0; c < columns; c += WIDTH) {
                        Floats sum = load(to + c) + load(tile + i * BLOCK_COLUMNS + c);
                        if (bias != nullptr) sum += load(bias + first + c);
                        store(to + c, sum);
                    }
                }
            });
        }

        void gate_up(const Layer<Element>& layer) {
            product(GATE_UP, layer.gate_up, activations_.normed, step_.num_tokens, &layer.down,
                    [&](int64_t block, int64_t row, int num_rows, float* tile) {
                        for (int i = 0; i < num_rows; ++i) {
                            Number* to = activations_.hidden.row(row + i) + block / 2 * BLOCK_COLUMNS;
                            const float *gate = tile + i * 2 * BLOCK_COLUMNS, *up = gate + BLOCK_COLUMNS;
                            for (int c = 0; c < BLOCK_COLUMNS; c += WIDTH)
                                Element::put(to + c, gated<Element>(load(gate + c), load(up + c)));
                        }
                    });
        }

        void head() {
            GreedyChoice* const choice = step_.greedy_ids == nullptr ? nullptr : &decoder_.choice_;
            each_row(NORM, step_.num_logits, [&](int64_t row) {
                norm_residual(step_.logit_rows[row], decoder_.weights_.final_norm, row);
                if (choice != nullptr) choice->mark(row);
            });
            product(HEAD, decoder_.weights_.head, activations_.normed, step_.num_logits, nullptr,
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
        const Activations<Element>& activations_;
        const DecoderStep& step_;
        const std::vector<Item>& items_;
        Team& team_;
        Scratch& scratch_;
        Clock::time_point last_;
    };

    const DecoderShape shape_;
    const std::vector<int64_t> windows_;
    const std::vector<float> frequencies_;
    PackedWeights<Element> weights_;
    const int64_t wide_bytes_;  // of the largest block of int8 weights as elements
    Activations<Element> activations_;
    GreedyChoice choice_;
    std::vector<std::unique_ptr<Scratch>> scratch_;
};

std::unique_ptr<Decoder> make_decoder(const DecoderShape& shape, int64_t is_bfloat16, int64_t has_int8_weights,
                                      WeightStream stream) {
    if (is_bfloat16) return std::make_unique<DecoderOf<BFloat16>>(shape, has_int8_weights, stream);
    return std::make_unique<DecoderOf<Float32>>(shape, has_int8_weights, stream);
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

// Returns 0, or 1 if there is not enough memory for the step's tokens.
int64_t inflight_decoder_step(void* decoder, void* pool, const inflight::DecoderStep* step) {
    return inflight::or_out_of_memory(
        [&] { static_cast<inflight::Decoder*>(decoder)->step(*static_cast<inflight::Pool*>(pool), *step); });
}

}  // extern "C"
