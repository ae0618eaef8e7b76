"""The GPU decoder's forward pass, under Triton's interpreter, yields the logits of the generic path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoModelForCausalLM,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from inflight.common.model_source import resolve_model
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.greedy import assert_same, generate_alone, generate_together

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0}
FAMILY: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**sizes()),
    "llama-yarn-bias-tied": LlamaConfig(**sizes(rope_parameters=YARN, attention_bias=True, tie_word_embeddings=True)),
    "mistral-window": MistralConfig(**sizes(sliding_window=8)),
    "qwen2-one-sliding-layer": Qwen2Config(**sizes(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen3": Qwen3Config(**sizes(head_dim=32)),
}
# Loading a model compares its logits with those of transformers.
LOADED: dict[str, PretrainedConfig] = {
    "phi3": Phi3Config(**sizes()),
    "granite": GraniteConfig(
        **sizes(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.1, logits_scaling=4.0)
    ),
    "olmo2": Olmo2Config(**sizes()),
    "olmo3": Olmo3Config(**sizes(sliding_window=8, layer_types=["sliding_attention", "full_attention"])),
    "smollm3": SmolLM3Config(**sizes(no_rope_layers=[1, 0])),
    "exaone4": Exaone4Config(**sizes(sliding_window=8, layer_types=["sliding_attention", "full_attention"])),
    "seed-oss": SeedOssConfig(**sizes(attention_bias=True, attention_out_bias=True)),
    "gemma2": Gemma2Config(**sizes(**GEMMA, attn_logit_softcapping=2.0)),
    "gemma3": Gemma3TextConfig(**sizes(**GEMMA, layer_types=["sliding_attention", "full_attention"])),
}
PROMPTS = [[5, 9, 3, 77, 41, 8, 2, 30, 64, 12, 33, 90, 7], [14], [21, 22, 23, 24, 25, 26]]


def load(folder: Path) -> PagedModel:
    return load_model(resolve_model(str(folder)), dtype_name="float32", backend_name="triton", device_name="cpu")


@pytest.mark.parametrize("name", FAMILY)
def test_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = save_model(FAMILY[name], tmp_path / name)
    network: Any = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")
    model = load(folder)
    assert isinstance(model.forward, GpuForward)

    together = generate_together(model, PROMPTS, num_tokens=4, chunk_tokens=6)

    for output_ids, prompt in zip(together, PROMPTS, strict=True):
        assert_same(output_ids, generate_alone(network, prompt, 4))


@pytest.mark.parametrize("name", LOADED)
def test_logits_in_chunks_and_decodes_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    assert isinstance(load(save_model(LOADED[name], tmp_path / name, has_random_vectors=True)).forward, GpuForward)


def test_other_forms_of_the_families_are_left_to_transformers_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LlamaConfig(**sizes(num_hidden_layers=1, mlp_bias=True))
    with caplog.at_level("INFO"):
        assert not isinstance(load(save_model(config, tmp_path / "tiny")).forward, GpuForward)
    assert "using the forward pass of transformers, because its feed-forward layers have biases" in caplog.text
