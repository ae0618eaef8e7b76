// Vectors of the target's width, and the element types that the kernels are written for.
//
// Data is in groups of 16 columns (or tokens), and a vector holds one number of WIDTH of them, so no sum runs across a
// vector. GCC keeps vectors wider than the target's in memory instead of registers. An element type defines how many
// numbers along the summed dimension share a lane: 1 for float32, 2 for bfloat16, whose dot-product instruction takes
// pairs. Instructions that the target lacks are replaced by plain arithmetic.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define INFLIGHT_DPBF16 1
#endif
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define INFLIGHT_AMX 1
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace inflight {

constexpr int LANES = 16;  // columns or tokens of a group, on every target
constexpr int64_t NO_TOKEN = -1;  // of a row without a usable logit; executor/engine/runner.py
constexpr int64_t ALL_EXCLUDED = -2;  // of a row whose usable logits are all banned; executor/scheduler/sequence.py
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int VECTORS = LANES / WIDTH;  // of a group

// GCC's vector types, split into those of the machine.
typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef float UnalignedFloats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t UnalignedWords __attribute__((vector_size(4 * WIDTH), aligned(2), may_alias));

ALWAYS_INLINE Floats load(const float* from) { return *reinterpret_cast<const UnalignedFloats*>(from); }
ALWAYS_INLINE void store(float* to, Floats value) { *reinterpret_cast<UnalignedFloats*>(to) = value; }
ALWAYS_INLINE Floats all(float value) { return value - Floats{}; }

// sum + x * y, rounded once where the target can do so. The compiler decides about an expression in each place apart,
// so that one row and several, or one rank and several, might get different bits.
ALWAYS_INLINE Floats fused_add(Floats sum, Floats x, Floats y) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#elif defined(__FP_FAST_FMAF)
    for (int lane = 0; lane < WIDTH; ++lane) sum[lane] = __builtin_fmaf(x[lane], y[lane], sum[lane]);
    return sum;
#else
    return sum + x * y;
#endif
}

// The larger number of each lane, of NaN and a number the second one.
ALWAYS_INLINE Floats larger(Floats x, Floats y) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return (x > y) ? x : y;
#endif
}

ALWAYS_INLINE Ints larger(Ints x, Ints y) { return (x > y) ? x : y; }

ALWAYS_INLINE float as_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounds to nearest even; a NaN stays one.
ALWAYS_INLINE Words round_to_bfloat16(Floats value) {
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (value == value) ? rounded : (bits >> 16) | 0x40u;
}

ALWAYS_INLINE Floats as_floats(Floats sums) { return sums; }
ALWAYS_INLINE Floats as_floats(Ints sums) { return __builtin_convertvector(sums, Floats); }
// The magnitudes of numbers in the order of integers: a NaN is above all.
ALWAYS_INLINE Ints magnitudes(Floats value) { return (Ints)value & 0x7fffffff; }

struct Float32 {
    using Number = float;
    using Unit = float;
    using Vector = Floats;
    using Sum = Floats;
    static constexpr int PAIR = 1;
    static ALWAYS_INLINE Vector load_units(const Number* from) { return load(from); }
    static ALWAYS_INLINE Vector load_units(const int8_t* from) {
        typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
        Bytes bytes;
        std::memcpy(&bytes, from, sizeof bytes);
        return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
    }
    static ALWAYS_INLINE Floats multiply_add(Floats sum, Unit unit, Vector units) {
        return fused_add(sum, all(unit), units);
    }
    static ALWAYS_INLINE void put(Number* to, Floats value) { store(to, value); }
    static ALWAYS_INLINE void put_two(Number* to, Floats first, Floats second) {
        put(to, first);
        put(to + WIDTH, second);
    }
    static ALWAYS_INLINE float get(Number number) { return number; }
    static ALWAYS_INLINE Floats load_floats(const Number* from) { return load(from); }
};

struct BFloat16 {
    using Number = uint16_t;
    using Unit = uint32_t;  // two numbers, the first in the low half
    using Vector = Words;
    using Sum = Floats;
    static constexpr int PAIR = 2;
    static ALWAYS_INLINE Vector load_units(const Number* from) {
        return *reinterpret_cast<const UnalignedWords*>(from);
    }
    static ALWAYS_INLINE Floats multiply_add(Floats sum, Unit unit, Vector units) {
#ifdef INFLIGHT_DPBF16
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)unit), (__m512bh)units);
#else
        const Floats low = (Floats)(units << 16), high = (Floats)(units & 0xffff0000u);
        return fused_add(fused_add(sum, all(as_float(unit << 16)), low), all(as_float(unit & 0xffff0000u)), high);
