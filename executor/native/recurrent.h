// Recurrent layers: gated short convolutions (LFM2), gated delta nets (Qwen3.5) and Mamba 2 (Granite 4, Nemotron-H),
// with their state in slots.
//
// The formulas are those of executor/recurrent, whose docstrings have them. The layer's first projection of each new row
// is in `projected`. A task computes all new rows of a sequence for some channels, or for a head of keys with its heads
// of values: it reads the slot, computes, saves checkpoints and writes the slot, so tasks share nothing. Each position is
// computed by the same code in the same order of operations, whatever else is in the step, so its numbers are the same
// bits in a chunk of a prompt, in a decode, in a draft and when they are computed again.
//
// A slot of a convolution has the newest inputs, that of position p at place p % num_places. A slot of a gated delta net
// has two chunks of GRID positions, which it uses in turn, and the states at a boundary: a multiple of GRID that drafts
// cannot reach. The states go on to the next chunk when a step begins behind it, and are not written otherwise.
//
// Mamba 2 has the slots of a gated delta net: its keys are B, its queries C and its updates dt * x. Many heads share a
// key, and the norm behind them covers all of these, so it takes three phases of tasks: the convolution, in place of its
// inputs in `projected`; some heads, each output in place of its z; and the norm of each row. The last one stores the
// keys, which the tasks of the second read.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "matmul.h"
#include "row_ops.h"
#include "vectors.h"

namespace inflight {

constexpr int64_t DELTA_GRID = 64;

extern "C" {

// What a layer does in place of attention.
enum MixerKind { NO_MIXER, SHORT_CONVOLUTION, GATED_DELTA, MAMBA2 };

// states.py's `MixerLayout`, in the same order. All recurrent layers of a model are of one kind. `channels` are those of
// the convolution; what follows up to `value_dim` is 0 of a short convolution. Heads and channels are those of this
// rank. A norm of Mamba 2 covers `norm_heads` heads, some of which other ranks may have.
struct MixerShape {
    int64_t kind, conv_width, channels, num_key_heads, num_heads, key_dim, value_dim, num_ranks, rank, norm_heads;

    bool has_states() const { return kind == GATED_DELTA || kind == MAMBA2; }
    // Columns of the projection of a layer's input: B, C, x; or queries, keys, values, z, b and a; or z, x, B, C and dt.
    int64_t columns() const {
        if (kind == MAMBA2) return channels + num_heads * value_dim + num_heads;
        return kind == GATED_DELTA ? channels + num_heads * value_dim + 2 * num_heads : 3 * channels;
    }
    // Numbers of a row that the layer yields before its output projection, on this rank and on all.
    int64_t depth() const { return has_states() ? num_heads * value_dim : channels; }
    int64_t whole_depth() const { return num_ranks * depth(); }
    // Heads of values of a head of keys.
    int64_t group() const { return num_heads / num_key_heads; }
    // Numbers of `MixerVectors`.
    int64_t vector_numbers() const {
        const int64_t taps = conv_width * channels;
        if (kind == MAMBA2) return taps + channels + 3 * num_heads + whole_depth() + 2;
        return taps + (kind == GATED_DELTA ? 2 * num_heads + value_dim : channels);
    }
};

// decoder.py's `_Memory`, in the same order: the slots and checkpoints of a layer; null for attention. Inputs are
// Elements, `inputs[slots, num_places, channels]` and `saved_inputs[checkpoints, conv_width - 1, channels]`. The rest is
// float32: `states[slots, heads, key_dim, value_dim]`, `saved_states[checkpoints, ...]` alike, `keys[slots, 2, key_heads,
// key_dim, GRID]`, `updates[slots, 2, heads, GRID, value_dim]`, and `decays[slots, 2, heads, GRID]`, the sums of the
// gates since the begin of the chunk.
struct MixerMemory {
    void *inputs, *saved_inputs;
    float *states, *saved_states, *keys, *updates, *decays;

    // `chunk` is that of `Span::chunk_of_slot`.
    float* keys_of_chunk(const MixerShape& shape, int64_t chunk, int64_t key_head) const {
        return keys + (chunk * shape.num_key_heads + key_head) * shape.key_dim * DELTA_GRID;
    }
};

// A checkpoint of the first `position` tokens that is copied to a slot before the rows are computed, or saved with those
// of sequence `row`.
struct StateLoad {
    int64_t checkpoint, slot, position;
};
struct StateSave {
    int64_t row, position, checkpoint;
};

// decoder.py's `_States`, in the same order.
struct StepStates {
    const MixerMemory* memories;  // [num_layers]
    const int64_t* slots;         // [num_sequences]
    int64_t* boundaries;          // [slots], where the states of heads are; written
    const StateLoad* loads;
    const StateSave* saves;
    int64_t num_loads, num_saves, num_places;
};

}  // extern "C"

constexpr float DELTA_EPSILON = 1e-6f;    // of the norms of queries and keys
constexpr int64_t CONV_ROWS = DELTA_GRID;  // that a convolution has in its window at once
constexpr int64_t CONV_CHANNELS = 128;    // of a task of a short convolution or of Mamba 2
constexpr int64_t MAMBA2_HEADS = 8;        // of a task, at most

// The vectors of a layer, one behind the other.
struct MixerVectors {
    const float *taps;                // [conv_width, channels], the oldest first
    const float *bias;                // [channels], not of a gated delta net
    const float *rates, *gate_bias;   // [heads], not of a short convolution
    const float *norm;                // [value_dim] of a gated delta net, [whole_depth] of Mamba 2
    const float *skips;               // [heads] of Mamba 2, D
    const float *limits;              // [2] of Mamba 2, the least and the largest dt

