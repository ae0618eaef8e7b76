// The logits stage of one row, as in executor/logits/reference.py, whose torch code is the reference: bit by bit the
// same float32 results, so that a token does not depend on the backend.
//
// A change looks only at the row's own ids. The mask is applied by the sampler where it looks for the largest logits,
// so that ids that are not allowed are never read. A NaN stays one: the sampler never chooses it. Nothing is allocated.
// An id outside the vocabulary is ignored.

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

    bool penalises_output() const { return frequency_penalty != 0.0f || presence_penalty != 0.0f; }
    bool counts_ids() const { return repetition_penalty != 1.0f || penalises_output(); }

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

ALWAYS_INLINE float after_repetition(float logit, float penalty) {
    const float divided = logit / penalty, multiplied = logit * penalty;
    return logit > 0 ? divided : multiplied;
}

ALWAYS_INLINE float after_count(float logit, int32_t count, const LogitsRow& of) {
    // volatile: the product is rounded before it is subtracted, whatever instructions the processor has.
    const volatile float product = of.frequency_penalty * (float)count;
    return logit - product - of.presence_penalty;
}

inline void penalise_repetition(const Row& row, const LogitsRow& of) {
    for (int64_t i = 0; i < of.num_ids; ++i) {
        if (!row.has(of.ids[i]) || row.counts[of.ids[i]]++ > 0) continue;
        float& logit = row.logits[of.ids[i]];
        logit = after_repetition(logit, of.repetition_penalty);
    }
    for (int64_t i = 0; i < of.num_ids; ++i)
        if (row.has(of.ids[i])) row.counts[of.ids[i]] = 0;
}

inline void penalise_counts(const Row& row, const LogitsRow& of) {
    for (int64_t i = of.num_prompt; i < of.num_ids; ++i)
        if (row.has(of.ids[i])) ++row.counts[of.ids[i]];
    for (int64_t i = of.num_prompt; i < of.num_ids; ++i) {
        if (!row.has(of.ids[i]) || row.counts[of.ids[i]] == 0) continue;
        float& logit = row.logits[of.ids[i]];
        logit = after_count(logit, row.counts[of.ids[i]], of);
        row.counts[of.ids[i]] = 0;
    }
}

// Calls `visit` with the ends of bad words whose beginning is the end of the output.
template <class Visit>
void each_bad_end(const LogitsRow& of, const Visit& visit) {
    const int32_t* const end = of.ids + of.num_ids;
    const int64_t num_output = of.num_ids - of.num_prompt;
    for (int64_t i = 0; i < of.num_bad_words; ++i) {
        const int32_t *const word = of.bad_ids + of.bad_starts[i], *const last = of.bad_ids + of.bad_starts[i + 1] - 1;
        if (last - word <= num_output && std::equal(word, last, end - (last - word))) visit(*last);
    }
}

// Calls `visit` with the ends of n-grams in prompt and output whose beginning is the end of the output.
template <class Visit>
void each_ngram_end(const LogitsRow& of, const Visit& visit) {
    const int64_t size = of.ngram_size;
    if (size <= 0 || size > of.num_ids) return;
    const int32_t *const end = of.ids + of.num_ids, *const begin = end - (size - 1);
    for (const int32_t *at = of.ids, *last = at + size - 1; last < end; ++at, ++last) {
        // The last id before the end differs most often.
        if (size > 1 && (last[-1] != begin[size - 2] || !std::equal(at, last, begin))) continue;
        visit(*last);
    }
}

// Calls `visit` with every id that is banned. An id may come several times, or be outside the vocabulary.
template <class Visit>
void each_banned(const Changes& changes, const Visit& visit) {
    if (changes.processed != nullptr) {
        each_bad_end(*changes.processed, visit);
        each_ngram_end(*changes.processed, visit);
    }
    for (int64_t i = 0; i < changes.num_banned; ++i) visit(changes.banned[i]);
}

// Not inlined, so that denormals are kept during all of it.
__attribute__((noinline)) inline void change(Row& row, const LogitsRow& of) {
    add_bias(row, of);
    if (of.repetition_penalty != 1.0f) penalise_repetition(row, of);
    if (of.penalises_output()) penalise_counts(row, of);
}

