// The sampler for callers with a C interface (sampler.py): each row of a step on some thread.

#include "pool.h"
#include "sampler.h"

using namespace inflight;

extern "C" {

// The fields of sampler.py's structure, in the same order. Columns have a number for each row.
struct SampleCall {
    const float* logits;           // [num_rows, vocabulary_size], left as they are
    const float* temperatures;
    const int32_t* top_ks;
    const double* top_ps;
    const uint64_t* seeds;
    const int64_t* output_indices;
    const int32_t* banned_ids;     // of row i: [banned_starts[i], banned_starts[i + 1])
    const int32_t* banned_starts;  // [num_rows + 1]
    int64_t* token_ids;            // what comes out
    int64_t num_rows, vocabulary_size, row_stride;
};

// `pool` may be null: then the caller's thread does all.
void inflight_sample_rows(void* pool, const SampleCall* call) {
    auto sample_one = [&](int64_t index, Scratch& scratch, std::vector<float>& copy) {
        const int32_t start = call->banned_starts[index];
        const SampleRow row = {call->temperatures[index],
                               call->top_ks[index],
                               call->top_ps[index],
                               call->seeds[index],
                               call->output_indices[index],
                               call->banned_ids + start,
                               call->banned_starts[index + 1] - start};
        // A row that would be written to is copied; the others are only read.
        float* logits = const_cast<float*>(call->logits + index * call->row_stride);
        if (changes_logits(row, call->vocabulary_size)) {
            copy.assign(logits, logits + call->vocabulary_size);
            logits = copy.data();
        }
        call->token_ids[index] = sample_row(logits, call->vocabulary_size, row, scratch);
    };
    run_on(call->num_rows > 1 ? static_cast<Pool*>(pool) : nullptr, [&](Team& team) {
        Scratch scratch;
        std::vector<float> copy;
        team.each(call->num_rows, [&](int64_t index) { sample_one(index, scratch, copy); });
    });
}

// For tests: Philox of one counter, and the words and the noise of 64 ids.
void inflight_philox(const uint32_t* counter, uint64_t key, uint32_t* words) {
    sampling::Counters counters[1];
    for (int i = 0; i < 4; ++i) counters[0].word[i] = sampling::Longs{} + (uint64_t)counter[i];
    sampling::philox(counters, key);
    for (int i = 0; i < 4; ++i) words[i] = (uint32_t)counters[0].word[i][0];
}

void inflight_group_noise(int64_t group, uint64_t seed, int64_t output_index, uint32_t* words, float* noise,
                          float* bounds) {
    Words vectors[sampling::GROUP_VECTORS];
    sampling::group_words(group, seed, output_index, vectors);
    std::memcpy(words, vectors, sizeof vectors);
    for (int v = 0; v < sampling::GROUP_VECTORS; ++v) {
        const Floats bound = sampling::noise_bound(vectors[v]);
        std::memcpy(bounds + v * WIDTH, &bound, sizeof bound);
    }
    for (int i = 0; i < sampling::GROUP; ++i) noise[i] = sampling::gumbel(words[i]);
}

}  // extern "C"
