"""Quantized matrices as the C++ products take them (codes.h).

A group's weights are `scale * (code - center + shift)`. The center is one number for the matrix. Where it is every
group's zero, as in symmetric formats, there are no shifts. Scales and shifts are kept in 16 bits, scales as shares of a
power of two for each column: with bfloat16 activations always, which changes a weight by at most 0.1 % of the largest
that its group can have, and with float32 activations if that changes nothing.

Weights in FP8 and FP4 are `scale * number`. The scales of FP4 are exact: those of MXFP4 keep their 8 bits, those of
NVFP4 become halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.executor.checkpoint.quantized_weight import (
    Coded,
    FloatWeight,
    QuantizedWeight,
    pack_halves,
    unpack_halves,
)

# Of the depth, the best first: each has memory for a scale.
GROUP_SIZES = (128, 64, 32, 16)
# A zero this near to a whole number, relatively, is that number: it was a quotient of float32 numbers.
NEAR = 1e-6
LARGEST_HALF = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """`CodedPart` of codes.h. `scales` and `shifts` are `[out, groups]`, `factors` are `[out]`. Scales in uint8 are the
    exponents of powers of two."""

    codes: Tensor
    scales: Tensor
    shifts: Tensor | None
    factors: Tensor
    order: Tensor | None
    depth: int
    bits: int
    group_size: int
    center: int
    is_float: bool = False

    @property
    def can_round_rows(self) -> bool:
        """Whether there are products with rows rounded to 8 bits."""
        return not self.is_float or self.bits == 4


def is_supported(weight: Coded) -> bool:
    """Whether the C++ products have groups of this size."""
    depth = weight.shape[1]
    return depth % 2 == 0 and (weight.group_size >= depth or weight.group_size % GROUP_SIZES[-1] == 0)


def encode(weight: Coded, dtype: torch.dtype) -> CodedWeight:
    """Returns a supported matrix for products with activations of `dtype`.

    Raises:
        ValueError: the order of its columns is none.
    """
    assert is_supported(weight)
    return _encode_floats(weight, dtype) if isinstance(weight, FloatWeight) else _encode_integers(weight, dtype)


def _encode_floats(weight: FloatWeight, dtype: torch.dtype) -> CodedWeight:
    one = weight.rows(0, weight.shape[0])
    depth, padded = weight.shape[1], _padded(weight.shape[1])
    # The last group of a row may be smaller.
    shared = padded if weight.group_size >= depth else weight.group_size
    group_size = next(size for size in GROUP_SIZES if shared % size == 0 and padded % size == 0)
    scales, factors = _scales_of_fp8(one, dtype) if weight.bits == 8 else _scales_of_fp4(one)
    scales = scales[:, torch.arange(0, padded, group_size) // shared].contiguous()
    return CodedWeight(
        one.codes.contiguous(), scales, None, factors, None, depth, weight.bits, group_size, 0, is_float=True
    )


def _scales_of_fp8(weight: FloatWeight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the scales `[out, groups]` and factors `[out]`."""
    scale = weight.scale.float() if weight.factor is None else weight.scale.float() * weight.factor[:, None]
    shares, factors = _shares(scale)
    return (shares.half(), factors) if _fits_halves(shares, None, dtype) else (scale, torch.ones_like(factors))


def _scales_of_fp4(weight: FloatWeight) -> tuple[Tensor, Tensor]:
    """Returns the same; factors are halved because products are with twice the numbers."""
    factors = torch.full((weight.shape[0],), 0.5) if weight.factor is None else 0.5 * weight.factor
    scale = weight.scale
    if scale.dtype == torch.float8_e4m3fn:
        return scale.float().half(), factors
    # The exponent 0 stands for 2^-127, which is no normal number of float32.
    if scale.dtype == torch.float8_e8m0fnu and bool(scale.view(torch.uint8).all()):
        return scale.view(torch.uint8), factors
    return scale.float(), factors


