// Products with weights that are numbers of 4 or 8 bits, with a scale for each group of the depth: whole numbers, which
// may have an offset too, or floating-point numbers, e2m1 ("FP4") and e4m3 ("FP8").
//
// They stay as they are in memory, and become Elements in registers, exactly: a code less a center is a small integer,
// and so is twice a number of FP4, which a table gives; the scales of FP4 are halves then. Numbers of FP8 have 4
// significant bits.
// The products of a group are added in float32, and then the group is scaled and shifted:
//
//     sum = Σ over groups of scale · (Σ (code - center) · x + shift · Σ x)
//
// so that a weight is never rounded, whatever its scale. A row's groups are added in the order of the depth and a
// group's products too, so a row's product does not depend on the other rows. Only with AMX and bfloat16 are weights
// rounded: scale · (code - center + shift) becomes bfloat16, and its products are those of a plain block. Tiles cannot
// scale a group's products, and without a scale their sums would leave the tiles after each group.
//
// A part may ask for rounded rows instead (llama.cpp's Q8_0 and Q8_1): each 32 numbers of a row, or 16 if groups are so
// small, become int8 with a scale of their own. Their products with codes, also those of FP4 by its table, are sums of
// integers, exact in every order. Tiles are not used for them, and FP8 has no such products.
//
// A block is 32 columns of a product, as in matmul.h, and of one format. Blocks of a matrix may differ, and some may be
// plain. A block has 32 float32 factors, and then for each group of the depth
//
//     [group_size * bits / 32 lanes, 32 columns] lanes, [32] scales, [32] shifts if there are any
//
// A lane of 32 bits has 8 codes of the depth, number 2i in the lower 16 bits at bit 4i and number 2i + 1 in the upper
// ones, or 4 codes of FP8, number 2i in the lower 16 bits at bit 8i, or 4 whole numbers of 8 bits in order, signed,
// their center subtracted. Scales are float32, halves, or powers of two by the 8 bits of their exponents, and are
// multiplied by the column's factor.

#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "arena.h"
#include "matmul.h"

namespace inflight {

// Whether weights become Elements before they are multiplied, instead of the sums of groups being scaled.
#ifdef INFLIGHT_AMX
template <class Element>
constexpr bool ROUNDS_WEIGHTS = std::is_same_v<Element, BFloat16>;
#else
template <class Element>
constexpr bool ROUNDS_WEIGHTS = false;
#endif

// How the codes of a part of a matrix are kept, and which rows they multiply.
struct CodeFormat {
    int64_t bits, group_size, num_groups;
    int64_t center;            // of whole numbers of 4 bits; else 0
    bool is_float;
    int64_t scale_size;        // bytes of a scale or shift
    bool has_shifts;
    bool has_rounded_rows;
    int view;                  // of the rows, or NO_VIEW: as they are

    static constexpr int NO_VIEW = -1;
    static constexpr int64_t FACTOR_BYTES = BLOCK_COLUMNS * sizeof(float);

    int64_t code_bytes() const { return group_size * BLOCK_COLUMNS * bits / 8; }
    int64_t scale_bytes() const { return BLOCK_COLUMNS * scale_size; }
    int64_t group_bytes() const { return code_bytes() + (has_shifts ? 2 : 1) * scale_bytes(); }
    int64_t block_bytes() const { return FACTOR_BYTES + num_groups * group_bytes(); }
};

extern "C" {

// A part of a matrix, some of its columns; decoder.py's `_CodedPart`, in the same order. Codes are
// `[num_columns, depth * bits / 8]`, those of 4 bits in pairs, the first in the lower half of a byte. Scales and shifts
// are `[num_columns, num_groups]` of `scale_size` bytes: float32, halves, or exponents of powers of two plus 127. Factors
// are `[num_columns]`; with FP4 they are halved. Column i of the codes multiplies number order[i] of a row, or without an
// order number i.
struct CodedPart {
    const uint8_t* codes;
    const void *scales, *shifts;
    const float* factors;
    const int32_t* order;
    int64_t first_column, num_columns, depth, bits, group_size, num_groups, center, is_float, scale_size;
    int64_t has_rounded_rows;
};

}  // extern "C"

// Some numbers of a row, rounded. Those for codes of 4 bits are in ORDER_OF_BYTES. `offset` is what is added to the sum
// of products because codes are not signed, and `sum` is that of the numbers before they were rounded.
struct Rounded {
    static constexpr int MOST = 32;

    alignas(16) int8_t numbers[MOST];
    float scale;
    int32_t offset;
    float sum;
};

// Of a row, how many numbers have one scale.
constexpr int64_t rounded_size(int64_t group_size) { return std::min<int64_t>(group_size, Rounded::MOST); }

// `stride` counts parts of a row.
struct RoundedRows {
    Rounded* parts = nullptr;
    int64_t stride = 0;

    RoundedRows from(int64_t row) const { return {parts + row * stride, stride}; }
};

// How parts of a matrix read rows: in another order unless it is empty, with the sums of groups, and rounded for codes
// of some bits unless they are 0.
struct RowView {
    std::vector<int32_t> order;
    int64_t group_size, num_groups;
    bool has_sums;
    int64_t rounded_for_bits;
    int64_t code_of_zero;  // as the rounded rows multiply codes

