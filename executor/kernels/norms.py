"""Kernels between the matrix products of a layer, in Triton: residual + RMSNorm, and activations, mostly of
gates, times what they gate."""

import triton
import triton.language as tl

from inflight.executor.kernels.fp8 import magnitudes, scale_of, scaled_sums, to_fp8


@triton.jit
def residual_norm_kernel(
    hidden,  # [rows, size], the residual stream; the delta is added in place
    delta,
    delta_row_scales, delta_column_scales,  # [rows] and [size] float32, if the delta is the sums of a product in FP8
    weight,
    outputs,
    scales,  # [rows] float32, of outputs in FP8; unused without
    size,
    epsilon,
    PADDED_SIZE: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Adds `delta` to `hidden` and computes its RMSNorm. Grid: rows. All three are contiguous."""
    index = tl.program_id(0).to(tl.int64)
    row = index * size
    columns = tl.arange(0, PADDED_SIZE)
    mask = columns < size
    stream = tl.load(hidden + row + columns, mask=mask, other=0.0)
    if HAS_DELTA:
        addend = tl.load(delta + row + columns, mask=mask, other=0.0).to(tl.float32)
        if HAS_SCALES:
            row_scale = tl.load(delta_row_scales + index)
            addend = scaled_sums(addend, row_scale, delta_column_scales, columns, mask, hidden.dtype.element_ty)
        added = stream.to(tl.float32) + addend
        # Rounded as the stream is stored, so that the norm sees the same values as the next layers.
        stream = added.to(hidden.dtype.element_ty)
        tl.store(hidden + row + columns, stream, mask=mask)
    wide = stream.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / size + epsilon)
    result = wide * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    store_row(result.to(hidden.dtype.element_ty), outputs, scales, size, columns)


@triton.jit
def store_row(result, outputs, scales, size, columns):
    """Stores a program's row. In FP8 it is rounded with a scale, as `round_rows_kernel` rounds the same numbers."""
    row, mask = tl.program_id(0).to(tl.int64), columns < size
    if outputs.dtype.element_ty == tl.float8e4nv:
        numbers = tl.where(mask, result.to(tl.float32), 0.0)
        scale = scale_of(tl.max(magnitudes(numbers), 0))
        tl.store(outputs + row * size + columns, to_fp8(numbers, scale), mask=mask)
        tl.store(scales + row, scale)
    else:
        tl.store(outputs + row * size + columns, result, mask=mask)


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
    gate, up = load_gate_and_up(gate_up, row, columns, size)
    result = activated(gate, up, HAS_GELU)
    tl.store(outputs + row * size + columns, result.to(outputs.dtype.element_ty), mask=mask)


@triton.jit
def gated_fp8_kernel(
    gate_up,  # as in `gated_kernel`, or the sums of a product in FP8 with
    row_scales, column_scales,  # [rows] and [2 * size] float32
    outputs,
    scales,
    size,
    PADDED_SIZE: tl.constexpr,
    HAS_GELU: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Computes what `gated_kernel` does, and rounds each row to FP8. Grid: rows."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_SIZE)
    gate, up = load_gate_and_up(gate_up, row, columns, size)
    if HAS_SCALES:
        row_scale, mask = tl.load(row_scales + row), columns < size
        gate = scaled_sums(gate, row_scale, column_scales, columns, mask, gate_up.dtype.element_ty)
        up = scaled_sums(up, row_scale, column_scales + size, columns, mask, gate_up.dtype.element_ty)
    result = activated(gate, up, HAS_GELU)
    store_row(result.to(gate_up.dtype.element_ty), outputs, scales, size, columns)


@triton.jit
def squared_relu_kernel(
    inputs,  # [rows, size], contiguous, or the sums of a product in FP8 with
    row_scales, column_scales,  # [rows] and [size] float32
    outputs,
    scales,  # [rows] float32, of outputs in FP8, whose rows are one tile; unused without
    size,
    TILE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Computes ReLU(x)^2. Grid: rows, tiles of columns."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < size
    numbers = tl.load(inputs + row * size + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALES:
        row_scale = tl.load(row_scales + row)
        numbers = scaled_sums(numbers, row_scale, column_scales, columns, mask, inputs.dtype.element_ty)
    store_row(squared_relu(numbers).to(inputs.dtype.element_ty), outputs, scales, size, columns)


@triton.jit
def load_gate_and_up(gate_up, row, columns, size):
    """Returns some columns of a row, in float32."""
    mask = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def clamped(gate, up, FACTOR: tl.constexpr, LIMIT: tl.constexpr):
    """Returns the activation `CLAMPED` of `checkpoint.decoder_weights`, in float32."""
    # Comparisons pass NaN on.
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return gate / (1.0 + tl.exp(-FACTOR * gate)) * (up + 1.0)


@triton.jit
def activated(gate, up, HAS_GELU: tl.constexpr):
    """Returns activation(gate) * up, in float32."""
    exponent = gate
    if HAS_GELU:
        # x * (1 + tanh(z)) / 2 = x / (1 + e^-2z) with z = sqrt(2 / pi) * (x + 0.044715 * x^3)
        exponent = gate * (1.5957691 + 0.071354814 * gate * gate)
    return gate / (1.0 + tl.exp(-exponent)) * up


@triton.jit
def squared_relu(x):
    """Returns ReLU(x)^2."""
    # A comparison passes NaN on.
    positive = tl.where(x < 0, 0.0, x)
    return positive * positive
