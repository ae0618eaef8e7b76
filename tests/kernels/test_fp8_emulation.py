"""The emulation of FP8 on a CPU, against the GPU path under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig

from inflight.bench.gpu.fp8_emulation import load_emulated
from inflight.common.model_source import resolve_model
from inflight.executor.model.loader import load_model
from inflight.executor.model.self_check import relative_distance
from tests.kernels.test_fp8_weights import logits_of
from tests.paged_cases import Spec, make_case
from tests.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.torch_threads import torch_threads


def test_logits_are_those_of_the_gpu_path(tmp_path: Path) -> None:
    # Rounding itself is compared bit by bit in test_fp8_kv.py and test_fp8_weights.py
    with torch.random.fork_rng(devices=[]), torch_threads(1):
        torch.manual_seed(0)
        source = resolve_model(str(save_model(LlamaConfig(**sizes(num_hidden_layers=1)), tmp_path / "tiny")))
        batch = make_case([Spec(9, 9), Spec(2, 2)], 16).batch
        batch.token_ids.copy_(torch.randint(VOCABULARY_SIZE, (batch.num_tokens,), dtype=batch.token_ids.dtype))
        gpu = load_model(
            source,
            dtype_name="float32",
            device_name="cpu",
            backend_name="triton",
            weight_dtype="fp8",
            kv_cache_dtype="fp8",
        )
        expected = logits_of(gpu, batch)

        def distance(*, has_fp8_weights: bool, has_fp8_kv: bool) -> float:
            model = load_emulated(source, "float32", has_fp8_weights=has_fp8_weights, has_fp8_kv=has_fp8_kv)
            return relative_distance(logits_of(model, batch), expected)

        same = distance(has_fp8_weights=True, has_fp8_kv=True)
        # Both roundings change the logits by more than another order of sums
        assert 10 * same < distance(has_fp8_weights=False, has_fp8_kv=True)
        assert 10 * same < distance(has_fp8_weights=True, has_fp8_kv=False)
