// The greedy choice of a step's tokens while the logits are computed, a group of columns at a time.
//
// Logits are not stored: each thread keeps the largest of a row that it has seen. The ids that the row's changes touch
// are known before. Their logits are set aside, changed (logits.h) and compared last. So the tokens are those of rows
// that are stored, changed and searched as a whole (sampler.h). No row has a mask.

#pragma once

#include <vector>

#include "decoder_weights.h"
#include "logits.h"

namespace inflight {

class GreedyChoice {
  public:
    static constexpr int64_t GROUP_COLUMNS = HEAD_BLOCKS * BLOCK_COLUMNS, GROUP_WORDS = GROUP_COLUMNS / 64;
    static_assert(GROUP_WORDS == 2);

    // Throws std::bad_alloc. The step must outlive the choice of its tokens.
    void begin(const DecoderStep& step, int64_t vocabulary_size, int num_threads) {
        step_ = &step;
        vocabulary_size_ = vocabulary_size;
        num_groups_ = (vocabulary_size + GROUP_COLUMNS - 1) / GROUP_COLUMNS;
        row_starts_.assign(1, 0);
        int64_t most_touched = 0;
        for (int64_t row = 0; row < step.num_logits; ++row) {
            const int64_t most = std::min(logits::most_uses(changes_of(row)), vocabulary_size);
            most_touched = std::max(most_touched, most);
            row_starts_.push_back(row_starts_.back() + most);
        }
        touches_ = most_touched > 0;
        threads_.resize(num_threads);
        for (Thread& thread : threads_) {
            thread.best.assign(step.num_logits, Best{});
            if (!touches_) continue;
            thread.values.assign(row_starts_.back(), 0);
            thread.logits.resize(most_touched);
            thread.bits.resize(num_groups_ * GROUP_WORDS);
        }
        if (!touches_) return;
        ids_.resize(row_starts_.back());
        uses_.resize(row_starts_.back());
        group_starts_.resize(step.num_logits * (num_groups_ + 1));
    }

    // Finds the ids that the row's changes touch, each once and in ascending order. Comes before `take`.
    void mark(int thread, int64_t row) {
        if (!touches_) return;
        const logits::Changes changes = changes_of(row);
        std::vector<uint64_t>& bits = threads_[thread].bits;
        std::fill(bits.begin(), bits.end(), 0);
        const auto set = [&](int32_t id, uint32_t, uint32_t) { bits[id / 64] |= uint64_t{1} << id % 64; };
        logits::each_use(changes, vocabulary_size_, set);
        int32_t* const starts = starts_of(row);
        starts[0] = 0;
        for (int64_t group = 0; group < num_groups_; ++group) {
            const uint64_t* const words = &bits[group * GROUP_WORDS];
            starts[group + 1] = starts[group] + count_bits(words[0]) + count_bits(words[1]);
        }
        int32_t* const ids = ids_.data() + row_starts_[row];
        uint32_t* const uses = uses_.data() + row_starts_[row];
        std::fill(uses, uses + starts[num_groups_], 0);
        logits::each_use(changes, vocabulary_size_, [&](int32_t id, uint32_t use, uint32_t count) {
            const int64_t word = id / 64;
            int32_t at = starts[id / GROUP_COLUMNS] + count_bits(bits[word] & ((uint64_t{1} << id % 64) - 1));
            if (word % GROUP_WORDS == 1) at += count_bits(bits[word - 1]);
            ids[at] = id;
            uses[at] = (uses[at] | use) + count;
        });
    }

    // Takes the `count` logits of a group, and may overwrite them. A thread takes a row's groups in ascending order.
    void take(int thread, int64_t row, int64_t group, float* logits, int64_t count) {
        const int64_t first = group * GROUP_COLUMNS;
        Best& best = threads_[thread].best[row];
        if (!touches_) return best.look_at(logits, first, count);
        const int32_t *const starts = starts_of(row), *const ids = ids_.data() + row_starts_[row];
        const int32_t start = starts[group], end = starts[group + 1];
        // Neighbouring groups often belong to different threads, whose values are apart: none waits for a cache line of
        // the other.
        uint32_t* const values = threads_[thread].values.data() + row_starts_[row];
        for (int32_t i = start; i < end; ++i) std::memcpy(values + i, logits + (ids[i] - first), 4);
        if (!best.may_win(logits)) return;
        for (int32_t i = start; i < end; ++i) logits[ids[i] - first] = logits::NOTHING;
        best.look_at(logits, first, count);
    }

