// The sampler with a C interface (sampler.py). Each row of a step is sampled by one thread.

#include <memory>
#include <mutex>
#include <new>
#include <numeric>

#include "pool.h"
#include "sampler.h"

using namespace inflight;

extern "C" {

// The fields of sampler.py's structure, in the same order. Columns have a number for each row.
struct SampleCall {
    float* logits;                 // [num_rows, vocabulary_size]
    const SamplingNumbers* numbers;
    const int64_t* output_indices;
    const int32_t* banned_ids;     // of row i: [banned_starts[i], banned_starts[i + 1])
    const int32_t* banned_starts;  // [num_rows + 1]
    const float* min_p_logs;       // null: no row has a min_p
    const LogitsRow* const* processed;  // null for a row whose logits are not changed; null: no row's are
    int64_t* token_ids;            // output
    int64_t num_rows, vocabulary_size, row_stride;
    int64_t may_change;  // whether the logits are not needed any more
};

}  // extern "C"

namespace {

// Buffers of the threads, kept between calls. One call at a time; others wait.
class Sampler {
  public:
    void sample(Pool* pool, const SampleCall& call) {
        const std::lock_guard<std::mutex> alone(mutex_);
        Pool* const used = call.num_rows > 1 ? pool : nullptr;
        reserve(used == nullptr ? 1 : used->num_threads(), call);
        run_on(used, [&](Team& team) {
            Kept& kept = *kept_[team.thread];
            team.each(call.num_rows, [&](int64_t index) { sample_one(call, index, kept); });
        });
    }

  private:
    struct Kept {
        Scratch scratch;
        std::vector<float> copy;
    };

    static SampleRow row_of(const SampleCall& call, int64_t index) {
        const int32_t start = call.banned_starts[index];
        return {call.numbers[index],
                call.min_p_logs == nullptr ? sampling::NOTHING : call.min_p_logs[index],
                call.output_indices[index],
                {call.processed == nullptr ? nullptr : call.processed[index], call.banned_ids + start,
                 call.banned_starts[index + 1] - start}};
    }

    void reserve(int num_threads, const SampleCall& call) {
        bool copies = false, restricted = false, counts_ids = false;
        for (int64_t index = 0; index < call.num_rows; ++index) {
            const SampleRow row = row_of(call, index);
            copies |= copies_logits(call, row);
            restricted |= restricts(row, call.vocabulary_size);
            counts_ids |= row.changes.counts_ids();
        }
        while ((int)kept_.size() < num_threads) kept_.push_back(std::make_unique<Kept>());
        for (int thread = 0; thread < num_threads; ++thread) {
            kept_[thread]->scratch.reserve(call.vocabulary_size, restricted, counts_ids);
            if (copies) kept_[thread]->copy.reserve(call.vocabulary_size);
        }
    }

    // A row that the sampler writes to is copied if the caller needs the logits; the others are only read.
    static bool copies_logits(const SampleCall& call, const SampleRow& row) {
        return call.may_change == 0 && changes_logits(row, call.vocabulary_size);
    }

    static void sample_one(const SampleCall& call, int64_t index, Kept& kept) {
        const SampleRow row = row_of(call, index);
        float* logits = call.logits + index * call.row_stride;
        if (copies_logits(call, row)) {
            kept.copy.assign(logits, logits + call.vocabulary_size);
            logits = kept.copy.data();
        }
        call.token_ids[index] = sample_row(logits, call.vocabulary_size, row, kept.scratch);
    }

    std::mutex mutex_;
    std::vector<std::unique_ptr<Kept>> kept_;
};

}  // namespace

extern "C" {

void* inflight_sampler_new() { return new (std::nothrow) Sampler; }
void inflight_sampler_free(void* sampler) { delete static_cast<Sampler*>(sampler); }

// Returns 0, or 1 if there is not enough memory. `pool` may be null: then the caller's thread samples all rows.
int64_t inflight_sample_rows(void* sampler, void* pool, const SampleCall* call) {
    return or_out_of_memory([&] { static_cast<Sampler*>(sampler)->sample(static_cast<Pool*>(pool), *call); });
}

// For tests: the logits stage of one row, in place; with `touched` as a greedy step applies it, with every id as one
// that is touched. Returns 0, or 1 if there is not enough memory.
int64_t inflight_process_row(float* row, int64_t vocabulary_size, const LogitsRow* processed, int64_t touched) {
    return or_out_of_memory([&] {
        const logits::Changes changes{processed, nullptr, 0};
        std::vector<int32_t> ids(vocabulary_size);
        std::vector<uint32_t> uses(vocabulary_size);
        const FlushDenormals as_in_a_pool;
        if (touched) {
            std::iota(ids.begin(), ids.end(), 0);
            logits::each_use(changes, vocabulary_size, [&](int32_t id, uint32_t use, uint32_t count) {
                uses[id] = (uses[id] | use) + count;
            });
            logits::process({ids.data(), uses.data(), row, vocabulary_size}, changes);
        } else {
            logits::process(row, vocabulary_size, changes, ids.data());
        }
        for (int64_t id = 0; id < vocabulary_size; ++id)
            if ((processed->allowed_of_64(id / 64) >> id % 64 & 1) == 0) row[id] = sampling::NOTHING;
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
