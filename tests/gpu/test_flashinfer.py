"""Chunks by the real FlashInfer on a GPU, against the Triton kernels."""

from __future__ import annotations

import pytest
import torch

from inflight.executor.attention.backend import KvShape, Scoring
from inflight.executor.attention.flashinfer import Heads, open_flashinfer
from inflight.executor.attention.triton import TritonAttention
from tests.kernels.comparison import TOLERANCE, filled
from tests.support.device.paged_cases import Spec, make_case

pytestmark = pytest.mark.gpu

MIXED = (*(Spec(1, 37 * i + 1) for i in range(9)), Spec(130, 130), Spec(5, 700), Spec(300, 900), Spec(600, 3000))
SCORINGS = (Scoring(0.1), Scoring(0.1, 33), Scoring(0.1, 512, 2.0), Scoring(0.3, None, 30.0))


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 1), (64, 3), (128, 4), (128, 8), (256, 2)])
def test_planned_attention_equals_the_kernels(gpu: torch.device, head_dim: int, group: int, block_size: int) -> None:
    pytest.importorskip("flashinfer", reason="the extra flashinfer is not installed")
    case, shape, backend, dtype = make_case(MIXED, block_size), KvShape(2, head_dim), TritonAttention(), torch.bfloat16
    keys, values = torch.randn(2, case.history.num_tokens, 2, head_dim).to(gpu, dtype)
    # What no token was written to is NaN.
    kv = filled(backend, shape, case, keys, values, block_size)
    queries = torch.randn(case.batch.num_tokens, 2 * group, head_dim).to(gpu, dtype)
    opened = open_flashinfer("flashinfer", Heads(2 * group, shape, SCORINGS), dtype, [dtype], gpu, backend)
    assert opened is not None
    attention = opened.plan(case.batch)
    assert attention is not None
    for scoring in SCORINGS:
        batch = case.batch.to(gpu)
        found, expected = (way.attend(queries, kv, batch, scoring) for way in (attention, backend))
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])