    // Chooses the row's token once all of its groups have been taken. It does not matter which thread took which.
    void choose(int thread, int64_t row) {
        Best best;
        const bool excludes = touches_ && change(threads_[thread], row, best);
        for (const Thread& other : threads_) best.join(other.best[row]);
        step_->greedy_ids[row] = best.id == NO_TOKEN && excludes ? ALL_EXCLUDED : best.id;
        if (step_->greedy_logits != nullptr) step_->greedy_logits[row] = best.logit;
    }

  private:
    // The largest logit and its id: the lowest id among equals, NO_TOKEN if no logit is above -inf.
    struct Best {
        float logit = logits::NOTHING;
        int64_t id = NO_TOKEN;

        // Whether a logit of a group is larger.
        ALWAYS_INLINE bool may_win(const float* logits) const {
            bool wins = false;
            for (int i = 0; i < GROUP_COLUMNS; i += WIDTH) wins |= any_above(load(logits + i), logit);
            return wins;
        }

        // The ids are higher than those before. Behind the `count` logits may be others, up to the end of the group.
        ALWAYS_INLINE void look_at(const float* logits, int64_t first, int64_t count) {
            if (!may_win(logits)) return;
            for (int64_t i = 0; i < count; ++i)
                if (logits[i] > logit) logit = logits[i], id = first + i;
        }

        void join(const Best& other) {
            if (other.logit > logit || (other.logit == logit && other.id < id)) *this = other;
        }
    };

    struct Thread {
        std::vector<Best> best;        // of each row, in the groups that this thread computed
        std::vector<uint32_t> values;  // bits of the logits of `ids_` that this thread computed; of others 0
        std::vector<float> logits;     // of a row's touched ids
        std::vector<uint64_t> bits;    // of the vocabulary's ids: whether they are touched
    };

    // Changes the logits that were set aside and finds the best. Returns whether a usable one was banned.
    bool change(Thread& thread, int64_t row, Best& best) {
        const int64_t first = row_starts_[row], count = starts_of(row)[num_groups_];
        uint32_t* const values = thread.values.data() + first;
        for (const Thread& other : threads_)
            for (int64_t i = 0; i < count; ++i) values[i] |= other.values[first + i];
        float* const logits = thread.logits.data();
        std::memcpy(logits, values, count * sizeof *logits);
        const int32_t* const ids = ids_.data() + first;
        const bool excludes = logits::process({ids, uses_.data() + first, logits, count}, changes_of(row));
        for (int64_t i = 0; i < count; ++i)
            if (logits[i] > best.logit) best = {logits[i], ids[i]};
        return excludes;
    }

    static ALWAYS_INLINE int32_t count_bits(uint64_t word) { return __builtin_popcountll(word); }

    logits::Changes changes_of(int64_t row) const {
        const LogitsRow* const processed = step_->processed == nullptr ? nullptr : step_->processed[row];
        if (step_->banned_starts == nullptr) return {processed, nullptr, 0};
        const int32_t start = step_->banned_starts[row];
        return {processed, step_->banned_ids + start, step_->banned_starts[row + 1] - start};
    }

    int32_t* starts_of(int64_t row) { return group_starts_.data() + row * (num_groups_ + 1); }

    const DecoderStep* step_ = nullptr;
    int64_t vocabulary_size_ = 0, num_groups_ = 0;
    bool touches_ = false;  // whether any row's changes touch a logit
    std::vector<Thread> threads_;
    std::vector<int64_t> row_starts_;    // [num_logits + 1], in `ids_`, `uses_` and each thread's values
    std::vector<int32_t> ids_;           // touched ids of each row
    std::vector<uint32_t> uses_;         // of `ids_`, as in logits.h
    std::vector<int32_t> group_starts_;  // [num_logits, num_groups + 1], in a row's ids
};

}  // namespace inflight