    MixerVectors(const MixerShape& shape, const float* numbers)
        : taps(numbers),
          bias(numbers + shape.conv_width * shape.channels),
          rates(bias + (shape.kind == GATED_DELTA ? 0 : shape.channels)),
          gate_bias(rates + shape.num_heads),
          norm(gate_bias + shape.num_heads),
          skips(norm + shape.whole_depth()),
          limits(skips + shape.num_heads) {}
};

// The new positions of a sequence, and the boundaries that its slot has before the step and after it.
struct Span {
    int64_t slot, first_row, start, end, boundary, kept;

    // The place of the chunk with a position among those of all slots.
    int64_t chunk_of_slot(int64_t position) const { return 2 * slot + position / DELTA_GRID % 2; }
};

// Where the sequences of a step are. Writes the boundaries after the step.
inline void find_spans(const StepStates& states, const int32_t* query_starts, const int32_t* context_lengths,
                       int64_t num_sequences, std::vector<Span>& spans) {
    for (int64_t i = 0; i < states.num_loads; ++i) states.boundaries[states.loads[i].slot] = states.loads[i].position;
    spans.clear();
    for (int64_t i = 0; i < num_sequences; ++i) {
        const int64_t slot = states.slots[i], end = context_lengths[i];
        const int64_t start = end - (query_starts[i + 1] - query_starts[i]);
        // A row that verifies drafts has at most GRID + 1 positions, the first of which is known. So a state up to its
        // end less GRID depends on no draft.
        const int64_t kept = std::max(start, end - DELTA_GRID) / DELTA_GRID * DELTA_GRID;
        spans.push_back({slot, query_starts[i], start, end, start == 0 ? 0 : states.boundaries[slot], kept});
        states.boundaries[slot] = kept;
    }
}

// Numbers as they are after they were Elements.
template <class Element>
ALWAYS_INLINE void copy_rounded(float* to, const float* from, int64_t count) {
    if constexpr (Element::PAIR == 1) {
        std::memcpy(to, from, count * sizeof *to);
    } else {
        alignas(64) typename Element::Number numbers[WIDTH];
        alignas(64) float some[WIDTH];
        for (int64_t i = 0; i < count; i += WIDTH) {
            const int64_t left = std::min<int64_t>(WIDTH, count - i);
            std::memcpy(some, from + i, left * sizeof *some);
            Element::put(numbers, load(some));
            for (int64_t lane = 0; lane < left; ++lane) to[i + lane] = Element::get(numbers[lane]);
        }
    }
}

template <class Element>
ALWAYS_INLINE void widen(float* to, const typename Element::Number* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) to[i] = Element::get(from[i]);
}

// Writes numbers that were Elements before.
template <class Element>
ALWAYS_INLINE void narrow(typename Element::Number* to, const float* from, int64_t count) {
    if constexpr (Element::PAIR == 1) {
        std::memcpy(to, from, count * sizeof *to);
    } else {
        for (int64_t i = 0; i < count; ++i) {
            uint32_t bits;
            std::memcpy(&bits, from + i, sizeof bits);
            to[i] = (typename Element::Number)(bits >> 16);
        }
    }
}

// Some channels of a row of inputs: those from `first` on, in the window behind the ones before.
struct Channels {
    int64_t first, count;
};

// A convolution of some channels of a sequence. `window[conv_width - 1 + CONV_ROWS, stride]` are the inputs before each
// row and at it.
template <class Element>
class Convolution {
    using Number = typename Element::Number;

  public:
    // `parts` are the channels of a row of the window, one part behind the other.
    Convolution(const MixerShape& shape, const MixerMemory& memory, const StepStates& states, const Span& span,
                int64_t sequence, const Channels* parts, int num_parts, float* window, int64_t stride)
        : shape_(shape),
          memory_(memory),
          states_(states),
          span_(span),
          sequence_(sequence),
          parts_(parts),
          num_parts_(num_parts),
          num_past_(shape.conv_width - 1),
          stride_(stride),
          window_(window) {}

