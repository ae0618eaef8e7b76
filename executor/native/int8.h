// Products of weights and activations in int8.
//
// Both are rounded in groups of 64 of their depth, each group of a column or row with a scale of its own. A group is
// first multiplied with a Hadamard matrix (Sylvester's, of plus and minus ones). That changes no product, as the
// transformed rows and columns have 64 times the product of the plain ones, but spreads a large number over its group,
// which then has a much smaller largest number to be rounded by (QuaRot, Ashkboos et al. 2024, does so with the heads).
//
// The products of a group are sums of integers, which are exact in every order. They are scaled and added in the order
// of the depth, so a row's product does not depend on the other rows. A weight is kept as an unsigned number, 128 above
// its value, because vector units multiply unsigned with signed bytes. What that adds depends on the row alone, and is
// in its `GroupScale`. AMX multiplies signed bytes, so with it a weight is kept as it is.

#pragma once

#include <cmath>
#include <type_traits>

#include "vectors.h"

namespace inflight {

constexpr int GROUP = 64;  // of the depth, with one scale
#ifdef INFLIGHT_AMX
constexpr int STORED_ZERO = 0;  // a weight of 0
#else
constexpr int STORED_ZERO = 128;
#endif

struct Int8 {
    using Number = int8_t;
    using Unit = int32_t;  // four numbers, the first in the lowest byte
    using Vector = Ints;
    using Sum = Ints;
    static constexpr int PAIR = 4;
    static ALWAYS_INLINE Vector load_units(const Number* from) {
        return (Ints)load(reinterpret_cast<const float*>(from));
    }
    // Adds the products of four signed numbers with the four unsigned ones of each lane.
    static ALWAYS_INLINE Ints multiply_add(Ints sum, Unit unit, Vector units) {
#if defined(__AVX512VNNI__)
        return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)units, _mm512_set1_epi32(unit));
#elif defined(__AVX512BW__)
        const __m512i left = _mm512_set1_epi32(unit), bytes = _mm512_set1_epi16(0xff);
        const __m512i even = _mm512_madd_epi16(_mm512_srai_epi16(_mm512_slli_epi16(left, 8), 8),
                                               _mm512_and_si512((__m512i)units, bytes));
        const __m512i odd = _mm512_madd_epi16(_mm512_srai_epi16(left, 8), _mm512_srli_epi16((__m512i)units, 8));
        return sum + (Ints)even + (Ints)odd;
#elif defined(__AVX2__)
        const __m256i left = _mm256_set1_epi32(unit), bytes = _mm256_set1_epi16(0xff);
        const __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(left, 8), 8),
                                               _mm256_and_si256((__m256i)units, bytes));
        const __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16(left, 8), _mm256_srli_epi16((__m256i)units, 8));
        return sum + (Ints)even + (Ints)odd;
#else
#pragma GCC unroll 4
        for (int byte = 0; byte < PAIR; ++byte)
            sum += (Ints)((Words)units >> (8 * byte) & 0xffu) * (int32_t)(int8_t)(unit >> (8 * byte));
        return sum;
#endif
    }
};

template <class Element>
constexpr bool IS_INT8 = std::is_same_v<Element, Int8>;

// Of a row's group: the scale, and what is added to a sum of products because weights are STORED_ZERO too large.
struct GroupScale {
    float scale;
    int32_t offset;
};

// Returns the numbers of a vector, those of lanes STRIDE apart exchanged.
template <int STRIDE>
ALWAYS_INLINE Floats exchanged(Floats x) {
#if defined(__clang__)
    Floats out;
    for (int lane = 0; lane < WIDTH; ++lane) out[lane] = x[lane ^ STRIDE];
    return out;
#else
    Ints lanes;
    for (int lane = 0; lane < WIDTH; ++lane) lanes[lane] = lane ^ STRIDE;
    return __builtin_shuffle(x, lanes);
#endif
}

// Replaces numbers that are STRIDE apart by their sum and difference. The result is the same for every width.
template <int STRIDE>
ALWAYS_INLINE void butterfly(Floats (&x)[GROUP / WIDTH]) {
    if constexpr (STRIDE < WIDTH) {
        Words signs;
        for (int lane = 0; lane < WIDTH; ++lane) signs[lane] = lane & STRIDE ? 0x80000000u : 0u;
#pragma GCC unroll 16
        for (int v = 0; v < GROUP / WIDTH; ++v)
            x[v] = exchanged<STRIDE>(x[v]) + (Floats)((Words)x[v] ^ signs);
    } else {
#pragma GCC unroll 16
        for (int v = 0; v < GROUP / WIDTH; ++v)
            if (!(v & STRIDE / WIDTH)) {
                const Floats first = x[v], second = x[v + STRIDE / WIDTH];
                x[v] = first + second;
                x[v + STRIDE / WIDTH] = first - second;
            }
    }
}

typedef Floats GroupVectors[GROUP / WIDTH];

// Transforms a group and returns its largest magnitude.
ALWAYS_INLINE float transform_group(const float* from, GroupVectors& x) {
#pragma GCC unroll 16
    for (int v = 0; v < GROUP / WIDTH; ++v) x[v] = load(from + v * WIDTH);
    butterfly<1>(x);
    butterfly<2>(x);
    butterfly<4>(x);
    butterfly<8>(x);
    butterfly<16>(x);
    butterfly<32>(x);
    Ints largest = {};
#pragma GCC unroll 16
    for (int v = 0; v < GROUP / WIDTH; ++v) largest = magnitudes(x[v]) > largest ? magnitudes(x[v]) : largest;
    return as_float((uint32_t)largest_of(largest));
}

constexpr float LARGEST_INT8 = 127, SMALLEST_MAGNITUDE = 1e-30f;  // below it numbers do not matter
constexpr float TO_INTEGER = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits

ALWAYS_INLINE bool can_be_scaled(float magnitude) { return magnitude > SMALLEST_MAGNITUDE && magnitude < INFINITY; }

// Rounds a group times `factor` to integers of a byte and returns their sum.
ALWAYS_INLINE int32_t round_vectors(const GroupVectors& x, float factor, int8_t* to) {
    [[maybe_unused]] typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
    Ints sums = {};
#pragma GCC unroll 16
    for (int v = 0; v < GROUP / WIDTH; ++v) {
        const Ints integers = (Ints)(x[v] * factor + TO_INTEGER) - (Ints)all(TO_INTEGER);
        sums += integers;
#if defined(__AVX512F__)
        _mm_storeu_si128((__m128i*)(to + v * WIDTH), _mm512_cvtepi32_epi8((__m512i)integers));
#else
        const Bytes bytes = __builtin_convertvector(integers, Bytes);
        std::memcpy(to + v * WIDTH, &bytes, sizeof bytes);
#endif
    }
    return sum_of(sums);
}

// Transforms a group of a row and rounds it, its largest number to 127. With a number that is not finite the scale is
// not a number, and so is every product with the group.
inline GroupScale round_group(const float* from, int8_t* to) {
    GroupVectors x;
    const float magnitude = transform_group(from, x);
    const float factor = can_be_scaled(magnitude) ? LARGEST_INT8 / magnitude : 0.0f;
    const int32_t sum = round_vectors(x, factor, to);
    // Unsigned, as a sum of what was not finite may be any number.
    const uint32_t offset = 0u - (uint32_t)STORED_ZERO * (uint32_t)sum;
    return {magnitude < INFINITY ? magnitude / LARGEST_INT8 : NAN, (int32_t)offset};
}

}  // namespace inflight