    int64_t num_rounded() const { return num_groups * group_size / rounded_size(group_size); }
};

// The zero of codes of 8 bits once they have become unsigned, and that of twice the numbers of FP4.
constexpr int64_t UNSIGNED_ZERO = 128, FP4_ZERO = 12;
// Twice the numbers of FP4 by their codes.
constexpr int TWICE_FP4[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// A matrix of blocks that differ, of some parts with codes, and of plain blocks.
class Mixture {
  public:
    // Adds a part that multiplies rows of Elements. Its columns are in the blocks `block_of(column)`.
    template <class Element, class BlockOf>
    void add(const CodedPart& part, int64_t num_blocks, const BlockOf& block_of) {
        blocks_.resize(num_blocks);
        formats_of_blocks_.resize(num_blocks, PLAIN);
        formats_.push_back({part.bits, part.group_size, part.num_groups, part.bits == 4 ? part.center : 0,
                            part.is_float != 0, part.scale_size, part.shifts != nullptr, part.has_rounded_rows != 0,
                            view_of(part, part.shifts != nullptr && !ROUNDS_WEIGHTS<Element> && !part.has_rounded_rows)});
        has_rounded_rows_ |= part.has_rounded_rows != 0;
        for (int64_t column = part.first_column; column < part.first_column + part.num_columns; ++column)
            formats_of_blocks_[block_of(column)] = (int)formats_.size() - 1;
    }

    // Takes the memory of all blocks, of those without codes `plain_bytes`. Returns its size.
    int64_t take(Cursor& cursor, int64_t plain_bytes) {
        const int64_t begin = cursor.used();
        for (size_t block = 0; block < blocks_.size(); ++block) {
            const int index = formats_of_blocks_[block];
            const CodeFormat* format = index == PLAIN ? nullptr : &formats_[index];
            char* data = cursor.take<char>(format == nullptr ? plain_bytes : format->block_bytes());
            blocks_[block] = {data, format};
        }
        return cursor.used() - begin;
    }

    const MixedBlock* blocks() const { return blocks_.data(); }
    const std::vector<RowView>& views() const { return views_; }
    // Whether a part multiplies rounded rows.
    bool has_rounded_rows() const { return has_rounded_rows_; }

    // Packs a column of a part, `placed` among the blocks' columns.
    void pack_column(const CodedPart& part, int64_t index, int64_t placed) const {
        const MixedBlock& block = blocks_[placed / BLOCK_COLUMNS];
        const CodeFormat& format = *block.format;
        const int64_t column = placed % BLOCK_COLUMNS, row_bytes = part.depth * part.bits / 8;
        const int64_t lanes = format.group_size * part.bits / 32;
        const uint8_t* codes = part.codes + index * row_bytes;
        reinterpret_cast<float*>(block.data)[column] = part.factors[index];
        const uint8_t filler = part.bits == 4 ? (uint8_t)(part.center * 0x11) : 0;
        for (int64_t group = 0; group < format.num_groups; ++group) {
            char* const to = block.data + format.FACTOR_BYTES + group * format.group_bytes();
            for (int64_t lane = 0; lane < lanes; ++lane) {
                uint32_t packed = 0;
                for (int64_t i = 0; i < 4; ++i) {
                    const int64_t at = (group * lanes + lane) * 4 + i;
                    const uint32_t byte = at < row_bytes ? codes[at] : filler;
                    if (part.bits == 4)
                        packed |= (byte & 15u) << (4 * i) | (byte >> 4) << (16 + 4 * i);
                    else
                        packed |= byte << (part.is_float ? 16 * (i % 2) + 8 * (i / 2) : 8 * i);
                }
                std::memcpy(to + (lane * BLOCK_COLUMNS + column) * 4, &packed, sizeof packed);
            }
            const int64_t size = format.scale_size;
            const int64_t from = (index * format.num_groups + group) * size;
            char* const scales = to + format.code_bytes() + column * size;
            std::memcpy(scales, static_cast<const char*>(part.scales) + from, size);
            if (format.has_shifts)
                std::memcpy(scales + format.scale_bytes(), static_cast<const char*>(part.shifts) + from, size);
        }
    }

  private:
    static constexpr int PLAIN = -1;

    int view_of(const CodedPart& part, bool has_sums) {
        const RowView view{part.order == nullptr ? std::vector<int32_t>()
                                                 : std::vector<int32_t>(part.order, part.order + part.depth),
                           part.group_size, part.num_groups, has_sums, part.has_rounded_rows ? part.bits : 0,
                           part.is_float ? FP4_ZERO : part.bits == 4 ? part.center : UNSIGNED_ZERO};
        if (view.order.empty() && !view.has_sums && view.rounded_for_bits == 0) return CodeFormat::NO_VIEW;
        for (size_t i = 0; i < views_.size(); ++i)
            if (views_[i].order == view.order && views_[i].group_size == view.group_size &&
                views_[i].rounded_for_bits == view.rounded_for_bits &&
                (view.rounded_for_bits == 0 || views_[i].code_of_zero == view.code_of_zero)) {
                views_[i].has_sums |= view.has_sums;
                return (int)i;
            }
        views_.push_back(view);
        return (int)views_.size() - 1;
    }

    bool has_rounded_rows_ = false;
    std::vector<CodeFormat> formats_;
    std::vector<int> formats_of_blocks_;
    std::vector<MixedBlock> blocks_;
    std::vector<RowView> views_;
};

// Which of 8 numbers the codes of 4 bits in the lower halves of a lane's bytes multiply, and those in the upper halves.
constexpr int ORDER_OF_BYTES[8] = {0, 4, 1, 5, 2, 6, 3, 7};

// Writes `COUNT` integers as bytes, for codes of 4 bits in ORDER_OF_BYTES.
template <int COUNT, int BITS>
ALWAYS_INLINE void put_bytes(const Ints* from, Rounded* to) {
#if defined(__AVX512F__)
    const __m128i order = _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);  // ORDER_OF_BYTES
#pragma GCC unroll 2
    for (int v = 0; v < COUNT / WIDTH; ++v) {
        const __m128i bytes = _mm512_cvtepi32_epi8((__m512i)from[v]);
        _mm_store_si128((__m128i*)(to->numbers + v * WIDTH), BITS == 4 ? _mm_shuffle_epi8(bytes, order) : bytes);
    }
#else
    for (int i = 0; i < COUNT; ++i) {
        const int number = BITS == 4 ? i / 8 * 8 + ORDER_OF_BYTES[i % 8] : i;
        to->numbers[i] = (int8_t)from[number / WIDTH][number % WIDTH];
    }
#endif
}

// Rounds parts of a row of COUNT numbers each, their largest to 127, for codes of some bits. With a number that is not
// finite a part's scale is not a number.
template <class Element, int COUNT, int BITS>
class PartsOfRow {
    static constexpr int NUM_VECTORS = COUNT / WIDTH, MOST = 64;  // parts at a time