    // Reads the inputs before the first new one. `input(row, part, to)` writes new inputs, which were Elements.
    template <class Input>
    void begin(const Input& input) {
        for (int64_t i = 0; i < num_past_; ++i) read(span_.start - num_past_ + i, window_ + i * stride_);
        save(input);
    }

    // Computes the sums of the inputs up to each of the next `count` rows, at most CONV_ROWS: calls `use(row, sums)`
    // with `stride` of them. `row` counts those of the step.
    template <class Input, class Use>
    void next(int64_t count, const MixerVectors& vectors, float* sums, const Input& input, const Use& use) {
        for (int64_t i = 0; i < count; ++i, ++row_) {
            float* const newest = window_ + (num_past_ + i) * stride_;
            each_part([&](const Channels& part, int64_t place) { input(row_, part, newest + place); });
            store_input(span_.start + row_, newest);
            each_part([&](const Channels& part, int64_t place) {
                for (int64_t c = 0; c < part.count; c += WIDTH) {
                    const float* const from = window_ + i * stride_ + place + c;
                    Floats sum = {};
                    for (int64_t tap = 0; tap < shape_.conv_width; ++tap)
                        sum = fused_add(sum, load(from + tap * stride_),
                                        load(vectors.taps + tap * shape_.channels + part.first + c));
                    store(sums + place + c, sum);
                }
            });
            use(row_, sums);
        }
        std::memmove(window_, window_ + count * stride_, num_past_ * stride_ * sizeof *window_);
    }

  private:
    template <class Work>
    void each_part(const Work& work) const {
        for (int64_t i = 0, place = 0; i < num_parts_; place += round_up(parts_[i++].count, LANES))
            work(parts_[i], place);
    }

    Number* stored(int64_t position) const {
        return static_cast<Number*>(memory_.inputs) +
               (span_.slot * states_.num_places + position % states_.num_places) * shape_.channels;
    }

    // Inputs of earlier steps. Those before the first position are zero.
    void read(int64_t position, float* to) const {
        std::memset(to, 0, stride_ * sizeof *to);
        if (position < 0) return;
        each_part([&](const Channels& part, int64_t place) {
            widen<Element>(to + place, stored(position) + part.first, part.count);
        });
    }

    // Keeps an input that a later step may need. The earlier ones have been read.
    void store_input(int64_t position, const float* from) const {
        if (position < span_.end - states_.num_places) return;
        each_part([&](const Channels& part, int64_t place) {
            narrow<Element>(stored(position) + part.first, from + place, part.count);
        });
    }

    // Saves the inputs before checkpoints. Those of earlier steps must be there still.
    template <class Input>
    void save(const Input& input) const {
        float* const row = window_ + num_past_ * stride_;
        for (int64_t i = 0; i < states_.num_saves; ++i) {
            const StateSave& one = states_.saves[i];
            if (one.row != sequence_) continue;
            for (int64_t place = 0; place < num_past_; ++place) {
                const int64_t position = one.position - num_past_ + place;
                if (position < span_.start)
                    read(position, row);
                else
                    each_part([&](const Channels& part, int64_t at) { input(position - span_.start, part, row + at); });
                Number* const to = static_cast<Number*>(memory_.saved_inputs) +
                                   (one.checkpoint * num_past_ + place) * shape_.channels;
                each_part([&](const Channels& part, int64_t at) {
                    narrow<Element>(to + part.first, row + at, part.count);
                });
            }
        }
    }

    const MixerShape& shape_;
    const MixerMemory& memory_;
    const StepStates& states_;
    const Span& span_;
    const int64_t sequence_;
    const Channels* const parts_;
    const int num_parts_;
    const int64_t num_past_, stride_;
    float* const window_;
    int64_t row_ = 0;
};

// Copies a checkpoint to a slot.
template <class Element>
void load_state(const MixerShape& shape, const MixerMemory& memory, const StateLoad& load, int64_t num_places) {
    using Number = typename Element::Number;
    const int64_t num_past = shape.conv_width - 1, channels = shape.channels;
    for (int64_t i = 0; i < num_past; ++i) {
        const int64_t position = load.position - num_past + i;
        if (position < 0) continue;
        std::memcpy(static_cast<Number*>(memory.inputs) + (load.slot * num_places + position % num_places) * channels,
                    static_cast<Number*>(memory.saved_inputs) + (load.checkpoint * num_past + i) * channels,
                    channels * sizeof(Number));
    }
    if (!shape.has_states()) return;
    const int64_t count = shape.num_heads * shape.key_dim * shape.value_dim;
    std::memcpy(memory.states + load.slot * count, memory.saved_states + load.checkpoint * count,
                count * sizeof(float));
}

