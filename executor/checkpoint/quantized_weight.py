"""Matrices of codes with scales, the two forms in which quantized checkpoints of all formats are computed.

The codes are whole numbers, or numbers of a floating-point type of 8 or 4 bits. What a format cannot express in such a
form without a change of its numbers is not read into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Numbers of a matrix that are dequantized at once: 64 MiB in float32.
PIECE_NUMBERS = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix of whole numbers with a scale and an offset per group of input columns.

    weight[o, i] = scale[o, i // group_size] * codes[o, i] + offset[o, i // group_size], in float32.
    `codes` is uint8 [out, in] for 8 bits, or [out, in / 2] for 4 bits (column 2j in the low half of byte j, 2j + 1 in
    the high half). `scale` and `offset` are float32 [out, in / group_size].
    `column_order` (int32 [in]) is set if the columns of `codes` are permuted (GPTQ's act-order): column j of the codes
    multiplies input column_order[j].
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    # 4 or 8.
    bits: int
    # Divides the number of input columns; 16, 32, 64, 128 or the whole row.
    group_size: int
    column_order: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`, as of the dense matrix."""
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * 8 // self.bits))

    @property
    def num_bytes(self) -> int:
        """Memory of codes, scales and offsets."""
        return sum(part.numel() * part.element_size() for part in (self.codes, self.scale, self.offset))

    def free(self) -> None:
        """Frees the memory of the numbers, whatever refers to them. They must not be read any more."""
        _free((self.codes, self.scale, self.offset))

    def rows(self, start: int, end: int) -> QuantizedWeight:
        """Returns the rows `[start, end)` as views."""
        codes, scale, offset = (part[start:end] for part in (self.codes, self.scale, self.offset))
        return replace(self, codes=codes, scale=scale, offset=offset)

    def taken(self, rows: Tensor) -> QuantizedWeight:
        """Returns copies of these rows, in this order."""
        codes, scale, offset = (part[rows] for part in (self.codes, self.scale, self.offset))
        return replace(self, codes=codes, scale=scale, offset=offset)

    def dequantized(self) -> Tensor:
        """Returns the dense matrix in float32: for each number a product and a sum, each rounded."""
        num_rows, num_columns = self.shape
        codes = self.codes if self.bits == 8 else unpack_halves(self.codes)
        numbers = codes.view(num_rows, -1, self.group_size).float()
        dense = numbers.mul_(self.scale[..., None]).add_(self.offset[..., None]).view(num_rows, num_columns)
        if self.column_order is None:
            return dense
        ordered = torch.empty_like(dense)
        ordered[:, self.column_order.long()] = dense
        return ordered

    def to(self, device: torch.device) -> QuantizedWeight:
        """Returns the matrix on a device."""
        codes, scale, offset = (part.to(device) for part in (self.codes, self.scale, self.offset))
        order = None if self.column_order is None else self.column_order.to(device)
        return replace(self, codes=codes, scale=scale, offset=offset, column_order=order)


