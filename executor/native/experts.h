// Routing of rows to experts: a mixture of feed-forward layers, of which each row uses a few.
//
// A router scores the experts of a row. The rows of an expert are gathered next to each other and multiplied with its
// weights, so that a weight is read once per step and only if a row uses it. What they yield is added in the order in
// which the row chose its experts, so that a row's result does not depend on which rows share its experts.

#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "arena.h"
#include "matmul.h"
#include "vectors.h"

namespace inflight {

// The rows of an expert: [first, first + num_rows) of those gathered.
struct ExpertRows {
    int64_t expert, first, num_rows;
};

// The choices of a step. Choice i of a row is at row * num_choices + i.
struct Routing {
    int64_t num_choices = 0;     // of a row
    int32_t* experts = nullptr;  // [num_rows * num_choices], best first
    float* weights = nullptr;    // the same shape
    int64_t* places = nullptr;   // the same shape, the index among the gathered rows

    void place(Cursor& cursor, int64_t num_rows, int64_t choices_of_row) {
        num_choices = choices_of_row;
        experts = cursor.take<int32_t>(num_rows * num_choices);
        weights = cursor.take<float>(num_rows * num_choices);
        places = cursor.take<int64_t>(num_rows * num_choices);
    }

    // Chooses the experts of a row `[width]` by the softmax of its products with `router[num_experts, width]`. With
    // `normalizes`, the weights of the chosen add up to 1. `scores[num_experts]` is overwritten. The lowest of equal
    // experts is first. A row that is not a number chooses some experts, and its weights are not numbers.
    void choose(int64_t row, const float* x, const float* router, int64_t width, std::vector<float>& scores,
                bool normalizes) const {
        float largest = -INFINITY, sum_of_all = 0, sum_of_chosen = 0;
        for (size_t expert = 0; expert < scores.size(); ++expert) {
            Floats sums = {};
            for (int64_t i = 0; i < width; i += WIDTH) sums += load(x + i) * load(router + expert * width + i);
            scores[expert] = sum_of(sums);
            largest = std::max(largest, scores[expert]);
        }
        for (float& score : scores) sum_of_all += score = std::exp(score - largest);
        int32_t* chosen = experts + row * num_choices;
        float* weight = weights + row * num_choices;
        for (int64_t i = 0; i < num_choices; ++i) {
            chosen[i] = (int32_t)(std::max_element(scores.begin(), scores.end()) - scores.begin());
            weight[i] = scores[chosen[i]];
            sum_of_chosen += weight[i];
            scores[chosen[i]] = -1;
        }
        for (int64_t i = 0; i < num_choices; ++i) weight[i] /= normalizes ? sum_of_chosen : sum_of_all;
    }

    // Orders the choices of `num_rows` rows by expert. `groups` gets the experts that have rows, and has capacity for
    // all; `next[num_experts]` is overwritten.
    void group(int64_t num_rows, std::vector<ExpertRows>& groups, std::vector<int64_t>& next) const {
        std::fill(next.begin(), next.end(), 0);
        groups.clear();
        const int64_t count = num_rows * num_choices;
        for (int64_t i = 0; i < count; ++i) ++next[experts[i]];
        int64_t first = 0;
        for (size_t expert = 0; expert < next.size(); ++expert) {
            const int64_t rows = next[expert];
            if (rows > 0) groups.push_back({(int64_t)expert, first, rows});
            next[expert] = first;
            first += rows;
        }
        for (int64_t i = 0; i < count; ++i) places[i] = next[experts[i]]++;
    }
};

}  // namespace inflight
