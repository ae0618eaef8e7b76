"""Matrices in FP8 (e4m3) with a scale for each row, for products that multiply FP8 with FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from inflight.executor.checkpoint.quantized_weight import FloatWeight, Matrix

# The largest number of e4m3.
LARGEST = 448.0
# A smaller scale would have no inverse in float32.
MIN_SCALE = 1e-30
# The matrix units of a GPU take rows and columns by so many numbers.
MULTIPLE = 16


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """A matrix: weight[o, i] = scales[0, o] * numbers[o, i]. `numbers` is float8_e4m3fn `[out, in]`, `scales` float32
    `[1, out]`."""

    numbers: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return self.numbers.shape


def round_rows(weight: Tensor) -> Fp8Weight:
    """Rounds a matrix `[out, in]`. The largest number of each row becomes 448.

    A matrix that was made from FP8 numbers with such a scale gets the same numbers again, even if it was rounded to
    bfloat16 in between: that changes a number by less than half the distance of two neighbours in e4m3.
    """
    numbers = weight.float()
    scales = (numbers.abs().amax(1) / LARGEST).clamp_(min=MIN_SCALE)
    return Fp8Weight((numbers / scales[:, None]).to(torch.float8_e4m3fn), scales[None])


def is_fp8_of_rows(weight: Matrix) -> TypeGuard[FloatWeight]:
    """Returns whether a matrix of a checkpoint is in FP8 with scales of rows or larger parts, which `of_rows` takes."""
    return isinstance(weight, FloatWeight) and weight.bits == 8 and weight.group_size >= weight.shape[1]


def of_rows(weight: FloatWeight) -> Fp8Weight:
    """Returns a matrix of a checkpoint with the same numbers, which it shares."""
    one = weight.rows(0, weight.shape[0])
    return Fp8Weight(one.codes.view(torch.float8_e4m3fn), one.scale.float().t().contiguous())


def stacked(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    """Returns matrices of the same inputs as one."""
    # torch concatenates no FP8 on some devices.
    numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return Fp8Weight(numbers, torch.cat([part.scales for part in parts], 1))


def unsupported_reason(weight: Matrix) -> str | None:
    """Returns why a matrix cannot be multiplied in FP8; None if it can."""
    if any(size % MULTIPLE for size in weight.shape):
        return f"the sizes of a matrix, {list(weight.shape)}, are not multiples of {MULTIPLE}"
    if isinstance(weight, Tensor) and not bool(weight.isfinite().all()):
        return "a matrix has a number that is not finite"
    return None
