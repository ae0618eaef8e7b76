"""FP8 KV by our kernels against torch's conversion and the reference backend, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.gpu.fp8_emulation import rounded
from executor.attention.backend import KvShape, LayerKv, Scoring
from executor.attention.reference import ReferenceAttention
from executor.attention.triton import TritonAttention
from tests.kernels.comparison import TOLERANCE, filled
from tests.paged_cases import PagedCase, Spec, make_case

CPU = torch.device("cpu")
FP8 = torch.float8_e4m3fn
# Of outputs, which are averages of values around 1: e4m3 keeps 4 significant bits of keys and values.
TOLERANCE_OF_ROUNDING = 0.15


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
    torch.testing.assert_close(found, expected(keys, values), rtol=0, atol=TOLERANCE_OF_ROUNDING)