  public:
    static void round(const typename Element::Number* from, int64_t num_parts, int64_t code_of_zero, Rounded* to) {
        for (; num_parts > 0; num_parts -= MOST, from += MOST * COUNT, to += MOST)
            round_some(from, (int)std::min<int64_t>(MOST, num_parts), code_of_zero, to);
    }

  private:
    using Number = typename Element::Number;
    // Each step for all parts before the next, and what crosses vectors for eight: one part would wait for each.
    static void round_some(const Number* from, int num_parts, int64_t code_of_zero, Rounded* to) {
        alignas(64) float magnitude[MOST], total[MOST], factor[MOST], scale[MOST];
        alignas(64) int32_t sum[MOST];
        eight_at_a_time(num_parts, [&](int first, auto count) {
            constexpr int SOME = decltype(count)::value;
            Floats totals[SOME];
            Ints largest[SOME];
#pragma GCC unroll 8
            for (int i = 0; i < SOME; ++i) {
                totals[i] = Floats{}, largest[i] = Ints{};
#pragma GCC unroll 8
                for (int v = 0; v < NUM_VECTORS; ++v) {
                    const Floats x = Element::load_floats(from + (first + i) * COUNT + v * WIDTH);
                    totals[i] += x;
                    largest[i] = larger(magnitudes(x), largest[i]);
                }
            }
            sums_of_each(totals, total + first);
            largest_of_each(largest, magnitude + first);
        });
        for (int part = 0; part < num_parts; ++part) {
            factor[part] = can_be_scaled(magnitude[part]) ? LARGEST_INT8 / magnitude[part] : 0.0f;
            scale[part] = magnitude[part] < INFINITY ? magnitude[part] / LARGEST_INT8 : NAN;
        }
        eight_at_a_time(num_parts, [&](int first, auto count) {
            constexpr int SOME = decltype(count)::value;
            Ints sums[SOME];
#pragma GCC unroll 8
            for (int i = 0; i < SOME; ++i) {
                Ints integers[NUM_VECTORS];
                sums[i] = Ints{};
#pragma GCC unroll 8
                for (int v = 0; v < NUM_VECTORS; ++v) {
                    const Floats x = Element::load_floats(from + (first + i) * COUNT + v * WIDTH);
                    integers[v] = (Ints)(x * factor[first + i] + TO_INTEGER) - (Ints)all(TO_INTEGER);
                    sums[i] += integers[v];
                }
                put_bytes<COUNT, BITS>(integers, to + first + i);
            }
            sums_of_each(sums, sum + first);
        });
        for (int part = 0; part < num_parts; ++part) {
            // Unsigned, as a sum of what was not finite may be any number.
            to[part].offset = (int32_t)(0u - (uint32_t)code_of_zero * (uint32_t)sum[part]);
            to[part].scale = scale[part], to[part].sum = total[part];
        }
    }

    // Calls `work(first, std::integral_constant<int, count>)` for eight parts at a time, and one by one for the rest.
    template <class Work>
    static ALWAYS_INLINE void eight_at_a_time(int num_parts, const Work& work) {
        int part = 0;
        for (; part + EIGHT <= num_parts; part += EIGHT) work(part, std::integral_constant<int, EIGHT>{});
        for (; part < num_parts; ++part) work(part, std::integral_constant<int, 1>{});
    }
};

// Rows as the parts of a matrix read them, for as many rows as were reserved. Products use the memory in turn.
template <class Element>
class ViewedRows {
  public:
    // Memory for `num_rows` rows and a matrix with these views.
    struct Size {
        size_t num_views = 0;
        int64_t num_groups = 0, depth = 0;  // the most of a view, and the deepest that has an order
        int64_t num_rounded = 0;            // the most rounded parts of a row

        void include(const std::vector<RowView>& views) {
            num_views = std::max(num_views, views.size());
            for (const RowView& view : views) {
                if (view.has_sums) num_groups = std::max(num_groups, view.num_groups);
                depth = std::max(depth, (int64_t)view.order.size());
                if (view.rounded_for_bits > 0) num_rounded = std::max(num_rounded, view.num_rounded());
            }
        }
    };

    void reserve(const Size& size, int64_t num_rows) {
        if (num_rows <= capacity_ || size.num_views == 0) return;
        capacity_ = num_rows;
        rows_.resize(size.num_views);
        sums_.resize(size.num_views);
        rounded_.resize(size.num_views);
        Cursor count(nullptr);
        place(count, size);
        arena_ = std::make_unique<Arena>(count.used());
        Cursor cursor(arena_->data());
        place(cursor, size);
    }

