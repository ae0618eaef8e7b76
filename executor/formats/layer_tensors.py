"""The tensors that a checkpoint has for a linear layer, with their checks, and the matrix that they make."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.quantized_weight import FloatWeight, QuantizedWeight, pack_halves, unpack_halves

# Group sizes that a matrix may have beside its whole rows. Larger groups are divided into groups of the last one.
GROUP_SIZES = (16, 32, 64, 128)
SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Of the scales of activations and of the KV cache. Products read activations as they are (docs/models.md).
ACTIVATION_SCALES = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale")
# The bits of a number of e4m3 without its sign, and those of NaN.
FP8_MAGNITUDE = FP8_NAN = 0x7F
SHAPES_OF_ONE = (1,), (), (1, 1)
INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class LayerTensors:
    """The tensors of a layer by their names in it, without the bias. `out_features` and `in_features` are those of the
    network."""

    layer: str
    tensors: Mapping[str, Tensor]
    out_features: int
    in_features: int

    def check_names(self, required: Collection[str], optional: Collection[str] = ()) -> None:
        """Raises `ModelError` for a tensor that is missing or not known."""
        for name in required:
            if name not in self.tensors:
                raise ModelError(f"{self.layer}.{name} is missing")
        for name in self.tensors:
            if name not in required and name not in optional:
                raise ModelError(f"{self.layer}.{name} is not supported")

    def get(self, name: str, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]) -> Tensor:
        """Returns a tensor that has one of the types and shapes."""
        tensor = self.tensors[name]
        if tensor.dtype not in dtypes:
            wanted = " or ".join(map(_dtype_name, dtypes))
            raise ModelError(f"{self.layer}.{name} is of {_dtype_name(tensor.dtype)} instead of {wanted}")
        if tuple(tensor.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ModelError(f"{self.layer}.{name} has the shape {list(tensor.shape)} instead of {wanted}")
        return tensor

    def finite(self, name: str, dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]) -> Tensor:
        """Returns scales like `get`. None is NaN or infinite."""
        scale = self.get(name, dtypes, *shapes)
        if not torch.isfinite(scale.float()).all():
            raise ModelError(f"{self.layer}.{name} has scales that are not finite")
        return scale

    def check_activation_scales(self) -> None:
        """Raises `ModelError` if the scales of activations, which are not used, are none."""
        for name in ACTIVATION_SCALES:
            if name in self.tensors and not torch.isfinite(self.tensors[name].float()).all():
                raise ModelError(f"{self.layer}.{name} has scales that are not finite")

    def fp8(self, scale: Tensor, row_block: int = 1, group_size: int | None = None) -> FloatWeight:
        """Returns the matrix of `weight` in FP8 with scales of a type and shape of `FloatWeight`; of whole rows without
        a size of groups."""
        numbers = self.get("weight", (torch.float8_e4m3fn,), (self.out_features, self.in_features))
        codes = numbers.contiguous().view(torch.uint8)
        if bool(((codes & FP8_MAGNITUDE) == FP8_NAN).any()):
            raise ModelError(f"{self.layer}.weight has numbers that are not finite (NaN)")
        return FloatWeight(codes, scale.contiguous(), 8, group_size or self.in_features, row_block)

    def fp8_of_rows(self, name: str, *shapes: tuple[int, ...]) -> FloatWeight:
        """Returns the matrix of `weight` in FP8 with the scale `name` of each row, or one of all."""
        scale = self.finite(name, SCALE_DTYPES, *shapes).float()
        return self.fp8(scale.reshape(-1, 1).expand(self.out_features, 1))

    def fp8_in_blocks(self, name: str, block: tuple[int, int]) -> FloatWeight:
        """Returns the matrix of `weight` in FP8 with the scale `name` of each block of rows and columns. The last ones
        may be smaller."""
        rows, columns = (-(-size // of) for size, of in zip((self.out_features, self.in_features), block, strict=True))
        shapes = (rows, columns), (rows, 1, columns, 1)
        scale = self.finite(name, (*SCALE_DTYPES, torch.float8_e8m0fnu), *shapes).float()
        return self.fp8(scale.view(rows, columns), *block)

    def fp4(self, weight: str, scale: Tensor, group_size: int, factor: Tensor | None = None) -> FloatWeight:
        """Returns a matrix in FP4 with scales `[out, groups]` of one byte. `factor` is one number."""
        codes = self.get(weight, (torch.uint8,), (self.out_features, self.in_features // 2))
        of_rows = None if factor is None else factor.reshape(1).expand(self.out_features).contiguous()
        return FloatWeight(codes.contiguous(), scale.contiguous(), 4, group_size, factor=of_rows)

    def num_groups(self, group_size: int) -> int:
        """Returns the groups of a row, which is one itself if the size is -1."""
        if group_size == -1:
            return 1
        if self.in_features % group_size:
            raise ModelError(
                f"{self.layer}: {self.in_features} columns are not a multiple of groups of {group_size}, "
                f"{self._fitting_groups}"
            )
        return self.in_features // group_size

    def weight(
        self, codes: Tensor, scale: Tensor, zeros: Tensor, bits: int, group_of_column: Tensor | None = None
    ) -> QuantizedWeight:
        """Returns the matrix `scale * (code - zero)`.

        `codes` are packed as in `QuantizedWeight`. `scale` and `zeros` are `[out, groups]`, and scales are finite.
        `group_of_column` is given if the groups are not runs of columns.
        """
        scale, zeros = scale.float(), zeros.float()
        group_size = self.in_features // scale.shape[1]
        order = None if group_of_column is None else self._column_order(group_of_column, scale.shape[1])
        if order is not None:
            codes = pack_halves(unpack_halves(codes)[:, order]) if bits == 4 else codes[:, order]
        if group_size not in GROUP_SIZES and group_size != self.in_features:
            parts, rest = divmod(group_size, GROUP_SIZES[-1])
            if rest:
                raise ModelError(
                    f"{self.layer}: groups of {group_size} columns are not supported, {self._fitting_groups}"
                )
            scale, zeros = scale.repeat_interleave(parts, 1), zeros.repeat_interleave(parts, 1)
            group_size = GROUP_SIZES[-1]
        return QuantizedWeight(
            codes.contiguous(),
            scale.contiguous(),
            (scale * -zeros).contiguous(),
            bits,
            group_size,
            None if order is None else order.int(),
        )

    @property
    def _fitting_groups(self) -> str:
        """The sizes of groups that this layer may have, in words."""
        sizes = [str(size) for size in GROUP_SIZES if self.in_features % size == 0]
        return f"only of {', '.join(sizes)} or a whole row" if sizes else "only of a whole row"

    def _column_order(self, group_of_column: Tensor, num_groups: int) -> Tensor | None:
        """Returns the columns in the order of their groups; None if that is how they are."""
        groups = group_of_column.long()
        expected = torch.arange(num_groups).repeat_interleave(self.in_features // num_groups)
        if torch.equal(groups, expected):
            return None
        order = torch.argsort(groups, stable=True)
        if not torch.equal(groups[order], expected):
            raise ModelError(f"{self.layer}: the groups of its columns are not of equal size")
        return order


def as_bytes(words: Tensor) -> Tensor:
    """Returns the bytes of int32 words, the lowest first: codes of 8 bits, or pairs of codes of 4 bits."""
    return words.contiguous().view(torch.uint8)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Returns the codes in int32 words, the lowest bits first, uint8."""
    packed = as_bytes(words)
    return packed if bits == 8 else unpack_halves(packed)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
