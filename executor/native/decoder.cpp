#include "decoder.h"

#include <functional>

#include "row_ops.h"

namespace inflight {

class Decoder {
  public:
    virtual ~Decoder() = default;
    virtual Arena& weights() = 0;
    virtual void pack(int64_t layer, int64_t part, const void* numbers) = 0;
    virtual void step(Pool& pool, const DecoderStep& step) = 0;
};

// What `pack` takes. Matrices are `[columns, depth]` of the element type, the rest is float32.
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
};

template <class Element, class Weight>
class DecoderOf final : public Decoder {
    using Number = typename Element::Number;
    static constexpr bool NARROWS = Activations<Element, Weight>::NARROWS;

  public:
    explicit DecoderOf(const DecoderShape& shape)
        : shape_(shape),
          windows_(shape.sliding_windows, shape.sliding_windows + shape.num_layers),
          frequencies_(shape.inverse_frequencies, shape.inverse_frequencies + shape.head_dim / 2),
          head_blocks_(round_up(shape.head_dim, BLOCK_COLUMNS) / BLOCK_COLUMNS),
          layers_(shape.num_layers) {
        Cursor count(nullptr);
        place(count);
        arena_ = std::make_unique<Arena>(count.used());
        Cursor cursor(arena_->data());
        place(cursor);
    }

    Arena& weights() override { return *arena_; }

    void pack(int64_t layer, int64_t part, const void* numbers) override {
        const int64_t hidden = shape_.hidden_size, heads = shape_.num_heads + 2 * shape_.num_kv_heads;
        const int64_t dim = shape_.head_dim, inner = shape_.intermediate_size;
        auto plain = [](int64_t column) { return column; };
        switch (part) {
            case PACK_EMBEDDING:
                std::memcpy(const_cast<Number*>(embedding_), numbers, shape_.vocabulary_size * hidden * sizeof(Number));
                break;
            case PACK_HEAD: pack_matrix(head_, numbers, shape_.vocabulary_size, hidden, plain); break;
            case PACK_QKV:
                // Each head begins a block of its own.
                pack_matrix(layers_[layer].qkv, numbers, heads * dim, hidden, [&](int64_t column) {
                    return column / dim * head_blocks_ * BLOCK_COLUMNS + column % dim;
                });
                break;
            case PACK_OUTPUT:
                pack_matrix(layers_[layer].output, numbers, hidden, shape_.num_heads * dim, plain);
                break;
            case PACK_GATE_UP:
                // Blocks of the gate and of the up projection take turns.
                pack_matrix(layers_[layer].gate_up, numbers, 2 * inner, hidden, [&](int64_t column) {
                    const int64_t index = column % inner;
                    return (2 * (index / BLOCK_COLUMNS) + column / inner) * BLOCK_COLUMNS + index % BLOCK_COLUMNS;
                });
                break;
            case PACK_DOWN: pack_matrix(layers_[layer].down, numbers, hidden, inner, plain); break;
            default: {
                const auto [vector, size] = vector_of(layer, part);
                std::memcpy(const_cast<float*>(vector), numbers, size * sizeof(float));
            }
        }
    }

    void step(Pool& pool, const DecoderStep& step) override {
        activations_.reserve(shape_, step.num_tokens);
        const auto items =
            attention_items(step.query_starts, step.num_sequences, shape_.num_heads, shape_.num_kv_heads);
        while ((int)scratch_.size() < pool.num_threads()) scratch_.push_back(std::make_unique<Scratch>());
        for (auto& scratch : scratch_) scratch->best.assign(step.num_logits, {-INFINITY, 0});
        pool.run([&](Team& team) {
            const TilesInUse tiles;
            Run(*this, step, items, team).through_layers();
        });
        if (step.greedy_ids != nullptr) choose_greedily(step);
    }

  private:
    struct Scratch {
        Workspace<Element> attention;
        alignas(64) float tile[TILE_ROWS * MAX_DIM];
        std::vector<float> row;
        std::vector<Best> best;
    };

    // A thread's way through one step.
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
              last_(Clock::now()) {
            scratch_.row.resize(
                round_up(std::max({shape_.hidden_size, shape_.num_heads * shape_.head_dim, shape_.intermediate_size}),
                         LANES),
                0.0f);
        }

