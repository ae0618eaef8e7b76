// The two products of attention by AMX. Included by attention.h.
//
// A tile has 32 tokens of values: two groups of the context, the first of which has an even index. TDPBF16PS sums its
// even and its odd tokens apart, from zero, and adds both sums to the tile of sums. A row's result therefore depends on
// which tokens share a tile: they are the same for few rows and for many, and wherever a sliding window begins. A group
// whose neighbour no row of the item sees has zeros in its place.
//
// For the few rows of a decode tiles 0 and 1 hold sums, 4 rows, 6 and 7 keys or values; those of rows have only as many
// as needed. For the many rows of a prompt tiles 0 to 3 hold sums, 4 rows, 5 to 7 keys or values.

#pragma once

namespace inflight {

#ifdef INFLIGHT_AMX

constexpr int FEW_ROWS = 16;

template <class Element>
void set_up_tiles(Workspace<Element>& work, int num_rows) {
    const int wanted = std::min(num_rows, FEW_ROWS + 1);
    if (work.tile_rows == wanted) return;
    work.tile_rows = wanted;
    work.tiles = TileConfiguration();
    if (num_rows <= FEW_ROWS)
        for (const int tile : {0, 1, 4}) work.tiles.rows[tile] = (uint8_t)num_rows;
    asm volatile("" ::: "memory");  // GCC treats only the first bytes of a tile load as read
    _tile_loadconfig(&work.tiles);
}

template <class Element>
bool can_use_tiles(int dim) {
    return Element::PAIR == 2 && dim % 32 == 0;
}

// Computes scores of a decode's rows from `first` on. A group holds its keys as tiles already.
template <class Element>
void score_by_tiles(Workspace<Element>& work, int first, const typename Element::Number* const* keys, int64_t offset,
                    int num_groups, int dim) {
    constexpr size_t QUERY_BYTES = sizeof work.query[0], SCORE_BYTES = sizeof work.score[0];
    for (int group = 0; group < num_groups; ++group) {
        _tile_zero(0);
        for (int step = 0; step < dim / 32; ++step) {
            _tile_loadd(6, keys[group] + offset + step * 32 * LANES, 64);
            _tile_loadd(4, &work.query[first][step * 32], QUERY_BYTES);
            _tile_dpbf16ps(0, 4, 6);
        }
        _tile_stored(0, &work.score[first][group * LANES], SCORE_BYTES);
    }
}

// Copies 32 numbers of the values of a chunk's tokens, from `d` on, to tiles. Returns the number of pairs of tiles.
template <class Element>
int gather_values(typename Element::Number* tiles, const typename Element::Number* const* values, int64_t offset,
                  int first_group, int num_groups, int d, int dim) {
    constexpr int HALF_UNITS = LANES / 2;
    auto* to = reinterpret_cast<float*>(tiles);
    for (int group = 0; group < num_groups; ++group) {
        const auto* from = reinterpret_cast<const float*>(values[group] + offset) + d;
#pragma GCC unroll 8
        for (int unit = 0; unit < HALF_UNITS; ++unit, from += dim, to += VALUE_COLUMNS)
            for (int i = 0; i < VALUE_COLUMNS; i += WIDTH) store(to + i, load(from + i));
        const bool is_alone = (first_group + group) % 2 ? group == 0 : group + 1 == num_groups;
        if (!is_alone) continue;
        std::memset(to, 0, HALF_UNITS * VALUE_COLUMNS * sizeof *to);
        to += HALF_UNITS * VALUE_COLUMNS;
    }
    return (int)(to - reinterpret_cast<float*>(tiles)) / (2 * HALF_UNITS * VALUE_COLUMNS);
}

// Raises the maximum of a row to the largest of its scores, in row `place` of the workspace, if it sees any key.
template <class Element>
void raise_maximum(Workspace<Element>& work, int row, int place, int num_keys, int dim, float factor) {
    Floats largest = all(MASKED);
    for (int key = 0; key < num_keys; key += WIDTH) largest = larger(load(&work.score[place][key]), largest);
    if (!any_above(largest, MASKED / 2)) return;
    const float maximum = largest_of(largest) * factor;
    const Floats rescale = power_of_two(all(work.maximum[row] - maximum));
    work.maximum[row] = maximum;
    work.sum[row] *= rescale;
    for (int d = 0; d < dim; d += WIDTH) store(&work.output[row][d], load(&work.output[row][d]) * rescale);
}

// Turns the scores of a row and a chunk, in row `place` of the workspace, into weights. They are powers of two of
// scores less a maximum of earlier scores, which is raised only for scores that are far above it: this costs one
// comparison, and seldom a second pass. Weights of up to 2^FAR are as precise as smaller ones.
template <class Element>
ALWAYS_INLINE void weigh_row_for_tiles(const Attention& call, Workspace<Element>& work, int row, int place,
                                       int first_key, int num_keys, int dim, float factor) {
    constexpr float FAR = 8;
    float* const scores = work.score[place];
    typename Element::Number* const weights = work.weight[place];
    mask_scores(scores, num_keys, work.first_key[row] - first_key, work.last_key[row] - first_key, call);
    const Floats factors = all(factor);
    const auto weigh = [&](Floats& sums) {
        const Floats lowered = all(-work.maximum[row]);
        Floats most = all(MASKED);
        const auto weight = [&](int key) {
            const Floats exponent = fused_add(lowered, load(scores + key), factors);
            most = larger(exponent, most);
            const Floats power = power_of_two<Element>(exponent);
            sums += power;
            return power;
        };
        int key = 0;
        for (; key + 2 * WIDTH <= num_keys; key += 2 * WIDTH) {
            const Floats low = weight(key);
            Element::put_two(weights + key, low, weight(key + WIDTH));
        }
        if (key < num_keys) Element::put(weights + key, weight(key));
        return any_above(most, FAR);
    };
    Floats sums = {};
    if (work.maximum[row] == unseen_maximum(factor) || weigh(sums)) {
        raise_maximum<Element>(work, row, place, num_keys, dim, factor);
        sums = Floats{};
        weigh(sums);
    }
    work.sum[row] += sums;
    // The values of these weights are zeros, which a NaN left there would not keep so.
    if (num_keys < CHUNK) std::memset(weights + num_keys, 0, LANES * sizeof *weights);
}

// The weights of a chunk that a pair of gathered groups is multiplied by. A first group without the one before it is
// followed by zeros, and its tile ends a group earlier.
template <class Element>
const typename Element::Number* weights_of_pair(const Workspace<Element>& work, int place, int first_group, int pair) {
    return &work.weight[place][std::max(0, pair * 2 - first_group % 2) * LANES];
}

// Adds the weighted values of a chunk to the output of a decode's rows. `first_group` is the index of its first group
// in the context.
template <class Element>
void weigh_values_by_tiles(Workspace<Element>& work, int first,
                           const typename Element::Number* const* values, int64_t offset, int first_group,
                           int num_groups, int dim) {
    constexpr size_t WEIGHT_BYTES = sizeof work.weight[0], OUTPUT_BYTES = sizeof work.output[0];
    for (int d = 0; d < dim; d += VALUE_COLUMNS) {
        const int num_pairs = gather_values<Element>(work.values, values, offset, first_group, num_groups, d, dim);
        float* const output = &work.output[first][d];
        _tile_loadd(0, output, OUTPUT_BYTES);
        _tile_loadd(1, output + 16, OUTPUT_BYTES);
        const auto* tokens = work.values;
        for (int pair = 0; pair < num_pairs; ++pair, tokens += 2 * LANES * VALUE_COLUMNS) {
            _tile_loadd(6, tokens, VALUE_COLUMNS * 4);
            _tile_loadd(7, tokens + 32, VALUE_COLUMNS * 4);
            _tile_loadd(4, weights_of_pair<Element>(work, first, first_group, pair), WEIGHT_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, output, OUTPUT_BYTES);
        _tile_stored(1, output + 16, OUTPUT_BYTES);
    }
}

// Computes scores of 32 rows of a prompt, two groups at a time. The last group may be computed twice.
template <class Element>
void score_32_rows(Workspace<Element>& work, int row, const typename Element::Number* const* keys, int num_groups,
                   int dim) {
    constexpr size_t QUERY_BYTES = sizeof work.query[0], SCORE_BYTES = sizeof work.score[0];
    for (int group = 0; group < num_groups; group += 2) {
        const int second = std::min(group + 1, num_groups - 1);
        clear_tiles();
        for (int step = 0; step < dim / 32; ++step) {
            _tile_loadd(6, keys[group] + step * 32 * LANES, 64);
            _tile_loadd(7, keys[second] + step * 32 * LANES, 64);
            _tile_loadd(4, &work.query[row][step * 32], QUERY_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, &work.query[row + 16][step * 32], QUERY_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, &work.score[0][group * LANES], SCORE_BYTES);
        _tile_stored(1, &work.score[0][second * LANES], SCORE_BYTES);
        _tile_stored(2, &work.score[16][group * LANES], SCORE_BYTES);
        _tile_stored(3, &work.score[16][second * LANES], SCORE_BYTES);
    }
}

// Adds the weighted values of a chunk to the output of 32 rows of a prompt.
template <class Element>
void weigh_values_of_32_rows(Workspace<Element>& work, int row, int first_group, int num_groups, int dim) {
    constexpr size_t WEIGHT_BYTES = sizeof work.weight[0], OUTPUT_BYTES = sizeof work.output[0];
    const int num_pairs = (first_group % 2 + num_groups + 1) / 2;
    for (int d = 0; d < dim; d += VALUE_COLUMNS) {
        float *const upper = &work.output[row][d], *const lower = upper + 16 * ROW_STRIDE;
        _tile_loadd(0, upper, OUTPUT_BYTES);
        _tile_loadd(1, upper + 16, OUTPUT_BYTES);
        _tile_loadd(2, lower, OUTPUT_BYTES);
        _tile_loadd(3, lower + 16, OUTPUT_BYTES);
        const auto* tokens = work.values + d * CHUNK;
        for (int pair = 0; pair < num_pairs; ++pair, tokens += 2 * LANES * VALUE_COLUMNS) {
            const auto* const weights = weights_of_pair<Element>(work, 0, first_group, pair);
            _tile_loadd(6, tokens, VALUE_COLUMNS * 4);
            _tile_loadd(7, tokens + 32, VALUE_COLUMNS * 4);
            _tile_loadd(4, weights, WEIGHT_BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, weights + 16 * CHUNK, WEIGHT_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, upper, OUTPUT_BYTES);
        _tile_stored(1, upper + 16, OUTPUT_BYTES);
        _tile_stored(2, lower, OUTPUT_BYTES);
        _tile_stored(3, lower + 16, OUTPUT_BYTES);
    }
}

// Adds a chunk to the outputs of a prompt's rows, 32 at a time, so that scores and weights stay in the first-level
// cache.
template <class Element>
void add_chunk_by_tiles(const Attention& call, Workspace<Element>& work, int num_rows,
                        const typename Element::Number* const* keys, const typename Element::Number* const* values,
                        int first_group, int num_groups, int dim, float factor) {
    for (int d = 0; d < dim; d += VALUE_COLUMNS)
        gather_values<Element>(work.values + d * CHUNK, values, 0, first_group, num_groups, d, dim);
    for (int first = 0; first < num_rows; first += TILE_ROWS) {
        const int end = std::min(first + TILE_ROWS, num_rows);
        // Later rows see more. What no row of these sees would be multiplied by weights of zero.
        const int seen = std::min(num_groups, work.last_key[end - 1] / LANES + 1 - first_group);
        if (seen <= 0) continue;
        score_32_rows<Element>(work, first, keys, seen, dim);
        for (int row = first; row < end; ++row)
            weigh_row_for_tiles<Element>(call, work, row, row - first, first_group * LANES, seen * LANES, dim, factor);
        weigh_values_of_32_rows<Element>(work, first, first_group, seen, dim);
    }
}

#else

constexpr int FEW_ROWS = MAX_ROWS;
template <class Element>
void set_up_tiles(Workspace<Element>&, int) {}
template <class Element>
bool can_use_tiles(int) {
    return false;
}
template <class Element>
void score_by_tiles(Workspace<Element>&, int, const typename Element::Number* const*, int64_t, int, int) {}
template <class Element>
void weigh_row_for_tiles(const Attention&, Workspace<Element>&, int, int, int, int, int, float) {}
template <class Element>
void weigh_values_by_tiles(Workspace<Element>&, int, const typename Element::Number* const*, int64_t, int, int, int) {}
template <class Element>
void add_chunk_by_tiles(const Attention&, Workspace<Element>&, int, const typename Element::Number* const*,
                        const typename Element::Number* const*, int, int, int, float) {}

#endif

}  // namespace inflight
