// The two products of attention by AMX. Included by attention.h.
//
// Tiles 0 and 1 sum, 4 and 5 are queries, 6 keys. Values come in two ways. For the few rows of a decode they are taken where they
// lie, a group of 16 tokens at a time: tile 2 holds its weights, tile 3 its values, both half full. For the many rows of a
// prompt the groups of a chunk are put side by side first, so that tiles 4, 6 and 7 are full.

#pragma once

namespace inflight {

#ifdef INFLIGHT_AMX

class AttentionTiles {
  public:
    AttentionTiles() {
        static const TileConfiguration configuration = [] {
            TileConfiguration tiles;
            tiles.row_bytes[2] = 32;
            tiles.rows[3] = 8;
            return tiles;
        }();
        _tile_loadconfig(&configuration);
    }
};

template <class Element>
bool can_use_tiles(int dim) {
    return Element::PAIR == 2 && dim % 32 == 0;
}

// Scores of all rows; 16 rows and a group of keys at a time, which lies there as a tile already.
template <class Element>
void score_by_tiles(Workspace<Element>& work, int num_rows, const typename Element::Number* const* keys, int num_groups,
                    int dim) {
    for (int row = 0; row < num_rows; row += 32) {
        const bool has_second = row + 16 < num_rows;
        for (int group = 0; group < num_groups; ++group) {
            _tile_zero(0);
            _tile_zero(1);
            for (int step = 0; step < dim / 32; ++step) {
                _tile_loadd(6, keys[group] + step * 32 * LANES, 64);
                _tile_loadd(4, &work.query[row][step * 32], sizeof work.query[0]);
                _tile_dpbf16ps(0, 4, 6);
                if (has_second) {
                    _tile_loadd(5, &work.query[row + 16][step * 32], sizeof work.query[0]);
                    _tile_dpbf16ps(1, 5, 6);
                }
            }
            _tile_stored(0, &work.score[row][group * LANES], sizeof work.score[0]);
            if (has_second) _tile_stored(1, &work.score[row + 16][group * LANES], sizeof work.score[0]);
        }
    }
}

template <class Element>
void add_groups(Workspace<Element>& work, const typename Element::Number* const* values, int num_groups, int dim) {
    for (int d = 0; d < dim; d += 32) {
        _tile_loadd(0, &work.output[0][d], sizeof work.output[0]);
        _tile_loadd(1, &work.output[0][d + 16], sizeof work.output[0]);
        for (int group = 0; group < num_groups; ++group) {
            _tile_loadd(2, &work.weight[0][group * LANES], sizeof work.weight[0]);
            _tile_loadd(3, values[group] + d * 2, dim * 4);
            _tile_dpbf16ps(0, 2, 3);
            _tile_loadd(3, values[group] + d * 2 + 32, dim * 4);
            _tile_dpbf16ps(1, 2, 3);
        }
        _tile_stored(0, &work.output[0][d], sizeof work.output[0]);
        _tile_stored(1, &work.output[0][d + 16], sizeof work.output[0]);
    }
}

template <class Element>
void add_gathered(Workspace<Element>& work, int num_rows, const typename Element::Number* const* values, int num_groups,
                  int dim) {
    const size_t group_numbers = (size_t)LANES * dim;
    for (int group = 0; group < num_groups; ++group)
        std::memcpy(work.values + group * group_numbers, values[group], group_numbers * sizeof *work.values);
    if (num_groups % 2) {
        std::memset(work.values + num_groups * group_numbers, 0, group_numbers * sizeof *work.values);
        for (int row = 0; row < num_rows; ++row) std::memset(&work.weight[row][num_groups * LANES], 0, LANES * 2);
    }
    const int num_steps = (num_groups + 1) / 2;
    for (int row = 0; row < num_rows; row += 16)
        for (int d = 0; d < dim; d += 32) {
            _tile_loadd(0, &work.output[row][d], sizeof work.output[0]);
            _tile_loadd(1, &work.output[row][d + 16], sizeof work.output[0]);
            for (int step = 0; step < num_steps; ++step) {
                const auto* tokens = work.values + step * 2 * group_numbers + d * 2;
                _tile_loadd(4, &work.weight[row][step * 32], sizeof work.weight[0]);
                _tile_loadd(6, tokens, dim * 4);
                _tile_loadd(7, tokens + 32, dim * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, &work.output[row][d], sizeof work.output[0]);
            _tile_stored(1, &work.output[row][d + 16], sizeof work.output[0]);
        }
}

// Adds the weighted values of a chunk to the output.
template <class Element>
void weigh_values_by_tiles(Workspace<Element>& work, int num_rows, const typename Element::Number* const* values,
                           int num_groups, int dim) {
    for (int row = 0; row < num_rows; ++row)
        if (work.rescale[row] != 1.0f)
            for (int d = 0; d < dim; d += WIDTH)
                store(&work.output[row][d], load(&work.output[row][d]) * work.rescale[row]);
    if (num_rows <= 16)
        add_groups(work, values, num_groups, dim);
    else
        add_gathered(work, num_rows, values, num_groups, dim);
}

#else

struct AttentionTiles {
    AttentionTiles() {}
};
template <class Element>
bool can_use_tiles(int) {
    return false;
}
template <class Element>
void score_by_tiles(Workspace<Element>&, int, const typename Element::Number* const*, int, int) {}
template <class Element>
void weigh_values_by_tiles(Workspace<Element>&, int, const typename Element::Number* const*, int, int) {}

#endif

}  // namespace inflight