// Calls `work` with blocks of columns, multiples of a vector, each with the number of vectors as a constant. A column is
// always in a block of the same size.
template <class Work>
ALWAYS_INLINE void each_block_of(int64_t num_columns, const Work& work) {
#if defined(__AVX512F__)
    constexpr int MOST = 8;
#else
    constexpr int MOST = 4;
#endif
    int64_t column = 0;
    for (; column + MOST * WIDTH <= num_columns; column += MOST * WIDTH)
        work(std::integral_constant<int, MOST>{}, column);
    for (; column < num_columns; column += WIDTH) work(std::integral_constant<int, 1>{}, column);
}

// The numbers of a thread's `MixerHeads` that a slot does not have: states that are beyond the boundary which it keeps,
// and with own keys those of a chunk.
inline int64_t heads_scratch_numbers(const MixerShape& shape, int64_t num_heads) {
    return (num_heads * shape.value_dim + DELTA_GRID) * shape.key_dim;
}

// Some heads of values of a sequence with the same head of keys, which decay a state each and add to it. With CORRECTS
// they correct it (gated delta net), have all heads of a head of keys, and keep the keys in the slot. Without, the keys
// of the chunk are those of the task, as others read the slot.
template <bool CORRECTS>
class MixerHeads {
  public:
    MixerHeads(const MixerShape& shape, const MixerMemory& memory, const StepStates& states, const Span& span,
               int64_t sequence, int64_t first_head, int64_t num_heads, float* scratch)
        : shape_(shape),
          memory_(memory),
          states_(states),
          span_(span),
          sequence_(sequence),
          first_head_(first_head),
          num_heads_(num_heads),
          key_head_(first_head / shape.group()),
          state_numbers_(shape.key_dim * shape.value_dim),
          scratch_(scratch),
          own_keys_(scratch + num_heads * state_numbers_),
          state_(memory.states + (span.slot * shape.num_heads + first_head) * state_numbers_) {}

    // Goes to the chunk of the first new position.
    void begin() {
        if (span_.start == 0) std::memset(state_, 0, num_heads_ * state_numbers_ * sizeof *state_);
        chunk_ = span_.boundary;
        const int64_t first = span_.start / DELTA_GRID * DELTA_GRID;
        read_keys();
        if (chunk_ < first) {
            advance_to(first);
            read_keys();
        }
        save();
    }

    // Goes on to the next chunk; this one is complete.
    void advance() {
        advance_to(chunk_ + DELTA_GRID);
        save();
    }

    // Saves a checkpoint at the end of the last chunk, if there is one. The slot stays before it.
    void end() {
        if (span_.end != chunk_ + DELTA_GRID) return;
        each_save(span_.end, [&](float* to) {
            for (int64_t i = 0; i < num_heads_; ++i) advance_head(i, to + i * state_numbers_);
        });
    }

    int64_t chunk() const { return chunk_; }

    // Sets the key of a position, and its products with the keys up to it, if they are needed, and of its query with
    // them.
    void put_key(int64_t position, const float* query, const float* key) {
        place_ = position - chunk_;
        query_ = query, key_ = key;
        float* const keys = CORRECTS ? keys_of_slot() : own_keys_;
        for (int64_t d = 0; d < shape_.key_dim; ++d) keys[d * DELTA_GRID + place_] = key[d];
        for (int64_t first = 0; first <= place_; first += WIDTH) {
            Floats of_key = {}, of_query = {};
            for (int64_t d = 0; d < shape_.key_dim; ++d) {
                const Floats column = load(keys + d * DELTA_GRID + first);
                if constexpr (CORRECTS) of_key = fused_add(of_key, all(key[d]), column);
                of_query = fused_add(of_query, all(query[d]), column);
            }
            if constexpr (CORRECTS) store(with_key_ + first, of_key);
            store(with_query_ + first, of_query);
        }
    }

    // Computes the output `[value_dim]` of a head at the position of `put_key`. `gate` is g there. Without a correction
    // `values` are the update, and `beta` is not used.
    void attend(int64_t head, const float* values, float gate, float beta, float* outputs) {
        float* const decays = decays_of_chunk(head);
        const float decay = gate + (place_ == 0 ? 0.0f : decays[place_ - 1]);
        decays[place_] = decay;
        for (int64_t first = 0; first <= place_; first += WIDTH) {
            const Floats weights = exponential(decay - load(decays + first));
            if constexpr (CORRECTS) store(key_weights_ + first, load(with_key_ + first) * weights);
            store(query_weights_ + first, load(with_query_ + first) * weights);
        }
        alignas(64) float grown[WIDTH];
        store(grown, exponential(all(decay)));
        const Floats factor = all(grown[0]), rate = all(beta);
        const float* const state = state_ + head * state_numbers_;
        float* const updates = updates_of_chunk(head);
        const int64_t dim = shape_.value_dim;
        each_block_of(dim, [&](auto count, int64_t column) {
            constexpr int COUNT = decltype(count)::value;
            Floats of_key[COUNT] = {}, of_query[COUNT] = {}, known[COUNT] = {}, seen[COUNT] = {};
            add_rows<COUNT>(state + column, dim, shape_.key_dim, key_, query_, of_key, of_query);
            add_rows<COUNT>(updates + column, dim, place_, key_weights_, query_weights_, known, seen);
            const Floats own = all(query_weights_[place_]);
#pragma GCC unroll 8
            for (int i = 0; i < COUNT; ++i) {
                Floats update = load(values + column + i * WIDTH);
                if constexpr (CORRECTS) update = rate * fused_add(update - known[i], -factor, of_key[i]);
                store(updates + place_ * dim + column + i * WIDTH, update);
                store(outputs + column + i * WIDTH, fused_add(fused_add(seen[i], own, update), factor, of_query[i]));
            }
        });
    }