@dataclass(frozen=True, slots=True, eq=False)
class FloatWeight:
    """A matrix of numbers of 8 bits (e4m3, "FP8") or 4 bits (e2m1, "FP4") with a scale per group of input columns.

    weight[o, i] = numbers[o, i] * (scale[o // row_block, i // group_size] * factor[o]), in float32.
    `codes` holds their bits: uint8 [out, in] for 8 bits, or [out, in / 2] for 4 bits, in pairs as in `QuantizedWeight`.
    None of them is NaN. `scale` is float32, float8_e4m3fn (NVFP4) or float8_e8m0fnu (MXFP4), a power of two, of the
    shape [ceil(out / row_block), ceil(in / group_size)]. `factor` is float32 [out]; None stands for 1.
    """

    codes: Tensor
    scale: Tensor
    # 4 or 8.
    bits: int
    # A power of two from 16 on, or the whole row. The last group of a row may be smaller.
    group_size: int
    # Rows that share a scale.
    row_block: int = 1
    factor: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`, as of the dense matrix."""
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * 8 // self.bits))

    @property
    def num_bytes(self) -> int:
        """Memory of codes, scales and factors."""
        return sum(part.numel() * part.element_size() for part in self._parts)

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return (self.codes, self.scale) if self.factor is None else (self.codes, self.scale, self.factor)

    @property
    def numbers(self) -> Tensor:
        """The numbers without scales in float32, `[out, in]`."""
        if self.bits == 8:
            return self.codes.view(torch.float8_e4m3fn).float()
        return torch.tensor(FP4_NUMBERS, device=self.codes.device)[unpack_halves(self.codes).int()]

    def free(self) -> None:
        """Frees the memory of the numbers, whatever refers to them. They must not be read any more."""
        _free(self._parts)

    def rows(self, start: int, end: int) -> FloatWeight:
        """Returns the rows `[start, end)`, each with scales of its own."""
        factor = None if self.factor is None else self.factor[start:end]
        codes, scale = self.codes[start:end], self.scale[start:end]
        if self.row_block > 1:
            rows = torch.arange(start, start + len(codes), device=codes.device) // self.row_block
            scale = self.scale[rows]
        return replace(self, codes=codes, scale=scale, factor=factor, row_block=1)

    def taken(self, rows: Tensor) -> FloatWeight:
        """Returns copies of these rows, in this order. Rows that are whole blocks have one scale again."""
        block = self.row_block
        starts = rows[::block]
        if not torch.equal(rows, (starts // block * block)[:, None].add(torch.arange(block)).flatten()):
            return self.rows(0, self.shape[0]).taken(rows)
        # torch takes no rows of types of one byte on some devices.
        scale = self.scale.view(torch.uint8) if self.scale.itemsize == 1 else self.scale
        scale = scale[starts // block].view(self.scale.dtype)
        factor = None if self.factor is None else self.factor[rows]
        return replace(self, codes=self.codes[rows], scale=scale, factor=factor)

    def dequantized(self) -> Tensor:
        """Returns the dense matrix in float32: for each number a product with the scale, rounded."""
        one = self.rows(0, self.shape[0])
        scale = one.scale.float() if one.factor is None else one.scale.float() * one.factor[:, None]
        return one.numbers.mul_(scale.repeat_interleave(self.group_size, 1)[:, : self.shape[1]])

    def to(self, device: torch.device) -> FloatWeight:
        """Returns the matrix on a device."""
        factor = None if self.factor is None else self.factor.to(device)
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device), factor=factor)

    def to_whole_numbers(self) -> QuantizedWeight:
        """Returns a matrix of 4 bits with codes of 8 bits that are whole numbers, which has the same numbers: twice a
        number is one, and half a scale is exact.

        Its scales must be of whole groups."""
        assert self.bits == 4
        one = self.rows(0, self.shape[0])
        scale = one.scale.float() if one.factor is None else one.scale.float() * one.factor[:, None]
        codes = torch.tensor([round(2 * number) + 128 for number in FP4_NUMBERS], dtype=torch.uint8)
        scale = scale / 2
        return QuantizedWeight(codes[unpack_halves(self.codes).int()], scale, -128 * scale, 8, self.group_size)


# A matrix that stays as a checkpoint has it.
Coded = QuantizedWeight | FloatWeight
# A matrix of a layer as a checkpoint has it.
Matrix = Tensor | Coded
# The numbers of e2m1 by their codes.
FP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dense_matrix(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of a matrix, rounded once to `dtype`. Of codes little is in float32 at a time."""
    if isinstance(matrix, Tensor):
        return matrix.detach().to(dtype)
    dense = torch.empty(matrix.shape, dtype=dtype, device=matrix.codes.device)
    num_rows = max(1, PIECE_NUMBERS // matrix.shape[1])
    for start in range(0, matrix.shape[0], num_rows):
        dense[start : start + num_rows] = matrix.rows(start, start + num_rows).dequantized()
    return dense


def taken(matrix: Matrix, rows: Tensor) -> Matrix:
    """Returns copies of some rows of a matrix, or of numbers of a vector, in this order."""
    return matrix[rows] if isinstance(matrix, Tensor) else matrix.taken(rows)


def stacked(parts: Sequence[Coded]) -> Coded:
    """Returns matrices one below the other, without the orders of their columns.

    Raises:
        ValueError: they differ in a field, which is named with both values.
    """
    if any(isinstance(part, FloatWeight) and part.shape[0] % part.row_block for part in parts):
        # A block of scales may not have rows of two matrices.
        parts = [part.rows(0, part.shape[0]) for part in parts]
    first = parts[0]
    for part in parts[1:]:
        for (name, expected), found in zip(_form(first).items(), _form(part).values(), strict=True):
            if found != expected:
                raise ValueError(f"{name} is {found} instead of {expected}")
    codes, scale = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scale"))
    if isinstance(first, QuantizedWeight):
        offset = torch.cat([part.offset for part in parts if isinstance(part, QuantizedWeight)])
        return replace(first, codes=codes, scale=scale, offset=offset, column_order=None)
    factors = [part.factor for part in parts if isinstance(part, FloatWeight) and part.factor is not None]
    return replace(first, codes=codes, scale=scale, factor=torch.cat(factors) if factors else None)


def _form(weight: Coded) -> dict[str, object]:
    """Returns what matrices must have in common to be one."""
    form: dict[str, object] = {"kind": type(weight).__name__, "bits": weight.bits, "group_size": weight.group_size}
    if isinstance(weight, FloatWeight):
        scale = str(weight.scale.dtype).removeprefix("torch.")
        form |= {"row_block": weight.row_block, "scale": scale, "has_factor": weight.factor is not None}
    return form | {"num_columns": weight.shape[1]}


def pack_halves(codes: Tensor) -> Tensor:
    """Packs codes below 16, `[..., in]` uint8, in pairs: `[..., in / 2]`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_halves(packed: Tensor) -> Tensor:
    """Returns the codes `[..., in]` of pairs `[..., in / 2]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _free(parts: tuple[Tensor, ...]) -> None:
    for part in parts:
        storage = part.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
