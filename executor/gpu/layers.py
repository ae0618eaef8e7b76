"""Operations of a decoder layer: those between its matrix products by the Triton kernels, and products by torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from inflight.executor.attention.backend import LayerKv
from inflight.executor.attention.triton import scales_of
from inflight.executor.checkpoint.fp8_weight import Fp8Weight
from inflight.executor.kernels.fp8 import round_rows_kernel
from inflight.executor.kernels.norms import gated_fp8_kernel, gated_kernel, residual_norm_kernel, squared_relu_kernel
from inflight.executor.kernels.rope_write import rope_write_kernel
from inflight.executor.kernels.tiling import power_of_two
from inflight.executor.products.coded import CodedWeight

# Numbers that a program of 4 warps processes at once, behind a layer's first product.
INNER_TILE = 1024
ROPE_TILE = 1024


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Rows:
    """Rows in FP8: row[i] = scales[i, 0] * numbers[i]. `numbers` is float8_e4m3fn `[T, size]`, `scales` float32 `[T,
    1]`, NaN for rows with a number that is not finite. `dtype` is that of the numbers before."""

    numbers: Tensor
    scales: Tensor
    dtype: torch.dtype

    def widened(self) -> Tensor:
        """Returns the rows in float32."""
        return self.numbers.float() * self.scales

    @classmethod
    def empty(cls, num_rows: int, size: int, like: Tensor) -> Fp8Rows:
        """Makes rows of numbers that have the dtype of `like`, on its device."""
        numbers = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=like.device)
        return cls(numbers, torch.empty((num_rows, 1), dtype=torch.float32, device=like.device), like.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Product:
    """A product of FP8 numbers: outputs[t, o] = sums[t, o] * row_scales[t, 0] * column_scales[0, o], rounded to the
    dtype of `sums`. The scales are float32 `[T, 1]` and `[1, out]`."""

    sums: Tensor
    row_scales: Tensor
    column_scales: Tensor


Projected = Tensor | Fp8Product
# How a product reads a weight: dense, in FP8 with rows in FP8, or as the checkpoint has it.
Weight = Tensor | Fp8Weight | CodedWeight


def dense(product: Projected) -> Tensor:
    """Returns the outputs of a product, those of FP8 numbers by kernels of torch."""
    if isinstance(product, Tensor):
        return product
    return (product.sums.float() * product.row_scales).mul_(product.column_scales).to(product.sums.dtype)


def linear(inputs: Tensor | Fp8Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Computes `inputs @ weight.T + bias`. With a weight in FP8 the inputs `[T, in]` are rounded to FP8 too, unless
    they are, each row with a scale."""
    if isinstance(weight, Fp8Weight):
        outputs = dense(fp8_product(inputs, weight))
        return outputs if bias is None else outputs.add_(bias)
    assert isinstance(inputs, Tensor)
    if isinstance(weight, CodedWeight):
        outputs = weight.product(inputs)
        return outputs if bias is None else outputs.add_(bias)
    return functional.linear(inputs, weight, bias)


def fp8_product(inputs: Tensor | Fp8Rows, weight: Fp8Weight) -> Fp8Product:
    """Multiplies without the scales, which the kernel that reads the product applies.

    A scale for each row and column would leave cuBLAS (13.0, H100) with one tile of 128 rows, which takes up to 1.8
    times as long for few rows. Sums are in float32 and then rounded to the dtype of the inputs, which must have the
    range of float32: float16 has not.
    """
    rows = rounded_rows(inputs) if isinstance(inputs, Tensor) else inputs
    one = _one(rows.numbers.device)
    sums = torch._scaled_mm(rows.numbers, weight.numbers.t(), one, one, out_dtype=rows.dtype)
    return Fp8Product(sums, rows.scales, weight.scales)


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def rounded_rows(inputs: Tensor) -> Fp8Rows:
    """Rounds `inputs[T, size]` to FP8."""
    num_rows, size = inputs.shape
    rows = Fp8Rows.empty(num_rows, size, inputs)
    padded = power_of_two(size)
    round_rows_kernel[(num_rows,)](
        *(inputs, rows.numbers, rows.scales, size, inputs.stride(0)),
        PADDED_SIZE=padded,
        num_warps=_row_warps(padded),
    )
    return rows


def residual_norm(hidden: Tensor, delta: Projected | None, weight: Tensor, epsilon: float) -> Tensor:
    """Adds `delta` to the residual stream `hidden[T, size]` in place and returns the RMSNorm of the sum."""
    outputs = torch.empty_like(hidden)
    _launch_norm(hidden, delta, weight, epsilon, outputs, outputs)
    return outputs


def residual_norm_fp8(hidden: Tensor, delta: Projected | None, weight: Tensor, epsilon: float) -> Fp8Rows:
    """Computes `rounded_rows(residual_norm(…))` by one kernel."""
    rows = Fp8Rows.empty(hidden.shape[0], hidden.shape[1], hidden)
    _launch_norm(hidden, delta, weight, epsilon, rows.numbers, rows.scales)
    return rows