  private:
    // Adds rows of a matrix, each by two factors, of which only a correction needs the first.
    template <int COUNT>
    static ALWAYS_INLINE void add_rows(const float* rows, int64_t stride, int64_t num_rows, const float* first,
                                       const float* second, Floats (&first_sums)[COUNT],
                                       Floats (&second_sums)[COUNT]) {
        for (int64_t row = 0; row < num_rows; ++row, rows += stride) {
            const Floats by_first = CORRECTS ? all(first[row]) : Floats{}, by_second = all(second[row]);
#pragma GCC unroll 8
            for (int i = 0; i < COUNT; ++i) {
                const Floats numbers = load(rows + i * WIDTH);
                if constexpr (CORRECTS) first_sums[i] = fused_add(first_sums[i], by_first, numbers);
                second_sums[i] = fused_add(second_sums[i], by_second, numbers);
            }
        }
    }

    int64_t chunk_of_slot() const { return span_.chunk_of_slot(chunk_); }
    float* keys_of_slot() const { return memory_.keys_of_chunk(shape_, chunk_of_slot(), key_head_); }
    float* updates_of_chunk(int64_t head) const {
        return memory_.updates +
               (chunk_of_slot() * shape_.num_heads + first_head_ + head) * DELTA_GRID * shape_.value_dim;
    }
    float* decays_of_chunk(int64_t head) const {
        return memory_.decays + (chunk_of_slot() * shape_.num_heads + first_head_ + head) * DELTA_GRID;
    }

    void read_keys() const {
        if constexpr (!CORRECTS)
            std::memcpy(own_keys_, keys_of_slot(), shape_.key_dim * DELTA_GRID * sizeof *own_keys_);
    }

    // Up to the boundary that is kept, the states of the slot go on.
    void advance_to(int64_t chunk) {
        float* const to = chunk <= span_.kept ? state_ : scratch_;
        for (int64_t i = 0; i < num_heads_; ++i) advance_head(i, to + i * state_numbers_);
        state_ = to;
        chunk_ = chunk;
    }

    // The state at the end of the chunk: exp(G) * S + sum over j of exp(G - G[j]) * k[j] u[j]ᵀ, with G at the end.
    void advance_head(int64_t head, float* to) const {
        const float* const decays = decays_of_chunk(head);
        const float* const keys = CORRECTS ? keys_of_slot() : own_keys_;
        const float* const updates = updates_of_chunk(head);
        const float* const state = state_ + head * state_numbers_;
        const int64_t dim = shape_.value_dim;
        const float last = decays[DELTA_GRID - 1];
        alignas(64) float factors[DELTA_GRID], weights[DELTA_GRID], grown[WIDTH];
        for (int64_t j = 0; j < DELTA_GRID; j += WIDTH) store(factors + j, exponential(last - load(decays + j)));
        store(grown, exponential(all(last)));
        for (int64_t d = 0; d < shape_.key_dim; ++d) {
            for (int64_t j = 0; j < DELTA_GRID; j += WIDTH)
                store(weights + j, load(keys + d * DELTA_GRID + j) * load(factors + j));
            each_block_of(dim, [&](auto count, int64_t column) {
                constexpr int COUNT = decltype(count)::value;
                Floats sums[COUNT];
#pragma GCC unroll 8
                for (int i = 0; i < COUNT; ++i) sums[i] = load(state + d * dim + column + i * WIDTH) * grown[0];
                for (int64_t j = 0; j < DELTA_GRID; ++j) {
                    const Floats weight = all(weights[j]);
#pragma GCC unroll 8
                    for (int i = 0; i < COUNT; ++i)
                        sums[i] = fused_add(sums[i], weight, load(updates + j * dim + column + i * WIDTH));
                }
#pragma GCC unroll 8
                for (int i = 0; i < COUNT; ++i) store(to + d * dim + column + i * WIDTH, sums[i]);
            });
        }
    }

