#include "decoder.h"

#include "adapters.h"
#include "decoder_weights.h"
#include "exchange.h"
#include "greedy.h"
#include "last_rows.h"
#include "row_ops.h"

namespace inflight {

constexpr int64_t NO_LAYER = -1;

class Decoder {
  public:
    virtual ~Decoder() = default;
    virtual int64_t matrix_bytes() const = 0;
    // The most bytes of a row that a rank gives the others at once.
    virtual int64_t row_part_bytes() const = 0;
    virtual void declare(int64_t layer, int64_t part, const CodedPart& coded) = 0;
    virtual void allocate() = 0;
    virtual void pack(int64_t layer, int64_t part, const void* numbers, int64_t first, int64_t count) = 0;
    virtual void pack_codes(int64_t layer, int64_t part, const CodedPart& coded) = 0;
    // Returns whether all ranks took part.
    virtual bool step(Pool& pool, const DecoderStep& step) = 0;
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
          layer_ropes_(shape.layer_ropes, shape.layer_ropes + shape.num_layers),
          frequencies_(shape.inverse_frequencies,
                       shape.inverse_frequencies + shape.num_ropes * shape.rotary_dim / 2),
          rope_scalings_(shape.rope_scalings, shape.rope_scalings + shape.num_ropes),
          is_recurrent_(shape.is_recurrent, shape.is_recurrent + shape.num_layers),
          is_bare_(shape.is_bare, shape.is_bare + shape.num_layers),
          weights_(shape, stream),
          adapters_(shape),
          next_places_(shape.num_experts) {
        groups_.reserve(shape.num_experts);
    }

    int64_t matrix_bytes() const override { return weights_.matrix_bytes(); }

    int64_t row_part_bytes() const override {
        const int64_t inner =
            shape_.part_of(std::max(shape_.intermediate_size, shape_.feed_forward_size()), PART_INNER_COLUMNS);
        const int64_t normed = shape_.head_norms == NORMS_OF_ALL_HEADS ? shape_.num_heads + shape_.num_kv_heads : 0;
        const int64_t mixed = shape_.mixer.kind == NO_MIXER ? 0 : shape_.mixer.depth();
        const int64_t summed = std::max({shape_.part_of(shape_.hidden_size), normed * shape_.head_dim, mixed});
        return std::max({summed * (int64_t)sizeof(float),
                         Rows<Element>::part_bytes(shape_.part_of(shape_.attention_depth(), 1)),
                         Rows<Element>::part_bytes(inner),  // of rows with adapters
                         Rows<Factor>::part_bytes(inner) * std::max<int64_t>(1, shape_.num_experts_per_token)});
    }

    void declare(int64_t layer, int64_t part, const CodedPart& coded) override { weights_.declare(layer, part, coded); }

    void allocate() override { weights_.allocate(); }

    void pack(int64_t layer, int64_t part, const void* numbers, int64_t first, int64_t count) override {
        weights_.pack(layer, part, numbers, first, count);
    }

    void pack_codes(int64_t layer, int64_t part, const CodedPart& coded) override {
        weights_.pack_codes(layer, part, coded);
    }

    bool step(Pool& pool, const DecoderStep& step) override {
        activations_.reserve(shape_, step.num_tokens);
        // Rows are gathered once for each of their experts.
        viewed_.reserve(weights_.viewed_size,
                        activations_.capacity * std::max<int64_t>(1, shape_.num_experts_per_token));
        if (shape_.num_ranks > 1)
            exchange_.begin(step, shape_.num_ranks, shape_.rank, step.num_tokens * row_part_bytes());
        adapted_.begin(shape_, adapters_, step.adapter_slots, step.query_starts, step.num_sequences);
        num_shrunk_.store(0, std::memory_order_relaxed);
        const auto items =
            attention_items(step.query_starts, step.num_sequences, shape_.num_heads, shape_.num_kv_heads,
                            pool.num_threads());
        last_rows_.begin(step, shape_, !adapted_.is_empty(), pool.num_threads());
        while ((int)scratch_.size() < pool.num_threads())
            scratch_.push_back(std::make_unique<Scratch>(shape_, weights_.most_unpacked_bytes));
        if (step.states != nullptr)
            find_spans(*step.states, step.query_starts, step.context_lengths, step.num_sequences, spans_);
        if (step.greedy_ids != nullptr) choice_.begin(step, shape_.vocabulary_columns().count, pool.num_threads());
        pool.run([&](Team& team) {
            const TilesInUse tiles;
            Run(*this, step, items, team).through_layers();
        });
        if (step.processor_seconds != nullptr)
            for (const auto& scratch : scratch_)
                for (int part = 0; part < NUM_PARTS; ++part)
                    step.processor_seconds[part] += std::exchange(scratch->processor_seconds[part], 0.0);
        return !exchange_.has_failed();
    }

    int64_t adapter_slot_bytes(int64_t max_rank) const override { return adapters_.slot_bytes(max_rank); }

    void reserve_adapters(int64_t num_slots, int64_t max_rank) override { adapters_.reserve(num_slots, max_rank); }

    bool load_adapter(int64_t slot, const AdapterMatrix* matrices) override { return adapters_.load(slot, matrices); }

  private:
    static_assert(ProductScratch::TILE_NUMBERS >= TILE_ROWS * MAX_DIM);

    struct Scratch {
        Scratch(const DecoderShape& shape, int64_t unpacked_bytes)
            : product(unpacked_bytes),
              mixer(shape.mixer.kind == NO_MIXER ? 0 : MixerStep<Element>::scratch_numbers(shape.mixer)),
              scores(shape.num_experts),
              corrected(shape.num_experts) {
            products.reserve(shape.num_experts);
            last_tasks.reserve(shape.num_experts);
        }

        Workspace<Element> attention;
        ProductScratch product;
        alignas(64) Number head[TILE_ROWS][MAX_DIM];  // keys or values of a tile
        std::vector<float> mixer;
        std::vector<float> scores, corrected;    // of the experts for a row
        std::vector<Product<Factor>> products;   // of the experts that have rows, and the end of each one's tasks
        std::vector<int64_t> last_tasks;
        double processor_seconds[NUM_PARTS] = {};
    };

    // One thread's part of a step.
    class Run {
      public:
        Run(DecoderOf& decoder, const DecoderStep& step, const std::vector<Item>& items, Team& team)
            : decoder_(decoder),
              shape_(decoder.shape_),
              activations_(decoder.activations_),
              adapted_(decoder.adapted_),
              exchange_(decoder.exchange_),
              step_(step),
              num_rows_(step.num_tokens),
              items_(items),
              team_(team),
              scratch_(*decoder.scratch_[team.thread]),
              last_(Clock::now()) {}