def _encode_integers(weight: QuantizedWeight, dtype: torch.dtype) -> CodedWeight:
    _, depth = weight.shape
    group_size, scale, offset = _regrouped(weight)
    is_constant = (scale == 0) & (offset != 0)
    scale = torch.where(is_constant, offset, scale)
    zeros = _zeros(scale, offset)
    center = None if is_constant.any() else _common_center(weight, zeros, scale)
    shifts = None
    if center is None:
        center = 1 << (weight.bits - 1)
        shifts = torch.where(is_constant, 1.0, torch.where(scale == 0, 0.0, center - zeros))
    codes = _with_constants(weight, is_constant, group_size, center) if is_constant.any() else weight.codes
    if weight.bits == 8:
        codes = codes - center
    shares, factors = _shares(scale)
    if _fits_halves(shares, shifts, dtype):
        shares, shifts = shares.half(), None if shifts is None else shifts.half()
    else:
        shares, factors = scale, torch.ones_like(factors)
    return CodedWeight(
        codes.contiguous(),
        shares.contiguous(),
        None if shifts is None else shifts.contiguous(),
        factors,
        _checked_order(weight.column_order, depth),
        depth,
        weight.bits,
        group_size,
        center,
    )


def _padded(depth: int) -> int:
    """Returns a depth in whole groups of the smallest size."""
    return -(-depth // GROUP_SIZES[-1]) * GROUP_SIZES[-1]


def _shares(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales `[out, groups]` as shares of powers of two, and these `[out]`."""
    _, exponents = torch.frexp(scale.abs().amax(dim=1))
    factors = torch.exp2(exponents.float())
    return scale / factors[:, None], factors


def _regrouped(weight: QuantizedWeight) -> tuple[int, Tensor, Tensor]:
    """Returns a size of groups that the products have, and scales and offsets of such groups."""
    padded = _padded(weight.group_size)
    size = next(size for size in GROUP_SIZES if padded % size == 0)
    scale, offset = (part.float().repeat_interleave(padded // size, dim=1) for part in (weight.scale, weight.offset))
    return size, scale, offset


def _zeros(scale: Tensor, offset: Tensor) -> Tensor:
    """Returns the code, not necessarily a whole one, that stands for 0 in each group."""
    zeros = -offset / torch.where(scale == 0, 1.0, scale)
    whole = zeros.round()
    return torch.where((zeros - whole).abs() <= NEAR * whole.abs().clamp(min=1.0), whole, zeros)


def _common_center(weight: QuantizedWeight, zeros: Tensor, scale: Tensor) -> int | None:
    """Returns the zero of all groups, None if they differ or codes are too far from it for signed bytes."""
    used = zeros[scale != 0]
    if used.numel() == 0:
        return 1 << (weight.bits - 1)
    first = float(used[0])
    if first != round(first) or not bool((used == first).all()):
        return None
    if weight.bits == 4:
        return int(first) if 0 <= first <= 15 else None
    lowest, highest = (int(bound) for bound in weight.codes.aminmax())
    return int(first) if highest - 127 <= first <= lowest + 128 else None


def _with_constants(weight: QuantizedWeight, is_constant: Tensor, group_size: int, center: int) -> Tensor:
    """Returns the codes with the center where a group has no scale: its weights are then its offset times a shift of
    1."""
    depth = weight.shape[1]
    columns = is_constant.repeat_interleave(group_size, dim=1)[:, :depth]
    if weight.bits == 8:
        return weight.codes.masked_fill(columns, center)
    return pack_halves(unpack_halves(weight.codes).masked_fill(columns, center))


def _fits_halves(shares: Tensor, shifts: Tensor | None, dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return shifts is None or bool((shifts.abs() <= LARGEST_HALF).all())
    return all(part is None or torch.equal(part.half().float(), part) for part in (shares, shifts))


def _checked_order(order: Tensor | None, depth: int) -> Tensor | None:
    if order is None:
        return None
    if not torch.equal(order.long().sort().values, torch.arange(depth)):
        raise ValueError("the order of a quantized matrix's columns is not a permutation")
    return order.to(torch.int32).contiguous()
