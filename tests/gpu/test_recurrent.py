"""Models with recurrent layers on a GPU: bits, logits and tokens, with graphs, of small models and of real shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GraniteMoeHybridConfig, Lfm2Config, PretrainedConfig, Qwen3_5TextConfig

from inflight.common.model_files.recurrent import MixerShape
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.loader import load_executor, step_sizes
from inflight.executor.settings import ExecutorSettings
from tests.kernels.test_gpu_recurrent import (
    FAMILY,
    SHAPES,
    check_bits,
    check_drafts,
    check_logits,
    check_runner,
    load,
)
from tests.property.test_native_hybrid import WITH_EXPERTS
from tests.support.checkpoints.tiny_models import save_model, sizes

pytestmark = pytest.mark.gpu

# Heads of the shapes that are served, and another type of activations than float32.
REAL = {
    "lfm2": MixerShape(3, 2048),
    "qwen3_5": MixerShape(4, 768, 2, 2, 128, 128),
    "granite_hybrid": MixerShape(4, 768, 1, 8, 128, 64, corrects=False),
}
LARGE: dict[str, PretrainedConfig] = {
    "lfm2": Lfm2Config(
        **sizes(hidden_size=1024, intermediate_size=2560, num_attention_heads=16, num_key_value_heads=8, head_dim=64)
        | {"num_hidden_layers": 3, "initializer_range": 0.02},
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
    ),
    "qwen3_5": Qwen3_5TextConfig(
        **sizes(hidden_size=1024, intermediate_size=3584, num_attention_heads=8, num_key_value_heads=2, head_dim=256)
        | {"num_hidden_layers": 4, "initializer_range": 0.02},
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    ),
    "granite_hybrid": GraniteMoeHybridConfig(
        **sizes(hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, head_dim=64)
        | {"num_hidden_layers": 3, "initializer_range": 0.02, "attention_multiplier": 0.015625},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=0,
        shared_intermediate_size=2048,
        mamba_n_heads=32,
        mamba_d_state=128,
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SHAPES)
def test_bits_do_not_depend_on_the_steps(gpu: torch.device, name: str, seed: int) -> None:
    check_bits(name, gpu, seed, None if seed == 0 else REAL[name])


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("name", FAMILY)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str, size: str) -> None:
    config = FAMILY[name] if size == "small" else LARGE[name]
    folder = save_model(config, tmp_path / name, has_random_vectors=True)
    check_logits(folder, load(folder, "cuda"), 150, (5, 1, 120, 1, 23))


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_logits_of_models_with_experts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = save_model(WITH_EXPERTS[name], tmp_path / name, has_random_vectors=True)
    check_logits(folder, load(folder, "cuda"), 150, (5, 1, 120, 1, 23))


@pytest.mark.parametrize("name", FAMILY)
def test_model_in_bfloat16_is_that_of_transformers(tmp_path: Path, name: str) -> None:
    """Loading compares logits."""
    folder = save_model(LARGE[name], tmp_path / name, has_random_vectors=True)
    assert isinstance(load(folder, "cuda", "bfloat16").forward, GpuForward)


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("name", FAMILY)
def test_tokens_of_graphs_are_those_of_transformers(tmp_path: Path, name: str, size: str) -> None:
    config = FAMILY[name] if size == "small" else LARGE[name]
    folder = save_model(config, tmp_path / name, has_random_vectors=True)
    check_runner(folder, load(folder, "cuda"), None, 25)


@pytest.mark.parametrize("name", FAMILY)
def test_tokens_do_not_depend_on_drafts_and_preemption(tmp_path: Path, name: str) -> None:
    folder = save_model(FAMILY[name], tmp_path / name, has_random_vectors=True)
    check_drafts(load(folder, "cuda"), None, 30, (0, 3))


def test_pool_leaves_room_for_slots_and_steps(tmp_path: Path) -> None:
    folder = save_model(LARGE["qwen3_5"], tmp_path / "large")
    settings = ExecutorSettings(model=str(folder), device="cuda", max_num_sequences=8, max_num_tokens=256)
    loaded = load_executor(settings)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    forward = loaded.model.forward
    assert loaded.limits.states is not None
    assert loaded.limits.states.num_checkpoints > 0
    kv_bytes = loaded.num_blocks * forward.layout.bytes_per_block(settings.tokens_per_block)
    assert kv_bytes > 0.4 * total_bytes
    assert free_bytes > 0
    runner = forward.start_runner(loaded.model.kv, step_sizes(settings, loaded.limits))
    assert runner is not None
    runner.close()
