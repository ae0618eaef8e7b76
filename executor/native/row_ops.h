// What is done to single rows between the products: norms, rotary embedding, SiLU, rounding to the elements of a product.

#pragma once

#include <cmath>

#include "matmul.h"

namespace inflight {

// Rounds a row of floats (a multiple of 16 of them) to the elements of a product. For int8 each row has a scale of its own, so
// that its largest number becomes 127.
template <class Element>
void put_row(const float* from, int64_t width, const Rows<Element>& to, int64_t row) {
    typename Element::Number* numbers = to.row(row);
    if constexpr (Element::PAIR == 4) {
        Floats largest = {};
        for (int64_t i = 0; i < width; i += WIDTH) {
            const Floats x = load(from + i);
            const Floats size = (x < 0.0f) ? -x : x;
            largest = (size > largest) ? size : largest;
        }
        const float scale = largest_of(largest) / 127.0f;
        const float inverse = scale > 0 ? 1.0f / scale : 0.0f;
        to.scales[row] = scale;
        for (int64_t i = 0; i < width; i += WIDTH) {
            const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
            const Ints rounded = (Ints)(load(from + i) * inverse + to_integer) - (Ints)all(to_integer);
            typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
            const Bytes bytes = __builtin_convertvector(rounded, Bytes);
            std::memcpy(numbers + i, &bytes, sizeof bytes);
        }
    } else {
        for (int64_t i = 0; i < width; i += WIDTH) Element::put(numbers + i, load(from + i));
    }
}

// One column of a weight in int8, its largest number 127; returns what a unit is worth.
template <class Element, class Weight>
float narrow_column(const typename Element::Number* from, int64_t depth, typename Weight::Number* to) {
    float largest = 0;
    for (int64_t i = 0; i < depth; ++i) largest = std::max(largest, std::fabs(Element::get(from[i])));
    const float scale = largest / 127.0f;
    for (int64_t i = 0; i < depth; ++i)
        to[i] = (typename Weight::Number)(scale > 0 ? std::lrint(Element::get(from[i]) / scale) : 0);
    return scale;
}

// Root mean square norm of `size` numbers: x / sqrt(mean(x^2) + epsilon) * weight (Zhang & Sennrich 2019). What follows them up to
// a multiple of 16 must be zero in `from`.
inline void norm_row(const float* from, const float* weight, int64_t size, float epsilon, float* to) {
    Floats squares = {};
    const int64_t width = round_up(size, LANES);
    for (int64_t i = 0; i < width; i += WIDTH) {
        const Floats x = load(from + i);
        squares += x * x;
    }
    const float factor = 1.0f / std::sqrt(sum_of(squares) / size + epsilon);
    for (int64_t i = 0; i < width; i += WIDTH) store(to + i, load(from + i) * factor * load(weight + i));
}

// Rotary embedding of a head in place (Su et al. 2021): number i turns with number i + half.
inline void rotate_row(float* __restrict__ x, const float* __restrict__ cosines, const float* __restrict__ sines,
                       int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float first = x[i], second = x[half + i];
        x[i] = first * cosines[i] - second * sines[i];
        x[half + i] = second * cosines[i] + first * sines[i];
    }
}

// silu(gate) * up, where silu(x) = x / (1 + e^-x).
ALWAYS_INLINE Floats gated(Floats gate, Floats up) {
    const Floats negative = (gate < -87.0f) ? all(87.0f) : -gate;
    return gate / (1.0f + exponential(negative)) * up;
}

}  // namespace inflight
