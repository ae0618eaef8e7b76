// Routing of rows to experts: a mixture of feed-forward layers, of which each row uses a few.
// Source of the correction that only chooses: DeepSeek-V3, arXiv 2412.19437.
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

// How the experts of a row are chosen, and their weights. Without `correction` those with the largest weights are.
struct Router {
    const float* weights;     // [num_experts, width]
    const float* bias;        // [num_experts], added to the scores; or null
    const float* correction;  // [num_experts], added to the weights for the choice alone; or null
    bool has_sigmoid;         // weights are sigmoids of the scores, not their softmax
    bool normalizes;          // the weights of the chosen add up to `scale`
    float epsilon;            // added to their sum before that, with sigmoids
    float scale;
};

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
    float* shared_weights = nullptr;  // [num_rows], of the shared expert, if it has a gate

    static float product(const float* x, const float* y, int64_t width) {
        Floats sums = {};
        for (int64_t i = 0; i < width; i += WIDTH) sums += load(x + i) * load(y + i);
        return sum_of(sums);
    }

    void place(Cursor& cursor, int64_t num_rows, int64_t choices_of_row) {
        shared_weights = cursor.take<float>(num_rows);
        num_choices = choices_of_row;
        experts = cursor.take<int32_t>(num_rows * num_choices);
        weights = cursor.take<float>(num_rows * num_choices);
        places = cursor.take<int64_t>(num_rows * num_choices);
    }

    // Chooses the experts of a row `[width]` by its products with those of the router. `scores[num_experts]` and
    // `corrected`, of the same size, are overwritten. The lowest of equal experts is first. A row that is not a number
    // chooses some experts, and its weights are not numbers.
    void choose(int64_t row, const float* x, const Router& router, int64_t width, std::vector<float>& scores,
                std::vector<float>& corrected) const {
        float largest = -INFINITY, sum_of_all = 0, sum_of_chosen = 0;
        for (size_t expert = 0; expert < scores.size(); ++expert) {
            scores[expert] = product(x, router.weights + expert * width, width);
            if (router.bias != nullptr) scores[expert] += router.bias[expert];
            largest = std::max(largest, scores[expert]);
        }
        if (router.has_sigmoid)
            for (float& score : scores) score = 1.0f / (1.0f + std::exp(-score));
        else
            for (float& score : scores) sum_of_all += score = std::exp(score - largest);
        for (size_t expert = 0; expert < scores.size(); ++expert)
            corrected[expert] = scores[expert] + (router.correction == nullptr ? 0.0f : router.correction[expert]);
        int32_t* chosen = experts + row * num_choices;
        float* weight = weights + row * num_choices;
        for (int64_t i = 0; i < num_choices; ++i) {
            chosen[i] = (int32_t)(std::max_element(corrected.begin(), corrected.end()) - corrected.begin());
            weight[i] = scores[chosen[i]];
            sum_of_chosen += weight[i];
            corrected[chosen[i]] = -INFINITY;
        }
        float divisor = router.has_sigmoid ? 1.0f : sum_of_all;
        if (router.normalizes) divisor = sum_of_chosen + router.epsilon;
        for (int64_t i = 0; i < num_choices; ++i) weight[i] = weight[i] / divisor * router.scale;
    }

    // The weight of the shared expert of a row: the sigmoid of a product with `gate[width]`.
    void weigh_shared(int64_t row, const float* x, const float* gate, int64_t width) const {
        shared_weights[row] = 1.0f / (1.0f + std::exp(-product(x, gate, width)));
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
