// LoRA adapters of a decoder (Hu et al. 2021): y += (x · Aᵀ) · Bᵀ · scale, for the rows that have an adapter.
//
// An adapter's matrices are packed into a slot, whose memory is there from the start. Those A that multiply the same
// rows are one after the other: queries, keys and values, or gate and up. They are kept in panels of 16 columns, and a
// panel in units of PAIR numbers along the depth, as are the matrices B:
//
//     A [panel of ranks, unit of inputs, 16, PAIR]      B [panel of outputs, unit of ranks, 16, PAIR]
//
// A slot is in the order in which a step reads it: for each layer and product first A, then B, with the panels of gate
// and up in turn. Memory limits steps of few rows with different adapters. So the first row of an adapter prefetches
// what is a fixed distance ahead in the slot, also that of the next product.
//
// x · Aᵀ is computed for the rows of an adapter together, in float32, and rounded to Elements after scaling. The rest
// is added to a row while it is in the tile of a product. Every sum of a row has the same order whatever the other rows
// are. Of several ranks each has all of A, and of B the columns that it has of the weight. So x · Aᵀ is computed by
// every rank, and nothing more is exchanged.

#pragma once

#include <memory>
#include <vector>

#include "arena.h"
#include "decoder.h"

namespace inflight {

extern "C" {

// decoder.py's `_AdapterMatrix`, in the same order. `a` is `[rank, inputs]` and `b` `[outputs, rank]` of Elements, with
// the outputs that this rank has. Rank 0: the adapter leaves the matrix as it is. Of the matrices in front of their
// feed-forward layers, recurrent layers have adapters of the output alone.
struct AdapterMatrix {
    const void *a, *b;
    int64_t rank;
    float scale, padding;
};

}  // extern "C"

// The matrices that an adapter may change, in the order of `PROJECTIONS` of decoder_weights.py, and the products they
// are in.
enum AdaptedMatrix { ADAPT_QUERY, ADAPT_KEY, ADAPT_VALUE, ADAPT_OUTPUT, ADAPT_GATE, ADAPT_UP, ADAPT_DOWN, NUM_ADAPTED };
enum AdaptedProduct { QKV_PRODUCT, OUTPUT_PRODUCT, GATE_UP_PRODUCT, DOWN_PRODUCT, NUM_PRODUCTS };
constexpr AdaptedProduct PRODUCT_OF[NUM_ADAPTED] = {QKV_PRODUCT,     QKV_PRODUCT,     QKV_PRODUCT, OUTPUT_PRODUCT,
                                                    GATE_UP_PRODUCT, GATE_UP_PRODUCT, DOWN_PRODUCT};

template <class Element>
struct AdapterLayer {
    using Number = typename Element::Number;

    // A of the matrices of a product, and the scale of each of its ranks.
    struct Shrink {
        Number* panels = nullptr;
        float* scales = nullptr;
        int64_t num_panels = 0, num_units = 0;
    } shrinks[NUM_PRODUCTS];
    // B of a matrix, and where its ranks begin among those of the product.
    struct Expand {
        Number* panels = nullptr;
        int64_t num_panels = 0, first_unit = 0, num_units = 0;
        int64_t panel_numbers = 0;  // from a panel to the next
    } expands[NUM_ADAPTED];
};

// The slots. A slot is loaded only while no step has rows of its adapter.
template <class Element>
class AdapterSlots {
    using Number = typename Element::Number;
    static constexpr int PAIR = Element::PAIR, UNIT_NUMBERS = LANES * PAIR;

  public:
    struct Slot {
        std::vector<AdapterLayer<Element>> layers;
        int64_t most_panels[NUM_PRODUCTS] = {};
    };

    explicit AdapterSlots(const DecoderShape& shape)
        : num_layers_(shape.num_layers),
          has_experts_(shape.num_experts != 0),
          is_recurrent_(shape.is_recurrent, shape.is_recurrent + shape.num_layers),
          mixer_depth_(shape.mixer.kind == NO_MIXER ? 0 : shape.mixer.whole_depth()) {
        const int64_t attention = shape.num_heads * shape.head_dim, kv = shape.num_kv_heads * shape.head_dim;
        const int64_t queries = attention * (1 + (shape.has_output_gate != 0));
        const int64_t hidden = shape.hidden_columns().count, inner = shape.inner_columns(shape.intermediate_size).count;
        const int64_t outputs[NUM_ADAPTED] = {queries, kv, kv, hidden, inner, inner, hidden};
        const int64_t inputs[NUM_PRODUCTS] = {shape.hidden_size, shape.attention_depth(), shape.hidden_size,
                                              shape.intermediate_size};
        std::copy(outputs, outputs + NUM_ADAPTED, outputs_);
        std::copy(inputs, inputs + NUM_PRODUCTS, inputs_);
    }

