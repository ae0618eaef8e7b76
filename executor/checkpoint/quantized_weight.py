"""Matrices of whole numbers with scales, the one form in which quantized checkpoints of all formats are computed.

What a format cannot express in this form without a change of its numbers is not read into it.
"""

from __future__ import annotations

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
        for part in (self.codes, self.scale, self.offset):
            storage = part.untyped_storage()
            if storage.resizable():
                storage.resize_(0)

    def rows(self, start: int, end: int) -> QuantizedWeight:
        """Returns the rows `[start, end)` as views."""
        codes, scale, offset = (part[start:end] for part in (self.codes, self.scale, self.offset))
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

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        """Returns the dense matrix, rounded once to `dtype`. Little of it is in float32 at a time."""
        dense = torch.empty(self.shape, dtype=dtype)
        num_rows = max(1, PIECE_NUMBERS // self.shape[1])
        for start in range(0, self.shape[0], num_rows):
            dense[start : start + num_rows] = self.rows(start, start + num_rows).dequantized()
        return dense


# A matrix of a layer as a checkpoint has it.
Matrix = Tensor | QuantizedWeight


def dense_matrix(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """Returns the numbers of a matrix in `dtype`."""
    return matrix.to_dense(dtype) if isinstance(matrix, QuantizedWeight) else matrix.detach().to(dtype)


def pack_halves(codes: Tensor) -> Tensor:
    """Packs codes below 16, `[..., in]` uint8, in pairs: `[..., in / 2]`."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_halves(packed: Tensor) -> Tensor:
    """Returns the codes `[..., in]` of pairs `[..., in / 2]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