    // Prepares a row for a product with a matrix of these views.
    void put(const std::vector<RowView>& views, const Rows<Element>& rows, int64_t row) const {
        using Number = typename Element::Number;
        for (size_t i = 0; i < views.size(); ++i) {
            const RowView& view = views[i];
            const Number* numbers = rows.row(row);
            const int64_t depth = (int64_t)view.order.size();
            if (depth > 0) {
                Number* to = rows_[i].row(row);
                for (int64_t j = 0; j < depth; ++j) to[j] = numbers[view.order[j]];
                // Whole groups, and whole steps as tiles read them: a number of another product may be left there.
                const int64_t end = std::max(view.num_groups * view.group_size, padded_depth<Element>(depth));
                for (int64_t j = depth; j < end; ++j) to[j] = 0;
                numbers = to;
            }
            if (view.has_sums)
                for (int64_t group = 0; group < view.num_groups; ++group)
                    sums_[i][row * view.num_groups + group] = sum(numbers + group * view.group_size, view.group_size);
            if (view.rounded_for_bits > 0) round(view, numbers, rounded_[i].from(row).parts);
        }
    }

    // The rows that a part multiplies, from `first` on; `plain` are those that it does not reorder.
    Rows<Element> rows(const std::vector<RowView>& views, int view, const Rows<Element>& plain, int64_t first) const {
        return view == CodeFormat::NO_VIEW || views[view].order.empty() ? plain : rows_[view].from(first, 0);
    }
    const float* sums(int view) const { return view == CodeFormat::NO_VIEW ? nullptr : sums_[view]; }
    const RoundedRows& rounded(int view) const { return rounded_[view]; }

  private:
    static void round(const RowView& view, const typename Element::Number* numbers, Rounded* to) {
        const int64_t size = rounded_size(view.group_size), num_parts = view.num_rounded();
        auto round = view.rounded_for_bits == 4 ? PartsOfRow<Element, Rounded::MOST, 4>::round
                                                : PartsOfRow<Element, Rounded::MOST, 8>::round;
        if (size < Rounded::MOST)
            round = view.rounded_for_bits == 4 ? PartsOfRow<Element, Rounded::MOST / 2, 4>::round
                                               : PartsOfRow<Element, Rounded::MOST / 2, 8>::round;
        round(numbers, num_parts, view.code_of_zero, to);
    }

    static float sum(const typename Element::Number* numbers, int64_t count) {
        Floats sums = {};
        for (int64_t i = 0; i < count; i += WIDTH) sums += Element::load_floats(numbers + i);
        return sum_of(sums);
    }

    void place(Cursor& cursor, const Size& size) {
        for (size_t i = 0; i < size.num_views; ++i) {
            if (size.depth > 0) {
                rows_[i].stride = padded_depth<Element>(size.depth) + STEP_DEPTH<Element>;
                rows_[i].numbers = cursor.take<typename Element::Number>((capacity_ + TILE_ROWS) * rows_[i].stride);
            }
            sums_[i] = cursor.take<float>(capacity_ * size.num_groups);
            if (size.num_rounded == 0) continue;
            rounded_[i] = {cursor.take<Rounded>(capacity_ * size.num_rounded), size.num_rounded};
        }
    }

    int64_t capacity_ = 0;
    std::unique_ptr<Arena> arena_;
    std::vector<Rows<Element>> rows_;
    std::vector<float*> sums_;
    std::vector<RoundedRows> rounded_;
};

// Rows that are multiplied at once: fewer than of plain weights, so that the sums of a group and those of all groups fit
// the registers. A store takes as long as two products.
constexpr int CODED_ROWS = REGISTER_ROWS / 2;

constexpr int ROUNDED_ROWS = REGISTER_ROWS * 2 / 3;

// Whether codes of 4 bits become Elements by a table, those of FP4 like whole numbers.
#if defined(__AVX512BW__)
constexpr bool HAS_TABLE = true;
#else
constexpr bool HAS_TABLE = false;
#endif

// Twice the numbers of FP4 codes, one in each lane of a vector of signed integers.
template <class Integers>
ALWAYS_INLINE Integers twice_fp4(Integers codes) {
    const Integers magnitude = codes & 7, exponent = magnitude >> 1, negative = codes > 7;
    Integers number = (magnitude & 1) | ((exponent > 0) & 2);
    number += number & (exponent > 1);
    number += number & (exponent > 2);
    return (number ^ negative) - negative;
}

struct UnsignedFp4 {
    int8_t numbers[16];
    constexpr UnsignedFp4() : numbers() {
        for (int i = 0; i < 16; ++i) numbers[i] = (int8_t)(TWICE_FP4[i] + FP4_ZERO);
    }
};
alignas(16) constexpr UnsignedFp4 UNSIGNED_FP4;

// The same of codes in bytes, as unsigned numbers: FP4_ZERO larger.
ALWAYS_INLINE Words unsigned_fp4(Words codes) {
#if defined(__AVX512BW__)
    const __m128i numbers = _mm_load_si128((const __m128i*)UNSIGNED_FP4.numbers);
    return (Words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), (__m512i)codes);
#elif defined(__AVX2__)
    const __m128i numbers = _mm_load_si128((const __m128i*)UNSIGNED_FP4.numbers);
    return (Words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), (__m256i)codes);
#else
    typedef int8_t Bytes __attribute__((vector_size(4 * WIDTH)));
    return (Words)(twice_fp4((Bytes)codes) + (int8_t)FP4_ZERO);
#endif
}

// Makes Elements of the packed codes of BITS bits, with IS_FLOAT of floating-point numbers, of FP4 twice of them.
template <class Element, int BITS, bool IS_FLOAT>
class Codes {
  public:
    static constexpr int UNITS = 32 / BITS / Element::PAIR;  // of a lane

