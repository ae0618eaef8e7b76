// The logits stage of one row, as in executor/logits/reference.py, whose torch code is the reference: bit by bit the same
// float32 results, so that a token does not depend on the backend.
//
// A change looks only at the row's own ids. The mask is applied by the sampler where it looks for the largest logits, so
// that ids that are not allowed are never read. A NaN stays one: the sampler never chooses it. Nothing is allocated. An
// id outside the vocabulary is ignored.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "pool.h"

namespace inflight {

// The fields of logits.py's structure, in the same order. `ids` are prompt and output; bad word i is
// `bad_ids[bad_starts[i]]` to `bad_ids[bad_starts[i + 1] - 1]`. Bit `id % 32` of `mask[id / 32]` is set if the id is
// allowed; a null mask allows all.
struct LogitsRow {
    const int32_t* ids;
    const int32_t* bias_ids;
    const float* bias_values;
    const int32_t* bad_starts;
    const int32_t* bad_ids;
    const int32_t* mask;
    int64_t num_ids, num_prompt, num_biases, num_bad_words, num_mask_words, ngram_size;
    float repetition_penalty, frequency_penalty, presence_penalty;

    bool counts_ids() const {
        return repetition_penalty != 1.0f || frequency_penalty != 0.0f || presence_penalty != 0.0f;
    }

    // Bit i says whether id `64 * group + i` is allowed.
    uint64_t allowed_of_64(int64_t group) const {
        if (mask == nullptr) return ~uint64_t{0};
        return (uint64_t)word_of_mask(2 * group) | (uint64_t)word_of_mask(2 * group + 1) << 32;
    }

  private:
    uint32_t word_of_mask(int64_t index) const { return index < num_mask_words ? (uint32_t)mask[index] : 0; }
};

namespace logits {

// What changes a row's logits before a token is chosen, without its mask. `processed` is null for a row that only has
// banned ids.
struct Changes {
    const LogitsRow* processed;
    const int32_t* banned;
    int64_t num_banned;

    bool any() const { return processed != nullptr || num_banned > 0; }
    bool counts_ids() const { return processed != nullptr && processed->counts_ids(); }
};

constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Row {
    float* logits;
    int64_t size;
    int32_t* counts;        // [size], all 0 between changes; only for a row that counts ids
    bool excludes = false;  // whether a usable logit was banned

    bool has(int32_t id) const { return id >= 0 && id < size; }
    void ban(int32_t id) {
        if (!has(id)) return;
        excludes |= logits[id] > NOTHING;
        logits[id] = NOTHING;
    }
};

inline void add_bias(const Row& row, const LogitsRow& of) {
    for (int64_t i = 0; i < of.num_biases; ++i)
        if (row.has(of.bias_ids[i])) row.logits[of.bias_ids[i]] += of.bias_values[i];
}

inline void penalise_repetition(const Row& row, const int32_t* ids, int64_t count, float penalty) {
    for (int64_t i = 0; i < count; ++i) {
        if (!row.has(ids[i]) || row.counts[ids[i]]++ > 0) continue;
        float& logit = row.logits[ids[i]];
        logit = logit > 0 ? logit / penalty : logit * penalty;
    }
    for (int64_t i = 0; i < count; ++i)
        if (row.has(ids[i])) row.counts[ids[i]] = 0;
}

inline void penalise_counts(const Row& row, const int32_t* ids, int64_t count, float frequency, float presence) {
    for (int64_t i = 0; i < count; ++i)
        if (row.has(ids[i])) ++row.counts[ids[i]];
    for (int64_t i = 0; i < count; ++i) {
        if (!row.has(ids[i]) || row.counts[ids[i]] == 0) continue;
        // volatile: the product is rounded before it is subtracted, whatever instructions the processor has.
        const volatile float product = frequency * (float)row.counts[ids[i]];
        row.counts[ids[i]] = 0;
        row.logits[ids[i]] = row.logits[ids[i]] - product - presence;
    }
}

// Bans the ends of bad words whose beginning is the end of the output.
inline void ban_words(Row& row, const LogitsRow& of) {
    const int32_t* const end = of.ids + of.num_ids;
    const int64_t num_output = of.num_ids - of.num_prompt;
    for (int64_t i = 0; i < of.num_bad_words; ++i) {
        const int32_t *const word = of.bad_ids + of.bad_starts[i], *const last = of.bad_ids + of.bad_starts[i + 1] - 1;
        if (last - word <= num_output && std::equal(word, last, end - (last - word))) row.ban(*last);
    }
}

// Bans the ends of n-grams in prompt and output whose beginning is the end of the output.
inline void ban_ngrams(Row& row, const int32_t* ids, int64_t count, int64_t size) {
    if (size <= 0 || size > count) return;
    const int32_t* const begin = ids + count - (size - 1);
    for (const int32_t *at = ids, *last = at + size - 1; last < ids + count; ++at, ++last) {
        // The last id before the end differs most often.
        if (size > 1 && (last[-1] != begin[size - 2] || !std::equal(at, last, begin))) continue;
        row.ban(*last);
    }
}

// Not inlined, so that denormals are kept during all of it.
__attribute__((noinline)) inline void change(Row& row, const LogitsRow& of) {
    add_bias(row, of);
    if (of.repetition_penalty != 1.0f) penalise_repetition(row, of.ids, of.num_ids, of.repetition_penalty);
    if (of.frequency_penalty != 0.0f || of.presence_penalty != 0.0f)
        penalise_counts(row, of.ids + of.num_prompt, of.num_ids - of.num_prompt, of.frequency_penalty,
                        of.presence_penalty);
    ban_words(row, of);
    ban_ngrams(row, of.ids, of.num_ids, of.ngram_size);
}

// Applies the changes in place. The mask is not applied. `counts[size]` is all 0 before and after the call; it may be
// null for a row that does not count ids. Returns whether a usable logit was banned.
inline bool process(float* logits, int64_t size, const Changes& changes, int32_t* counts) {
    Row row{logits, size, counts};
    if (changes.processed != nullptr) {
        const KeepDenormals keep_denormals;
        change(row, *changes.processed);
    }
    for (int64_t i = 0; i < changes.num_banned; ++i) row.ban(changes.banned[i]);
    return row.excludes;
}

// The ids of prompt and output that a row's penalties and n-grams regard: [first, num_ids).
inline int64_t first_touched(const LogitsRow& of) {
    if (of.repetition_penalty != 1.0f || of.ngram_size > 0) return 0;
    return of.counts_ids() ? of.num_prompt : of.num_ids;
}

// Returns how often `each_touched` calls.
inline int64_t num_touched(const Changes& changes) {
    if (changes.processed == nullptr) return changes.num_banned;
    const LogitsRow& of = *changes.processed;
    return changes.num_banned + of.num_biases + of.num_bad_words + of.num_ids - first_touched(of);
}

// Calls `visit` with every id whose logit `process` may read or write. An id may come several times.
template <class Visit>
void each_touched(const Changes& changes, const Visit& visit) {
    for (int64_t i = 0; i < changes.num_banned; ++i) visit(changes.banned[i]);
    if (changes.processed == nullptr) return;
    const LogitsRow& of = *changes.processed;
    for (int64_t i = 0; i < of.num_biases; ++i) visit(of.bias_ids[i]);
    for (int64_t i = 0; i < of.num_bad_words; ++i) visit(of.bad_ids[of.bad_starts[i + 1] - 1]);
    for (int64_t i = first_touched(of); i < of.num_ids; ++i) visit(of.ids[i]);
}

}  // namespace logits
}  // namespace inflight