    template <class Work>
    void each_save(int64_t position, const Work& work) const {
        for (int64_t i = 0; i < states_.num_saves; ++i) {
            const StateSave& one = states_.saves[i];
            if (one.row == sequence_ && one.position == position)
                work(memory_.saved_states + (one.checkpoint * shape_.num_heads + first_head_) * state_numbers_);
        }
    }

    void save() const {
        each_save(chunk_, [&](float* to) {
            std::memcpy(to, state_, num_heads_ * state_numbers_ * sizeof *to);
        });
    }

    const MixerShape& shape_;
    const MixerMemory& memory_;
    const StepStates& states_;
    const Span& span_;
    const int64_t sequence_, first_head_, num_heads_, key_head_, state_numbers_;
    float* const scratch_;
    float* const own_keys_;  // [key_dim, GRID]
    float* state_;  // at the begin of the chunk
    int64_t chunk_ = 0, place_ = 0;
    const float *query_ = nullptr, *key_ = nullptr;
    alignas(64) float with_key_[DELTA_GRID], with_query_[DELTA_GRID];
    alignas(64) float key_weights_[DELTA_GRID], query_weights_[DELTA_GRID];
};

// x / (1 + e^-x)
ALWAYS_INLINE Floats silu(Floats x) { return x / (1.0f + exponential(-larger(x, all(-87.0f)))); }
ALWAYS_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-larger(x, all(-87.0f)))); }

// Divides a vector by its length and multiplies it.
ALWAYS_INLINE void scale_to_length(float* x, int64_t size, float factor) {
    Floats squares = {};
    for (int64_t i = 0; i < size; i += WIDTH) squares = fused_add(squares, load(x + i), load(x + i));
    const float scale = factor / std::sqrt(sum_of(squares) + DELTA_EPSILON);
    for (int64_t i = 0; i < size; i += WIDTH) store(x + i, load(x + i) * scale);
}

// The recurrent layer of a step, between its two projections.
template <class Element>
class MixerStep {
  public:
    // `projected` are rows of `stride` numbers, which Mamba 2 overwrites, and `to` rows of what the layer yields. Before
    // the norms of Mamba 2 these are in rows of `gated`: of one rank in those of `projected`.
    MixerStep(const MixerShape& shape, const MixerMemory& memory, const MixerVectors& vectors,
              const StepStates& states, const std::vector<Span>& spans, float* projected, int64_t stride,
              float* gated, int64_t gated_stride, const Rows<Element>& to, float epsilon)
        : shape_(shape),
          memory_(memory),
          vectors_(vectors),
          states_(states),
          spans_(spans),
          projected_(projected),
          stride_(stride),
          gated_(gated),
          gated_stride_(gated_stride),
          to_(to),
          epsilon_(epsilon) {}

    // Of one thread.
    static int64_t scratch_numbers(const MixerShape& shape) {
        const int64_t window = (shape.conv_width - 1 + CONV_ROWS + 1) * row_numbers(shape);
        if (shape.kind == SHORT_CONVOLUTION) return window;
        const int64_t num_heads = shape.kind == MAMBA2 ? heads_of_task(shape) : shape.group();
        const int64_t of_heads = heads_scratch_numbers(shape, num_heads) + 2 * shape.value_dim;
        return shape.kind == MAMBA2 ? std::max(window, of_heads) : window + of_heads;
    }

    // Phases of tasks, one after the other. Between the second and the third one of Mamba 2, ranks exchange rows.
    int num_phases() const { return shape_.kind == MAMBA2 ? 3 : 1; }

    int64_t num_tasks(int phase) const {
        const int64_t num_sequences = (int64_t)spans_.size();
        if (phase == 2) return spans_.back().first_row + spans_.back().end - spans_.back().start + num_sequences;
        return num_sequences * tasks_of_sequence(phase);
    }

    void compute(int phase, int64_t task, float* scratch) const {
        if (phase == 2) return task < (int64_t)spans_.size() ? store_keys(task) : norm(task - spans_.size());
        const int64_t sequence = task / tasks_of_sequence(phase), part = task % tasks_of_sequence(phase);
        if (phase == 1)
            add_to_states(sequence, part, scratch);
        else if (shape_.kind == GATED_DELTA)
            delta(sequence, part, scratch);
        else if (shape_.kind == MAMBA2)
            convolve_in_place(sequence, part * CONV_CHANNELS, scratch);
        else
            convolve(sequence, part * CONV_CHANNELS, scratch);
    }

  private:
    // The most heads that divide those of a key.
    static int64_t heads_of_task(const MixerShape& shape) {
        int64_t count = std::min(shape.group(), MAMBA2_HEADS);
        while (shape.group() % count != 0) --count;
        return count;
    }

    int64_t tasks_of_sequence(int phase) const {
        if (phase == 1) return shape_.num_heads / heads_of_task(shape_);
        return shape_.kind == GATED_DELTA ? shape_.num_key_heads
                                          : (shape_.channels + CONV_CHANNELS - 1) / CONV_CHANNELS;
    }

