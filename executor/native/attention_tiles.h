// The two products of attention by AMX. Included by attention.h.
//
// A tile has 32 tokens of values: two groups of the context, the first of which has an even index. TDPBF16PS sums its
// even and its odd tokens apart, from zero, and adds both sums to the tile of sums. A row's result therefore depends on
// which tokens share a tile: they are the same for few rows and for many, and wherever a sliding window begins. A group
// whose neighbour no row of the item sees has zeros in its place.
//
// For the few rows of a decode tiles 0 and 1 hold sums, 4 rows, 6 and 7 keys or values; those of rows have only as many
// as needed. For the many rows of a prompt tiles 0 to 3 hold sums and 5 more rows.

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

// Computes scores of the rows from `first` on. A group holds its keys as tiles already.
template <class Element>
void score_by_tiles(Workspace<Element>& work, int first, int num_rows, const typename Element::Number* const* keys,
                    int64_t offset, int num_groups, int dim) {
    constexpr size_t QUERY_BYTES = sizeof work.query[0], SCORE_BYTES = sizeof work.score[0];
    if (num_rows <= FEW_ROWS) {
        for (int group = 0; group < num_groups; ++group) {
            _tile_zero(0);
            for (int step = 0; step < dim / 32; ++step) {
                _tile_loadd(6, keys[group] + offset + step * 32 * LANES, 64);
                _tile_loadd(4, &work.query[first][step * 32], QUERY_BYTES);
                _tile_dpbf16ps(0, 4, 6);
            }
            _tile_stored(0, &work.score[first][group * LANES], SCORE_BYTES);
        }
        return;
    }
    // Two times 16 rows and two groups at a time. There is space behind the last row, and the last group may be
    // computed twice.
    for (int row = first; row < first + num_rows; row += 32)
        for (int group = 0; group < num_groups; group += 2) {
            const int second = std::min(group + 1, num_groups - 1);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int step = 0; step < dim / 32; ++step) {
                _tile_loadd(6, keys[group] + offset + step * 32 * LANES, 64);
                _tile_loadd(7, keys[second] + offset + step * 32 * LANES, 64);
                _tile_loadd(4, &work.query[row][step * 32], QUERY_BYTES);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, &work.query[row + 16][step * 32], QUERY_BYTES);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, &work.score[row][group * LANES], SCORE_BYTES);
            _tile_stored(1, &work.score[row][second * LANES], SCORE_BYTES);
            _tile_stored(2, &work.score[row + 16][group * LANES], SCORE_BYTES);
            _tile_stored(3, &work.score[row + 16][second * LANES], SCORE_BYTES);
        }
}

// Copies 32 numbers of the values of a chunk's tokens, from `d` on, to tiles. Returns the number of pairs of tiles.
template <class Element>
int gather_values(Workspace<Element>& work, const typename Element::Number* const* values, int64_t offset,
                  int first_group, int num_groups, int d, int dim) {
    constexpr int HALF_UNITS = LANES / 2;
    auto* to = reinterpret_cast<float*>(work.values);
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
    return (int)(to - reinterpret_cast<float*>(work.values)) / (2 * HALF_UNITS * VALUE_COLUMNS);
}

// Adds the products of gathered values to 32 numbers of the output of up to 16 rows, or of up to 32.
template <class Element, bool HAS_SECOND_ROWS>
void add_values(Workspace<Element>& work, int row, int first_group, int num_pairs, int d) {
    constexpr size_t WEIGHT_BYTES = sizeof work.weight[0], OUTPUT_BYTES = sizeof work.output[0];
    float *const upper = &work.output[row][d], *const lower = upper + 16 * ROW_STRIDE;
    _tile_loadd(0, upper, OUTPUT_BYTES);
    _tile_loadd(1, upper + 16, OUTPUT_BYTES);
    if constexpr (HAS_SECOND_ROWS) {
        _tile_loadd(2, lower, OUTPUT_BYTES);
        _tile_loadd(3, lower + 16, OUTPUT_BYTES);
    }
    const auto* tokens = work.values;
    for (int pair = 0; pair < num_pairs; ++pair, tokens += 2 * LANES * VALUE_COLUMNS) {
        // A first group without the one before it is followed by zeros, and its tile ends a group earlier.
        const auto* weights = &work.weight[row][std::max(0, pair * 2 - first_group % 2) * LANES];
        _tile_loadd(6, tokens, VALUE_COLUMNS * 4);
        _tile_loadd(7, tokens + 32, VALUE_COLUMNS * 4);
        _tile_loadd(4, weights, WEIGHT_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (HAS_SECOND_ROWS) {
            _tile_loadd(5, weights + 16 * CHUNK, WEIGHT_BYTES);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, upper, OUTPUT_BYTES);
    _tile_stored(1, upper + 16, OUTPUT_BYTES);
    if constexpr (HAS_SECOND_ROWS) {
        _tile_stored(2, lower, OUTPUT_BYTES);
        _tile_stored(3, lower + 16, OUTPUT_BYTES);
    }
}

// Adds the weighted values of a chunk to the output. `first_group` is the index of its first group in the context.
template <class Element>
void weigh_values_by_tiles(Workspace<Element>& work, int first, int num_rows,
                           const typename Element::Number* const* values, int64_t offset, int first_group,
                           int num_groups, int dim) {
    for (int row = first; row < first + num_rows; ++row) {
        if (work.rescale[row] != 1.0f)
            for (int d = 0; d < dim; d += WIDTH)
                store(&work.output[row][d], load(&work.output[row][d]) * work.rescale[row]);
        // The values of these weights are zeros, which a NaN left there would not keep so.
        if (num_groups < CHUNK_GROUPS)
            std::memset(&work.weight[row][num_groups * LANES], 0, LANES * sizeof work.weight[0][0]);
    }
    for (int d = 0; d < dim; d += VALUE_COLUMNS) {
        const int num_pairs = gather_values<Element>(work, values, offset, first_group, num_groups, d, dim);
        if (num_rows <= FEW_ROWS) {
            add_values<Element, false>(work, first, first_group, num_pairs, d);
            continue;
        }
        for (int row = first; row < first + num_rows; row += 32)
            add_values<Element, true>(work, row, first_group, num_pairs, d);
    }
}

#else

template <class Element>
void set_up_tiles(Workspace<Element>&, int) {}
template <class Element>
bool can_use_tiles(int) {
    return false;
}
template <class Element>
void score_by_tiles(Workspace<Element>&, int, int, const typename Element::Number* const*, int64_t, int, int) {}
template <class Element>
void weigh_values_by_tiles(Workspace<Element>&, int, int, const typename Element::Number* const*, int64_t, int, int,
                           int) {}

#endif

}  // namespace inflight
