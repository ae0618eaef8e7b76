"""Operations of a decoder layer: those between its matrix products by the Triton kernels, and products by torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from executor.attention.backend import LayerKv
from executor.attention.triton import scales_of
from executor.checkpoint.fp8_weight import Fp8Weight
from executor.kernels.fp8 import round_rows_kernel
from executor.kernels.norms import gated_kernel, residual_norm_kernel
from executor.kernels.rope_write import rope_write_kernel
from executor.kernels.tiling import power_of_two

# Numbers that a program of 4 warps processes at once.
GATED_TILE = 1024
ROPE_TILE = 1024


def linear(inputs: Tensor, weight: Tensor | Fp8Weight, bias: Tensor | None = None) -> Tensor:
    """Computes `inputs @ weight.T + bias`. With a weight in FP8 the inputs `[T, in]` are rounded to FP8 too, each row
    with a scale; sums are in float32."""
    if isinstance(weight, Tensor):
        return functional.linear(inputs, weight, bias)
    numbers, scales = rounded_rows(inputs)
    outputs = torch._scaled_mm(numbers, weight.numbers.t(), scales, weight.scales, out_dtype=inputs.dtype)
    return outputs if bias is None else outputs.add_(bias)


def rounded_rows(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds `inputs[T, size]` to FP8. Returns the numbers and their scales `[T, 1]` in float32, which are NaN for rows
    with a number that is not finite."""
    num_rows, size = inputs.shape
    outputs = torch.empty(inputs.shape, dtype=torch.float8_e4m3fn, device=inputs.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=inputs.device)
    padded = power_of_two(size)
    round_rows_kernel[(num_rows,)](
        *(inputs, outputs, scales, size, inputs.stride(0)), PADDED_SIZE=padded, num_warps=_row_warps(padded)
    )
    return outputs, scales


def residual_norm(hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Adds `delta` to the residual stream `hidden[T, size]` in place and returns the RMSNorm of the sum."""
    outputs = torch.empty_like(hidden)
    num_rows, size = hidden.shape
    padded = power_of_two(size)
    residual_norm_kernel[(num_rows,)](
        *(hidden, hidden if delta is None else delta, weight, outputs, size, epsilon),
        PADDED_SIZE=padded,
        HAS_DELTA=delta is not None,
        num_warps=_row_warps(padded),
    )
    return outputs


def _row_warps(padded_size: int) -> int:
    """Returns the warps of a program that processes a row."""
    return min(16, max(4, padded_size // 512))


def gated(gate_up: Tensor, has_gelu: bool = False) -> Tensor:
    """Returns `silu(gate) * up`, or with GELU in its approximation by tanh, of `gate_up[T, 2 * size]`."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    outputs = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    gated_kernel[(num_rows, -(-size // GATED_TILE))](gate_up, outputs, size, TILE=GATED_TILE, HAS_GELU=has_gelu)
    return outputs


def rope_write(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    slot_mapping: Tensor,
    rotations: Tensor,
    kv: LayerKv,
    epsilon: float,
) -> Tensor:
    """Normalises and rotates queries and keys, stores keys and values, and returns the queries `[T, num_heads,
    head_dim]`.

    `qkv[T, (num_heads + 2 * num_kv_heads) * head_dim]` is changed in place; `norms` are those of queries and keys.
    `rotations[positions, head_dim]` holds the cosines of each position, then the sines.
    """
    num_kv_heads, half = kv.shape.num_kv_heads, kv.shape.head_dim // 2
    num_all = qkv.shape[1] // (2 * half)
    num_heads = num_all - 2 * num_kv_heads
    padded_half = power_of_two(half)
    tile_heads = max(1, ROPE_TILE // padded_half)
    query_norm, key_norm = norms or (qkv, qkv)
    rope_write_kernel[(qkv.shape[0], -(-num_all // tile_heads))](
        *(qkv, query_norm, key_norm, positions, slot_mapping, rotations, kv.keys, kv.values, *scales_of(kv)),
        *(qkv.stride(0), *kv.keys.stride()[:3], epsilon),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF_DIM=half,
        PADDED_HALF=padded_half,
        BLOCK_SIZE=kv.keys.shape[2],
        TILE_HEADS=tile_heads,
        HAS_NORMS=norms is not None,
    )
    return qkv[:, : num_heads * 2 * half].view(-1, num_heads, 2 * half)


def rotation_table(inverse_frequencies: Tensor, scaling: float, num_positions: int) -> Tensor:
    """Returns cosines and sines of every position, `[num_positions, head_dim]` float32, as transformers computes
    them."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=inverse_frequencies.device)
    angles = positions[:, None] * inverse_frequencies.float()
    return torch.cat((angles.cos(), angles.sin()), 1) * scaling
