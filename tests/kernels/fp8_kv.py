"""FP8 KV and activations by our kernels against torch's conversion and the reference backend, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from inflight.executor.attention.backend import KvShape, LayerKv, Scoring
from inflight.executor.attention.reference import ReferenceAttention
from inflight.executor.attention.triton import TritonAttention
from inflight.executor.checkpoint.fp8_weight import round_rows
from inflight.executor.gpu.layers import (
    Fp8Rows,
    Projected,
    dense,
    fp8_product,
    gated,
    gated_fp8,
    residual_norm,
    residual_norm_fp8,
    rope_write,
    rotation_table,
    rounded_rows,
    squared_relu,
    squared_relu_fp8,
)
from tests.kernels.comparison import TOLERANCE, filled
from tests.support.device.paged_cases import PagedCase, Spec, make_case

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
# Relative distance of outputs from those of exact keys and values, of which e4m3 keeps 4 significant bits.
TOLERANCE_OF_ROUNDING = 0.1


def rounded(numbers: Tensor) -> Tensor:
    """Returns finite numbers `[..., size]` as the kernels keep them in e4m3, in float32. The largest of each row is 448
    times its scale."""
    scales = numbers.float().abs().amax(-1, keepdim=True).clamp(min=2.0**-100) * (1 / 448)
    return (numbers.float() / scales).to(FP8).float() * scales


def stored(kv: LayerKv, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and the values `[tokens, num_kv_heads, head_dim]` of slots, in float32."""
    block_size = kv.keys.shape[2]
    places = slots // block_size, slice(None), slots % block_size
    keys, values = (
        cached.float()[places] * scales[places][..., None]
        for cached, scales in zip((kv.keys, kv.values), kv.scales, strict=True)
    )
    return keys, values


def poisoned(shape: KvShape, num_blocks: int, device: torch.device = CPU) -> LayerKv:
    """KV whose every number and scale is NaN."""
    kv = TritonAttention().allocate(shape, num_blocks, 16, FP8, device)
    for memory in (kv.keys, kv.values, *kv.scales):
        memory.view(torch.uint8).fill_(255)
    return kv


def assert_attends_to_fp8(
    specs: tuple[Spec, ...],
    shape: KvShape,
    group: int,
    *,
    scoring: Scoring = Scoring(0.2),  # noqa: B008 - immutable
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> None:
    """Attention over FP8 KV against float32 attention over the same rounded numbers, and near that over exact ones."""
    backend, reference = TritonAttention(), ReferenceAttention()
    case: PagedCase = make_case(specs, 16)
    size = (case.history.num_tokens, shape.num_kv_heads, shape.head_dim)
    keys, values = torch.randn(2, *size).to(device, dtype)
    queries = torch.randn(case.batch.num_tokens, shape.num_kv_heads * group, shape.head_dim).to(device, dtype)
    batch = case.batch.to(device)
    kv = poisoned(shape, case.num_blocks + 1, device)
    backend.write(kv, keys, values, case.history.to(device))
    found = backend.attend(queries, kv, batch, scoring).float()

    def expected(some_keys: Tensor, some_values: Tensor) -> Tensor:
        exact_kv = filled(reference, shape, case, some_keys.float(), some_values.float(), 16)
        return reference.attend(queries.float(), exact_kv, batch, scoring)

    torch.testing.assert_close(found, expected(rounded(keys), rounded(values)), rtol=0, atol=TOLERANCE[dtype])
    exact = expected(keys, values)
    assert (found - exact).norm() <= TOLERANCE_OF_ROUNDING * exact.norm()


def assert_fused_rounding_changes_nothing(num_rows: int, size: int, device: torch.device = CPU) -> None:
    """Norm and gate that round to FP8 yield what rounding their results yields, bit for bit."""
    hidden, delta = (torch.randn(num_rows, size, device=device).bfloat16() for _ in range(2))
    weight, gate_up = (
        torch.rand(size, device=device).bfloat16(),
        torch.randn(num_rows, 2 * size, device=device).bfloat16(),
    )
    gate_up[0] = 0
    streams = hidden.clone(), hidden.clone()
    _assert_same(
        residual_norm_fp8(streams[0], delta, weight, 1e-5),
        rounded_rows(residual_norm(streams[1], delta, weight, 1e-5)),
    )
    assert torch.equal(*streams)
    for has_gelu in (False, True):
        _assert_same(gated_fp8(gate_up, has_gelu), rounded_rows(gated(gate_up, has_gelu)))
    _assert_same(squared_relu_fp8(gate_up), rounded_rows(squared_relu(gate_up)))


def assert_kernels_apply_scales(num_rows: int, size: int, device: torch.device = CPU) -> None:
    """Kernels that read a product of FP8 numbers by its sums yield what they yield for its outputs, bit for bit."""
    # The interpreter does not round to bfloat16 as torch does.
    dtype = torch.float32 if device == CPU else torch.bfloat16
    rows, weight = torch.randn(num_rows, size).to(device, dtype), torch.rand(size).to(device, dtype)
    product = fp8_product(rows, round_rows(torch.randn(size, size, device=device)))
    products: tuple[Projected, Projected] = (product, dense(product))
    streams = rows.clone(), rows.clone()
    pairs = zip(streams, products, strict=True)
    assert torch.equal(*(residual_norm(stream, delta, weight, 1e-5) for stream, delta in pairs))
    assert torch.equal(*streams)
    for activated in (gated_fp8, squared_relu_fp8):
        _assert_same(*(activated(gate_up) for gate_up in products))

    shape, positions = KvShape(1, size // 4), torch.arange(num_rows, device=device)
    rotations = rotation_table(torch.rand(size // 8, device=device), 1.0, num_rows)
    pools = [TritonAttention().allocate(shape, 1 + num_rows // 16, 16, dtype, device) for _ in range(2)]
    # The outputs first: the sums are changed in place.
    queries = [
        rope_write(qkv, None, positions, positions, rotations, kv, 1e-5)
        for qkv, kv in zip(products[::-1], pools, strict=True)
    ]
    assert torch.equal(*queries)
    assert torch.equal(pools[0].keys, pools[1].keys)
    assert torch.equal(pools[0].values, pools[1].values)


def _assert_same(found: Fp8Rows, expected: Fp8Rows) -> None:
    assert torch.equal(found.numbers.view(torch.uint8), expected.numbers.view(torch.uint8))
    assert torch.equal(found.scales, expected.scales)
    assert found.dtype == expected.dtype