    explicit Codes(const CodeFormat& format) {
        if constexpr (BITS == 8 && !IS_FLOAT) return;
        center_ = all((float)format.center);
#if defined(__AVX512F__)
        // Of each possible code, and again for codes whose highest bit is the lowest of another code; of FP8 those of
        // codes below 8, which have no implicit bit.
        alignas(64) typename Element::Number table[64 / sizeof(typename Element::Number)];
        for (int i = 0; i < 16; i += WIDTH) {
            Floats numbers;
            for (int lane = 0; lane < WIDTH; ++lane) {
                const int code = i + lane;
                if constexpr (BITS == 8) numbers[lane] = (float)code * 0x1p-9f;
                else numbers[lane] = (float)(format.is_float ? TWICE_FP4[code] : code - format.center);
            }
            Element::put(table + i, numbers);
            if constexpr (Element::PAIR == 2) Element::put(table + 16 + i, numbers);
        }
        table_ = _mm512_load_si512(table);
#endif
    }

    // Returns the unit `index` of each lane.
    ALWAYS_INLINE typename Element::Vector unit(Words lanes, int index) const {
        if constexpr (Element::PAIR == 2) {
#if defined(__AVX512BW__)
            if constexpr (BITS == 4)
                return (Words)_mm512_permutexvar_epi16((__m512i)(lanes >> (4 * index)), table_);
            else if constexpr (IS_FLOAT) {
                const Words codes = lanes >> (8 * index);
                const __m512i magnitudes = (__m512i)(codes & 0x007f007fu);
                // The exponents differ by 120.
                const __m512i numbers = _mm512_add_epi16(_mm512_slli_epi16(magnitudes, 4), _mm512_set1_epi16(120 << 7));
                const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitudes, _mm512_set1_epi16(8));
                return (Words)_mm512_mask_permutexvar_epi16(numbers, is_small, magnitudes, table_) |
                       (codes & 0x00800080u) << 8;
            }
#endif
            return ((Words)number(lanes, 2 * index) >> 16) | ((Words)number(lanes, 2 * index + 1) & 0xffff0000u);
        } else {
            return number(lanes, index);
        }
    }

  private:
    ALWAYS_INLINE Floats number(Words lanes, int index) const {
        if constexpr (BITS == 4) {
            const Words shifted = lanes >> (16 * (index % 2) + 4 * (index / 2));
#if defined(__AVX512F__)
            if constexpr (Element::PAIR == 1)
                return (Floats)_mm512_permutexvar_ps((__m512i)shifted, _mm512_castsi512_ps(table_));
#endif
            if constexpr (IS_FLOAT) return __builtin_convertvector(twice_fp4((Ints)(shifted & 15u)), Floats);
            return __builtin_convertvector((Ints)(shifted & 15u), Floats) - center_;
        } else if constexpr (IS_FLOAT) {
            const Words code = lanes >> (16 * (index % 2) + 8 * (index / 2));
            const Floats magnitude = (Floats)((code & 0x7fu) << 20) * 0x1p120f;
            return (Floats)((Words)magnitude | (code & 0x80u) << 24);
        } else {
            return __builtin_convertvector((Ints)(lanes << (24 - 8 * index)) >> 24, Floats);
        }
    }

    Floats center_ = {};
#if defined(__AVX512F__)
    __m512i table_ = {};
#endif
};

// A row's scales of 16 bits are IEEE halves, which is known to vector units since AVX-512.
ALWAYS_INLINE Floats load_halves(const char* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
    typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words words = __builtin_convertvector(halves, Words);
    // The exponents differ by 112.
    return (Floats)((words & 0x7fffu) << 13 | (words & 0x8000u) << 16) * 0x1p112f;
#endif
}

// The scales or shifts of columns, from `column` of a block on.
ALWAYS_INLINE Floats load_scales(const CodeFormat& format, const char* scales, int column) {
    if (format.scale_size == sizeof(uint16_t)) return load_halves(scales + column * sizeof(uint16_t));
    if (format.scale_size == sizeof(float)) return load(reinterpret_cast<const float*>(scales) + column);
    typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
    Bytes exponents;
    std::memcpy(&exponents, scales + column, sizeof exponents);
    return (Floats)(__builtin_convertvector(exponents, Words) << 23);
}

// Computes `to[row, 32 columns]`, for the columns of one pass. `row_sums` are those of a row's groups.
template <class These, class Element, int ROWS>
void multiply_codes(const CodeFormat& format, const These& codes, const char* block, const char* next, int pass,
                    const Rows<Element>& rows, const float* row_sums, float* to, int64_t out_stride) {
    using Number = typename Element::Number;
    const int64_t num_lanes = format.group_size / (These::UNITS * Element::PAIR);
    int column_of[PASS_VECTORS];
    Floats factors[PASS_VECTORS];
    for (int v = 0; v < PASS_VECTORS; ++v) {
        column_of[v] = (pass * PASS_VECTORS + v) * WIDTH;
        factors[v] = load(reinterpret_cast<const float*>(block) + column_of[v]);
    }
    Floats out[ROWS][PASS_VECTORS] = {};
    const Number* numbers = rows.numbers;
    const int64_t stride = rows.stride;
    for (int64_t group = 0; group < format.num_groups; ++group, numbers += format.group_size) {
        const char* const from = block + format.FACTOR_BYTES + group * format.group_bytes();
        const char* lanes = from;
        if (next != nullptr) {
            for (int64_t byte = 0; byte < format.group_bytes(); byte += 64) prefetch_line(next + byte);
            next += format.group_bytes();
        }
        Floats sum[ROWS][PASS_VECTORS] = {};
        const Number* left = numbers;
        for (int64_t lane = 0; lane < num_lanes; ++lane, lanes += 4 * BLOCK_COLUMNS) {
            Words packed[PASS_VECTORS];
#pragma GCC unroll 2
            for (int v = 0; v < PASS_VECTORS; ++v) packed[v] = (Words)load((const float*)lanes + column_of[v]);
#pragma GCC unroll 8
            for (int i = 0; i < These::UNITS; ++i, left += Element::PAIR) {
                typename Element::Vector loaded[PASS_VECTORS];
#pragma GCC unroll 2
                for (int v = 0; v < PASS_VECTORS; ++v) loaded[v] = codes.unit(packed[v], i);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    const auto unit = unit_at<Element>(left + r * stride, 0);
#pragma GCC unroll 2
                    for (int v = 0; v < PASS_VECTORS; ++v)
                        sum[r][v] = Element::multiply_add(sum[r][v], unit, loaded[v]);
                }
            }
        }
        const char* const scales = from + format.code_bytes();
#pragma GCC unroll 2
        for (int v = 0; v < PASS_VECTORS; ++v) {
            const Floats scale = load_scales(format, scales, column_of[v]) * factors[v];
            Floats shift = {};
            if (format.has_shifts) {
                shift = load_scales(format, scales + format.scale_bytes(), column_of[v]);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r)
                    sum[r][v] = fused_add(sum[r][v], shift, all(row_sums[r * format.num_groups + group]));
            }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) out[r][v] = fused_add(out[r][v], scale, sum[r][v]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < PASS_VECTORS; ++v) store(to + r * out_stride + column_of[v], out[r][v]);
}

