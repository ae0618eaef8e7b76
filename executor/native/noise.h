// Random numbers for sampling: Philox4x32-10, and the Gumbel noise that is made of its words.
//
// Philox is done for eight counters in a vector, one in the low half of every 64-bit lane; what a product leaves in the high
// half is never looked at. Noise is computed in double precision and rounded, so that it is the same on every processor; it is
// slow, and an upper bound that takes a few instructions says for which of many words it is needed.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__SSE2__) && !defined(INFLIGHT_PLAIN)
#include <immintrin.h>
#endif

#define INFLIGHT_INLINE inline __attribute__((always_inline))

namespace inflight {
namespace sampling {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "two 32-bit words are written as one of 64 bits");

constexpr int LANES = 16;
constexpr int VECTORS = 4;
constexpr int GROUP = VECTORS * LANES;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(64)));
typedef float UnalignedFloats __attribute__((vector_size(64), aligned(4), may_alias));
typedef float HalfFloats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint64_t Longs __attribute__((vector_size(64)));

INFLIGHT_INLINE Floats load(const float* from) { return *reinterpret_cast<const UnalignedFloats*>(from); }
INFLIGHT_INLINE void store(float* to, Floats value) { *reinterpret_cast<UnalignedFloats*>(to) = value; }
INFLIGHT_INLINE Floats all(float value) { return value - Floats{}; }
INFLIGHT_INLINE Floats larger(Floats x, Floats y) { return (x > y) ? x : y; }  // y where x is NaN
INFLIGHT_INLINE Floats as_floats(Ints x) { return __builtin_convertvector(x, Floats); }

template <class Half, class Whole>
INFLIGHT_INLINE Half half_of(const Whole& whole, int index) {
    Half half;
    std::memcpy(&half, reinterpret_cast<const char*>(&whole) + index * sizeof half, sizeof half);
    return half;
}

INFLIGHT_INLINE float largest_lane(Floats x) {
    typedef float Quarter __attribute__((vector_size(16)));
    const HalfFloats low = half_of<HalfFloats>(x, 0), high = half_of<HalfFloats>(x, 1);
    const HalfFloats eight = (low > high) ? low : high;
    const Quarter first = half_of<Quarter>(eight, 0), second = half_of<Quarter>(eight, 1);
    const Quarter four = (first > second) ? first : second;
    return std::max(std::max(four[0], four[1]), std::max(four[2], four[3]));
}

INFLIGHT_INLINE bool any(Ints mask) {
#if defined(__AVX512F__) && !defined(INFLIGHT_PLAIN)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    const Longs bits = (Longs)mask;
    return ((bits[0] | bits[1]) | (bits[2] | bits[3]) | (bits[4] | bits[5]) | (bits[6] | bits[7])) != 0;
#endif
}

// e^x to about one unit in the last place for -87 <= x <= 0; 0 below, and for a NaN.
INFLIGHT_INLINE Floats exponential(Floats x) {
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    const Floats shifted = x * 1.44269504f + to_integer;
    const Floats n = shifted - to_integer;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats sum = all(1.0f / 720);
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const Ints exponent = ((Ints)shifted - (Ints)all(to_integer) + 127) << 23;
    return (x >= -87.0f) ? sum * (Floats)exponent : Floats{};
}

// ---- Random numbers ----

// Eight products of the low halves of `x` with a 32-bit number.
INFLIGHT_INLINE Longs multiply_low(Longs x, uint32_t factor) {
#if defined(__AVX512F__) && !defined(INFLIGHT_PLAIN)
    return (Longs)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__) && !defined(INFLIGHT_PLAIN)
    __m256i parts[2];
    std::memcpy(parts, &x, sizeof x);
    for (__m256i& part : parts) part = _mm256_mul_epu32(part, _mm256_set1_epi64x(factor));
    std::memcpy(&x, parts, sizeof x);
    return x;