    int64_t size() const { return (int64_t)slots_.size(); }
    const Slot& operator[](int64_t index) const { return slots_[index]; }

    // Bytes of a slot for adapters up to a rank.
    int64_t slot_bytes(int64_t max_rank) const {
        std::vector<AdapterMatrix> matrices(num_layers_ * NUM_ADAPTED, {nullptr, nullptr, 0, 0.0f, 0.0f});
        for (size_t i = 0; i < matrices.size(); ++i) {
            const size_t matrix = i % NUM_ADAPTED;
            const bool is_in_front = matrix < ADAPT_OUTPUT, is_feed_forward = matrix > ADAPT_OUTPUT;
            if ((is_in_front && is_recurrent_[i / NUM_ADAPTED]) || (is_feed_forward && has_experts_)) continue;
            matrices[i].rank = max_rank;
        }
        Cursor count(nullptr);
        place(matrices.data(), count);
        return count.used();
    }

    void reserve(int64_t num_slots, int64_t max_rank) {
        slot_bytes_ = slot_bytes(max_rank);
        arena_ = std::make_unique<Arena>(num_slots * slot_bytes_);
        slots_.resize(num_slots);
    }

    // Packs `matrices[num_layers, NUM_ADAPTED]`. Returns false if they do not fit the slot.
    bool load(int64_t index, const AdapterMatrix* matrices) {
        Cursor count(nullptr);
        place(matrices, count);
        if (index < 0 || index >= size() || count.used() > slot_bytes_) return false;
        char* memory = arena_->data() + index * slot_bytes_;
        std::memset(memory, 0, slot_bytes_);
        Cursor cursor(memory);
        Slot slot{place(matrices, cursor), {}};
        for (int64_t layer = 0; layer < num_layers_; ++layer)
            for (int matrix = 0; matrix < NUM_ADAPTED; ++matrix) {
                const int product = PRODUCT_OF[matrix];
                pack(slot.layers[layer], layer, matrix, matrices[layer * NUM_ADAPTED + matrix]);
                slot.most_panels[product] =
                    std::max(slot.most_panels[product], slot.layers[layer].shrinks[product].num_panels);
            }
        slots_[index] = std::move(slot);
        return true;
    }

  private:
    std::vector<AdapterLayer<Element>> place(const AdapterMatrix* matrices, Cursor& cursor) const {
        std::vector<AdapterLayer<Element>> layers(num_layers_);
        for (int64_t index = 0; index < num_layers_; ++index) {
            AdapterLayer<Element>& layer = layers[index];
            for (int product = 0, matrix = 0; product < NUM_PRODUCTS; ++product) {
                const int first = matrix;
                int64_t num_units = 0;
                for (; matrix < NUM_ADAPTED && PRODUCT_OF[matrix] == product; ++matrix, ++matrices) {
                    auto& expand = layer.expands[matrix];
                    expand.first_unit = num_units;
                    expand.num_units = round_up(matrices->rank, PAIR) / PAIR;
                    expand.num_panels = round_up(outputs_[matrix], LANES) / LANES;
                    num_units += expand.num_units;
                }
                auto& shrink = layer.shrinks[product];
                shrink.num_panels = round_up(num_units * PAIR, LANES) / LANES;
                shrink.num_units = round_up(inputs_of(index, product), PAIR) / PAIR;
                shrink.panels = cursor.take<Number>(shrink.num_panels * shrink.num_units * UNIT_NUMBERS);
                shrink.scales = cursor.take<float>(shrink.num_panels * LANES);
                if (product == GATE_UP_PRODUCT) {
                    auto &gate = layer.expands[ADAPT_GATE], &up = layer.expands[ADAPT_UP];
                    gate.panel_numbers = up.panel_numbers = num_units * UNIT_NUMBERS;
                    gate.panels = cursor.take<Number>(gate.num_panels * gate.panel_numbers);
                    up.panels = gate.panels + gate.num_units * UNIT_NUMBERS;
                } else {
                    for (int each = first; each < matrix; ++each) {
                        auto& expand = layer.expands[each];
                        expand.panel_numbers = expand.num_units * UNIT_NUMBERS;
                        expand.panels = cursor.take<Number>(expand.num_panels * expand.panel_numbers);
                    }
                }
            }
        }
        return layers;
    }

    int64_t inputs_of(int64_t layer, int product) const {
        return product == OUTPUT_PRODUCT && is_recurrent_[layer] ? mixer_depth_ : inputs_[product];
    }