// Calls `multiply_codes` with the number of rows as a constant.
template <class These, class Element, int ROWS = CODED_ROWS>
void multiply_some_codes(int num_rows, const CodeFormat& format, const These& codes, const char* block,
                         const char* next, int pass, const Rows<Element>& rows, const float* row_sums, float* out,
                         int64_t out_stride) {
    if constexpr (ROWS > 1)
        if (num_rows < ROWS)
            return multiply_some_codes<These, Element, ROWS - 1>(num_rows, format, codes, block, next, pass, rows,
                                                                 row_sums, out, out_stride);
    multiply_codes<These, Element, ROWS>(format, codes, block, next, pass, rows, row_sums, out, out_stride);
}

// Computes `to[row, 32 columns]` of rounded rows, for the columns of one pass.
template <int BITS, bool HAS_SHIFTS, bool IS_FLOAT, int ROWS>
void multiply_rounded(const CodeFormat& format, const char* block, const char* next, int pass, const RoundedRows& rows,
                      float* to, int64_t out_stride) {
    const int64_t size = rounded_size(format.group_size), num_lanes = size * BITS / 32;
    int column_of[PASS_VECTORS];
    Floats factors[PASS_VECTORS], out[ROWS][PASS_VECTORS] = {};
    for (int v = 0; v < PASS_VECTORS; ++v) {
        column_of[v] = (pass * PASS_VECTORS + v) * WIDTH;
        factors[v] = load(reinterpret_cast<const float*>(block) + column_of[v]);
    }
    const Rounded* left = rows.parts;
    const int64_t stride = rows.stride;
    for (int64_t group = 0; group < format.num_groups; ++group) {
        const char* const from = block + format.FACTOR_BYTES + group * format.group_bytes();
        const char* lanes = from;
        if (next != nullptr) {
            for (int64_t byte = 0; byte < format.group_bytes(); byte += 64) prefetch_line(next + byte);
            next += format.group_bytes();
        }
        const char* const scales = from + format.code_bytes();
        for (int64_t part = 0; part < format.group_size; part += size, ++left) {
            Ints sum[ROWS][PASS_VECTORS];
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
                for (int v = 0; v < PASS_VECTORS; ++v) sum[r][v] = left[r * stride].offset - Ints{};
            const int8_t* numbers = left->numbers;
            for (int64_t lane = 0; lane < num_lanes; ++lane, lanes += 4 * BLOCK_COLUMNS) {
                Words packed[PASS_VECTORS];
#pragma GCC unroll 2
                for (int v = 0; v < PASS_VECTORS; ++v) packed[v] = (Words)load((const float*)lanes + column_of[v]);
#pragma GCC unroll 2
                for (int i = 0; i < 8 / BITS; ++i, numbers += Int8::PAIR) {
                    Ints codes[PASS_VECTORS];
#pragma GCC unroll 2
                    for (int v = 0; v < PASS_VECTORS; ++v)
                        if constexpr (BITS == 8) codes[v] = (Ints)(packed[v] ^ 0x80808080u);
                        else if constexpr (IS_FLOAT) codes[v] = (Ints)unsigned_fp4(packed[v] >> (4 * i) & 0x0f0f0f0fu);
                        else codes[v] = (Ints)(packed[v] >> (4 * i) & 0x0f0f0f0fu);
#pragma GCC unroll 12
                    for (int r = 0; r < ROWS; ++r) {
                        const auto unit = unit_at<Int8>(numbers + r * stride * (int64_t)sizeof(Rounded), 0);
#pragma GCC unroll 2
                        for (int v = 0; v < PASS_VECTORS; ++v)
                            sum[r][v] = Int8::multiply_add(sum[r][v], unit, codes[v]);
                    }
                }
            }
#pragma GCC unroll 2
            for (int v = 0; v < PASS_VECTORS; ++v) {
                const Floats scale = load_scales(format, scales, column_of[v]);
                Floats shift = {};
                if (HAS_SHIFTS) shift = load_scales(format, scales + format.scale_bytes(), column_of[v]);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; ++r) {
                    const Rounded& of_row = left[r * stride];
                    Floats products = as_floats(sum[r][v]) * of_row.scale;
                    if (HAS_SHIFTS) products = fused_add(products, shift, all(of_row.sum));
                    out[r][v] = fused_add(out[r][v], scale, products);
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < PASS_VECTORS; ++v) store(to + r * out_stride + column_of[v], out[r][v] * factors[v]);
}

// Calls `multiply_rounded` with the number of rows as a constant.
template <int BITS, bool HAS_SHIFTS, bool IS_FLOAT, int ROWS = ROUNDED_ROWS>
void multiply_some_rounded(int num_rows, const CodeFormat& format, const char* block, const char* next, int pass,
                           const RoundedRows& rows, float* out, int64_t out_stride) {
    if constexpr (ROWS > 1)
        if (num_rows < ROWS)
            return multiply_some_rounded<BITS, HAS_SHIFTS, IS_FLOAT, ROWS - 1>(num_rows, format, block, next, pass,
                                                                               rows, out, out_stride);
    multiply_rounded<BITS, HAS_SHIFTS, IS_FLOAT, ROWS>(format, block, next, pass, rows, out, out_stride);
}

#ifdef INFLIGHT_AMX

// Of pairs of lanes: the upper halves of the first lanes, each followed by that of the second.
struct UpperHalves {
    uint16_t indices[32];
    constexpr UpperHalves() : indices() {
        for (int i = 0; i < 32; ++i) indices[i] = (uint16_t)(i % 2 ? 32 + i : i + 1);
    }
};
alignas(64) constexpr UpperHalves UPPER_HALVES;

// Rounds the numbers of each lane to bfloat16, those of `low` in the lower halves. Ties are rounded away from 0, which
// takes fewer instructions than to even.
ALWAYS_INLINE Words rounded_pairs(Floats low, Floats high) {
    const Words first = (Words)low + 0x8000u, second = (Words)high + 0x8000u;
#if defined(__AVX512BW__)
    return (Words)_mm512_permutex2var_epi16((__m512i)first, _mm512_load_si512(UPPER_HALVES.indices), (__m512i)second);
#else
    return (first >> 16) | (second & 0xffff0000u);
#endif
}

// Makes plain tiles of a step of a block: its two panels, one after the other.
template <int BITS, bool IS_FLOAT>
ALWAYS_INLINE void unpack_step(const CodeFormat& format, const Codes<Float32, BITS, IS_FLOAT>& codes,
                               const char* block, int64_t step, char* to) {
    constexpr int UNITS_OF_LANE = Codes<BFloat16, BITS, IS_FLOAT>::UNITS;
    constexpr int HALF_DEPTH = 16, LANES_OF_HALF = HALF_DEPTH * BITS / 32;  // the smallest group
    const float* const factors = reinterpret_cast<const float*>(block);
    Floats scale[BLOCK_COLUMNS / WIDTH], offset[BLOCK_COLUMNS / WIDTH];
    for (int64_t depth = step * STEP_DEPTH<BFloat16>; depth < (step + 1) * STEP_DEPTH<BFloat16>;
         depth += HALF_DEPTH, to += STEP_BYTES / 4) {
        const int64_t group = depth / format.group_size, within = depth % format.group_size;
        if (group >= format.num_groups) {
            for (const int64_t panel : {0, 1}) std::memset(to + panel * APART.panel_bytes, 0, STEP_BYTES / 4);
            continue;
        }
        const char* const from = block + format.FACTOR_BYTES + group * format.group_bytes();
        const char* const scales = from + format.code_bytes();
        if (within == 0 || depth % STEP_DEPTH<BFloat16> == 0)
            for (int v = 0; v < BLOCK_COLUMNS / WIDTH; ++v) {
                scale[v] = load_scales(format, scales, v * WIDTH) * load(factors + v * WIDTH);
                offset[v] = Floats{};
                if (format.has_shifts)
                    offset[v] = load_scales(format, scales + format.scale_bytes(), v * WIDTH) * scale[v];
            }
        const char* lanes = from + within * BLOCK_COLUMNS * BITS / 8;
#pragma GCC unroll 4
        for (int lane = 0; lane < LANES_OF_HALF; ++lane, lanes += 4 * BLOCK_COLUMNS)
#pragma GCC unroll 2
            for (int v = 0; v < BLOCK_COLUMNS / WIDTH; ++v) {
                const Words packed = (Words)load((const float*)lanes + v * WIDTH);
                char* const units = to + v * WIDTH / LANES * APART.panel_bytes + v * WIDTH % LANES * sizeof(float) +
                                    lane * UNITS_OF_LANE * APART.unit_bytes;
#pragma GCC unroll 4
                for (int i = 0; i < UNITS_OF_LANE; ++i) {
                    const Floats low = fused_add(offset[v], scale[v], codes.unit(packed, 2 * i));
                    const Floats high = fused_add(offset[v], scale[v], codes.unit(packed, 2 * i + 1));
                    store((float*)(units + i * APART.unit_bytes), (Floats)rounded_pairs(low, high));
                }
            }
    }
}

template <int BITS, bool IS_FLOAT>
void unpack_block_of(const CodeFormat& format, const char* block, int64_t num_steps, char* to) {
    const Codes<Float32, BITS, IS_FLOAT> codes(format);
    for (int64_t step = 0; step < num_steps; ++step)
        unpack_step<BITS>(format, codes, block, step, to + step * STEP_BYTES);
}

// Makes a plain block of one with codes.
inline void unpack_block(const CodeFormat& format, const char* block, int64_t num_steps, char* to) {
    auto unpack = format.bits == 4 ? unpack_block_of<4, false> : unpack_block_of<8, false>;
    if (format.is_float) unpack = format.bits == 4 ? unpack_block_of<4, !HAS_TABLE> : unpack_block_of<8, true>;
    unpack(format, block, num_steps, to);
}

// Multiplies with a block by tiles and unpacks it meanwhile.
template <int BITS, bool IS_FLOAT, TileHeight HEIGHT>
void multiply_codes_by_tiles(const CodeFormat& format, const char* block, const char* next, int64_t num_steps,
                             const Rows<BFloat16>& rows, float* out, int64_t out_stride) {
    const Codes<Float32, BITS, IS_FLOAT> codes(format);
    alignas(64) char unpacked[2][STEP_BYTES];
    const char* left = reinterpret_cast<const char*>(rows.numbers);
    const int64_t ahead_bytes = next == nullptr ? 0 : format.block_bytes() / num_steps;  // prefetched in a step
    clear_tiles();
    unpack_step<BITS>(format, codes, block, 0, unpacked[0]);
    for (int64_t step = 0; step < num_steps; ++step, left += 64, next += ahead_bytes) {
        for (int64_t byte = 0; byte < ahead_bytes; byte += 64) prefetch_line(next + byte);
        // A step ahead, because tiles are loaded from the cache, to which stores take some time.
        if (step + 1 < num_steps) unpack_step<BITS>(format, codes, block, step + 1, unpacked[(step + 1) % 2]);
        add_step_of_tiles<BFloat16, HEIGHT>(APART, unpacked[step % 2], left, rows.row_bytes());
    }
    store_tiles<HEIGHT>(out, out_stride);
}

// Calls it for the kind of codes.
template <TileHeight HEIGHT>
void multiply_by_tiles(const CodeFormat& format, const char* block, const char* next, int64_t num_steps,
                       const Rows<BFloat16>& rows, float* out, int64_t out_stride) {
    auto multiply =
        format.bits == 4 ? multiply_codes_by_tiles<4, false, HEIGHT> : multiply_codes_by_tiles<8, false, HEIGHT>;
    if (format.is_float)
        multiply =
            format.bits == 4 ? multiply_codes_by_tiles<4, !HAS_TABLE, HEIGHT> : multiply_codes_by_tiles<8, true, HEIGHT>;
    multiply(format, block, next, num_steps, rows, out, out_stride);
}

#endif

// Calls `multiply(count, next, pass, first row)` for all columns and up to 32 rows, MOST_ROWS at a time. `next` is what
// is probably multiplied next, or null.
template <int MOST_ROWS, class Multiply>
void multiply_by_turns(const char* next, int num_rows, const Multiply& multiply) {
    const int num_turns = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int pass = 0; pass < NUM_PASSES; ++pass)
        for (int turn = 0, row = 0, end; turn < num_turns; ++turn, row = end) {
            end = (turn + 1) * num_rows / num_turns;
            multiply(end - row, pass == NUM_PASSES - 1 && end == num_rows ? next : nullptr, pass, row);
        }
}

// `multiply_coded` for a kind of codes.
template <class Element, int BITS, bool IS_FLOAT>
void multiply_codes_of(const CodeFormat& format, const char* block, const char* next, const Rows<Element>& rows,
                       const float* row_sums, int num_rows, float* out, int64_t out_stride) {
    using These = Codes<Element, BITS, IS_FLOAT>;
    const These codes(format);
    multiply_by_turns<CODED_ROWS>(next, num_rows, [&](int count, const char* following, int pass, int row) {
        multiply_some_codes<These, Element>(count, format, codes, block, following, pass, rows.from(row, 0),
                                            row_sums == nullptr ? nullptr : row_sums + row * format.num_groups,
                                            out + row * out_stride, out_stride);
    });
}

// Computes `out[r, 0..32) = rows[r] · block` for up to 32 rows. `next` is what is probably multiplied next, or null.
// Memory behind the last row of `out` may be overwritten.
template <class Element>
void multiply_coded(const CodeFormat& format, const char* block, const char* next, [[maybe_unused]] int64_t num_steps,
                    const Rows<Element>& rows, const float* row_sums, int num_rows, float* out, int64_t out_stride) {
#ifdef INFLIGHT_AMX
    if constexpr (ROUNDS_WEIGHTS<Element>) {
        const auto by_tiles = num_rows > 16 ? multiply_by_tiles<SOME> : multiply_by_tiles<FEW>;
        return by_tiles(format, block, next, num_steps, rows, out, out_stride);
    }
#endif
    auto multiply = format.bits == 4 ? multiply_codes_of<Element, 4, false> : multiply_codes_of<Element, 8, false>;
    if (format.is_float)
        multiply = format.bits == 4 ? multiply_codes_of<Element, 4, !HAS_TABLE> : multiply_codes_of<Element, 8, true>;
    multiply(format, block, next, rows, row_sums, num_rows, out, out_stride);
}

// The same with rounded rows.
inline void multiply_rounded_rows(const CodeFormat& format, const char* block, const char* next,
                                  const RoundedRows& rows, int num_rows, float* out, int64_t out_stride) {
    const auto of_4_bits =
        format.has_shifts ? multiply_some_rounded<4, true, false> : multiply_some_rounded<4, false, false>;
    const auto of_8_bits =
        format.has_shifts ? multiply_some_rounded<8, true, false> : multiply_some_rounded<8, false, false>;
    const auto of_integers = format.bits == 4 ? of_4_bits : of_8_bits;
    const auto multiply = format.is_float ? multiply_some_rounded<4, false, true> : of_integers;
    multiply_by_turns<ROUNDED_ROWS>(next, num_rows, [&](int count, const char* following, int pass, int row) {
        multiply(count, format, block, following, pass, rows.from(row), out + row * out_stride, out_stride);
    });
}

}  // namespace inflight