#endif
    }
    static ALWAYS_INLINE void put(Number* to, Floats value) {
#ifdef INFLIGHT_DPBF16
        _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh((__m512)value));
#else
        const Words words = round_to_bfloat16(value);
        for (int lane = 0; lane < WIDTH; ++lane) to[lane] = (Number)words[lane];
#endif
    }
    // Puts two vectors, one behind the other.
    static ALWAYS_INLINE void put_two(Number* to, Floats first, Floats second) {
#ifdef INFLIGHT_DPBF16
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
        put(to, first);
        put(to + WIDTH, second);
#endif
    }
    static ALWAYS_INLINE float get(Number number) { return as_float((uint32_t)number << 16); }
    static ALWAYS_INLINE Floats load_floats(const Number* from) {
#if defined(__AVX512F__)
        const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        return (Floats)_mm512_slli_epi32(words, 16);
#else
        typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
        Halves halves;
        std::memcpy(&halves, from, sizeof halves);
        return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
    }
};

// Integers of 16 bits, which are multiplied with int8. Their sums are exact, so they have no order.
struct Int16 {
    using Number = uint16_t;
    using Unit = uint32_t;  // two numbers, the first in the low half
    using Vector = Words;
    using Sum = Ints;
    static constexpr int PAIR = 2;
    static constexpr float LARGEST = 32767;
    static ALWAYS_INLINE Vector load_units(const int8_t* from) {
        typedef int8_t Bytes __attribute__((vector_size(2 * WIDTH)));
        typedef int16_t Shorts __attribute__((vector_size(4 * WIDTH)));
        Bytes bytes;
        std::memcpy(&bytes, from, sizeof bytes);
        return (Vector)__builtin_convertvector(bytes, Shorts);
    }
    static ALWAYS_INLINE Ints multiply_add(Ints sum, Unit unit, Vector units) {
#if defined(__AVX512VNNI__)
        return (Ints)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32((int)unit), (__m512i)units);
#elif defined(__AVX512BW__)
        return sum + (Ints)_mm512_madd_epi16(_mm512_set1_epi32((int)unit), (__m512i)units);
#elif defined(__AVX2__)
        return sum + (Ints)_mm256_madd_epi16(_mm256_set1_epi32((int)unit), (__m256i)units);
#else
        const Ints low = (Ints)(units << 16) >> 16, high = (Ints)units >> 16;
        return sum + (int16_t)unit * low + ((int32_t)unit >> 16) * high;
#endif
    }
    // Rounds numbers of at most LARGEST to the nearest integers, even ones of two.
    static ALWAYS_INLINE void put(Number* to, Floats value) {
        typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
        const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
        const Halves halves = __builtin_convertvector((Words)(value + to_integer), Halves);
        std::memcpy(to, &halves, sizeof halves);
    }
};

// 2^x, 0 where that is too small to matter: x = n + r, a polynomial in r, n into the exponent. To about one unit in the
// last place of a float32. If the result becomes a bfloat16 (8 bits), four terms of the polynomial suffice.
template <class Element = Float32>
ALWAYS_INLINE Floats power_of_two(Floats x) {
#if defined(INFLIGHT_AMX) && defined(__AVX512DQ__)
    // Fewer instructions on processors with AMX: r is at least 0, and the terms have the least relative error for it.
    if constexpr (Element::PAIR > 1) {
        const Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        Floats sum = fused_add(all(2.2606716e-1f), r, all(7.8024523e-2f));
        sum = fused_add(all(6.9583354e-1f), r, sum);
        sum = fused_add(all(9.9992522e-1f), r, sum);
        return (Floats)_mm512_scalef_ps((__m512)sum, (__m512)x);
    }
#endif
#if defined(__AVX512F__)
    const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    const Floats shifted = x + to_integer;
    const Floats n = shifted - to_integer;
#endif
    const Floats r = x - n;
    Floats sum;
    if constexpr (Element::PAIR == 1) {
        sum = all(1.5403530e-4f);
        sum = sum * r + 1.3333558e-3f;
        sum = sum * r + 9.6181291e-3f;
        sum = sum * r + 5.5504109e-2f;
    } else {
        sum = all(5.5504109e-2f);
    }
    sum = sum * r + 2.4022651e-1f;
    sum = sum * r + 6.9314718e-1f;
    sum = sum * r + 1.0f;
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)sum, (__m512)n);
#else
    const Ints exponent = ((Ints)shifted - (Ints)all(to_integer) + 127) << 23;
    return (x < -126.0f) ? Floats{} : sum * (Floats)exponent;