// Applies the changes in place. The mask is not applied. `counts[size]` is all 0 before and after the call; it may be
// null for a row that does not count ids. Returns whether a usable logit was banned.
inline bool process(float* logits, int64_t size, const Changes& changes, int32_t* counts) {
    Row row{logits, size, counts};
    if (changes.processed != nullptr) {
        const KeepDenormals keep_denormals;
        change(row, *changes.processed);
    }
    each_banned(changes, [&](int32_t id) { row.ban(id); });
    return row.excludes;
}

// What is done with the logit of an id: how often it is in the output, and these bits.
constexpr uint32_t REPEATED = 1u << 30, BANNED = 1u << 31, COUNT = REPEATED - 1;

// The ids that a row's penalties regard: [first, num_ids).
inline int64_t first_counted(const LogitsRow& of) {
    if (of.repetition_penalty != 1.0f) return 0;
    return of.counts_ids() ? of.num_prompt : of.num_ids;
}

// Returns a bound of how often `each_use` calls.
inline int64_t most_uses(const Changes& changes) {
    if (changes.processed == nullptr) return changes.num_banned;
    const LogitsRow& of = *changes.processed;
    const int64_t num_ngrams = of.ngram_size > 0 ? of.num_ids : 0;
    return changes.num_banned + of.num_biases + of.num_bad_words + num_ngrams + of.num_ids - first_counted(of);
}

// Calls `visit` with every id of the vocabulary whose logit is changed, the bits of what is done with it, and 1 for
// each time that it is in the output. An id may come several times.
template <class Visit>
void each_use(const Changes& changes, int64_t vocabulary_size, const Visit& visit) {
    const auto use = [&](int32_t id, uint32_t bits, uint32_t count) {
        if (id >= 0 && id < vocabulary_size) visit(id, bits, count);
    };
    if (changes.processed != nullptr) {
        const LogitsRow& of = *changes.processed;
        for (int64_t i = 0; i < of.num_biases; ++i) use(of.bias_ids[i], 0, 0);
        const int64_t first = first_counted(of);
        for (int64_t i = first; i < of.num_prompt; ++i) use(of.ids[i], REPEATED, 0);
        for (int64_t i = std::max(first, of.num_prompt); i < of.num_ids; ++i) use(of.ids[i], REPEATED, 1);
    }
    each_banned(changes, [&](int32_t id) { use(id, BANNED, 0); });
}

// The ids of a row that `each_use` names, each once and in ascending order, and their logits.
struct Touched {
    const int32_t* ids;
    const uint32_t* uses;
    float* logits;
    int64_t count;
};

inline void add_bias(const Touched& row, const LogitsRow& of) {
    const int32_t *at = row.ids, *const end = row.ids + row.count;
    for (int64_t i = 0; i < of.num_biases; ++i) {
        const int32_t* const found = std::find(at, end, of.bias_ids[i]);
        if (found == end) continue;  // outside the vocabulary
        row.logits[found - row.ids] += of.bias_values[i];
        at = found;
    }
}

// Not inlined, so that denormals are kept during all of it.
__attribute__((noinline)) inline void change(const Touched& row, const LogitsRow& of) {
    add_bias(row, of);
    if (of.repetition_penalty != 1.0f)
        for (int64_t i = 0; i < row.count; ++i) {
            const float logit = row.logits[i], repeated = after_repetition(logit, of.repetition_penalty);
            row.logits[i] = row.uses[i] & REPEATED ? repeated : logit;
        }
    if (of.penalises_output())
        for (int64_t i = 0; i < row.count; ++i)
            if (const int32_t count = row.uses[i] & COUNT) row.logits[i] = after_count(row.logits[i], count, of);
}

// Applies the changes to the touched logits, as `process` does. Returns whether a usable logit was banned.
inline bool process(const Touched& row, const Changes& changes) {
    if (changes.processed != nullptr) {
        const KeepDenormals keep_denormals;
        change(row, *changes.processed);
    }
    bool excludes = false;
    for (int64_t i = 0; i < row.count; ++i) {
        const bool banned = row.uses[i] & BANNED;
        excludes |= banned && row.logits[i] > NOTHING;
        row.logits[i] = banned ? NOTHING : row.logits[i];
    }
    return excludes;
}

}  // namespace logits
}  // namespace inflight
