"""Kernels between the matrix products of a layer, in Triton: residual + RMSNorm, and activation(gate) * up."""

import triton
import triton.language as tl


@triton.jit
def residual_norm_kernel(
    hidden,  # [rows, size], the residual stream; the delta is added in place
    delta,
    weight,
    outputs,
    size,
    epsilon,
    PADDED_SIZE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
):
    """Adds `delta` to `hidden` and computes its RMSNorm. Grid: rows. All three are contiguous."""
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, PADDED_SIZE)
    mask = columns < size
    stream = tl.load(hidden + row + columns, mask=mask, other=0.0)
    if HAS_DELTA:
        added = stream.to(tl.float32) + tl.load(delta + row + columns, mask=mask, other=0.0).to(tl.float32)
        # Rounded as the stream is stored, so that the norm sees the same values as the next layers.
        stream = added.to(hidden.dtype.element_ty)
        tl.store(hidden + row + columns, stream, mask=mask)
    wide = stream.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / size + epsilon)
    result = wide * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(outputs + row + columns, result.to(outputs.dtype.element_ty), mask=mask)


@triton.jit
def gated_kernel(
    gate_up,  # [rows, 2 * size], contiguous: gates, then what they gate
    outputs,
    size,
    TILE: tl.constexpr,
    HAS_GELU: tl.constexpr,
):
    """Computes SiLU(gate) * up, or with GELU in its approximation by tanh. Grid: rows, tiles of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=mask, other=0.0).to(tl.float32)
    exponent = gate
    if HAS_GELU:
        # x * (1 + tanh(z)) / 2 = x / (1 + e^-2z) with z = sqrt(2 / pi) * (x + 0.044715 * x^3)
        exponent = gate * (1.5957691 + 0.071354814 * gate * gate)
    result = gate / (1.0 + tl.exp(-exponent)) * up
    tl.store(outputs + row * size + columns, result.to(outputs.dtype.element_ty), mask=mask)