#elif defined(__SSE2__) && !defined(INFLIGHT_PLAIN)
    __m128i parts[4];
    std::memcpy(parts, &x, sizeof x);
    for (__m128i& part : parts) part = _mm_mul_epu32(part, _mm_set1_epi64x(factor));
    std::memcpy(&x, parts, sizeof x);
    return x;
#else
    return (x & 0xffffffffu) * (uint64_t)factor;
#endif
}

// Eight counters side by side, one in the low half of every lane; the high halves hold anything.
struct Counters {
    Longs word[4];
};

// Philox4x32-10 (see philox.py) of NUM times eight counters; several at once hide the time that a product takes.
template <int NUM>
INFLIGHT_INLINE void philox(Counters (&counters)[NUM], uint64_t key) {
    uint32_t low = (uint32_t)key, high = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; ++round) {
        for (Counters& x : counters) {
            const Longs first = multiply_low(x.word[0], 0xD2511F53u), second = multiply_low(x.word[2], 0xCD9E8D57u);
            x.word[0] = (second >> 32) ^ x.word[1] ^ (uint64_t)low;
            x.word[2] = (first >> 32) ^ x.word[3] ^ (uint64_t)high;
            x.word[1] = second;
            x.word[3] = first;
        }
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
}

template <int... LANE>
INFLIGHT_INLINE Words pick(Longs x, Longs y) {
#if defined(__clang__) || __GNUC__ >= 12
    return (Words)__builtin_shufflevector(x, y, LANE...);
#else
    return (Words)__builtin_shuffle(x, y, Longs{LANE...});
#endif
}

// The words of 32 ids in their order. Lanes hold the counters 0 4 1 5 2 6 3 7, so that pairs of words only change places
// inside 128 bits.
INFLIGHT_INLINE void put_words(const Counters& x, Words* to) {
    const Longs front = (x.word[0] & 0xffffffffu) | (x.word[1] << 32);
    const Longs back = (x.word[2] & 0xffffffffu) | (x.word[3] << 32);
    to[0] = pick<0, 8, 2, 10, 4, 12, 6, 14>(front, back);
    to[1] = pick<1, 9, 3, 11, 5, 13, 7, 15>(front, back);
}

// The random words of the ids [64 * group, 64 * group + 64): word `id % 4` of counter (id / 4, output index, 0, 0).
INFLIGHT_INLINE void group_words(int64_t group, uint64_t seed, int64_t output_index, Words (&words)[VECTORS]) {
    const Longs lane = {0, 4, 1, 5, 2, 6, 3, 7}, none = {};
    const Longs first = lane + (uint64_t)(group * GROUP / 4), index = none + (uint64_t)output_index;
    Counters counters[2] = {{{first, index, none, none}}, {{first + 8, index, none, none}}};
    philox(counters, seed);
    put_words(counters[0], words);
    put_words(counters[1], words + 2);
}

// -log(-log(1 - u)), u being the middle of the word's interval.
inline float gumbel(uint32_t word) {
    const float uniform = std::min(((float)word + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
    return (float)-std::log(-std::log1p(-(double)uniform));
}

// At least the noise of each word, at most 0.1 more where it is large. -log(-log(1 - u)) <= -log(u), and read as an integer
// a float lies below the line of its logarithm: 2^23 * (log2(x) + 127) >= bits(x). The last bit of the word is left out,
// which lowers u and lets the conversion be the signed one that every processor has; 1e-3 is for rounding.
INFLIGHT_INLINE Floats noise_bound(Words words) {
    constexpr float LN2 = 0.693147181f;
    const Floats uniform = as_floats((Ints)(words >> 1)) + 0.25f;  // at most 2^31 u
    return (31 + 127) * LN2 + 1e-3f - as_floats((Ints)uniform) * (LN2 * 0x1p-23f);
}
constexpr float LARGEST_BOUND = 23.0f;  // of word 0: 33 log(2), and rounding

}  // namespace sampling
}  // namespace inflight
