// The two products of attention by AMX. Included by attention.h.
//
// For the few rows of a decode, values are read in place, a group of 16 tokens at a time: tile 2 holds its weights,
// tile 3 its values, both half full; tiles 0 and 1 hold sums, 4 queries, 6 keys; and the tiles have only as many rows
// as needed. For the many rows of a prompt all tiles are full, and the groups of a chunk are first made contiguous:
// tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 keys or values.

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
    if (num_rows <= FEW_ROWS) {
        for (const int tile : {0, 1, 2, 4}) work.tiles.rows[tile] = (uint8_t)num_rows;
        work.tiles.row_bytes[2] = 32;
        work.tiles.rows[3] = 8;
    }
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

template <class Element>
void add_groups(Workspace<Element>& work, int first, const typename Element::Number* const* values, int64_t offset,
                int num_groups, int dim) {
    for (int d = 0; d < dim; d += 32) {
        _tile_loadd(0, &work.output[first][d], sizeof work.output[0]);
        _tile_loadd(1, &work.output[first][d + 16], sizeof work.output[0]);
        for (int group = 0; group < num_groups; ++group) {
            const auto* tokens = values[group] + offset + d * 2;
            _tile_loadd(2, &work.weight[first][group * LANES], sizeof work.weight[0]);
            _tile_loadd(3, tokens, dim * 4);
            _tile_dpbf16ps(0, 2, 3);
            _tile_loadd(3, tokens + 32, dim * 4);
            _tile_dpbf16ps(1, 2, 3);
        }
        _tile_stored(0, &work.output[first][d], sizeof work.output[0]);
        _tile_stored(1, &work.output[first][d + 16], sizeof work.output[0]);
    }
}

template <class Element>
void add_gathered(Workspace<Element>& work, int first, int num_rows, const typename Element::Number* const* values,
                  int64_t offset, int num_groups, int dim) {
    constexpr size_t WEIGHT_BYTES = sizeof work.weight[0], OUTPUT_BYTES = sizeof work.output[0];
    const size_t group_numbers = (size_t)LANES * dim;
    for (int group = 0; group < num_groups; ++group)
        std::memcpy(work.values + group * group_numbers, values[group] + offset, group_numbers * sizeof *work.values);
    if (num_groups % 2) {
        std::memset(work.values + num_groups * group_numbers, 0, group_numbers * sizeof *work.values);
        for (int row = first; row < first + num_rows; ++row)
            std::memset(&work.weight[row][num_groups * LANES], 0, LANES * sizeof work.weight[0][0]);
    }
    for (int row = first; row < first + num_rows; row += 32)
        for (int d = 0; d < dim; d += 32) {
            float *upper = &work.output[row][d], *lower = &work.output[row + 16][d];
            _tile_loadd(0, upper, OUTPUT_BYTES);
            _tile_loadd(1, upper + 16, OUTPUT_BYTES);
            _tile_loadd(2, lower, OUTPUT_BYTES);
            _tile_loadd(3, lower + 16, OUTPUT_BYTES);
            for (int step = 0; step < (num_groups + 1) / 2; ++step) {
                const auto* tokens = work.values + step * 2 * group_numbers + d * 2;
                _tile_loadd(6, tokens, dim * 4);
                _tile_loadd(7, tokens + 32, dim * 4);
                _tile_loadd(4, &work.weight[row][step * 32], WEIGHT_BYTES);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, &work.weight[row + 16][step * 32], WEIGHT_BYTES);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, upper, OUTPUT_BYTES);
            _tile_stored(1, upper + 16, OUTPUT_BYTES);
            _tile_stored(2, lower, OUTPUT_BYTES);
            _tile_stored(3, lower + 16, OUTPUT_BYTES);
        }
}

// Adds the weighted values of a chunk to the output.
template <class Element>
void weigh_values_by_tiles(Workspace<Element>& work, int first, int num_rows,
                           const typename Element::Number* const* values, int64_t offset, int num_groups, int dim) {
    for (int row = first; row < first + num_rows; ++row)
        if (work.rescale[row] != 1.0f)
            for (int d = 0; d < dim; d += WIDTH)
                store(&work.output[row][d], load(&work.output[row][d]) * work.rescale[row]);
    if (num_rows <= FEW_ROWS)
        add_groups<Element>(work, first, values, offset, num_groups, dim);
    else
        add_gathered<Element>(work, first, num_rows, values, offset, num_groups, dim);
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
void weigh_values_by_tiles(Workspace<Element>&, int, int, const typename Element::Number* const*, int64_t, int, int) {}

#endif

}  // namespace inflight
