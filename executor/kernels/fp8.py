"""Rounding to FP8 (e4m3) in Triton: of keys and values with a scale for each token and KV head, and of whole rows.

A scale makes the largest number e4m3's largest, 448, which rounding leaves as it is. Outliers contribute most to the
errors of products, and so does the largest of a row where it is one. Numbers are divided by the scale, to nearest as in
IEEE 754, which is the same on every device. A product with the scale's inverse could be fused with the sum below, and
then be rounded otherwise. Numbers below 2^-14 of the largest lose precision, those below 2^-18 become 0.
"""

import triton
import triton.language as tl

# The bits of float32: a sign, 8 bits of exponent with a bias of 127, and 23 bits of mantissa.
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
EXPONENT_BITS = tl.constexpr(0x7F800000)
# The largest number of e4m3, inverted.
INVERSE_OF_LARGEST = tl.constexpr(1 / 448)
# The smallest largest number, 2^-100, below which all numbers may become 0. Its scale is normal.
LEAST_BITS = tl.constexpr(27 << 23)
# The least exponent of e4m3's normal numbers, -6, and the 20 bits that its mantissa lacks.
MIN_NORMAL_BITS = tl.constexpr(121 << 23)
LOST_BITS = tl.constexpr(20 << 23)
HALF_BITS = tl.constexpr(1 << 22)


@triton.jit
def magnitudes(numbers):
    """Returns the bits of the magnitudes of float32 numbers. They are ordered as the numbers, infinity and NaN last."""
    return numbers.to(tl.int32, bitcast=True) & MAGNITUDE_BITS


@triton.jit
def scale_of(largest):
    """Returns the scale of numbers whose largest of `magnitudes` is given. It is NaN if that is infinite or NaN, and so
    are then all results that they take part in."""
    scale = tl.maximum(largest, LEAST_BITS).to(tl.float32, bitcast=True) * INVERSE_OF_LARGEST
    return tl.where(largest >= EXPONENT_BITS, float("nan"), scale)


@triton.jit
def to_fp8(numbers, scale):
    """Returns `numbers / scale` in e4m3, rounded to nearest, even for halves; 0 if the scale is NaN.

    The sum with 1.5 times a power of two rounds in float32. The conversion is then exact. Triton's interpreter would
    lose the carry of a conversion that rounds up to the next power of two.
    """
    is_number = scale == scale
    scaled = tl.math.div_rn(tl.where(is_number, numbers, 0.0), tl.where(is_number, scale, 1.0))
    exponent = tl.maximum(scaled.to(tl.int32, bitcast=True) & EXPONENT_BITS, MIN_NORMAL_BITS)
    rounder = ((exponent + LOST_BITS) | HALF_BITS).to(tl.float32, bitcast=True)
    return ((scaled + rounder) - rounder).to(tl.float8e4nv)


@triton.jit
def round_rows_kernel(inputs, outputs, scales, size, token_stride, PADDED_SIZE: tl.constexpr):
    """Rounds the rows of `inputs` to FP8 with a scale each. Grid: rows. `outputs[rows, size]` is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_SIZE)
    mask = columns < size
    numbers = tl.load(inputs + row * token_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(magnitudes(numbers), 0))
    tl.store(outputs + row * size + columns, to_fp8(numbers, scale), mask=mask)
    tl.store(scales + row, scale)


@triton.jit
def scaled_sums(sums, row_scale, column_scales, columns, mask, dtype: tl.constexpr):
    """Returns a product of FP8 numbers from its sums, `columns` of a row: times both scales, rounded to `dtype`, in
    float32."""
    scales = tl.load(column_scales + columns, mask=mask, other=0.0)
    return (sums * row_scale * scales).to(dtype).to(tl.float32)
