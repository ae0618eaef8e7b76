// Sampling of the next token of one row of logits, as in executor/step/sampling.py, whose torch code is the reference.
//
// A row that has any changes of its logits gets them first (logits.h). It is sampled in groups of 64 ids. A group of
// which the row's mask allows nothing is not read. Random words come from Philox4x32-10, 16 counters for a group, and
// most groups end there: an upper bound of the noise, taken from the exponent of the uniform number, already shows that
// no token of the group can win. The few that might are computed exactly, in double precision rounded to float, so that
// the result is the same on every processor. top_k and top_p search for the smallest value that is kept, not for an
// order: with the largest value of every group known, only groups that reach into the top are read.
//
// Thread-safe: all state kept between calls is in the caller's Scratch. A NaN is never chosen and has no weight. A row
// without a usable logit (only NaN and -inf) yields NO_TOKEN, and ALL_EXCLUDED if bans left none.

#pragma once

#include <functional>
#include <vector>

#include "logits.h"
#include "noise.h"

namespace inflight {

// The numbers of a request, in the order of `Sampling` (scheduler/sequence.py), as `NUMBERS` of step/sampling_columns.py.
struct SamplingNumbers {
    float temperature;
    int32_t top_k;
    double top_p;
    uint64_t seed;
    float min_p;
};

// How a row is sampled: greedily unless `temperature` > 0; `min_p_log` -inf, `top_k` 0 and `top_p` 1 keep every token.
struct SampleRow : SamplingNumbers {
    float min_p_log;  // as the host computes it
    int64_t output_index;
    logits::Changes changes;
};

namespace sampling {

struct Scratch {
    std::vector<float> maxima;      // of every group, divided by the temperature
    std::vector<float> candidates;  // values that may be kept
    std::vector<double> masses;     // of top_p's bins
    std::vector<int32_t> counts;    // of ids, all 0
    alignas(64) float tail[GROUP];  // the last group, where the vocabulary does not fill it

    // Reserves memory for rows of this many logits, so that sampling them allocates nothing. Throws std::bad_alloc.
    void reserve(int64_t vocabulary_size, bool restricts, bool counts_ids);
};

// A row as groups; a value is the number in memory, divided by `divisor`.
struct Values {
    float* logits;
    float* tail;
    float* maxima;
    int64_t num_whole, num_groups;
    float divisor;

