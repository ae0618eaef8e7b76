"""Rounding to FP8 (e4m3) in Triton: of keys and values with a scale for each token and KV head, and of whole rows.

A scale is a power of two, so multiplying by it is exact on every device. A finer one would gain nothing, because e4m3
has the same relative precision over its whole range. The largest number lies in [128, 256) after scaling, below
e4m3's 448, so nothing saturates. Numbers below 2^-13 of the largest lose precision, those below 2^-18 become 0.
"""

import triton
import triton.language as tl

# The bits of float32: a sign, 8 bits of exponent with a bias of 127, and 23 bits of mantissa.
MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
EXPONENT_BITS = tl.constexpr(0x7F800000)
# The exponent of the largest number after scaling, 2^7, less the bias. The smallest largest number, below which all
# numbers may become 0, keeps a scale and its inverse normal.
TARGET_BITS = tl.constexpr(7 << 23)
LEAST_BITS = tl.constexpr(27 << 23)
INVERSE_BITS = tl.constexpr(254 << 23)
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
    exponent = tl.maximum(largest & EXPONENT_BITS, LEAST_BITS)
    scale = (exponent - TARGET_BITS).to(tl.float32, bitcast=True)
    return tl.where(exponent == EXPONENT_BITS, float("nan"), scale)


@triton.jit
def to_fp8(numbers, scale):
    """Returns `numbers / scale` in e4m3, rounded to nearest, even for halves; 0 if the scale is NaN.

    The sum with 1.5 times a power of two rounds in float32. The conversion is then exact. Triton's interpreter would
    lose the carry of a conversion that rounds up to the next power of two.
    """
    is_number = scale == scale
    inverse = (-scale.to(tl.int32, bitcast=True) + INVERSE_BITS).to(tl.float32, bitcast=True)
    scaled = tl.where(is_number, numbers, 0.0) * tl.where(is_number, inverse, 0.0)
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
