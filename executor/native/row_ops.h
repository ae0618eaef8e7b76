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
    // Several sums, because each waits for its previous addition.
    constexpr int NUM_SUMS = 4;
    Floats squares[NUM_SUMS] = {};
    const int64_t width = round_up(size, LANES);
    int64_t next = 0;
    for (; next + NUM_SUMS * WIDTH <= width; next += NUM_SUMS * WIDTH)
#pragma GCC unroll 4
        for (int i = 0; i < NUM_SUMS; ++i) {
            const Floats x = load(from + next + i * WIDTH);
            squares[i] = fused_add(squares[i], x, x);
        }
    for (; next < width; next += WIDTH) squares[0] = fused_add(squares[0], load(from + next), load(from + next));
    const Floats sum = (squares[0] + squares[1]) + (squares[2] + squares[3]);
    const float factor = 1.0f / std::sqrt(sum_of(sum) / size + epsilon);
    for (int64_t i = 0; i < width; i += WIDTH) put(i, load(from + i) * factor * load(weight + i));
}

// Rotary embedding of a head in place (Su et al. 2021): number i is rotated with number i + half.
inline void rotate_row(float* __restrict__ x, const float* __restrict__ cosines, const float* __restrict__ sines,
                       int64_t half) {
    int64_t i = 0;
    for (; i + WIDTH <= half; i += WIDTH) {
        const Floats first = load(x + i), second = load(x + half + i);
        const Floats cosine = load(cosines + i), sine = load(sines + i);
        store(x + i, fused_add(-(second * sine), first, cosine));
        store(x + half + i, fused_add(first * sine, second, cosine));
    }
    for (; i < half; ++i) {
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
    const Floats limited = larger(exponent, all(-87.0f));
    const Floats divisor = 1.0f + power_of_two<Element>(limited * -LOG2_E);
#if defined(INFLIGHT_AMX) && defined(__AVX512F__)
    // To 14 bits, where a division takes 10 cycles in place of 2 (Intel); the result becomes a bfloat16.
    if constexpr (Element::PAIR > 1) return gate * (Floats)_mm512_rcp14_ps((__m512)divisor) * up;
#endif
    return gate / divisor * up;
}

// Of gpt-oss: g * sigmoid(factor * g) * (u + 1) of a gate g up to `limit` and u between plus and minus that.
template <class Element>
ALWAYS_INLINE Floats clamped(Floats gate, Floats up, float factor, float limit) {
    const Floats low = -larger(-gate, all(-limit)), within = larger(-larger(-up, all(-limit)), all(-limit));
    const Floats exponent = larger(low * factor, all(-87.0f));
    return low / (1.0f + power_of_two<Element>(exponent * -LOG2_E)) * (within + 1.0f);
}

// max(x, 0)^2
ALWAYS_INLINE Floats squared_relu(Floats x) {
    const Floats positive = larger(x, all(0.0f));
    return positive * positive;
}

}  // namespace inflight