    float* group(int64_t index) const { return index < num_whole ? logits + index * GROUP : tail; }
    ALWAYS_INLINE Floats vector(const float* group, int index) const { return load(group + index * WIDTH) / divisor; }
};

inline Values as_groups(float* logits, int64_t size, Scratch& scratch) {
    const int64_t num_groups = (size + GROUP - 1) / GROUP, num_whole = size / GROUP;
    scratch.maxima.resize(num_groups);
    std::fill(scratch.tail, scratch.tail + GROUP, NOTHING);
    std::copy(logits + num_whole * GROUP, logits + size, scratch.tail);
    return {logits, scratch.tail, scratch.maxima.data(), num_whole, num_groups, 1.0f};
}

inline float maximum_of(const float* group) {
    Floats largest = all(NOTHING);
    for (int v = 0; v < GROUP_VECTORS; ++v) largest = larger(load(group + v * WIDTH), largest);
    return largest_of(largest);
}

// Returns the largest number whose bit in `allowed` is set, and writes -inf for those whose bit is not. A group whose
// maximum is -inf is not written: no other function reads it.
inline float maximum_of_allowed(float* group, uint64_t allowed) {
    if (allowed == 0) return NOTHING;
    Words lanes;
    for (int lane = 0; lane < WIDTH; ++lane) lanes[lane] = lane;
    Floats kept[GROUP_VECTORS], largest = all(NOTHING);
    for (int v = 0; v < GROUP_VECTORS; ++v) {
        const Words bits = (Words{} + (uint32_t)(allowed >> v * WIDTH)) >> lanes & 1u;
        kept[v] = (bits != 0u) ? load(group + v * WIDTH) : all(NOTHING);
        largest = larger(kept[v], largest);
    }
    const float maximum = largest_of(largest);
    if (maximum > NOTHING)
        for (int v = 0; v < GROUP_VECTORS; ++v) store(group + v * WIDTH, kept[v]);
    return maximum;
}

// Fills in the maxima of what the row's mask allows, and returns the first group that has the largest.
inline int64_t find_maxima(const Values& values, const LogitsRow* processed) {
    int64_t first = 0;
    for (int64_t i = 0; i < values.num_groups; ++i) {
        const uint64_t allowed = processed == nullptr ? ~uint64_t{0} : processed->allowed_of_64(i);
        float* const group = values.group(i);
        values.maxima[i] = ~allowed == 0 ? maximum_of(group) : maximum_of_allowed(group, allowed);
        if (values.maxima[i] > values.maxima[first]) first = i;
    }
    return first;
}

// Returns whether there was a usable logit, of a row of which none is left. The mask has written to no group of it.
inline bool has_usable(const Values& values) {
    for (int64_t i = 0; i < values.num_groups; ++i)
        if (maximum_of(values.group(i)) > NOTHING) return true;
    return false;
}

// ---- min_p, top_k and top_p ----

// Values above `value` are kept, and of those equal to it the `num_equal` lowest ids.
struct Edge {
    float value;
    int64_t num_equal;
};

inline Edge edge_of(const float* kept, int64_t count) {
    const float value = *std::min_element(kept, kept + count);
    return {value, std::count(kept, kept + count, value)};
}

// Returns a value that at least `count` values reach, because that many groups do; -inf if there are fewer groups.
inline float reached_by(const Values& values, int64_t count, Scratch& scratch) {
    if (count > values.num_groups) return NOTHING;
    std::vector<float>& maxima = scratch.candidates;
    maxima.assign(values.maxima, values.maxima + values.num_groups);
    std::nth_element(maxima.begin(), maxima.begin() + (count - 1), maxima.end(), std::greater<float>());
    return maxima[count - 1];
}

// Copies the values that are at least `threshold`, but not -inf, to the scratch.
inline void collect(const Values& values, float threshold, Scratch& scratch) {
    threshold = std::max(threshold, std::numeric_limits<float>::lowest());
    std::vector<float>& found = scratch.candidates;
    found.resize(values.num_groups * GROUP);
    size_t count = 0;
    for (int64_t i = 0; i < values.num_groups; ++i) {
        if (!(values.maxima[i] >= threshold)) continue;
        const float* group = values.group(i);
        for (int j = 0; j < GROUP; ++j) {
            const float value = group[j] / values.divisor;
            found[count] = value;
            count += value >= threshold;
        }
    }
    found.resize(count);
}

inline double mass_of(const float* begin, const float* end, float largest) {
    double mass = 0;
    for (; begin < end; ++begin) mass += std::exp((double)*begin - largest);
    return mass;
}

// Moves the largest values to the front and returns how many are kept while those before them weigh less than `needed`.
// The range in doubt is halved, not sorted. `mass` is the weight before all of them. Returns 0 if all together weigh
// less.
inline int64_t count_needed(std::vector<float>& values, float largest, double mass, double needed) {
    float *begin = values.data(), *end = begin + values.size(), *from = begin, *to = end;
    while (to - from > 64) {
        float* middle = from + (to - from) / 2;
        std::nth_element(from, middle, to, std::greater<float>());
        const double front = mass_of(from, middle, largest);
        if (mass + front >= needed) {
            to = middle;
        } else {
            mass += front;
            from = middle;
        }
    }
    std::sort(from, to, std::greater<float>());
    for (; from < to; ++from) {
        mass += mass_of(from, from + 1, largest);
        if (mass >= needed) return from + 1 - begin;
    }
    return to < end ? to - begin : 0;
}

inline Edge find_top_k(const Values& values, float largest, int64_t top_k, double top_p, Scratch& scratch) {
    collect(values, reached_by(values, top_k, scratch), scratch);
    std::vector<float>& kept = scratch.candidates;
    if ((int64_t)kept.size() > top_k) {
        std::nth_element(kept.begin(), kept.begin() + (top_k - 1), kept.end(), std::greater<float>());
        kept.resize(top_k);
    }
    if (top_p >= 1) return edge_of(kept.data(), kept.size());
    const double total = mass_of(kept.data(), kept.data() + kept.size(), largest);
    const int64_t count = count_needed(kept, largest, 0, top_p * total);
    return edge_of(kept.data(), count > 0 ? count : kept.size());
}

// Sum of e^(value - largest).
inline double total_mass(const Values& values, float largest) {
    Doubles low = {}, high = {};
    for (int64_t i = 0; i < values.num_groups; ++i) {
        if (values.maxima[i] == NOTHING) continue;
        const float* group = values.group(i);
        Floats sum = {};
        for (int v = 0; v < GROUP_VECTORS; ++v) sum += small_exponential(values.vector(group, v) - largest);
        low += half_of(sum, 0);
        high += half_of(sum, 1);
    }
    low += high;
    double total = 0;
    for (int lane = 0; lane < WIDTH / 2; ++lane) total += low[lane];
    return total;
}

// Bins of 1/32 below the largest value, the last one open; a token there weighs less than 1e-27 of the largest.
constexpr int NUM_BINS = 2048;
ALWAYS_INLINE Ints bins_of(Floats values, float largest) {
    const Floats bin = (largest - values) * 32.0f;
    return __builtin_convertvector((bin < (float)NUM_BINS) ? bin : all(NUM_BINS - 1), Ints);
}

// Sums of e^(value - largest) by bin.
inline void weigh_bins(const Values& values, float largest, double* masses) {
    for (int64_t i = 0; i < values.num_groups; ++i) {
        if (values.maxima[i] == NOTHING) continue;
        const float* group = values.group(i);
        for (int v = 0; v < GROUP_VECTORS; ++v) {
            const Floats value = values.vector(group, v), weight = small_exponential(value - largest);
            const Ints bin = bins_of(value, largest);
            alignas(64) float weights[WIDTH];
            alignas(64) int32_t bins[WIDTH];
            std::memcpy(weights, &weight, sizeof weights);
            std::memcpy(bins, &bin, sizeof bins);
            for (int lane = 0; lane < WIDTH; ++lane) masses[bins[lane]] += weights[lane];
        }
    }
}

inline void collect_bin(const Values& values, float largest, int wanted, std::vector<float>& found) {
    found.clear();
    for (int64_t i = 0; i < values.num_groups; ++i) {
        if (values.maxima[i] == NOTHING) continue;
        const float* group = values.group(i);
        for (int v = 0; v < GROUP_VECTORS; ++v) {
            const Floats value = values.vector(group, v);
            const Ints is_wanted = (bins_of(value, largest) == wanted) & (value > NOTHING);
            if (!any(is_wanted)) continue;
            for (int lane = 0; lane < WIDTH; ++lane)
                if (is_wanted[lane]) found.push_back(value[lane]);
        }
    }
}

// For a flat distribution: weighs the bins, and examines only the values in the bin of the edge.
inline Edge find_in_bins(const Values& values, float largest, double needed, Scratch& scratch) {
    std::vector<double>& masses = scratch.masses;
    masses.assign(NUM_BINS, 0.0);
    weigh_bins(values, largest, masses.data());
    double mass = 0;
    int edge = 0;
    while (edge < NUM_BINS - 1 && mass + masses[edge] < needed) mass += masses[edge++];
    std::vector<float>& candidates = scratch.candidates;
    collect_bin(values, largest, edge, candidates);
    if (candidates.empty()) return {NOTHING, 0};  // rounding: not even all of them weigh enough
    const int64_t count = count_needed(candidates, largest, mass, needed);
    return edge_of(candidates.data(), count > 0 ? count : candidates.size());
}

inline Edge find_top_p(const Values& values, float largest, double top_p, Scratch& scratch) {
    const double needed = top_p * total_mass(values, largest);
    collect(values, reached_by(values, std::min<int64_t>(64, values.num_groups), scratch), scratch);
    std::vector<float>& likeliest = scratch.candidates;
    const int64_t count = count_needed(likeliest, largest, 0, needed);
    return count > 0 ? edge_of(likeliest.data(), count) : find_in_bins(values, largest, needed, scratch);
}

// Writes the values that are kept, and -inf for the others; groups without any are marked by their maximum instead.
// From then on the values in memory are not divided.
inline void keep(Values& values, Edge edge) {
    for (int64_t i = 0; i < values.num_groups; ++i) {
        // The edge may be -inf.
        if (values.maxima[i] == NOTHING || !(values.maxima[i] >= edge.value)) {
            values.maxima[i] = NOTHING;
            continue;
        }
        float* group = values.group(i);
        for (int v = 0; v < GROUP_VECTORS; ++v) {
            const Floats value = values.vector(group, v);
            Ints stays = value > edge.value;
            const Ints at_edge = value == edge.value;
            if (any(at_edge))
                for (int lane = 0; lane < WIDTH; ++lane)
                    if (at_edge[lane] && edge.num_equal > 0) stays[lane] = -1, --edge.num_equal;
            store(group + v * WIDTH, stays ? value : all(NOTHING));
        }
    }
    values.divisor = 1;
}

// Of the `largest` value, so that min_p comes before top_k and top_p.
inline void keep_likeliest(Values& values, float largest, const SampleRow& row, bool has_top_k, Scratch& scratch) {
    if (row.min_p_log > NOTHING) keep(values, {largest + row.min_p_log, std::numeric_limits<int64_t>::max()});
    if (has_top_k) {
        keep(values, find_top_k(values, largest, row.top_k, row.top_p, scratch));
    } else if (row.top_p < 1) {
        keep(values, find_top_p(values, largest, row.top_p, scratch));
    }
}

// ---- The draw ----

struct Draw {
    uint64_t seed;
    int64_t output_index;
    float best = NOTHING;
    int64_t id = std::numeric_limits<int64_t>::max();

