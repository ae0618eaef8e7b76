// The greedy choice of a step's tokens while the logits are computed, a group of columns at a time.
//
// Logits are not stored: each thread keeps the largest of a row that it has seen. The ids that the row's changes touch are
// known before. Their logits are set aside, changed (logits.h) and compared last. So the tokens are those of rows that
// are stored, changed and searched as a whole (sampler.h). No row has a mask.

#pragma once

#include <vector>

#include "decoder_weights.h"
#include "logits.h"

namespace inflight {

class GreedyChoice {
  public:
    static constexpr int64_t GROUP_COLUMNS = HEAD_BLOCKS * BLOCK_COLUMNS;

    // Throws std::bad_alloc. The step must outlive the choice of its tokens.
    void begin(const DecoderStep& step, int64_t vocabulary_size, int num_threads) {
        step_ = &step;
        vocabulary_size_ = vocabulary_size;
        num_groups_ = (vocabulary_size + GROUP_COLUMNS - 1) / GROUP_COLUMNS;
        row_starts_.assign(1, 0);
        bool counts_ids = false;
        for (int64_t row = 0; row < step.num_logits; ++row) {
            const logits::Changes changes = changes_of(row);
            counts_ids |= changes.counts_ids();
            row_starts_.push_back(row_starts_.back() + logits::num_touched(changes));
        }
        touches_ = row_starts_.back() > 0;
        threads_.resize(num_threads);
        for (Thread& thread : threads_) {
            thread.best.assign(step.num_logits, Best{});
            if (touches_) thread.logits.resize(vocabulary_size);
            if (counts_ids) thread.counts.resize(vocabulary_size);
        }
        if (!touches_) return;
        ids_.resize(row_starts_.back());
        for (Thread& thread : threads_) thread.values.assign(row_starts_.back(), 0);
        group_starts_.resize(step.num_logits * (num_groups_ + 1));
    }

    // Finds the ids that the row's changes touch, in the order of their groups. Comes before `take`.
    void mark(int64_t row) {
        if (!touches_) return;
        const logits::Changes changes = changes_of(row);
        int32_t *const starts = starts_of(row), *const ids = ids_of(row);
        std::fill(starts, starts + num_groups_ + 1, 0);
        each_touched(changes, [&](int32_t id) { ++starts[id / GROUP_COLUMNS]; });
        for (int64_t group = 0; group < num_groups_; ++group) starts[group + 1] += starts[group];
        // The ends of the groups become their starts.
        each_touched(changes, [&](int32_t id) { ids[--starts[id / GROUP_COLUMNS]] = id; });
    }

    // Takes the `count` logits of a group, and may overwrite them. A thread takes a row's groups in ascending order.
    void take(int thread, int64_t row, int64_t group, float* logits, int64_t count) {
        const int64_t first = group * GROUP_COLUMNS;
        if (touches_) set_aside(threads_[thread], row, group, logits - first);
        threads_[thread].best[row].look_at(logits, first, count);
    }

    // Chooses the row's token once all of its groups have been taken. It does not matter which thread took which.
    void choose(int thread, int64_t row) {
        Best best;
        const bool excludes = touches_ && change(threads_[thread], row, best);
        for (const Thread& other : threads_) best.join(other.best[row]);
        step_->greedy_ids[row] = best.id == NO_TOKEN && excludes ? ALL_EXCLUDED : best.id;
    }

  private:
    // The largest logit and its id: the lowest id among equals, NO_TOKEN if no logit is above -inf.
    struct Best {
        float logit = logits::NOTHING;
        int64_t id = NO_TOKEN;

        // The ids are higher than those before. Behind the `count` logits may be others, up to the end of the group.
        ALWAYS_INLINE void look_at(const float* logits, int64_t first, int64_t count) {
            bool may_win = false;
            for (int i = 0; i < GROUP_COLUMNS; i += WIDTH) may_win |= any_above(load(logits + i), logit);
            if (!may_win) return;
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
        std::vector<float> logits;     // [vocabulary_size], of a row's touched ids
        std::vector<int32_t> counts;   // of ids, all 0
    };

    // `logits[id]` is the logit of an id of the group. Neighbouring groups often belong to different threads, whose values
    // therefore are apart: none waits for a cache line of the other. An id may come several times, so no logit is
    // overwritten before all are read.
    void set_aside(Thread& thread, int64_t row, int64_t group, float* logits) {
        const int32_t *const starts = starts_of(row), *const ids = ids_of(row);
        uint32_t* const values = thread.values.data() + row_starts_[row];
        for (int32_t i = starts[group]; i < starts[group + 1]; ++i) std::memcpy(values + i, logits + ids[i], 4);
        for (int32_t i = starts[group]; i < starts[group + 1]; ++i) logits[ids[i]] = logits::NOTHING;
    }

    // Changes the logits that were set aside and finds the best. Returns whether a usable one was banned.
    bool change(Thread& thread, int64_t row, Best& best) {
        const int32_t *const ids = ids_of(row), count = starts_of(row)[num_groups_];
        float* const logits = thread.logits.data();
        for (int32_t i = 0; i < count; ++i) {
            uint32_t bits = 0;
            for (const Thread& other : threads_) bits |= other.values[row_starts_[row] + i];
            std::memcpy(logits + ids[i], &bits, 4);
        }
        const bool excludes = logits::process(logits, vocabulary_size_, changes_of(row), thread.counts.data());
        for (int32_t i = 0; i < count; ++i) best.join({logits[ids[i]], ids[i]});
        return excludes;
    }

    template <class Visit>
    void each_touched(const logits::Changes& changes, const Visit& visit) const {
        logits::each_touched(changes, [&](int32_t id) {
            if (id >= 0 && id < vocabulary_size_) visit(id);
        });
    }

    logits::Changes changes_of(int64_t row) const {
        const LogitsRow* const processed = step_->processed == nullptr ? nullptr : step_->processed[row];
        if (step_->banned_starts == nullptr) return {processed, nullptr, 0};
        const int32_t start = step_->banned_starts[row];
        return {processed, step_->banned_ids + start, step_->banned_starts[row + 1] - start};
    }

    int32_t* starts_of(int64_t row) { return group_starts_.data() + row * (num_groups_ + 1); }
    int32_t* ids_of(int64_t row) { return ids_.data() + row_starts_[row]; }

    const DecoderStep* step_ = nullptr;
    int64_t vocabulary_size_ = 0, num_groups_ = 0;
    bool touches_ = false;  // whether any row's changes touch a logit
    std::vector<Thread> threads_;
    std::vector<int64_t> row_starts_;    // [num_logits + 1], in `ids_` and in each thread's values
    std::vector<int32_t> ids_;           // touched ids of each row, in the order of their groups
    std::vector<int32_t> group_starts_;  // [num_logits, num_groups + 1], in a row's ids
};

}  // namespace inflight
