// Rows that the last layer computes behind its keys and values: those that yield logits or hidden states.
//
// No later layer attends to what the others would be. A row's result does not depend on the rows beside it, so the
// logits are the same bit by bit.

#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "decoder.h"

namespace inflight {

class LastRows {
  public:
    // Chooses the rows of a step. Those with adapters are found by their places in the step, so they all stay.
    void begin(const DecoderStep& step, const DecoderShape& shape, bool has_adapters, int num_threads) {
        const int64_t num_needed = step.num_logits + step.num_hidden;
        rows_.assign(step.logit_rows, step.logit_rows + num_needed);
        std::sort(rows_.begin(), rows_.end());
        rows_.erase(std::unique(rows_.begin(), rows_.end()), rows_.end());
        is_narrow_ = !has_adapters && (int64_t)rows_.size() < step.num_tokens;
        if (!is_narrow_) return;
        places_.clear();
        for (int64_t i = 0; i < num_needed; ++i)
            places_.push_back(std::lower_bound(rows_.begin(), rows_.end(), step.logit_rows[i]) - rows_.begin());
        const AttentionItems add(shape.num_heads, shape.num_kv_heads, (int64_t)rows_.size(), num_threads);
        items_.clear();
        int64_t sequence = step.num_sequences - 1;
        for (auto row = rows_.rbegin(); row != rows_.rend(); ++row) {
            while (step.query_starts[sequence] > *row) --sequence;
            const auto token = (int)(*row - step.query_starts[sequence]);
            add.of_tokens(items_, (int)sequence, token, token + 1);
        }
    }

    bool is_narrow() const { return is_narrow_; }
    const std::vector<int64_t>& rows() const { return rows_; }  // ascending
    const std::vector<Item>& items() const { return items_; }
    // Where the row of a logit is among `rows`.
    int64_t place(int64_t logit) const { return places_[logit]; }

  private:
    bool is_narrow_ = false;
    std::vector<int64_t> rows_, places_;
    std::vector<Item> items_;
};

}  // namespace inflight