    ALWAYS_INLINE void look_at(const Values& values, int64_t index) {
        const float* group = values.group(index);
        Words words[GROUP_VECTORS];
        group_words(index, seed, output_index, words);
        Ints may_win[GROUP_VECTORS], some = {};
        for (int v = 0; v < GROUP_VECTORS; ++v) {
            may_win[v] = values.vector(group, v) + noise_bound(words[v]) >= all(best);
            some |= may_win[v];
        }
        if (any(some)) look_closely(values, index, words, may_win);
    }

    void look_closely(const Values& values, int64_t index, const Words* words, const Ints* may_win) {
        alignas(64) uint32_t word[GROUP];
        alignas(64) int32_t chosen[GROUP];
        std::memcpy(word, words, sizeof word);
        std::memcpy(chosen, may_win, sizeof chosen);
        for (int j = 0; j < GROUP; ++j) {
            if (!chosen[j]) continue;
            const float score = values.group(index)[j] / values.divisor + gumbel(word[j]);
            const int64_t candidate = index * GROUP + j;
            if (score > best || (score == best && candidate < id)) best = score, id = candidate;
        }
    }
};

inline int64_t draw(const Values& values, int64_t first, uint64_t seed, int64_t output_index) {
    Draw draw{seed, output_index};
    draw.look_at(values, first);
    for (int64_t i = 0; i < values.num_groups; ++i)
        if (i != first && values.maxima[i] + LARGEST_BOUND >= draw.best) draw.look_at(values, i);
    return draw.id;
}

inline bool has_top_k(const SampleRow& row, int64_t vocabulary_size) {
    return row.top_k > 0 && row.top_k < vocabulary_size;
}

inline bool restricts(const SampleRow& row, int64_t vocabulary_size) {
    return has_top_k(row, vocabulary_size) || row.top_p < 1 || row.min_p_log > NOTHING;
}

inline void Scratch::reserve(int64_t vocabulary_size, bool restricts, bool counts_ids) {
    const int64_t num_groups = (vocabulary_size + GROUP - 1) / GROUP;
    maxima.reserve(num_groups);
    if (counts_ids && (int64_t)counts.size() < vocabulary_size) counts.resize(vocabulary_size);
    if (!restricts) return;
    candidates.reserve(num_groups * GROUP);
    masses.reserve(NUM_BINS);
}

// Returns whether sample_row writes to the logits of this row.
inline bool changes_logits(const SampleRow& row, int64_t vocabulary_size) {
    return row.changes.any() || (row.temperature > 0 && restricts(row, vocabulary_size));
}

// Returns the next token of a row of at least one logit.
inline int64_t sample_row(float* logits, int64_t vocabulary_size, const SampleRow& row, Scratch& scratch) {
    const bool excludes = logits::process(logits, vocabulary_size, row.changes, scratch.counts.data());
    Values values = as_groups(logits, vocabulary_size, scratch);
    const int64_t first = find_maxima(values, row.changes.processed);
    const float largest = values.maxima[first];
    if (largest == NOTHING) return excludes || has_usable(values) ? ALL_EXCLUDED : NO_TOKEN;
    const float* group = values.group(first);
    const int64_t greedy = first * GROUP + (std::find(group, group + GROUP, largest) - group);
    // A temperature near 0 may take even the largest out of float's range.
    if (!(row.temperature > 0) || largest / row.temperature == NOTHING) return greedy;

    values.divisor = row.temperature;
    for (int64_t i = 0; i < values.num_groups; ++i) values.maxima[i] /= values.divisor;
    const float scaled = values.maxima[first];
    // An infinite value always wins, the lowest id of several.
    if (!std::isinf(scaled)) keep_likeliest(values, scaled, row, has_top_k(row, vocabulary_size), scratch);
    return draw(values, first, row.seed, row.output_index);
}

}  // namespace sampling

using sampling::changes_logits;
using sampling::restricts;
using sampling::sample_row;
using sampling::Scratch;

}  // namespace inflight
