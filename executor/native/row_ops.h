// Operations on single rows between the products: norms, rotary embedding, activations.

#pragma once

#include <cmath>

#include "vectors.h"

namespace inflight {

// Root mean square norm of `size` numbers: x / sqrt(mean(x^2) + epsilon) * weight (Zhang & Sennrich 2019). In `from`
// the numbers behind them up to a multiple of 16 must be zero.
//
// Calls `put(i, x)` with `WIDTH` results at a time, which may overwrite `from`.
template <class Put>
ALWAYS_INLINE void norm_row(const float* from, const float* weight, int64_t size, float epsilon, const Put& put) {
    Floats squares = {};
    const int64_t width = round_up(size, LANES);
    for (int64_t i = 0; i < width; i += WIDTH) {
        const Floats x = load(from + i);
        squares += x * x;
    }
    const float factor = 1.0f / std::sqrt(sum_of(squares) / size + epsilon);
    for (int64_t i = 0; i < width; i += WIDTH) put(i, load(from + i) * factor * load(weight + i));
}

// Rotary embedding of a head in place (Su et al. 2021): number i is rotated with number i + half.
inline void rotate_row(float* __restrict__ x, const float* __restrict__ cosines, const float* __restrict__ sines,
                       int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float first = x[i], second = x[half + i];
        x[i] = first * cosines[i] - second * sines[i];
        x[half + i] = second * cosines[i] + first * sines[i];
    }
}

// silu(gate) * up, where silu(x) = x / (1 + e^-x); or with GELU in its approximation by tanh (Hendrycks & Gimpel 2016):
// x * (1 + tanh(z)) / 2 = x / (1 + e^-2z) with z = sqrt(2 / pi) * (x + 0.044715 * x^3).
template <class Element, bool HAS_GELU>
ALWAYS_INLINE Floats gated(Floats gate, Floats up) {
    const Floats exponent = HAS_GELU ? gate * (1.5957691f + 0.071354814f * gate * gate) : gate;
    const Floats negative = (exponent < -87.0f) ? all(87.0f) : -exponent;
    return gate / (1.0f + power_of_two<Element>(negative * LOG2_E)) * up;
}

}  // namespace inflight
