"""The Triton kernels between a layer's matrix products, under the interpreter, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inflight.executor.attention.backend import KvShape
from inflight.executor.attention.triton import TritonAttention
from inflight.executor.gpu.layers import gated, residual_norm, rope_write, rotation_table, squared_relu

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def rms_norm(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon) * weight


@pytest.mark.parametrize("size", [64, 100])
def test_norm_adds_the_delta_to_the_residual_first(size: int) -> None:
    hidden, delta, weight = torch.randn(3, size), torch.randn(3, size), torch.randn(size)
    expected = hidden + delta
    outputs = residual_norm(hidden, delta, weight, 1e-5)
    torch.testing.assert_close(hidden, expected)
    torch.testing.assert_close(outputs, rms_norm(expected, weight, 1e-5))


def test_norm_without_delta_leaves_the_residual_alone() -> None:
    hidden, weight = torch.randn(2, 32), torch.randn(32)
    before = hidden.clone()
    torch.testing.assert_close(residual_norm(hidden, None, weight, 1e-6), rms_norm(before, weight, 1e-6))
    assert torch.equal(hidden, before)


def test_norm_sees_the_residual_as_it_is_kept() -> None:
    # In float16, for the interpreter cuts bfloat16 off where a GPU rounds it
    hidden, delta, ones = torch.randn(2, 32).half(), torch.randn(2, 32).half(), torch.ones(32).half()
    expected = hidden + delta
    outputs = residual_norm(hidden, delta, ones, 0.0)
    assert torch.equal(hidden, expected)
    torch.testing.assert_close(outputs, rms_norm(expected.float(), ones.float(), 0.0).half())


def test_gated_is_silu_times_up() -> None:
    gate_up = torch.randn(3, 2 * 1100) * 4
    expected = torch.nn.functional.silu(gate_up[:, :1100]) * gate_up[:, 1100:]
    torch.testing.assert_close(gated(gate_up), expected)


def test_squares_of_relu_are_those_of_torch() -> None:
    inputs = torch.randn(3, 1100)
    inputs[1, 7] = float("nan")
    torch.testing.assert_close(squared_relu(inputs), torch.nn.functional.relu(inputs).square(), equal_nan=True)


def rotated(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding as the models have it: the first half of a head turns against the second."""
    low, high = heads.chunk(2, -1)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat((low * cosine - high * sine, high * cosine + low * sine), -1)


@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "head-norms"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 16), (9, 3, 80)])
def test_queries_are_rotated_and_keys_and_values_stored(
    num_heads: int, num_kv_heads: int, head_dim: int, has_norms: bool
) -> None:
    # Given three tokens of other positions, and slots that are not in order
    shape, positions, slots = KvShape(num_kv_heads, head_dim), torch.tensor([0, 5, 41]), torch.tensor([17, 40, 3])
    kv = TritonAttention().allocate(shape, 3, 16, torch.float32, CPU)
    frequencies = 100.0 ** -torch.linspace(0, 1, head_dim // 2)
    qkv = torch.randn(3, (num_heads + 2 * num_kv_heads) * head_dim)
    heads = qkv.clone().unflatten(1, (-1, head_dim))
    norms = (torch.randn(head_dim), torch.randn(head_dim)) if has_norms else None

    queries = rope_write(qkv, norms, positions, slots, rotation_table(frequencies, 1.0, 64), kv, 1e-6)

    expected_queries, keys, values = heads.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if norms is not None:
        expected_queries, keys = rms_norm(expected_queries, norms[0], 1e-6), rms_norm(keys, norms[1], 1e-6)
    angles = positions[:, None] * frequencies
    torch.testing.assert_close(queries, rotated(expected_queries, angles))
    torch.testing.assert_close(kv.keys[slots // 16, :, slots % 16], rotated(keys, angles))
    assert torch.equal(kv.values[slots // 16, :, slots % 16], values)
    assert int(kv.values.any(-1).sum()) == 3 * num_kv_heads, "only these slots are written"