#endif
}

constexpr float LOG2_E = 1.44269504f;

ALWAYS_INLINE Floats exponential(Floats x) { return power_of_two(x * LOG2_E); }

ALWAYS_INLINE Floats soft_capped(Floats x, float cap) {
    const Floats ratio = x / cap;
    const Floats e = exponential((ratio > 0.0f) ? -2.0f * ratio : 2.0f * ratio);
    const Floats magnitude = cap * (1.0f - e) / (1.0f + e);
    return (ratio > 0.0f) ? magnitude : -magnitude;
}

ALWAYS_INLINE constexpr int64_t round_up(int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

template <class Element>
ALWAYS_INLINE typename Element::Unit unit_at(const typename Element::Number* numbers, int64_t index) {
    typename Element::Unit unit;
    std::memcpy(&unit, numbers + index * Element::PAIR, sizeof unit);
    return unit;
}

ALWAYS_INLINE float sum_of(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float sum = 0;
    for (int lane = 0; lane < WIDTH; ++lane) sum += x[lane];
    return sum;
#endif
}

ALWAYS_INLINE int32_t sum_of(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int lane = 0; lane < WIDTH; ++lane) sum += x[lane];
    return sum;
#endif
}

ALWAYS_INLINE float largest_of(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float largest = x[0];
    for (int lane = 1; lane < WIDTH; ++lane) largest = x[lane] > largest ? x[lane] : largest;
    return largest;
#endif
}

ALWAYS_INLINE int32_t largest_of(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t largest = x[0];
    for (int lane = 1; lane < WIDTH; ++lane) largest = x[lane] > largest ? x[lane] : largest;
    return largest;
#endif
}

// Sums and maximums of several vectors at a time, with the same bits as of one.
constexpr int EIGHT = 8;

#if defined(__AVX512F__)
// Four quarters of two vectors: two of each.
template <int WHICH, class Vector>
ALWAYS_INLINE Vector quarters(Vector x, Vector y) {
    return (Vector)_mm512_shuffle_f32x4((__m512)x, (__m512)y, WHICH);
}

// Combines the lanes of each vector, those that are the farthest apart first, like `_mm512_reduce_add_ps`.
template <class Vector, class Combine>
ALWAYS_INLINE Vector combined_lanes(const Vector (&x)[EIGHT], const Combine& combine) {
    constexpr int LOWER = 0x44, UPPER = 0xee, EVEN = 0x88, ODD = 0xdd;
    Vector halves[4], fours[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const Vector first = x[2 * i], second = x[2 * i + 1];
        halves[i] = combine(quarters<UPPER>(first, second), quarters<LOWER>(first, second));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        const Vector first = halves[2 * i], second = halves[2 * i + 1];
        fours[i] = combine(quarters<ODD>(first, second), quarters<EVEN>(first, second));
    }
    const __m512d first = (__m512d)fours[0], second = (__m512d)fours[1];
    const Vector twos = combine((Vector)_mm512_unpackhi_pd(first, second), (Vector)_mm512_unpacklo_pd(first, second));
    const Vector ones = combine((Vector)_mm512_permute_ps((__m512)twos, 0xb1), twos);
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
    return (Vector)_mm512_permutexvar_ps(order, (__m512)ones);
}
#endif

// Writes `sum_of` each vector.
template <class Vector, int COUNT, class Number>
ALWAYS_INLINE void sums_of_each(const Vector (&x)[COUNT], Number* to) {
#if defined(__AVX512F__)
    if constexpr (COUNT == EIGHT) {
        const Vector sums = combined_lanes(x, [](Vector a, Vector b) { return a + b; });
        return _mm256_storeu_ps((float*)to, _mm512_castps512_ps256((__m512)sums));
    }
#endif
    for (int i = 0; i < COUNT; ++i) to[i] = sum_of(x[i]);
}

// Writes `largest_of` each vector of magnitudes.
template <int COUNT>
ALWAYS_INLINE void largest_of_each(const Ints (&x)[COUNT], float* to) {
#if defined(__AVX512F__)
    if constexpr (COUNT == EIGHT) {
        const Ints largest = combined_lanes(x, [](Ints a, Ints b) { return larger(a, b); });
        return _mm256_storeu_ps(to, _mm512_castps512_ps256((__m512)largest));
    }
#endif
    for (int i = 0; i < COUNT; ++i) to[i] = as_float((uint32_t)largest_of(x[i]));
}

ALWAYS_INLINE bool any_above(Floats x, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#else
    return largest_of(x) > bound;
#endif
}

}  // namespace inflight