        void through_layers() {
            embed();
            for (int64_t index = 0; index < shape_.num_layers; ++index) {
                const Layer<Weight>& layer = decoder_.layers_[index];
                const LayerKv kv{step_.keys[index], step_.values[index], shape_.num_kv_heads, shape_.head_dim};
                norm(layer.input_norm, &kv);
                project_qkv(layer, kv);
                attend_all(kv, decoder_.windows_[index]);
                add_product(OUTPUT, layer.output, narrowed(activations_.attended, shape_.num_heads * shape_.head_dim),
                            layer.output_bias);
                norm(layer.post_attention_norm, nullptr);
                gate_up(layer);
                add_product(DOWN, layer.down, narrowed(activations_.hidden, shape_.intermediate_size), nullptr);
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

        // Some rows at a time: few enough that every thread gets some, enough that handing them out costs little.
        template <class Work>
        void each_row(Part part, int64_t num_rows, const Work& work) {
            const int64_t at_once = std::clamp<int64_t>(num_rows / (4 * team_.num_threads), 1, 16);
            phase(part, (num_rows + at_once - 1) / at_once, [&](int64_t task) {
                for (int64_t row = task * at_once; row < std::min(num_rows, (task + 1) * at_once); ++row) work(row);
            });
        }

        // Columns times rows: as many rows in a task as stay in the second-level cache while the columns pass.
        template <class Work>
        void each_tile(Part part, int64_t num_columns, int64_t row_bytes, const Work& work) {
            const int64_t num_rows = step_.num_tokens;
            const int64_t at_once = std::clamp<int64_t>(CACHED_BYTES / row_bytes / TILE_ROWS * TILE_ROWS, TILE_ROWS, 512);
            const int64_t num_chunks = (num_rows + at_once - 1) / at_once;
            phase(part, num_chunks * num_columns, [&](int64_t task) {
                const int64_t end = std::min(num_rows, (task / num_columns + 1) * at_once);
                for (int64_t row = task / num_columns * at_once; row < end; row += TILE_ROWS)
                    work(task % num_columns, row, (int)std::min<int64_t>(TILE_ROWS, end - row));
            });
        }

        void embed() {
            const int64_t half = shape_.head_dim / 2, hidden = shape_.hidden_size;
            each_row(EMBED, step_.num_tokens, [&](int64_t row) {
                float* residual = activations_.residual + row * activations_.width;
                const Number* embedding = decoder_.embedding_ + step_.token_ids[row] * hidden;
                for (int64_t i = 0; i < hidden; ++i) residual[i] = Element::get(embedding[i]);
                for (int64_t i = 0; i < half; ++i) {
                    const float angle = (float)step_.positions[row] * decoder_.frequencies_[i];
                    activations_.cosines[row * half + i] = std::cos(angle) * shape_.rope_scaling;
                    activations_.sines[row * half + i] = std::sin(angle) * shape_.rope_scaling;
                }
            });
        }

        // Norms the residual into `input`; before keys and values are written, clears the groups that begin in this step.
        void norm(const float* weight, const LayerKv* kv) {
            each_row(NORM, step_.num_tokens, [&](int64_t row) {
                norm_residual(row, weight, row);
                if (kv != nullptr && step_.slots[row] % LANES == 0) clear_values<Element>(*kv, step_.slots[row]);
            });
        }

        void norm_residual(int64_t row, const float* weight, int64_t to_row) {
            norm_row(activations_.residual + row * activations_.width, weight, shape_.hidden_size,
                     shape_.norm_epsilon, scratch_.row.data());
            put_row(scratch_.row.data(), activations_.width, activations_.input, to_row);
        }

        void project_qkv(const Layer<Weight>& layer, const LayerKv& kv) {
            const int64_t blocks = decoder_.head_blocks_, stride = blocks * BLOCK_COLUMNS;
            const int64_t num_heads = shape_.num_heads + 2 * shape_.num_kv_heads;
            const Rows<Weight>& input = activations_.input;
            each_tile(QKV, num_heads, input.stride * sizeof(*input.numbers), [&](int64_t head, int64_t row, int num_rows) {
                for (int64_t block = 0; block < blocks; ++block)
                    multiply(layer.qkv, head * blocks + block, input, row, num_rows,
                             scratch_.tile + block * BLOCK_COLUMNS, stride);
                for (int i = 0; i < num_rows; ++i)
                    finish_head(layer, kv, head, row + i, scratch_.tile + i * stride);
            });
        }

        // Bias, norm and rotation of a new query, key or value, and where it goes.
        void finish_head(const Layer<Weight>& layer, const LayerKv& kv, int64_t head, int64_t row, float* x) {
            const int64_t dim = shape_.head_dim;
            const int64_t kv_head = head - shape_.num_heads, value_head = kv_head - shape_.num_kv_heads;
            if (layer.qkv_bias != nullptr)
                for (int64_t d = 0; d < dim; ++d) x[d] += layer.qkv_bias[head * dim + d];
            if (value_head < 0) {
                const float* weight = kv_head < 0 ? layer.query_norm : layer.key_norm;
                if (weight != nullptr) norm_row(x, weight, dim, shape_.norm_epsilon, x);
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
            const AttentionTiles tiles;
            const int64_t num_items = (int64_t)items_.size();
            phase(ATTENTION, num_items, [&](int64_t task) {
                const int64_t next = task + team_.num_threads;
                attend<Element>(call, items_[task], next < num_items ? &items_[next] : nullptr, scratch_.attention);
            });
            const MatrixTiles tiles_again;
        }

        // The rows as the weights' elements; where these are others, every row is rounded first.
        const Rows<Weight>& narrowed(const Rows<Element>& rows, int64_t depth) {
            if constexpr (NARROWS) {
                const int64_t width = round_up(depth, LANES);
                each_row(NORM, step_.num_tokens, [&](int64_t row) {
                    for (int64_t i = 0; i < depth; ++i) scratch_.row[i] = Element::get(rows.row(row)[i]);
                    std::fill(scratch_.row.data() + depth, scratch_.row.data() + width, 0.0f);
                    put_row(scratch_.row.data(), width, activations_.input, row);
                });
                return activations_.input;
            } else {
                return rows;
            }
        }

        // residual += rows · matrix + bias
        void add_product(Part part, const Matrix<Weight>& matrix, const Rows<Weight>& rows, const float* bias) {
            each_tile(part, matrix.num_blocks, rows.stride * sizeof(*rows.numbers),
                      [&](int64_t block, int64_t row, int num_rows) {
                          multiply(matrix, block, rows, row, num_rows, scratch_.tile, BLOCK_COLUMNS);
                          const int64_t first = block * BLOCK_COLUMNS;
                          const int64_t columns = std::min<int64_t>(BLOCK_COLUMNS, activations_.width - first);
                          for (int i = 0; i < num_rows; ++i) {
                              float* to = activations_.residual + (row + i) * activations_.width + first;
                              const float* sums = scratch_.tile + i * BLOCK_COLUMNS;
                              for (int64_t c = 0; c < columns; c += WIDTH) {
                                  Floats sum = load(to + c) + load(sums + c);
                                  if (bias != nullptr) sum += load(bias + first + c);
                                  store(to + c, sum);
                              }
                          }
                      });
        }

        void gate_up(const Layer<Weight>& layer) {
            const Rows<Weight>& input = activations_.input;
            constexpr int STRIDE = 2 * BLOCK_COLUMNS;
            each_tile(GATE_UP, layer.gate_up.num_blocks / 2, input.stride * sizeof(*input.numbers),
                      [&](int64_t block, int64_t row, int num_rows) {
                          multiply(layer.gate_up, 2 * block, input, row, num_rows, scratch_.tile, STRIDE);
                          multiply(layer.gate_up, 2 * block + 1, input, row, num_rows, scratch_.tile + BLOCK_COLUMNS,
                                   STRIDE);
                          for (int i = 0; i < num_rows; ++i) {
                              Number* to = activations_.hidden.row(row + i) + block * BLOCK_COLUMNS;
                              const float* sums = scratch_.tile + i * STRIDE;
                              for (int c = 0; c < BLOCK_COLUMNS; c += WIDTH)
                                  Element::put(to + c, gated(load(sums + c), load(sums + BLOCK_COLUMNS + c)));
                          }
                      });
        }

        void head() {
            each_row(NORM, step_.num_logits, [&](int64_t row) {
                norm_residual(step_.logit_rows[row], decoder_.final_norm_, row);
            });
            constexpr int64_t AT_ONCE = 4;
            const Matrix<Weight>& matrix = decoder_.head_;
            phase(HEAD, (matrix.num_blocks + AT_ONCE - 1) / AT_ONCE, [&](int64_t task) {
                const int64_t end = std::min(matrix.num_blocks, (task + 1) * AT_ONCE);
                for (int64_t row = 0; row < step_.num_logits; row += TILE_ROWS) {
                    const int num_rows = (int)std::min<int64_t>(TILE_ROWS, step_.num_logits - row);
                    for (int64_t block = task * AT_ONCE; block < end; ++block) {
                        multiply(matrix, block, activations_.input, row, num_rows, scratch_.tile, BLOCK_COLUMNS);
                        for (int i = 0; i < num_rows; ++i)
                            take_logits(row + i, block * BLOCK_COLUMNS, scratch_.tile + i * BLOCK_COLUMNS);
                    }
                }
            });
        }

        void take_logits(int64_t row, int64_t first, const float* logits) {
            const int64_t count = std::min<int64_t>(BLOCK_COLUMNS, shape_.vocabulary_size - first);
            if (step_.logits != nullptr)
                std::memcpy(step_.logits + row * shape_.vocabulary_size + first, logits, count * sizeof(float));
            Best& best = scratch_.best[row];
            bool may_win = false;
            for (int i = 0; i < BLOCK_COLUMNS; i += WIDTH) may_win |= any_above(load(logits + i), best.logit);
            if (!may_win) return;
            for (int64_t i = 0; i < count; ++i)
                if (logits[i] > best.logit) best = {logits[i], first + i};
        }

        static constexpr int64_t CACHED_BYTES = 768 << 10;

        DecoderOf& decoder_;
        const DecoderShape& shape_;
        const Activations<Element, Weight>& activations_;
        const DecoderStep& step_;
        const std::vector<Item>& items_;
        Team& team_;
        Scratch& scratch_;
        Clock::time_point last_;
    };

    // Which thread saw which columns is chance; who wins is not.
    void choose_greedily(const DecoderStep& step) const {
        for (int64_t row = 0; row < step.num_logits; ++row) {
            Best best = scratch_[0]->best[row];
            for (const auto& scratch : scratch_) {
                const Best& other = scratch->best[row];
                if (other.logit > best.logit || (other.logit == best.logit && other.id < best.id)) best = other;
            }
            step.greedy_ids[row] = best.id;
        }
    }

    void place(Cursor& cursor) {
        const int64_t hidden = shape_.hidden_size, width = round_up(hidden, BLOCK_COLUMNS), dim = shape_.head_dim;
        const int64_t heads = shape_.num_heads + 2 * shape_.num_kv_heads, inner = shape_.intermediate_size;
        embedding_ = cursor.take<Number>(shape_.vocabulary_size * hidden);
        head_ = place_matrix(cursor, shape_.vocabulary_size, hidden);
        final_norm_ = cursor.take<float>(width);
        for (Layer<Weight>& layer : layers_) {
            layer.qkv = place_matrix(cursor, heads * head_blocks_ * BLOCK_COLUMNS, hidden);
            layer.output = place_matrix(cursor, hidden, shape_.num_heads * dim);
            layer.gate_up = place_matrix(cursor, 2 * round_up(inner, BLOCK_COLUMNS), hidden);
            layer.down = place_matrix(cursor, hidden, inner);
            layer.input_norm = cursor.take<float>(width);
            layer.post_attention_norm = cursor.take<float>(width);
            layer.query_norm = shape_.has_head_norms ? cursor.take<float>(dim) : nullptr;
            layer.key_norm = shape_.has_head_norms ? cursor.take<float>(dim) : nullptr;
            layer.qkv_bias = shape_.has_qkv_bias ? cursor.take<float>(heads * dim) : nullptr;
            layer.output_bias = shape_.has_output_bias ? cursor.take<float>(width) : nullptr;
        }
    }

    Matrix<Weight> place_matrix(Cursor& cursor, int64_t columns, int64_t depth) {
        Matrix<Weight> matrix;
        matrix.num_blocks = round_up(columns, BLOCK_COLUMNS) / BLOCK_COLUMNS;
        matrix.num_steps = padded_depth<Weight>(depth) / (UNITS * Weight::PAIR);
        matrix.blocks = cursor.take<char>(matrix_bytes<Weight>(columns, depth));
        if (NARROWS) matrix.scales = cursor.take<float>(matrix.num_blocks * BLOCK_COLUMNS);
        return matrix;
    }

    template <class Place>
    void pack_matrix(Matrix<Weight>& matrix, const void* numbers, int64_t columns, int64_t depth, const Place& place) {
        std::vector<typename Weight::Number> narrow(NARROWS ? depth : 0);
        for (int64_t column = 0; column < columns; ++column) {
            const Number* from = static_cast<const Number*>(numbers) + column * depth;
            const int64_t to = place(column);
            char* block = const_cast<char*>(matrix.block(to / BLOCK_COLUMNS));
            if constexpr (NARROWS) {
                const_cast<float*>(matrix.scales)[to] = narrow_column<Element, Weight>(from, depth, narrow.data());
                pack_column<Weight>(block, (int)(to % BLOCK_COLUMNS), narrow.data(), depth);
            } else {
                pack_column<Weight>(block, (int)(to % BLOCK_COLUMNS), from, depth);
            }
        }
    }

    std::pair<const float*, int64_t> vector_of(int64_t index, int64_t part) const {
        const int64_t hidden = shape_.hidden_size, dim = shape_.head_dim;
        if (part == PACK_FINAL_NORM) return {final_norm_, hidden};
        const Layer<Weight>& layer = layers_[index];
        switch (part) {
            case PACK_INPUT_NORM: return {layer.input_norm, hidden};
            case PACK_POST_ATTENTION_NORM: return {layer.post_attention_norm, hidden};
            case PACK_QUERY_NORM: return {layer.query_norm, dim};
            case PACK_KEY_NORM: return {layer.key_norm, dim};
            case PACK_QKV_BIAS: return {layer.qkv_bias, (shape_.num_heads + 2 * shape_.num_kv_heads) * dim};
            default: return {layer.output_bias, hidden};
        }
    }

    const DecoderShape shape_;
    const std::vector<int64_t> windows_;
    const std::vector<float> frequencies_;
    const int64_t head_blocks_;
    std::unique_ptr<Arena> arena_;
    const Number* embedding_ = nullptr;
    Matrix<Weight> head_;
    const float* final_norm_ = nullptr;
    std::vector<Layer<Weight>> layers_;
    Activations<Element, Weight> activations_;
    std::vector<std::unique_ptr<Scratch>> scratch_;
};

std::unique_ptr<Decoder> make_decoder(const DecoderShape& shape, int64_t is_bfloat16, int64_t has_int8_weights) {
    if (is_bfloat16 && has_int8_weights) return std::make_unique<DecoderOf<BFloat16, Int8>>(shape);
    if (is_bfloat16) return std::make_unique<DecoderOf<BFloat16, BFloat16>>(shape);
    if (has_int8_weights) return std::make_unique<DecoderOf<Float32, Int8>>(shape);
    return std::make_unique<DecoderOf<Float32, Float32>>(shape);
}

}  // namespace inflight

extern "C" {

// Null where there is not enough memory.
void* inflight_decoder_new(const inflight::DecoderShape* shape, int64_t is_bfloat16, int64_t has_int8_weights) {
    try {
        return inflight::make_decoder(*shape, is_bfloat16, has_int8_weights).release();
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void inflight_decoder_free(void* decoder) { delete static_cast<inflight::Decoder*>(decoder); }

void inflight_decoder_pack(void* decoder, int64_t layer, int64_t part, const void* numbers) {
    static_cast<inflight::Decoder*>(decoder)->pack(layer, part, numbers);
}

// The packed weights, to be kept on disk and read back.
void* inflight_decoder_weights(void* decoder) { return static_cast<inflight::Decoder*>(decoder)->weights().data(); }
int64_t inflight_decoder_weight_bytes(void* decoder) {
    return (int64_t)static_cast<inflight::Decoder*>(decoder)->weights().size();
}

// 0, or 1 where there is not enough memory for so many tokens.
int64_t inflight_decoder_step(void* decoder, void* pool, const inflight::DecoderStep* step) {
    try {
        static_cast<inflight::Decoder*>(decoder)->step(*static_cast<inflight::Pool*>(pool), *step);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // extern "C"