def _launch_norm(
    hidden: Tensor,
    delta: Projected | None,
    weight: Tensor,
    epsilon: float,
    outputs: Tensor,
    scales: Tensor,
) -> None:
    num_rows, size = hidden.shape
    padded = power_of_two(size)
    residual_norm_kernel[(num_rows,)](
        *(hidden, *_sums_and_scales(hidden if delta is None else delta), weight, outputs, scales, size, epsilon),
        PADDED_SIZE=padded,
        HAS_DELTA=delta is not None,
        HAS_SCALES=isinstance(delta, Fp8Product),
        num_warps=_row_warps(padded),
    )


def _sums_and_scales(product: Projected) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the kernels' arguments; without FP8 the scales are unused tensors."""
    if isinstance(product, Tensor):
        return product, product, product
    return product.sums, product.row_scales, product.column_scales


def _row_warps(padded_size: int) -> int:
    """Returns the warps of a program that processes a row."""
    return min(16, max(4, padded_size // 512))


def gated(gate_up: Tensor, has_gelu: bool = False) -> Tensor:
    """Returns `silu(gate) * up`, or with GELU in its approximation by tanh, of `gate_up[T, 2 * size]`."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    outputs = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    gated_kernel[(num_rows, -(-size // INNER_TILE))](*(gate_up, outputs, size), TILE=INNER_TILE, HAS_GELU=has_gelu)
    return outputs


def gated_fp8(gate_up: Projected, has_gelu: bool = False) -> Fp8Rows:
    """Computes `rounded_rows(gated(…))` by one kernel."""
    sums, *scales = _sums_and_scales(gate_up)
    num_rows, size = sums.shape[0], sums.shape[1] // 2
    rows = Fp8Rows.empty(num_rows, size, sums)
    padded = power_of_two(size)
    gated_fp8_kernel[(num_rows,)](
        *(sums, *scales, rows.numbers, rows.scales, size),
        PADDED_SIZE=padded,
        HAS_GELU=has_gelu,
        HAS_SCALES=isinstance(gate_up, Fp8Product),
        num_warps=_row_warps(padded),
    )
    return rows


def squared_relu(inputs: Tensor) -> Tensor:
    """Returns the squares of ReLU of `inputs[T, size]`."""
    outputs = torch.empty_like(inputs)
    _launch_squared_relu(inputs, outputs, outputs, INNER_TILE, 4)
    return outputs


def squared_relu_fp8(product: Projected) -> Fp8Rows:
    """Computes `rounded_rows(squared_relu(…))` by one kernel."""
    sums, *_ = _sums_and_scales(product)
    num_rows, size = sums.shape
    rows, padded = Fp8Rows.empty(num_rows, size, sums), power_of_two(size)
    _launch_squared_relu(product, rows.numbers, rows.scales, padded, _row_warps(padded))
    return rows


def _launch_squared_relu(product: Projected, outputs: Tensor, scales: Tensor, tile: int, num_warps: int) -> None:
    num_rows, size = outputs.shape
    squared_relu_kernel[(num_rows, -(-size // tile))](
        *(*_sums_and_scales(product), outputs, scales, size),
        TILE=tile,
        HAS_SCALES=isinstance(product, Fp8Product),
        num_warps=num_warps,
    )


def rope_write(
    product: Projected,
    norms: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    slot_mapping: Tensor,
    rotations: Tensor,
    kv: LayerKv,
    epsilon: float,
) -> Tensor:
    """Normalises and rotates queries and keys, stores keys and values, and returns the queries `[T, num_heads,
    head_dim]`.

    `product` is `qkv[T, (num_heads + 2 * num_kv_heads) * head_dim]`, which is changed in place; `norms` are those of
    queries and keys.
    `rotations[positions, rotary_dim]` holds the cosines of each position, then the sines; the other numbers of a head
    are not rotated.
    """
    qkv, *scales = _sums_and_scales(product)
    num_kv_heads, half = kv.shape.num_kv_heads, kv.shape.head_dim // 2
    num_all = qkv.shape[1] // (2 * half)
    num_heads = num_all - 2 * num_kv_heads
    padded_half = power_of_two(half)
    tile_heads = max(1, ROPE_TILE // padded_half)
    query_norm, key_norm = norms or (qkv, qkv)
    rope_write_kernel[(qkv.shape[0], -(-num_all // tile_heads))](
        *(qkv, *scales, query_norm, key_norm, positions, slot_mapping, rotations, kv.keys, kv.values, *scales_of(kv)),
        *(qkv.stride(0), *kv.keys.stride()[:3], epsilon),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF_DIM=half,
        PADDED_HALF=padded_half,
        BLOCK_SIZE=kv.keys.shape[2],
        TILE_HEADS=tile_heads,
        HAS_NORMS=norms is not None,
        HAS_SCALES=isinstance(product, Fp8Product),
        HALF_ROTARY=rotations.shape[1] // 2,
    )
    return qkv[:, : num_heads * 2 * half].view(-1, num_heads, 2 * half)


def rotation_table(inverse_frequencies: Tensor, scaling: float, num_positions: int) -> Tensor:
    """Returns cosines and sines of every position, `[num_positions, rotary_dim]` float32, as transformers computes
    them."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=inverse_frequencies.device)
    angles = positions[:, None] * inverse_frequencies.float()
    return torch.cat((angles.cos(), angles.sin()), 1) * scaling