        void through_layers() {
            embed();
            if (exchange_.has_failed()) return;
            for (int64_t index = 0; index < shape_.num_layers; ++index) {
                const Layer<Factor>& layer = decoder_.weights_.layers[index];
                const bool is_recurrent = decoder_.is_recurrent_[index] != 0;
                const bool is_narrow = index + 1 == shape_.num_layers && decoder_.last_rows_.is_narrow();
                const Rows<Element>& mixed = is_recurrent ? activations_.mixed : activations_.attended;
                const Rows<Factor>& factors = is_recurrent ? activations_.mixed_factors : activations_.heads;
                if (is_recurrent)
                    mix(layer, index);
                else
                    compute_attention(layer, index, is_narrow);
                if (is_narrow) keep_last_rows(mixed);
                if (num_rows_ == 0) break;
                const int64_t depth = is_recurrent ? shape_.mixer.whole_depth() : shape_.attention_depth();
                // What Mamba 2 yields has been exchanged before its norm.
                if (!is_recurrent || shape_.mixer.kind != MAMBA2) gather(mixed, num_rows_, depth, 1);
                if constexpr (!std::is_same_v<Element, Factor>) round_mixed(mixed, factors, depth);
                const bool is_bare = decoder_.is_bare_[index] != 0;
                const Blocks* const next = is_bare ? first_of(index + 1) : &layer.gate_up;
                add_product(OUTPUT, layer.output, factors, layer.output_bias, layer.attention_output_norm,
                            {OUTPUT_PRODUCT, index, mixed}, ADAPT_OUTPUT, layer.router == nullptr ? next : nullptr);
                if (is_bare) {
                    if (exchange_.has_failed()) return;
                    continue;
                }
                norm(layer.post_attention_norm, nullptr, layer.gate_up, layer.router == nullptr ? nullptr : &layer);
                if (layer.router != nullptr) {
                    if (shape_.shared_size > 0) add_shared_expert(layer);
                    add_experts(layer);
                    if (exchange_.has_failed()) return;
                    continue;
                }
                gate_up(layer, index);
                const int64_t inner = shape_.feed_forward_size();
                gather(activations_.hidden, num_rows_, inner, PART_INNER_COLUMNS);
                if constexpr (!std::is_same_v<Element, Factor>)
                    if (!adapted_.is_empty())
                        gather(adapted_.hidden, num_rows_, inner, PART_INNER_COLUMNS);
                add_product(DOWN, layer.down, activations_.hidden, nullptr, layer.feed_forward_output_norm,
                            {DOWN_PRODUCT, index, hidden_elements()}, ADAPT_DOWN, first_of(index + 1));
                if (exchange_.has_failed()) return;
            }
            head();
        }

      private:
        using Clock = std::chrono::steady_clock;

        // The first matrix of a layer, or the output layer behind all.
        const Blocks* first_of(int64_t index) const {
            const auto& weights = decoder_.weights_;
            return index < shape_.num_layers ? static_cast<const Blocks*>(&weights.layers[index].qkv) : &weights.head;
        }

        void compute_attention(const Layer<Factor>& layer, int64_t index, bool is_narrow) {
            const LayerKv kv{step_.keys[index], step_.values[index], shape_.num_kv_heads, shape_.head_dim,
                             step_.is_int8[index] != 0};
            slots_ = step_.slots[index];
            norm(layer.input_norm, &kv, layer.qkv);
            project_qkv(layer, kv, index);
            attend_all(kv, step_.block_tables[index], decoder_.windows_[index], layer.sinks,
                       is_narrow ? decoder_.last_rows_.items() : items_);
            if (shape_.has_output_gate) gate_attended();
        }

        // A recurrent layer up to its output projection.
        void mix(const Layer<Factor>& layer, int64_t index) {
            const StepStates& states = *step_.states;
            const MixerMemory& memory = states.memories[index];
            norm(layer.input_norm, nullptr, layer.qkv);
            // Before any is saved: a checkpoint that is loaded may be another one behind this step.
            if (states.num_loads > 0)
                phase(ATTENTION, states.num_loads, [&](int64_t task) {
                    load_state<Element>(shape_.mixer, memory, states.loads[task], states.num_places);
                });
            product(QKV, layer.qkv, activations_.normed, num_rows_, &layer.output,
                    [&](int64_t block, int64_t row, int num_rows, float* tile) {
                        const int64_t first = block * BLOCK_COLUMNS;
                        for (int i = 0; i < num_rows; ++i) {
                            float* const to = activations_.projected + (row + i) * activations_.projected_stride + first;
                            for (int64_t c = 0; c < BLOCK_COLUMNS; c += WIDTH) {
                                const Floats sums = load(tile + i * BLOCK_COLUMNS + c);
                                store(to + c, layer.qkv_bias == nullptr ? sums : sums + load(layer.qkv_bias + first + c));
                            }
                        }
                    });
            float *const projected = activations_.projected, *const gated = activations_.gated;
            const int64_t stride = activations_.projected_stride;
            const MixerStep<Element> mixer(shape_.mixer, memory, {shape_.mixer, layer.mixer}, states, decoder_.spans_,
                                           projected, stride, gated == nullptr ? projected : gated,
                                           gated == nullptr ? stride : shape_.mixer.whole_depth(), activations_.mixed,
                                           shape_.norm_epsilon);
            for (int number = 0; number < mixer.num_phases(); ++number) {
                if (number == 2) gather_gated();
                phase(ATTENTION, mixer.num_tasks(number),
                      [&](int64_t task) { mixer.compute(number, task, scratch_.mixer.data()); });
            }
        }

        // Exchanges what Mamba 2 yields before its norm, which is in the first columns of `projected`.
        void gather_gated() {
            if (shape_.num_ranks == 1) return;
            const int64_t depth = shape_.mixer.depth(), whole = shape_.mixer.whole_depth();
            const int64_t row_bytes = depth * sizeof(float), num_bytes = num_rows_ * row_bytes;
            each_row(EXCHANGE, num_rows_, [&](int64_t row) {
                std::memcpy(exchange_.own_part(num_bytes) + row * row_bytes,
                            activations_.projected + row * activations_.projected_stride, row_bytes);
            });
            phase(EXCHANGE, 1, [&](int64_t) { exchange_.run(num_bytes); });
            each_row(EXCHANGE, num_rows_, [&](int64_t row) {
                for (int64_t rank = 0; rank < shape_.num_ranks; ++rank)
                    std::memcpy(activations_.gated + row * whole + rank * depth,
                                exchange_.part(rank, num_bytes) + row * row_bytes, row_bytes);
            });
        }

        template <class Work>
        void phase(Part part, int64_t num_tasks, const Work& work) {
            if (step_.processor_seconds == nullptr)
                team_.each(num_tasks, work);
            else
                team_.each(num_tasks, [&](int64_t task) {
                    const int64_t began = processor_nanoseconds();
                    work(task);
                    scratch_.processor_seconds[part] += 1e-9 * (double)(processor_nanoseconds() - began);
                });
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
            product(part, matrix, rows, num_rows, after, PrepareNothing{}, finish);
        }