    void pack(AdapterLayer<Element>& layer, int64_t index, int matrix, const AdapterMatrix& from) const {
        const auto& expand = layer.expands[matrix];
        const auto& shrink = layer.shrinks[PRODUCT_OF[matrix]];
        const int64_t inputs = inputs_of(index, PRODUCT_OF[matrix]);
        const auto *a = static_cast<const Number*>(from.a), *b = static_cast<const Number*>(from.b);
        for (int64_t rank = 0; rank < from.rank; ++rank) {
            const int64_t column = expand.first_unit * PAIR + rank;
            Number* panel = shrink.panels + column / LANES * shrink.num_units * LANES * PAIR + column % LANES * PAIR;
            for (int64_t i = 0; i < inputs; ++i) panel[i / PAIR * LANES * PAIR + i % PAIR] = a[rank * inputs + i];
            shrink.scales[column] = from.scale;
            Number* unit = expand.panels + rank / PAIR * LANES * PAIR + rank % PAIR;
            for (int64_t out = 0; out < outputs_[matrix]; ++out)
                unit[out / LANES * expand.panel_numbers + out % LANES * PAIR] = b[out * from.rank + rank];
        }
    }

    const int64_t num_layers_;
    const bool has_experts_;  // they have no adapters
    const std::vector<int64_t> is_recurrent_;
    const int64_t mixer_depth_;  // what a recurrent layer yields before its output
    int64_t outputs_[NUM_ADAPTED], inputs_[NUM_PRODUCTS];
    int64_t slot_bytes_ = 0;
    std::unique_ptr<Arena> arena_;
    std::vector<Slot> slots_;
};

// A step's rows by adapter, and their memory.
template <class Element, class Factor>
class AdaptedRows {
    static constexpr int64_t GROUP_ROWS = 16;  // at most, of one task

  public:
    struct Group {
        int32_t slot;
        int64_t first, count;  // in `order`
    };

    bool is_empty() const { return groups_.empty(); }
    int32_t slot_of(int64_t row) const { return slots_[row]; }
    // Whether a row is the first of its group.
    bool leads(int64_t row) const { return leads_[row] != 0; }
    // A task is a panel of a group. The next tasks are of other groups.
    int64_t num_tasks(AdaptedProduct product) const { return (int64_t)groups_.size() * most_panels_[product]; }
    const Group& group(int64_t task) const { return groups_[task % groups_.size()]; }
    int64_t panel(int64_t task) const { return task / groups_.size(); }
    const int64_t* rows(const Group& group) const { return order_.data() + group.first; }

    // `of_sequences[num_sequences]` are slots, -1 for none; null if no sequence has one.
    void begin(const DecoderShape& shape, const AdapterSlots<Element>& slots, const int32_t* of_sequences,
               const int32_t* query_starts, int64_t num_sequences) {
        groups_.clear();
        if (of_sequences == nullptr) return;
        order_.clear();
        const int64_t num_tokens = query_starts[num_sequences];
        slots_.assign(num_tokens, -1);
        leads_.assign(num_tokens, 0);
        std::fill(most_panels_, most_panels_ + NUM_PRODUCTS, 0);
        for (int32_t slot = 0; slot < slots.size(); ++slot) {
            const int64_t begin = (int64_t)order_.size();
            for (int64_t i = 0; i < num_sequences; ++i)
                for (int64_t row = query_starts[i]; of_sequences[i] == slot && row < query_starts[i + 1]; ++row) {
                    order_.push_back(row);
                    slots_[row] = slot;
                }
            const int64_t end = (int64_t)order_.size();
            for (int64_t first = begin; first < end; first += GROUP_ROWS) {
                groups_.push_back({slot, first, std::min(GROUP_ROWS, end - first)});
                leads_[order_[first]] = 1;
            }
            for (int product = 0; begin < end && product < NUM_PRODUCTS; ++product)
                most_panels_[product] = std::max(most_panels_[product], slots[slot].most_panels[product]);
        }
        reserve(shape, num_tokens);
    }

    Rows<Element> low;             // x · Aᵀ · scale of the newest product
    Rows<Element> normed, hidden;  // where factors are not Elements: the same numbers as Elements

  private:
    void reserve(const DecoderShape& shape, int64_t num_tokens) {
        const int64_t most = *std::max_element(most_panels_, most_panels_ + NUM_PRODUCTS) * LANES;
        if (num_tokens <= capacity_ && most <= width_) return;
        capacity_ = round_up(std::max(num_tokens, capacity_), 64);
        width_ = std::max(most, width_);
        Cursor count(nullptr);
        place(shape, count);
        arena_ = std::make_unique<Arena>(count.used());
        Cursor cursor(arena_->data());
        place(shape, cursor);
    }

    void place(const DecoderShape& shape, Cursor& cursor) {
        low = take_rows<Element>(cursor, capacity_, width_);
        if constexpr (!std::is_same_v<Element, Factor>) {
            normed = take_rows<Element>(cursor, capacity_, shape.hidden_size);
            // Also of layers without experts in models that have some.
            const int64_t inner = std::max(shape.intermediate_size, shape.feed_forward_size());
            hidden = take_rows<Element>(cursor, capacity_, round_up(inner, STEP_DEPTH<Factor>));
        }
    }

