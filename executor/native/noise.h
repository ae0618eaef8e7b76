// Random numbers for sampling: Philox4x32-10, and the Gumbel noise made of its words.
//
// Philox is computed for several counters in a vector, one in the low half of every 64-bit lane; the high half of a
// product is ignored. Noise is computed in double precision and rounded, so that it is the same on every processor.
// That is slow, and an upper bound of a few instructions shows for which of many words it is needed.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "vectors.h"

namespace inflight {
namespace sampling {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "two 32-bit words are written as one of 64 bits");

constexpr int GROUP = 64;
constexpr int GROUP_VECTORS = GROUP / WIDTH;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

typedef float HalfFloats __attribute__((vector_size(2 * WIDTH)));
typedef double Doubles __attribute__((vector_size(4 * WIDTH)));
typedef uint64_t Longs __attribute__((vector_size(4 * WIDTH)));

ALWAYS_INLINE Floats larger(Floats x, Floats y) { return (x > y) ? x : y; }  // y where x is NaN
ALWAYS_INLINE Floats as_floats(Ints x) { return __builtin_convertvector(x, Floats); }

ALWAYS_INLINE Doubles half_of(const Floats& whole, int index) {
    HalfFloats half;
    std::memcpy(&half, reinterpret_cast<const char*>(&whole) + index * sizeof half, sizeof half);
    return __builtin_convertvector(half, Doubles);
}

ALWAYS_INLINE bool any(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    const Longs lanes = (Longs)mask;
    uint64_t bits = 0;
    for (int lane = 0; lane < WIDTH / 2; ++lane) bits |= lanes[lane];
    return bits != 0;
#endif
}

// e^x to about one unit in the last place for -87 <= x <= 0; 0 below, and for a NaN. More precise than the one for
// attention, whose error grows with x, because tens of thousands of small weights are summed here.
ALWAYS_INLINE Floats small_exponential(Floats x) {
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
    const Floats shifted = x * LOG2_E + to_integer;
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

constexpr int COUNTERS = WIDTH / 2;  // side by side

// Products of the low halves of `x` with a 32-bit number.
ALWAYS_INLINE Longs multiply_low(Longs x, uint32_t factor) {
#if defined(__AVX512F__)
    return (Longs)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
    return (Longs)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#else
    return (x & 0xffffffffu) * (uint64_t)factor;
#endif
}

// Counters side by side, one in the low half of every lane; the high halves are undefined.
struct Counters {
    Longs word[4];
};

// Philox4x32-10 (see philox.py) of NUM vectors of counters; several at once hide the latency of a product.
template <int NUM>
ALWAYS_INLINE void philox(Counters (&counters)[NUM], uint64_t key) {
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

// Lanes of `x` and of `y` alternately: the even ones, or the odd ones.
template <int ODD, size_t... LANE>
ALWAYS_INLINE Words pick(Longs x, Longs y, std::index_sequence<LANE...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return (Words)__builtin_shufflevector(x, y, (int)(LANE % 2 == 0 ? LANE + ODD : COUNTERS + LANE - 1 + ODD)...);
#else
    return (Words)__builtin_shuffle(x, y, Longs{(LANE % 2 == 0 ? LANE + ODD : COUNTERS + LANE - 1 + ODD)...});
#endif
}

// The words of `4 * COUNTERS` ids in their order. The first half of the counters is in the even lanes (eight lanes hold
// 0 4 1 5 2 6 3 7), so that pairs of words are only permuted within 128 bits.
ALWAYS_INLINE void put_words(const Counters& x, Words* to) {
    constexpr std::make_index_sequence<COUNTERS> lanes;
    const Longs front = (x.word[0] & 0xffffffffu) | (x.word[1] << 32);
    const Longs back = (x.word[2] & 0xffffffffu) | (x.word[3] << 32);
    to[0] = pick<0>(front, back, lanes);
    to[1] = pick<1>(front, back, lanes);
}

// The random words of the ids [64 * group, 64 * group + 64): word `id % 4` of counter (id / 4, output index, 0, 0).
ALWAYS_INLINE void group_words(int64_t group, uint64_t seed, int64_t output_index, Words (&words)[GROUP_VECTORS]) {
    Longs lane = {};
    for (int i = 0; i < COUNTERS; ++i) lane[i] = i % 2 * (COUNTERS / 2) + i / 2;
    const Longs none = {}, first = lane + (uint64_t)(group * GROUP / 4), index = none + (uint64_t)output_index;
    for (int done = 0; done < GROUP / 4; done += 2 * COUNTERS) {
        Counters counters[2] = {{{first + done, index, none, none}}, {{first + (done + COUNTERS), index, none, none}}};
        philox(counters, seed);
        put_words(counters[0], words + done * 4 / WIDTH);
        put_words(counters[1], words + done * 4 / WIDTH + 2);
    }
}

// -log(-log(1 - u)), u being the middle of the word's interval.
inline float gumbel(uint32_t word) {
    const float uniform = std::min(((float)word + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
    return (float)-std::log(-std::log1p(-(double)uniform));
}

// Upper bound of the noise of each word, at most 0.1 above it where it is large. -log(-log(1 - u)) <= -log(u), and read
// as an integer a float is below the line of its logarithm: 2^23 * (log2(x) + 127) >= bits(x). The last bit of the word
// is dropped, which lowers u and allows the signed conversion that every processor has; 1e-3 covers rounding.
ALWAYS_INLINE Floats noise_bound(Words words) {
    constexpr float LN2 = 0.693147181f;
    const Floats uniform = as_floats((Ints)(words >> 1)) + 0.25f;  // at most 2^31 u
    return (31 + 127) * LN2 + 1e-3f - as_floats((Ints)uniform) * (LN2 * 0x1p-23f);
}
constexpr float LARGEST_BOUND = 23.0f;  // of word 0: 33 log(2), and rounding

}  // namespace sampling
}  // namespace inflight