        template <class Type, class Prepare, class Finish>
        void product(Part part, const Matrix<Type>& matrix, const Rows<Type>& rows, int64_t num_rows,
                     const Blocks* after, const Prepare& prepare, const Finish& finish) {
            const Product<Type> product(matrix, rows, num_rows, team_.num_threads, decoder_.weights_.stream, after,
                                        prepared(matrix));
            phase(part, product.num_tasks,
                  [&](int64_t task) { product.compute(task, scratch_.product, prepare, finish); });
        }

        // The rows of a product, from `first_row` on, as its matrix reads them.
        template <class Type>
        PreparedRows<Type> prepared(const Matrix<Type>& matrix, int64_t first_row = 0) const {
            if constexpr (std::is_same_v<Type, Element>)
                return {&decoder_.viewed_, &decoder_.weights_.views(matrix), first_row};
            else
                return {};
        }

        // Prepares a row for a product with a matrix.
        template <class Type>
        void view_row(const Matrix<Type>& matrix, const Rows<Type>& rows, int64_t row) const {
            if constexpr (std::is_same_v<Type, Element>)
                decoder_.viewed_.put(decoder_.weights_.views(matrix), rows, row);
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

        // What adapters change: a product of layer `index`. `rows` are those that it multiplies, as Elements.
        struct Change {
            AdaptedProduct product;
            int64_t index;
            const Rows<Element>& rows;
        };

        // The product of all rows with a matrix, and x · Aᵀ · scale of the rows that have an adapter. Both are tasks of
        // one phase, because only `finish` needs the latter. They come first, so that it seldom waits.
        template <class Finish>
        void adapted_product(Part part, const Change& change, const Matrix<Factor>& matrix, const Rows<Factor>& rows,
                             const Blocks* after, const Finish& finish) {
            adapted_product(part, change, matrix, rows, after, PrepareNothing{}, finish);
        }

        template <class Prepare, class Finish>
        void adapted_product(Part part, const Change& change, const Matrix<Factor>& matrix, const Rows<Factor>& rows,
                             const Blocks* after, const Prepare& prepare, const Finish& finish) {
            const Product<Factor> product(matrix, rows, num_rows_, team_.num_threads, decoder_.weights_.stream, after,
                                          prepared(matrix));
            const int64_t num_shrinks = adapted_.num_tasks(change.product);
            num_shrinks_ += num_shrinks;
            phase(part, num_shrinks + product.num_tasks, [&](int64_t task) {
                if (task < num_shrinks) return shrink(change, task);
                product.compute(task - num_shrinks, scratch_.product, prepare,
                                [&](int64_t block, int64_t row, int num_rows, float* tile) {
                                    wait_for_shrinks();
                                    finish(block, row, num_rows, tile);
                                });
            });
        }

        void shrink(const Change& change, int64_t task) {
            const auto& group = adapted_.group(task);
            const auto& shrink = adapter_layer(group.slot, change.index).shrinks[change.product];
            const int64_t panel = adapted_.panel(task);
            if (panel < shrink.num_panels)
                shrink_group<Element>(shrink, panel, change.rows, adapted_.rows(group), group.count, adapted_.low);
            decoder_.num_shrunk_.fetch_add(1, std::memory_order_release);
        }

        // Returns when no thread computes a shrink. Tasks are taken in order, so every shrink has a thread.
        void wait_for_shrinks() const {
            for (int spins = 0; decoder_.num_shrunk_.load(std::memory_order_acquire) < num_shrinks_; ++spins)
                if (spins < SPINS)
                    pause_briefly();
                else
                    sched_yield();
        }

        // Adds the adapter's part of `count` columns of a matrix, from column `first` on, to a row's sums.
        void add_adapter(int64_t row, int64_t index, int matrix, int64_t first, int64_t count, float* sums) {
            const auto& expand = adapter_layer(adapted_.slot_of(row), index).expands[matrix];
            const Number* low = adapted_.low.row(row);
            if (adapted_.leads(row))
                add_expanded<Element, true>(expand, first / LANES, count / LANES, low, sums);
            else
                add_expanded<Element, false>(expand, first / LANES, count / LANES, low, sums);
        }

        void embed() {
            const int64_t half = shape_.rotary_dim / 2, columns = shape_.hidden_columns().count;
            each_row(EMBED, num_rows_, [&](int64_t row) {
                float* to = shape_.num_ranks == 1 ? activations_.residual + row * activations_.width : own_sums(row);
                const Number* embedding = decoder_.weights_.embedding + step_.token_ids[row] * columns;
                for (int64_t i = 0; i < columns; ++i) to[i] = Element::get(embedding[i]) * shape_.embedding_scale;
                for (int64_t rope = 0; rope < shape_.num_ropes; ++rope)
                    for (int64_t i = 0; i < half; ++i) {
                        const float angle = (float)step_.positions[row] * decoder_.frequencies_[rope * half + i];
                        const int64_t to = rotation(rope, row) + i;
                        activations_.cosines[to] = std::cos(angle) * decoder_.rope_scalings_[rope];
                        activations_.sines[to] = std::sin(angle) * decoder_.rope_scalings_[rope];
                    }
            });
            gather_residual();
        }

        // The sums of a row that this rank has computed, for `gather_sums`.
        float* own_sums(int64_t row) const {
            const int64_t part = shape_.part_of(shape_.hidden_size);
            return reinterpret_cast<float*>(exchange_.own_part(num_rows_ * part * sizeof(float))) + row * part;
        }

        // Exchanges columns of rows of the residual's size. Calls `take(row, first, count, sums)` for each rank's.
        template <class Take>
        void gather_sums(const Take& take) {
            if (shape_.num_ranks == 1) return;
            const int64_t part = shape_.part_of(shape_.hidden_size), num_bytes = num_rows_ * part * sizeof(float);
            phase(EXCHANGE, 1, [&](int64_t) { exchange_.run(num_bytes); });
            each_row(EXCHANGE, num_rows_, [&](int64_t row) {
                for (int64_t rank = 0; rank < shape_.num_ranks; ++rank) {
                    const auto [first, count] = shape_.columns_of(rank, shape_.hidden_size);
                    take(row, first, count, reinterpret_cast<float*>(exchange_.part(rank, num_bytes)) + row * part);
                }
            });
        }

        // Exchanges columns of the residual itself.
        void gather_residual() {
            gather_sums([&](int64_t row, int64_t first, int64_t count, const float* sums) {
                std::memcpy(activations_.residual + row * activations_.width + first, sums, count * sizeof *sums);
            });
        }

        // Exchanges columns of rows of activations, whose parts of each rank are multiples of `multiple`.
        template <class Type>
        void gather(const Rows<Type>& rows, int64_t num_rows, int64_t depth, int64_t multiple) {
            if (shape_.num_ranks == 1) return;
            const int64_t part = shape_.part_of(depth, multiple), row_bytes = Rows<Type>::part_bytes(part);
            const int64_t num_bytes = num_rows * row_bytes;
            const auto [own_first, own_count] = shape_.columns_of(shape_.rank, depth, multiple);
            each_row(EXCHANGE, num_rows, [&](int64_t row) {
                rows.copy_part(row, own_first, own_count, exchange_.own_part(num_bytes) + row * row_bytes);
            });
            phase(EXCHANGE, 1, [&](int64_t) { exchange_.run(num_bytes); });
            each_row(EXCHANGE, num_rows, [&](int64_t row) {
                for (int64_t rank = 0; rank < shape_.num_ranks; ++rank) {
                    const auto [first, count] = shape_.columns_of(rank, depth, multiple);
                    if (rank != shape_.rank)
                        rows.put_part(row, first, count, exchange_.part(rank, num_bytes) + row * row_bytes);
                }
            });
        }

        // Index of the first cosine and sine of a row.
        int64_t rotation(int64_t rope, int64_t row) const {
            return (rope * activations_.capacity + row) * shape_.rotary_dim / 2;
        }

        // Adds to the residual what the last sublayer left in `delta`: normed, or of all experts of the row.
        void settle(int64_t row) {
            float* residual = activations_.residual + row * activations_.width;
            if (has_expert_rows_) add_expert_rows(row, residual, 0, activations_.width);
            if (delta_norm_ == nullptr) return;
            norm_row(activations_.delta + row * activations_.width, delta_norm_, shape_.hidden_size,
                     shape_.norm_epsilon, [&](int64_t i, Floats x) {
                         store(residual + i, fused_add(load(residual + i), x, all(shape_.residual_scale)));
                     });
        }

        // Adds to `count` columns of the residual of a row, from `first` on, what the row's experts left in `delta`.
        void add_expert_rows(int64_t row, float* residual, int64_t first, int64_t count) const {
            const Routing& routing = activations_.routing;
            for (int64_t i = row * routing.num_choices; i < (row + 1) * routing.num_choices; ++i) {
                const float* delta = activations_.delta + routing.places[i] * activations_.width + first;
                const float weight = routing.weights[i] * shape_.residual_scale;
                for (int64_t c = 0; c < count; c += WIDTH)
                    store(residual + c, fused_add(load(residual + c), load(delta + c), all(weight)));
            }
        }

        // Norms the residual, for the product with `next`. Before keys and values are written, clears the groups that
        // begin in this step. Chooses experts if there is a router.
        void norm(const float* weight, const LayerKv* kv, const Matrix<Factor>& next,
                  const Layer<Factor>* routed = nullptr) {
            each_row(NORM, num_rows_, [&](int64_t row) {
                settle(row);
                norm_residual(activations_.normed, row, weight, row);
                view_row(next, activations_.normed, row);
                if constexpr (!std::is_same_v<Element, Factor>)
                    if (has_adapter(row)) adapted_.normed.put(row, 0, scratch_.product.tile, activations_.width);
                if (routed != nullptr) route(*routed, row, scratch_.product.tile);
                if (kv != nullptr && slots_[row] % LANES == 0) clear_values<Element>(*kv, slots_[row]);
            });
        }

        // Chooses the experts of a normed row `x`.
        void route(const Layer<Factor>& layer, int64_t row, const float* x) {
            const Router router{layer.router,
                                layer.router_bias,
                                layer.router_correction,
                                shape_.has_sigmoid_router != 0,
                                shape_.normalizes_experts != 0,
                                shape_.router_epsilon,
                                shape_.router_scale};
            const Routing& routing = activations_.routing;
            routing.choose(row, x, router, activations_.width, scratch_.scores, scratch_.corrected);
            if (layer.shared_gate != nullptr) routing.weigh_shared(row, x, layer.shared_gate, activations_.width);
        }

        // Without a weight, the residual itself is copied.
        template <class Type>
        void norm_residual(const Rows<Type>& to, int64_t row, const float* weight, int64_t to_row) {
            to.put(to_row, 0, normed_residual(row, weight), activations_.width);
        }

        const float* normed_residual(int64_t row, const float* weight) {
            const float* residual = activations_.residual + row * activations_.width;
            if (weight == nullptr) return residual;
            float* normed = scratch_.product.tile;
            norm_row(residual, weight, shape_.hidden_size, shape_.norm_epsilon,
                     [&](int64_t i, Floats x) { store(normed + i, x); });
            return normed;
        }

        void project_qkv(const Layer<Factor>& layer, const LayerKv& kv, int64_t index) {
            const int64_t rope = decoder_.layer_ropes_[index];
            const int64_t blocks = decoder_.weights_.head_blocks, stride = blocks * BLOCK_COLUMNS;
            const Change change{QKV_PRODUCT, index, normed_elements()};
            adapted_product(QKV, change, layer.qkv, activations_.normed, &layer.output,
                            [&](int64_t block, int64_t row, int num_rows, float* tile) {
                                int64_t head = block / blocks;
                                for (int i = 0; i < num_rows; ++i)
                                    if (has_adapter(row + i)) adapt_head(index, head, row + i, tile + i * stride);
                                if (shape_.has_output_gate) {
                                    if (head < 2 * shape_.num_heads && head % 2 == 1)
                                        return keep_gates(head / 2, row, num_rows, tile, stride);
                                    head = head < 2 * shape_.num_heads ? head / 2 : head - shape_.num_heads;
                                }
                                for (int i = 0; i < num_rows; ++i)
                                    finish_head(layer, head, row + i, tile + i * stride);
                                store_heads(kv, rope, head, row, num_rows, tile, stride);
                            });
            if (shape_.head_norms == NORMS_OF_ALL_HEADS) norm_all_heads(layer, kv, rope);
        }

        // `head` counts the gates of queries as well.
        void adapt_head(int64_t index, int64_t head, int64_t row, float* sums) {
            const int64_t dim = shape_.head_dim, kv_head = head - shape_.qkv_heads() + 2 * shape_.num_kv_heads;
            if (kv_head < 0)
                add_adapter(row, index, ADAPT_QUERY, head * dim, dim, sums);
            else if (kv_head < shape_.num_kv_heads)
                add_adapter(row, index, ADAPT_KEY, kv_head * dim, dim, sums);
            else
                add_adapter(row, index, ADAPT_VALUE, (kv_head - shape_.num_kv_heads) * dim, dim, sums);
        }

        // Adds bias and norm to a new query, key or value. Norms of all heads wait for all of them.
        void finish_head(const Layer<Factor>& layer, int64_t head, int64_t row, float* x) {
            const int64_t dim = shape_.head_dim, num_normed = shape_.num_heads + shape_.num_kv_heads;
            if (layer.qkv_bias != nullptr)
                for (int64_t d = 0; d < dim; ++d) x[d] += layer.qkv_bias[head * dim + d];
            if (head < num_normed && shape_.head_norms == NORMS_OF_ONE_HEAD)
                norm_in_place(x, head < shape_.num_heads ? layer.query_norm : layer.key_norm, dim);
        }

        // Stores a query, key or value of some rows, or keeps it for norms of all heads.
        void store_heads(const LayerKv& kv, int64_t rope, int64_t head, int64_t row, int num_rows, float* x,
                         int64_t stride) {
            if (head >= shape_.num_heads + shape_.num_kv_heads || shape_.head_norms != NORMS_OF_ALL_HEADS)
                return rotate_and_store(kv, rope, head, row, num_rows, x, stride);
            for (int i = 0; i < num_rows; ++i)
                std::memcpy(unnormed_head(row + i, shape_.rank, head), x + i * stride, shape_.head_dim * sizeof *x);
        }

        // A query or key of a rank before its norm.
        float* unnormed_head(int64_t row, int64_t rank, int64_t head) const {
            const int64_t index = row * shape_.all_normed_heads() + shape_.normed_head(rank, head);
            return activations_.unnormed + index * shape_.head_dim;
        }

        void norm_all_heads(const Layer<Factor>& layer, const LayerKv& kv, int64_t rope) {
            const int64_t num_queries = shape_.attention_depth();
            gather_unnormed();
            each_row(QKV, step_.num_tokens, [&](int64_t row) {
                float* x = unnormed_head(row, 0, 0);
                norm_in_place(x, layer.query_norm, num_queries);
                norm_in_place(x + num_queries, layer.key_norm, shape_.all_kv_heads * shape_.head_dim);
                for (int64_t head = 0; head < shape_.num_heads + shape_.num_kv_heads; ++head)
                    rotate_and_store(kv, rope, head, row, 1, unnormed_head(row, shape_.rank, head), 0);
            });
        }

        // Exchanges queries and keys before their norms.
        void gather_unnormed() {
            if (shape_.num_ranks == 1) return;
            const int64_t num_heads = shape_.num_heads, dim = shape_.head_dim;
            const int64_t num_queries = num_heads * dim, num_keys = shape_.num_kv_heads * dim;
            const int64_t num_bytes = step_.num_tokens * (num_queries + num_keys) * sizeof(float);
            const auto part_of_row = [&](char* part, int64_t row) {
                return reinterpret_cast<float*>(part) + row * (num_queries + num_keys);
            };
            each_row(EXCHANGE, step_.num_tokens, [&](int64_t row) {
                float* to = part_of_row(exchange_.own_part(num_bytes), row);
                std::memcpy(to, unnormed_head(row, shape_.rank, 0), num_queries * sizeof *to);
                std::memcpy(to + num_queries, unnormed_head(row, shape_.rank, num_heads), num_keys * sizeof *to);
            });
            phase(EXCHANGE, 1, [&](int64_t) { exchange_.run(num_bytes); });
            each_row(EXCHANGE, step_.num_tokens, [&](int64_t row) {
                for (int64_t rank = 0; rank < shape_.num_ranks; ++rank) {
                    const float* from = part_of_row(exchange_.part(rank, num_bytes), row);
                    std::memcpy(unnormed_head(row, rank, 0), from, num_queries * sizeof *from);
                    std::memcpy(unnormed_head(row, rank, num_heads), from + num_queries, num_keys * sizeof *from);
                }
            });
        }

        void norm_in_place(float* x, const float* weight, int64_t size) {
            norm_row(x, weight, size, shape_.norm_epsilon, [&](int64_t i, Floats y) { store(x + i, y); });
        }

        // Rotates a new query or key of up to 32 rows, and stores it or a new value.
        void rotate_and_store(const LayerKv& kv, int64_t rope, int64_t head, int64_t row, int num_rows, float* x,
                              int64_t stride) {
            const int64_t dim = shape_.head_dim;
            const int64_t kv_head = head - shape_.num_heads, value_head = kv_head - shape_.num_kv_heads;
            for (int i = 0; i < num_rows; ++i) {
                float* const numbers = x + i * stride;
                const int64_t first = rotation(rope, row + i);
                if (value_head < 0)
                    rotate_row(numbers, activations_.cosines + first, activations_.sines + first,
                               shape_.rotary_dim / 2);
                Number* to = kv_head < 0 ? activations_.queries.row(row + i) + head * dim : scratch_.head[i];
                for (int64_t d = 0; d < dim; d += WIDTH) Element::put(to + d, load(numbers + d));
            }
            if (kv_head < 0) return;
            if (value_head < 0)
                write_keys<Element>(kv, slots_ + row, num_rows, kv_head, scratch_.head[0], MAX_DIM);
            else
                write_values<Element>(kv, slots_ + row, num_rows, value_head, scratch_.head[0], MAX_DIM);
        }

        void attend_all(const LayerKv& kv, const int32_t* block_tables, int64_t window, const float* sinks,
                        const std::vector<Item>& items) {
            const Attention call{kv,
                                 activations_.queries.numbers,
                                 activations_.queries.stride,
                                 shape_.head_dim,
                                 activations_.attended.numbers + shape_.rank * shape_.num_heads * shape_.head_dim,
                                 activations_.attended.stride,
                                 step_.query_starts,
                                 step_.context_lengths,
                                 block_tables,
                                 step_.table_rows,
                                 step_.table_stride,
                                 step_.num_sequences,
                                 shape_.num_heads,
                                 step_.block_size,
                                 window,
                                 shape_.attention_scale,
                                 shape_.softcap,
                                 sinks};
            scratch_.attention.tile_rows = 0;
            const int64_t num_items = (int64_t)items.size();
            phase(ATTENTION, num_items, [&](int64_t task) {
                const int64_t next = task + team_.num_threads;
                attend<Element>(call, items[task], next < num_items ? &items[next] : nullptr, scratch_.attention);
            });
            const MatrixTiles tiles_again;
        }

        // Keeps the gates of a head until it is known what the head yields.
        void keep_gates(int64_t head, int64_t row, int num_rows, const float* tile, int64_t stride) {
            for (int i = 0; i < num_rows; ++i)
                std::memcpy(activations_.projected + (row + i) * activations_.projected_stride + head * shape_.head_dim,
                            tile + i * stride, shape_.head_dim * sizeof *tile);
        }

        void gate_attended() {
            const int64_t depth = shape_.num_heads * shape_.head_dim;
            each_row(ATTENTION, num_rows_, [&](int64_t row) {
                Number* const to = activations_.attended.row(row) + shape_.rank * depth;
                const float* const gates = activations_.projected + row * activations_.projected_stride;
                alignas(64) float numbers[WIDTH];
                for (int64_t i = 0; i < depth; i += WIDTH) {
                    for (int lane = 0; lane < WIDTH; ++lane) numbers[lane] = Element::get(to[i + lane]);
                    Element::put(to + i, load(numbers) * sigmoid(load(gates + i)));
                }
            });
        }

        // Moves what the last rows have so far to the first rows. `mixed` is what attention or a mixer has yielded.
        void keep_last_rows(const Rows<Element>& mixed) {
            const auto& rows = decoder_.last_rows_.rows();
            num_rows_ = (int64_t)rows.size();
            // One after the other, as a row may move to where a later one was.
            phase(ATTENTION, 1, [&](int64_t) {
                for (int64_t i = 0; i < num_rows_; ++i) {
                    if (rows[i] == i) continue;
                    mixed.copy_row(i, mixed, rows[i]);
                    std::memcpy(activations_.residual + i * activations_.width,
                                activations_.residual + rows[i] * activations_.width,
                                activations_.width * sizeof *activations_.residual);
                }
            });
        }

        void round_mixed(const Rows<Element>& mixed, const Rows<Factor>& factors, int64_t depth) {
            const int64_t width = round_up(depth, LANES);
            each_row(ATTENTION, num_rows_, [&](int64_t row) {
                const Number* from = mixed.row(row);
                float* numbers = scratch_.product.tile;
                for (int64_t i = 0; i < width; ++i) numbers[i] = Element::get(from[i]);
                factors.put(row, 0, numbers, width);
            });
        }

        // residual += (rows · matrix + bias) * scale; or, if it is to be normed, delta = rows · matrix + bias
        void add_product(Part part, const Matrix<Factor>& matrix, const Rows<Factor>& rows, const float* bias,
                         const float* norm, const Change& change, AdaptedMatrix adapted, const Blocks* after) {
            const int64_t num_tokens = num_rows_;
            const Floats scale = all(norm == nullptr ? shape_.residual_scale : 1.0f);
            delta_norm_ = norm;
            has_expert_rows_ = false;
            if (!decoder_.weights_.views(matrix).empty())
                each_row(part, num_tokens, [&](int64_t row) { view_row(matrix, rows, row); });
            const auto add = [&](int64_t row, int64_t first, int64_t columns, const float* sums) {
                float* to = (norm == nullptr ? activations_.residual : activations_.delta) + row * activations_.width +
                            first;
                for (int64_t c = 0; c < columns; c += WIDTH) {
                    Floats sum = norm == nullptr ? fused_add(load(to + c), load(sums + c), scale) : load(sums + c);
                    if (bias != nullptr) sum = fused_add(sum, load(bias + first + c), scale);
                    store(to + c, sum);
                }
            };
            // Often another thread wrote these columns last, so they come from its cache while the tile is computed.
            const auto fetch = [&](int64_t block, int64_t row, int num_rows) {
                if (norm != nullptr || num_tokens <= TILE_ROWS || shape_.num_ranks > 1) return;
                const float* from = activations_.residual + row * activations_.width + block * BLOCK_COLUMNS;
                for (int i = 0; i < num_rows; ++i, from += activations_.width)
                    for (int64_t c = 0; c < BLOCK_COLUMNS; c += LANES)
                        prefetch_line(reinterpret_cast<const char*>(from + c));
            };
            const auto finish = [&](int64_t block, int64_t row, int num_rows, float* tile) {
                const int64_t first = block * BLOCK_COLUMNS;
                const int64_t columns = std::min<int64_t>(BLOCK_COLUMNS, activations_.width - first);
                for (int i = 0; i < num_rows; ++i) {
                    float* const sums = tile + i * BLOCK_COLUMNS;
                    if (has_adapter(row + i)) add_adapter(row + i, change.index, adapted, first, BLOCK_COLUMNS, sums);
                    if (shape_.num_ranks == 1)
                        add(row + i, first, columns, sums);
                    else
                        std::memcpy(own_sums(row + i) + first, sums, BLOCK_COLUMNS * sizeof *sums);
                }
            };
            adapted_product(part, change, matrix, rows, after, fetch, finish);
            gather_sums([&](int64_t row, int64_t first, int64_t count, const float* sums) {
                add(row, first, round_up(count, LANES), sums);
            });
        }

        void gate_up(const Layer<Factor>& layer, int64_t index) {
            const Change change{GATE_UP_PRODUCT, index, normed_elements()};
            adapted_product(GATE_UP, change, layer.gate_up, activations_.normed, &layer.down,
                            [&](int64_t block, int64_t row, int num_rows, float* tile) {
                                activate(index, activations_.hidden, block, row, num_rows, tile);
                            });
        }

        // `index` is the layer whose adapters apply to the rows, or NO_LAYER. Writes to `hidden`. `bias` is that of an
        // expert, or null.
        void activate(int64_t index, const Rows<Factor>& hidden, int64_t block, int64_t row, int num_rows,
                      float* tile, const float* bias = nullptr) {
            if (shape_.has_squared_relu)
                activate_alone(hidden, block, row, num_rows, tile);
            else if (shape_.has_clamped_gates)
                activate_by(index, hidden, block, row, num_rows, tile, bias, [&](Floats gate, Floats up) {
                    return clamped<Element>(gate, up, shape_.gate_factor, shape_.gate_limit);
                });
            else if (shape_.has_gelu)
                activate_by(index, hidden, block, row, num_rows, tile, bias, gated<Element, true>);
            else
                activate_by(index, hidden, block, row, num_rows, tile, bias, gated<Element, false>);
        }

        // Without gates: of layers that have neither adapters nor biases, on one rank.
        void activate_alone(const Rows<Factor>& to, int64_t block, int64_t row, int num_rows, float* tile) {
            constexpr int64_t COLUMNS = GATE_BLOCKS<Factor> * BLOCK_COLUMNS;
            for (int i = 0; i < num_rows; ++i) {
                float* const numbers = tile + i * COLUMNS;
                for (int c = 0; c < COLUMNS; c += WIDTH) store(numbers + c, squared_relu(load(numbers + c)));
                to.put(row + i, block * BLOCK_COLUMNS, numbers, COLUMNS);
            }
        }

        template <class Gated>
        void activate_by(int64_t index, const Rows<Factor>& to, int64_t block, int64_t row, int num_rows, float* tile,
                         const float* bias, const Gated& gated_of) {
            constexpr int64_t COLUMNS = GATE_BLOCKS<Factor> * BLOCK_COLUMNS;
            // Of several ranks all feed-forward layers have the same size.
            const int64_t first =
                shape_.inner_columns(shape_.intermediate_size).first + block / 2 * BLOCK_COLUMNS;
            for (int i = 0; i < num_rows; ++i) {
                alignas(64) float hidden[COLUMNS];
                float* const gate = tile + i * 2 * COLUMNS;
                const bool is_adapted = index != NO_LAYER && has_adapter(row + i);
                if (is_adapted) adapt_gate_up(index, block / 2 * BLOCK_COLUMNS, COLUMNS, row + i, gate);
                for (int c = 0; c < COLUMNS; c += WIDTH) {
                    const float* both = gate + c / BLOCK_COLUMNS * 2 * BLOCK_COLUMNS + c % BLOCK_COLUMNS;
                    Floats of_gate = load(both), of_up = load(both + BLOCK_COLUMNS);
                    if (bias != nullptr) {
                        of_gate += load(bias + first + c);
                        of_up += load(bias + decoder_.weights_.padded_inner() + first + c);
                    }
                    store(hidden + c, gated_of(of_gate, of_up));
                }
                to.put(row + i, first, hidden, COLUMNS);
                if constexpr (!std::is_same_v<Element, Factor>)
                    if (is_adapted) adapted_.hidden.put(row + i, first, hidden, COLUMNS);
            }
        }

        // residual += what the expert yields that all rows share, by its weight for the row
        void add_shared_expert(const Layer<Factor>& layer) {
            product(GATE_UP, layer.gate_up, activations_.normed, num_rows_, &layer.down,
                    [&](int64_t block, int64_t row, int num_rows, float* tile) {
                        activate(NO_LAYER, activations_.hidden, block, row, num_rows, tile);
                    });
            if (!decoder_.weights_.views(layer.down).empty())
                each_row(DOWN, num_rows_, [&](int64_t row) { view_row(layer.down, activations_.hidden, row); });
            product(DOWN, layer.down, activations_.hidden, num_rows_, nullptr,
                    [&](int64_t block, int64_t row, int num_rows, const float* tile) {
                        const int64_t first = block * BLOCK_COLUMNS;
                        const int64_t columns = std::min<int64_t>(BLOCK_COLUMNS, activations_.width - first);
                        for (int i = 0; i < num_rows; ++i) {
                            float* const to = activations_.residual + (row + i) * activations_.width + first;
                            const float weight = layer.shared_gate == nullptr
                                                     ? 1.0f
                                                     : activations_.routing.shared_weights[row + i];
                            for (int64_t c = 0; c < columns; c += WIDTH)
                                store(to + c, fused_add(load(to + c), load(tile + i * BLOCK_COLUMNS + c),
                                                        all(weight * shape_.residual_scale)));
                        }
                    });
        }

        // Leaves in `delta` what each row's experts yield; of several ranks each adds its columns to the residual.
        void add_experts(const Layer<Factor>& layer) {
            const Routing& routing = activations_.routing;
            phase(GATE_UP, 1,
                  [&](int64_t) { routing.group(num_rows_, decoder_.groups_, decoder_.next_places_); });
            each_row(GATE_UP, num_rows_ * routing.num_choices, [&](int64_t i) {
                activations_.gathered.copy_row(routing.places[i], activations_.normed, i / routing.num_choices);
                view_row(layer.experts[routing.experts[i]].gate_up, activations_.gathered, routing.places[i]);
            });
            const int64_t bias_size = 2 * decoder_.weights_.padded_inner();
            each_expert(GATE_UP, layer, &FeedForward<Factor>::gate_up, activations_.gathered,
                        [&](int64_t expert, int64_t block, int64_t row, int num_rows, float* tile) {
                            activate(NO_LAYER, activations_.expert_hidden, block, row, num_rows, tile,
                                     layer.gate_up_bias == nullptr ? nullptr : layer.gate_up_bias + expert * bias_size);
                        });
            gather(activations_.expert_hidden, num_rows_ * routing.num_choices, shape_.intermediate_size,
                   PART_INNER_COLUMNS);
            if (decoder_.weights_.viewed_size.num_views > 0)
                each_row(DOWN, num_rows_ * routing.num_choices, [&](int64_t i) {
                    view_row(layer.experts[routing.experts[i]].down, activations_.expert_hidden, routing.places[i]);
                });
            const auto [own_first, own_count] = shape_.hidden_columns();
            each_expert(DOWN, layer, &FeedForward<Factor>::down, activations_.expert_hidden,
                        [&, first_column = own_first](int64_t expert, int64_t block, int64_t row, int num_rows,
                                                      float* tile) {
                            const int64_t first = first_column + block * BLOCK_COLUMNS;
                            const int64_t columns = std::min<int64_t>(BLOCK_COLUMNS, activations_.width - first);
                            for (int i = 0; i < num_rows; ++i) {
                                float* const sums = tile + i * BLOCK_COLUMNS;
                                if (layer.down_bias != nullptr) {
                                    const float* bias = layer.down_bias + expert * padded_width() + first;
                                    for (int64_t c = 0; c < columns; c += WIDTH)
                                        store(sums + c, load(sums + c) + load(bias + c));
                                }
                                std::memcpy(activations_.delta + (row + i) * activations_.width + first, sums,
                                            columns * sizeof *sums);
                            }
                        });
            delta_norm_ = nullptr;
            has_expert_rows_ = shape_.num_ranks == 1;
            if (has_expert_rows_) return;
            each_row(EXCHANGE, num_rows_, [&, first = own_first, count = own_count](int64_t row) {
                float* sums = own_sums(row);
                std::memcpy(sums, activations_.residual + row * activations_.width + first, count * sizeof *sums);
                add_expert_rows(row, sums, first, round_up(count, LANES));
            });
            gather_residual();
        }

        // Numbers of a row of biases of the residual's size.
        int64_t padded_width() const { return round_up(shape_.hidden_size, BLOCK_COLUMNS); }

        // rows of each expert · its matrix. A task is some blocks of one expert, whose number `finish` gets first.
        template <class Finish>
        void each_expert(Part part, const Layer<Factor>& layer, Matrix<Factor> FeedForward<Factor>::*matrix,
                         const Rows<Factor>& rows, const Finish& finish) {
            const auto& groups = decoder_.groups_;
            auto& products = scratch_.products;
            auto& last_tasks = scratch_.last_tasks;
            products.clear();
            last_tasks.clear();
            for (const ExpertRows& group : groups) {
                const Blocks* after = &group == &groups.back() ? nullptr : &(layer.experts[(&group)[1].expert].*matrix);
                products.emplace_back(layer.experts[group.expert].*matrix, rows.from(group.first, 0), group.num_rows,
                                      team_.num_threads, decoder_.weights_.stream, after,
                                      prepared(layer.experts[group.expert].*matrix, group.first));
                last_tasks.push_back(products.back().num_tasks + (last_tasks.empty() ? 0 : last_tasks.back()));
            }
            phase(part, last_tasks.back(), [&](int64_t task) {
                const auto index = std::upper_bound(last_tasks.begin(), last_tasks.end(), task) - last_tasks.begin();
                const int64_t first_task = index == 0 ? 0 : last_tasks[index - 1], first_row = groups[index].first;
                products[index].compute(task - first_task, scratch_.product, PrepareNothing{},
                                        [&](int64_t block, int64_t row, int num_rows, float* tile) {
                                            finish(groups[index].expert, block, first_row + row, num_rows, tile);
                                        });
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
            // Not with the norms below, because a row may yield more than one row of logits.
            if (delta_norm_ != nullptr || has_expert_rows_)
                each_row(NORM, num_rows_, [&](int64_t row) { settle(row); });
            each_row(NORM, step_.num_logits + step_.num_hidden, [&](int64_t row) {
                const int64_t from = decoder_.last_rows_.is_narrow() ? decoder_.last_rows_.place(row)
                                                                     : step_.logit_rows[row];
                if (row >= step_.num_logits) {
                    std::memcpy(step_.hidden + (row - step_.num_logits) * shape_.hidden_size,
                                normed_residual(from, decoder_.weights_.final_norm),
                                shape_.hidden_size * sizeof(float));
                    return;
                }
                norm_residual(activations_.last, from, decoder_.weights_.final_norm, row);
                view_row(decoder_.weights_.head, activations_.last, row);
                if (choice != nullptr) choice->mark(team_.thread, row);
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
            const int64_t num_columns = shape_.vocabulary_columns().count;
            const int64_t count = std::min(num_columns - first, GreedyChoice::GROUP_COLUMNS);
            if (shape_.changes_logits()) change_logits(logits);
            if (choice != nullptr)
                choice->take(team_.thread, row, group, logits, count);
            else
                std::memcpy(step_.logits + row * num_columns + first, logits, count * sizeof(float));
        }

        void change_logits(float* logits) const {
            for (int64_t i = 0; i < GreedyChoice::GROUP_COLUMNS; i += WIDTH) {
                const Floats scaled = load(logits + i) * shape_.logit_scale;
                store(logits + i, shape_.logit_softcap > 0 ? soft_capped(scaled, shape_.logit_softcap) : scaled);
            }
        }

        DecoderOf& decoder_;
        const DecoderShape& shape_;
        const Activations<Element, Factor>& activations_;
        const AdaptedRows<Element, Factor>& adapted_;
        Exchange& exchange_;
        const DecoderStep& step_;
        int64_t num_rows_;  // of the activations: those of the step, or in the last layer of `last_rows_`
        const int64_t* slots_ = nullptr;  // of the layer that is computed
        int64_t num_shrinks_ = 0;         // in the step up to the current product
        const std::vector<Item>& items_;
        Team& team_;
        Scratch& scratch_;
        Clock::time_point last_;
        // The norm of what the last sublayer left in `delta`, or whether experts left it; null and false if empty.
        const float* delta_norm_ = nullptr;
        bool has_expert_rows_ = false;
    };

    const DecoderShape shape_;
    const std::vector<int64_t> windows_, layer_ropes_;
    const std::vector<float> frequencies_, rope_scalings_;
    const std::vector<int64_t> is_recurrent_, is_bare_;
    std::vector<Span> spans_;  // of the sequences of a step with recurrent layers
    PackedWeights<Element, Factor> weights_;
    AdapterSlots<Element> adapters_;
    Activations<Element, Factor> activations_;
    AdaptedRows<Element, Factor> adapted_;
    std::atomic<int64_t> num_shrunk_{0};  // shrinks of the step that are done
    ViewedRows<Element> viewed_;
    GreedyChoice choice_;
    LastRows last_rows_;
    Exchange exchange_;
    std::vector<ExpertRows> groups_;     // experts that have rows in the current layer
    std::vector<int64_t> next_places_;   // of each expert
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

// Announces a part of a matrix that has codes, before `allocate`. Reads its sizes and its order.
void inflight_decoder_declare(void* decoder, int64_t layer, int64_t part, const inflight::CodedPart* coded) {
    static_cast<inflight::Decoder*>(decoder)->declare(layer, part, *coded);
}

// Allocates memory for all weights, once. Returns 0, or 1 if there is not enough.
int64_t inflight_decoder_allocate(void* decoder) {
    return inflight::or_out_of_memory([&] { static_cast<inflight::Decoder*>(decoder)->allocate(); });
}

// Packs `count` columns of a matrix from `first` on, or anything else as a whole.
void inflight_decoder_pack(void* decoder, int64_t layer, int64_t part, const void* numbers, int64_t first,
                           int64_t count) {
    static_cast<inflight::Decoder*>(decoder)->pack(layer, part, numbers, first, count);
}

// Packs a part that was declared.
void inflight_decoder_pack_codes(void* decoder, int64_t layer, int64_t part, const inflight::CodedPart* coded) {
    static_cast<inflight::Decoder*>(decoder)->pack_codes(layer, part, *coded);
}

// Returns the bytes of the weights that a step multiplies with, if it uses all experts.
int64_t inflight_decoder_matrix_bytes(void* decoder) {
    return static_cast<inflight::Decoder*>(decoder)->matrix_bytes();
}

// Returns the most bytes of a row of activations that a rank gives the others at once.
int64_t inflight_decoder_row_part_bytes(void* decoder) {
    return static_cast<inflight::Decoder*>(decoder)->row_part_bytes();
}

// Waits for all ranks that share the memory. Returns 0, or 2 if one does not come in time.
int64_t inflight_shared_parts_meet(void* shared_parts, int64_t num_ranks) {
    return static_cast<inflight::SharedParts*>(shared_parts)->meet(num_ranks) ? 0 : 2;
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

// Loads an adapter into a slot that no step uses: a matrix for each layer and adapted matrix. Returns 0, or 1 if it
// does not fit the slot. Other slots may be in use meanwhile.
int64_t inflight_decoder_load_adapter(void* decoder, int64_t slot, const inflight::AdapterMatrix* matrices) {
    return static_cast<inflight::Decoder*>(decoder)->load_adapter(slot, matrices) ? 0 : 1;
}

// Returns 0; 1 if there is not enough memory for the step's tokens; 2 if an exchange with other ranks has failed, after
// which the results are undefined.
int64_t inflight_decoder_step(void* decoder, void* pool, const inflight::DecoderStep* step) {
    bool is_complete = true;
    const int64_t is_out_of_memory = inflight::or_out_of_memory([&] {
        is_complete = static_cast<inflight::Decoder*>(decoder)->step(*static_cast<inflight::Pool*>(pool), *step);
    });
    return is_complete ? is_out_of_memory : 2;
}

}  // extern "C"