    // Of a row of the window of a task.
    static int64_t row_numbers(const MixerShape& shape) {
        if (shape.kind != GATED_DELTA) return CONV_CHANNELS;
        return 2 * round_up(shape.key_dim, LANES) + round_up(shape.group() * shape.value_dim, LANES);
    }

    // The first column of this rank in a row of what all yield.
    int64_t own_column() const { return shape_.rank * shape_.depth(); }

    float* projected_row(const Span& span, int64_t row) const { return projected_ + (span.first_row + row) * stride_; }

    void convolve(int64_t sequence, int64_t first, float* scratch) const {
        const Span& span = spans_[sequence];
        const Channels part{first, std::min(CONV_CHANNELS, shape_.channels - first)};
        float *const sums = scratch, *const window = scratch + CONV_CHANNELS;
        const auto input = [&](int64_t row, const Channels& channels, float* to) {
            const float* const before = projected_row(span, row) + channels.first;
            const float* const values = before + 2 * shape_.channels;
            alignas(64) float products[CONV_CHANNELS];
            for (int64_t c = 0; c < channels.count; c += WIDTH) store(products + c, load(before + c) * load(values + c));
            copy_rounded<Element>(to, products, channels.count);
        };
        Convolution<Element> convolution(shape_, memory_, states_, span, sequence, &part, 1, window, CONV_CHANNELS);
        convolution.begin(input);
        const int64_t num_rows = span.end - span.start;
        for (int64_t row = 0; row < num_rows; row += CONV_ROWS)
            convolution.next(std::min(CONV_ROWS, num_rows - row), vectors_, sums, input, [&](int64_t at, float* mixed) {
                const float* const after = projected_row(span, at) + shape_.channels + first;
                for (int64_t c = 0; c < part.count; c += WIDTH)
                    store(mixed + c, load(after + c) * (load(mixed + c) + load(vectors_.bias + first + c)));
                std::fill(mixed + part.count, mixed + round_up(part.count, LANES), 0.0f);
                to_.put(span.first_row + at, own_column() + first, mixed, round_up(part.count, LANES));
            });
    }

    void delta(int64_t sequence, int64_t key_head, float* scratch) const {
        const Span& span = spans_[sequence];
        const int64_t key_dim = shape_.key_dim, value_dim = shape_.value_dim, group = shape_.group();
        const int64_t key_size = shape_.num_key_heads * key_dim, width = row_numbers(shape_);
        const Channels parts[] = {{key_head * key_dim, key_dim},
                                  {key_size + key_head * key_dim, key_dim},
                                  {2 * key_size + key_head * group * value_dim, group * value_dim}};
        float *const sums = scratch, *const window = sums + width;
        float* const outputs = window + (shape_.conv_width - 1 + CONV_ROWS) * width;
        const auto input = [&](int64_t row, const Channels& channels, float* to) {
            copy_rounded<Element>(to, projected_row(span, row) + channels.first, channels.count);
        };
        Convolution<Element> convolution(shape_, memory_, states_, span, sequence, parts, 3, window, width);
        convolution.begin(input);
        MixerHeads<true> head(shape_, memory_, states_, span, sequence, key_head * group, group, outputs + value_dim);
        head.begin();
        for (int64_t start = span.start; start < span.end;) {
            if (start == head.chunk() + DELTA_GRID) head.advance();
            const int64_t count = std::min(span.end, head.chunk() + DELTA_GRID) - start;
            convolution.next(count, vectors_, sums, input, [&](int64_t row, float* mixed) {
                for (int64_t c = 0; c < width; c += WIDTH) store(mixed + c, silu(load(mixed + c)));
                float *const query = mixed, *const key = query + key_dim, *const values = key + key_dim;
                scale_to_length(query, key_dim, 1.0f / std::sqrt((float)key_dim));
                scale_to_length(key, key_dim, 1.0f);
                head.put_key(span.start + row, query, key);
                for (int64_t i = 0; i < group; ++i)
                    attend(head, span, row, key_head * group + i, i, values + i * value_dim, outputs);
            });
            start += count;
        }
        head.end();
    }

    // Computes a head of values, norms and gates it.
    void attend(MixerHeads<true>& head, const Span& span, int64_t row, int64_t index, int64_t of_group,
                const float* values, float* outputs) const {
        const int64_t dim = shape_.value_dim, num_heads = shape_.num_heads;
        const float* const numbers = projected_row(span, row) + shape_.channels;
        const float *const z = numbers + index * dim, *const b = numbers + num_heads * dim, *const a = b + num_heads;
        const float x = a[index] + vectors_.gate_bias[index];
        const float gate = vectors_.rates[index] * softplus(x);
        head.attend(of_group, values, gate, 1.0f / (1.0f + std::exp(-b[index])), outputs);
        norm_row(outputs, vectors_.norm, dim, epsilon_,
                 [&](int64_t i, Floats normed) { store(outputs + i, normed * silu(load(z + i))); });
        to_.put(span.first_row + row, own_column() + index * dim, outputs, dim);
    }

