"""FP8 on a GPU: the rounding of the kernels, attention over FP8 KV, products of FP8 weights, and a model with both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from inflight.common.model_source import resolve_model
from inflight.executor.attention.backend import KvShape, Scoring
from inflight.executor.attention.quantized import MIN_FP8_CAPABILITY
from inflight.executor.checkpoint.fp8_weight import round_rows
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.layers import linear, rounded_rows
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.loader import load_model
from tests.kernels.fp8_kv import (
    assert_attends_to_fp8,
    assert_fused_rounding_changes_nothing,
    assert_kernels_apply_scales,
    rounded,
)
from tests.kernels.test_gpu_runner import BLOCK_SIZE, LIMITS, NUM_BLOCKS, outputs, requests
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.paged_cases import Spec

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fp8_gpu(_gpu: None, gpu: torch.device) -> None:
    """Skips, with the reason, where the GPU has no FP8."""
    if torch.cuda.get_device_capability(gpu) < MIN_FP8_CAPABILITY:
        pytest.skip("this GPU is of compute capability below 8.9")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_that_of_torch(gpu: torch.device, dtype: torch.dtype) -> None:
    rows = (torch.randn(99, 14336) * 2.0 ** torch.randint(-40, 20, (99, 1))).to(gpu, dtype)
    rows[0] *= 2.0 ** torch.randint(-25, 0, (14336,), device=gpu)
    rows[1] = 0
    assert torch.equal(rounded_rows(rows).widened(), rounded(rows))


def test_norm_and_gate_round_in_the_same_kernel(gpu: torch.device) -> None:
    for size in (4096, 14336):
        assert_fused_rounding_changes_nothing(9, size, gpu)


def test_kernels_apply_the_scales_of_products(gpu: torch.device) -> None:
    for size in (512, 4096):
        assert_kernels_apply_scales(9, size, gpu)


@pytest.mark.parametrize("scoring", [Scoring(0.1), Scoring(0.1, 100), Scoring(0.1, None, 30.0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_is_that_over_the_rounded_numbers(gpu: torch.device, head_dim: int, scoring: Scoring) -> None:
    specs = (*(Spec(1, 37 * i + 1) for i in range(9)), Spec(130, 130), Spec(5, 700), Spec(300, 900))
    assert_attends_to_fp8(specs, KvShape(2, head_dim), 4, scoring=scoring, dtype=torch.bfloat16, device=gpu)


def test_product_is_that_of_the_rounded_numbers(gpu: torch.device) -> None:
    for num_rows in (1, 7, 300):
        rows, bias = torch.randn(num_rows, 4096, device=gpu).bfloat16(), torch.randn(512, device=gpu).bfloat16()
        weight = round_rows(torch.randn(512, 4096, device=gpu))
        widened = weight.numbers.double() * weight.scales.double().t()
        expected = rounded(rows).double() @ widened.t() + bias.double()
        # The sum is rounded to bfloat16, and so is the sum with the bias.
        torch.testing.assert_close(linear(rows, weight, bias).double(), expected, rtol=2**-7, atol=0.5)


def test_model_is_loaded_and_its_tokens_do_not_depend_on_graphs(tmp_path: Path) -> None:
    # Loading compares its logits with those of transformers
    folder = save_model(LlamaConfig(**sizes()), tmp_path / "tiny")
    model = load_model(
        resolve_model(str(folder)),
        dtype_name="bfloat16",
        device_name="cuda",
        weight_dtype="fp8",
        kv_cache_dtype="fp8",
    )
    assert isinstance(model.forward, GpuForward)
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    runs = []
    for uses_graphs in (True, False):
        runner = GpuRunner(model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE, uses_graphs=uses_graphs)
        runner.prepare()
        runs.append(outputs(runner, requests()))
        runner.close()
    assert runs[0] == runs[1]