    std::vector<int32_t> slots_;  // of the rows
    std::vector<char> leads_;
    std::vector<int64_t> order_;  // rows that have an adapter, by slot
    std::vector<Group> groups_;
    int64_t most_panels_[NUM_PRODUCTS] = {};
    int64_t capacity_ = 0, width_ = 0;
    std::unique_ptr<Arena> arena_;
};

// Prefetches what is AHEAD_BYTES behind a vector of a slot. Addresses behind the memory of the slots have no effect.
template <class Number>
ALWAYS_INLINE void prefetch_ahead(const Number* vector) {
    constexpr uintptr_t AHEAD_BYTES = 4 << 10;
    prefetch_line(reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(vector) + AHEAD_BYTES));
}

// Computes a panel of x · Aᵀ · scale for ROWS rows. A row's sum is in CHAINS parts, so that it need not wait for each
// addition.
template <class Element, int ROWS, bool PREFETCHES>
void shrink_rows(const typename AdapterLayer<Element>::Shrink& shrink, int64_t panel, const Rows<Element>& from,
                 const int64_t* rows, const Rows<Element>& to) {
    using Number = typename Element::Number;
    constexpr int CHAINS = 4, PAIR = Element::PAIR;
    const Number* units = shrink.panels + panel * shrink.num_units * LANES * PAIR;
    const Number* numbers[ROWS];
    for (int r = 0; r < ROWS; ++r) numbers[r] = from.row(rows[r]);
    for (int v = 0; v < VECTORS; ++v, units += WIDTH * PAIR) {
        Floats sums[ROWS][CHAINS] = {};
        int64_t unit = 0;
        for (; unit + CHAINS <= shrink.num_units; unit += CHAINS)
#pragma GCC unroll 4
            for (int chain = 0; chain < CHAINS; ++chain) {
                const Number* vector = units + (unit + chain) * LANES * PAIR;
                if (PREFETCHES && v == 0) prefetch_ahead(vector);
                const auto loaded = Element::load_units(vector);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r)
                    sums[r][chain] =
                        Element::multiply_add(sums[r][chain], unit_at<Element>(numbers[r], unit + chain), loaded);
            }
        for (; unit < shrink.num_units; ++unit) {
            const auto loaded = Element::load_units(units + unit * LANES * PAIR);
            for (int r = 0; r < ROWS; ++r)
                sums[r][0] = Element::multiply_add(sums[r][0], unit_at<Element>(numbers[r], unit), loaded);
        }
        const Floats scales = load(shrink.scales + panel * LANES + v * WIDTH);
        for (int r = 0; r < ROWS; ++r)
            Element::put(to.row(rows[r]) + panel * LANES + v * WIDTH,
                         ((sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3])) * scales);
    }
}

// The first of the rows prefetch.
template <class Element>
void shrink_group(const typename AdapterLayer<Element>::Shrink& shrink, int64_t panel, const Rows<Element>& from,
                  const int64_t* rows, int64_t count, const Rows<Element>& to) {
    if (count >= 4) {
        shrink_rows<Element, 4, true>(shrink, panel, from, rows, to);
        for (count -= 4, rows += 4; count >= 4; count -= 4, rows += 4)
            shrink_rows<Element, 4, false>(shrink, panel, from, rows, to);
    } else {
        shrink_rows<Element, 1, true>(shrink, panel, from, rows, to);
        --count, ++rows;
    }
    for (; count > 0; --count, ++rows) shrink_rows<Element, 1, false>(shrink, panel, from, rows, to);
}

// Adds (x · Aᵀ · scale) · Bᵀ of a row, panels `[first, first + num_panels)` as far as there are any, to `out`.
template <class Element, bool PREFETCHES>
void add_expanded(const typename AdapterLayer<Element>::Expand& expand, int64_t first, int64_t num_panels,
                  const typename Element::Number* low, float* out) {
    constexpr int PAIR = Element::PAIR;
    if (expand.num_units == 0) return;
    low += expand.first_unit * PAIR;
    const int64_t end = std::min(first + num_panels, expand.num_panels);
    for (int64_t panel = first; panel < end; ++panel, out += LANES)
        for (int v = 0; v < VECTORS; ++v) {
            const auto* units = expand.panels + panel * expand.panel_numbers + v * WIDTH * PAIR;
            Floats sum = {};
            for (int64_t unit = 0; unit < expand.num_units; ++unit, units += LANES * PAIR) {
                if (PREFETCHES && v == 0) prefetch_ahead(units);
                sum = Element::multiply_add(sum, unit_at<Element>(low, unit), Element::load_units(units));
            }
            store(out + v * WIDTH, load(out + v * WIDTH) + sum);
        }
}

}  // namespace inflight