    static float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

    // Some channels of the convolution of Mamba 2, with its bias and SiLU.
    void convolve_in_place(int64_t sequence, int64_t first, float* scratch) const {
        const Span& span = spans_[sequence];
        const Channels part{first, std::min(CONV_CHANNELS, shape_.channels - first)};
        float *const sums = scratch, *const window = scratch + CONV_CHANNELS;
        const auto input = [&](int64_t row, const Channels& channels, float* to) {
            copy_rounded<Element>(to, projected_row(span, row) + shape_.depth() + channels.first, channels.count);
        };
        Convolution<Element> convolution(shape_, memory_, states_, span, sequence, &part, 1, window, CONV_CHANNELS);
        convolution.begin(input);
        const int64_t num_rows = span.end - span.start;
        for (int64_t row = 0; row < num_rows; row += CONV_ROWS)
            convolution.next(std::min(CONV_ROWS, num_rows - row), vectors_, sums, input, [&](int64_t at, float* mixed) {
                float* const to = projected_row(span, at) + shape_.depth() + first;
                for (int64_t c = 0; c < part.count; c += WIDTH)
                    store(to + c, silu(load(mixed + c) + load(vectors_.bias + first + c)));
            });
    }

    // Some heads of Mamba 2.
    void add_to_states(int64_t sequence, int64_t part, float* scratch) const {
        const Span& span = spans_[sequence];
        const int64_t count = heads_of_task(shape_), first = part * count, dim = shape_.value_dim;
        float *const outputs = scratch, *const update = outputs + dim;
        MixerHeads<false> heads(shape_, memory_, states_, span, sequence, first, count, update + dim);
        heads.begin();
        for (int64_t position = span.start; position < span.end; ++position) {
            if (position == heads.chunk() + DELTA_GRID) heads.advance();
            float* const row = projected_row(span, position - span.start);
            const float* const key = key_of(row, first / shape_.group());
            heads.put_key(position, key + shape_.num_key_heads * shape_.key_dim, key);
            for (int64_t head = first; head < first + count; ++head) {
                float* const z = row + head * dim;
                const float* const x = z + shape_.depth();
                const float bare = softplus(row[shape_.depth() + shape_.channels + head] + vectors_.gate_bias[head]);
                const float step = std::min(std::max(bare, vectors_.limits[0]), vectors_.limits[1]);
                for (int64_t c = 0; c < dim; c += WIDTH) store(update + c, load(x + c) * step);
                heads.attend(head - first, update, vectors_.rates[head] * step, 1.0f, outputs);
                const Floats skip = all(vectors_.skips[head]);
                for (int64_t c = 0; c < dim; c += WIDTH)
                    store(z + c, fused_add(load(outputs + c), skip, load(x + c)) * silu(load(z + c)));
            }
        }
        heads.end();
    }

    // B of a row, behind z and x.
    const float* key_of(const float* row, int64_t key_head) const {
        return row + 2 * shape_.depth() + key_head * shape_.key_dim;
    }

    // Keeps the keys behind the boundary that the slot has after the step.
    void store_keys(int64_t sequence) const {
        const Span& span = spans_[sequence];
        for (int64_t position = std::max(span.start, span.kept); position < span.end; ++position)
            for (int64_t head = 0; head < shape_.num_key_heads; ++head) {
                float* const keys = memory_.keys_of_chunk(shape_, span.chunk_of_slot(position), head);
                const float* const key = key_of(projected_row(span, position - span.start), head);
                for (int64_t d = 0; d < shape_.key_dim; ++d) keys[d * DELTA_GRID + position % DELTA_GRID] = key[d];
            }
    }

    // Norms the gated outputs of a row of the step, those of each head of keys together. Every rank norms all of them.
    void norm(int64_t row) const {
        const int64_t size = shape_.norm_heads * shape_.value_dim, depth = shape_.whole_depth();
        float* const numbers = gated_ + row * gated_stride_;
        for (int64_t first = 0; first < depth; first += size)
            norm_row(numbers + first, vectors_.norm + first, size, epsilon_,
                     [&](int64_t i, Floats normed) { store(numbers + first + i, normed); });
        to_.put(row, 0, numbers, depth);
    }

    const MixerShape& shape_;
    const MixerMemory& memory_;
    const MixerVectors vectors_;
    const StepStates& states_;
    const std::vector<Span>& spans_;
    float* const projected_;
    const int64_t stride_;
    float* const gated_;
    const int64_t gated_stride_;
    const Rows<Element>& to_;
    const float epsilon_;
};

}  // namespace inflight
