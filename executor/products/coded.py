"""Products with matrices of codes on a GPU, whose memory stays as small as in the checkpoint.

Steps of few tokens read the codes and multiply tile by tile: reading them bounds such a step. Of many tokens the
products bound it. They are faster by cuBLAS, with some rows of the matrix at a time, decoded to a buffer that stays in
the GPU's cache. Both have the numbers of the dense matrix in the type of the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from inflight.executor.checkpoint.quantized_linear import QuantizedLinear
from inflight.executor.checkpoint.quantized_weight import Coded, Matrix, QuantizedWeight
from inflight.executor.kernels import coded as kernels
from inflight.executor.kernels.coded import add_splits_kernel, coded_product_kernel, decode_kernel
from inflight.executor.kernels.tiling import power_of_two
from inflight.executor.products.tiling import DECODED_TILE, LARGEST_STEP, product_tiling

# Of the rows that are decoded at a time: half of an H100's L2 cache.
DECODED_BYTES = 24 << 20
ADDED_TILE = 1024
# Types in which scales are kept, the smallest first, if they have the same numbers there.
SCALE_DTYPES = (torch.float16, torch.bfloat16)
INTEGER_KINDS = {4: kernels.INT4, 8: kernels.INT8}
FLOAT_KINDS = {4: kernels.FP4, 8: kernels.FP8}


@dataclass(frozen=True, slots=True, eq=False)
class CodedMatrix:
    """A matrix `[out, in]` as `decoded_tile` takes it.

    `codes` is uint8 `[out, in]`, or `[out, in / 2]` in pairs. `scales` are `[groups, ceil(out / row_block)]`, and so is
    `beside`: zeros (uint8), offsets (float32), or None. `factors` are float32 `[out]`. With `order` (int32 `[in]`)
    column j of the codes multiplies input `order[j]`.
    """

    codes: Tensor
    scales: Tensor
    beside: Tensor | None
    factors: Tensor | None
    order: Tensor | None
    kind: int
    scale_kind: int
    group_size: int
    row_block: int

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        per_byte = 2 if self.kind in (kernels.INT4.value, kernels.FP4.value) else 1
        return torch.Size((self.codes.shape[0], self.codes.shape[1] * per_byte))

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        parts = (self.codes, self.scales, self.beside, self.factors, self.order)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def multiply(self, inputs: Tensor, outputs: Tensor) -> None:
        """Writes `inputs[T, in] @ matrix.T` to `outputs[T, out]`, whose rows may be apart."""
        if self.order is not None:
            inputs = inputs.index_select(1, self.order)
        if inputs.shape[0] > LARGEST_STEP:
            self._multiply_decoded(inputs, outputs)
        elif inputs.shape[0]:
            self._multiply_tiles(inputs if inputs.stride(1) == 1 else inputs.contiguous(), outputs)

    def decode(self, first: int, outputs: Tensor) -> None:
        """Writes the rows of the matrix from `first` on to `outputs[rows, in]`, in the order of the codes."""
        tile_out, tile_in = DECODED_TILE
        grid = -(-outputs.shape[0] // tile_out), -(-self.shape[1] // tile_in)
        decode_kernel[grid](
            *(*self.tensors, outputs, first, first + outputs.shape[0], self.shape[1], self.scales.shape[1]),
            **self.constants,
            TILE_OUT=tile_out,
            TILE_IN=tile_in,
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The kernels' arguments; what there is not are unused tensors."""
        beside = self.scales if self.beside is None else self.beside
        return self.codes, self.scales, beside, self.scales if self.factors is None else self.factors

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of `decoded_tile` by name."""
        following = kernels.NOTHING
        if self.beside is not None:
            following = kernels.ZERO if self.beside.dtype == torch.uint8 else kernels.OFFSET
        return {
            "KIND": self.kind,
            "SCALE_KIND": self.scale_kind,
            "BESIDE": following.value,
            "HAS_FACTORS": self.factors is not None,
            "GROUP": power_of_two(self.group_size),
            "ROW_BLOCK": self.row_block,
        }

    def _multiply_tiles(self, inputs: Tensor, outputs: Tensor) -> None:
        num_tokens, (num_rows, num_columns) = inputs.shape[0], self.shape
        tiling = product_tiling(num_tokens, num_rows, num_columns)
        parts = outputs
        if tiling.splits > 1:
            parts = torch.empty((tiling.splits, num_tokens, num_rows), dtype=torch.float32, device=inputs.device)
        grid = -(-num_tokens // tiling.tokens), -(-num_rows // tiling.rows), tiling.splits
        coded_product_kernel[grid](
            *(inputs, *self.tensors, parts, num_tokens, num_rows, num_columns, self.scales.shape[1]),
            *(inputs.stride(0), parts.stride(-2), num_tokens * num_rows, tiling.columns_per_split(num_columns)),
            **self.constants,
            TILE_TOKENS=tiling.tokens,
            TILE_OUT=tiling.rows,
            TILE_IN=tiling.columns,
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
        )
        if tiling.splits > 1:
            add_splits_kernel[(num_tokens, -(-num_rows // ADDED_TILE))](
                *(parts, outputs, num_tokens, num_rows, outputs.stride(0)), NUM_SPLITS=tiling.splits, TILE=ADDED_TILE
            )

    def _multiply_decoded(self, inputs: Tensor, outputs: Tensor) -> None:
        num_rows, num_columns = self.shape
        multiple = DECODED_TILE[0]
        some = max(1, DECODED_BYTES // (num_columns * inputs.element_size() * multiple)) * multiple
        buffer = torch.empty((min(some, num_rows), num_columns), dtype=inputs.dtype, device=inputs.device)
        for first in range(0, num_rows, some):
            dense = buffer[: min(some, num_rows - first)]
            self.decode(first, dense)
            torch.mm(inputs, dense.t(), out=outputs[:, first : first + dense.shape[0]])


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """Matrices of the same inputs, one below the other; those that differ in form, or are dense, are multiplied one by
    one."""

    parts: tuple[CodedMatrix | Tensor, ...]

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(part.nbytes if isinstance(part, Tensor) else part.num_bytes for part in self.parts)

    def product(self, inputs: Tensor, outputs: Tensor | None = None) -> Tensor:
        """Computes `inputs[T, in] @ weight.T`, `[T, out]`, into `outputs` if they are given."""
        if outputs is None:
            outputs = inputs.new_empty((inputs.shape[0], self.shape[0]))
        first = 0
        for part in self.parts:
            of_part = outputs[:, first : (first := first + part.shape[0])]
            if isinstance(part, Tensor):
                torch.mm(inputs, part.t(), out=of_part)
            else:
                part.multiply(inputs, of_part)
        return outputs


class CodedLinear(nn.Module):
    """An `nn.Linear` with a matrix of codes on a GPU, for networks of transformers."""

    def __init__(self, weight: CodedWeight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Computes `inputs @ weight.T + bias`."""
        outputs = self.weight.product(inputs.flatten(0, -2)).view(*inputs.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs.add_(self.bias)


def multiply_codes(network: nn.Module) -> None:
    """Replaces the quantized layers of a network on a GPU by layers whose products read the codes."""
    for name, module in [*network.named_modules()]:
        if isinstance(module, QuantizedLinear):
            network.set_submodule(name, CodedLinear(coded_weight([module.weight]), module.bias))


def coded_weight(parts: Sequence[Matrix]) -> CodedWeight:
    """Returns matrices as one. Their numbers are taken over: what of them is copied is freed, whatever refers to it."""
    coded: list[CodedMatrix | Tensor] = []
    for run in _runs([part if isinstance(part, Tensor) else coded_matrix(part) for part in parts]):
        if len(run) == 1:
            coded += run
        elif isinstance(run[0], Tensor):
            coded.append(torch.cat([part for part in run if isinstance(part, Tensor)]))
        else:
            coded.append(_stacked([part for part in run if isinstance(part, CodedMatrix)]))
    return CodedWeight(tuple(coded))


def coded_matrix(weight: Coded) -> CodedMatrix:
    """Returns the form of the kernels. The codes stay where they are, and what is copied is freed."""
    scales, beside, factors, order = weight.scale.t().contiguous().clone(), None, None, None
    scale_kind, row_block = kernels.NUMBER, 1
    if isinstance(weight, QuantizedWeight):
        kind = INTEGER_KINDS[weight.bits]
        beside = _beside(scales, weight.offset.t().contiguous().clone())
        scales = _narrowed(scales)
        order = None if weight.column_order is None else weight.column_order
        for part in (weight.scale, weight.offset):
            _free(part)
    else:
        kind, factors, row_block = FLOAT_KINDS[weight.bits], weight.factor, weight.row_block
        if scales.dtype == torch.float8_e4m3fn:
            scale_kind = kernels.E4M3
        elif scales.dtype == torch.float8_e8m0fnu:
            scale_kind = kernels.E8M0
        scales = scales if scale_kind is kernels.NUMBER else scales.view(torch.uint8)
        _free(weight.scale)
    return CodedMatrix(
        weight.codes, scales, beside, factors, order, kind.value, scale_kind.value, weight.group_size, row_block
    )


def _beside(scale: Tensor, offset: Tensor) -> Tensor:
    """Returns the zeros of groups as bytes if offsets are whole multiples of scales, which they are to the bit, else
    the offsets."""
    zeros = (-offset / torch.where(scale == 0, 1.0, scale)).round()
    is_exact = torch.equal(scale * -zeros, offset) and bool(((zeros >= 0) & (zeros <= 255)).all())
    return zeros.to(torch.uint8) if is_exact else offset


def _narrowed(scale: Tensor) -> Tensor:
    """Returns scales in the smallest type that has the same numbers."""
    return next((small for small in map(scale.to, SCALE_DTYPES) if torch.equal(small.float(), scale)), scale)


def _runs(parts: list[CodedMatrix | Tensor]) -> list[list[CodedMatrix | Tensor]]:
    """Returns neighbours that are one matrix together."""
    runs = [[parts[0]]]
    for before, part in pairwise(parts):
        if _joins(before, part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _joins(first: CodedMatrix | Tensor, second: CodedMatrix | Tensor) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return isinstance(first, Tensor) and isinstance(second, Tensor)
    if (first.order is None) != (second.order is None):
        return False
    if first.order is not None and second.order is not None and not torch.equal(first.order, second.order):
        return False
    # A block of scales may not have rows of two matrices.
    return _form(first) == _form(second) and first.shape[0] % first.row_block == 0


def _form(matrix: CodedMatrix) -> tuple[Any, ...]:
    beside = None if matrix.beside is None else matrix.beside.dtype
    constants = matrix.kind, matrix.scale_kind, matrix.group_size, matrix.row_block, matrix.shape[1]
    return (*constants, matrix.scales.dtype, beside, matrix.factors is None)


def _stacked(parts: Sequence[CodedMatrix]) -> CodedMatrix:
    first = parts[0]
    codes = torch.cat([part.codes for part in parts])
    for part in parts:
        _free(part.codes)

    def joined(tensors: list[Tensor | None], dim: int) -> Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present, dim) if present else None

    scales = torch.cat([part.scales for part in parts], 1)
    beside = joined([part.beside for part in parts], 1)
    factors = joined([part.factors for part in parts], 0)
    constants = first.kind, first.scale_kind, first.group_size, first.row_block
    return CodedMatrix(codes, scales, beside, factors, first.order, *constants)


def _free(part: Tensor) -> None:
    """Frees the memory of a tensor that is not used any more, whatever refers to it."""
    storage = part.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
