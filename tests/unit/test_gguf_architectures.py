"""GGUF files of models with experts and of hybrids: the numbers of their parameters are those of the model that was
converted, and their logits those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

import inflight.common.model_source as model_source
from inflight.common.model_source import ModelError, load_tokenizer, resolve_model
from inflight.executor.checkpoint.expert_matrices import coded_experts, expand_experts
from inflight.executor.checkpoint.quantized_linear import make_dense
from inflight.executor.checkpoint.quantized_weight import FloatWeight, QuantizedWeight
from inflight.executor.formats.loading import load_network
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.self_check import relative_distance
from inflight.executor.recurrent.mixer import StateSizes
from tests.property.test_hybrid_models import BLOCK_SIZE, NUM_BLOCKS, TOKENS
from tests.property.test_native_hybrid import CHUNKS, LENGTH, logits_of
from tests.property.test_row_invariance import one_by_one
from tests.support.checkpoints.gguf_models import save_gguf_model
from tests.support.checkpoints.gpt_oss import gpt_oss_config
from tests.support.checkpoints.tiny_models import sizes
from tests.support.device.greedy import assert_same, generate_alone, generate_together
from tests.support.device.torch_threads import torch_threads

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

KINDS: Any = gguf.GGMLQuantizationType
# Superblocks have 256 numbers.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.05}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
}
HYBRID: dict[str, Any] = sizes(**WIDE, num_hidden_layers=3, head_dim=32)
CHOICE: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2}
SHARED: dict[str, Any] = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 64}
MROPE: dict[str, Any] = {
    "rope_theta": 1e4,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
    "partial_rotary_factor": 0.25,
}


def configs() -> dict[str, PretrainedConfig]:
    """Configurations by architecture. A file changes the size of their vocabulary."""
    return {
        "glm4moe": Glm4MoeConfig(
            **sizes(**WIDE, n_routed_experts=5, moe_intermediate_size=256, first_k_dense_replace=1),
            num_experts_per_tok=2,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
        ),
        "gpt-oss": gpt_oss_config(hidden_size=256, intermediate_size=256, swiglu_limit=7.0),
        "lfm2": Lfm2Config(
            **sizes(**WIDE, num_hidden_layers=3),
            layer_types=["conv", "full_attention", "conv"],
            block_auto_adjust_ff_dim=False,
            conv_bias=True,
        ),
        "lfm2moe": Lfm2MoeConfig(
            **sizes(**WIDE, num_hidden_layers=3, moe_intermediate_size=256),
            **CHOICE,
            layer_types=["conv", "full_attention", "conv"],
            num_dense_layers=1,
        ),
        "mixtral": MixtralConfig(**sizes(**WIDE, num_local_experts=4), num_experts_per_tok=2),
        "olmoe": OlmoeConfig(**sizes(**WIDE, head_dim=64), **CHOICE),
        "qwen2moe": Qwen2MoeConfig(**sizes(**WIDE, **SHARED), **CHOICE),
        "qwen3moe": Qwen3MoeConfig(**sizes(**WIDE, moe_intermediate_size=256), **CHOICE, norm_topk_prob=True),
        "qwen3next": Qwen3NextConfig(**HYBRID, **DELTA, **SHARED, **CHOICE),
        "qwen35": Qwen3_5TextConfig(**HYBRID, **DELTA, rope_parameters=dict(MROPE)),
        "qwen35moe": Qwen3_5MoeTextConfig(**HYBRID, **DELTA, **SHARED, **CHOICE, rope_parameters=dict(MROPE)),
    }


# Two types in turn: gate and up of experts differ in the second set.
TYPES = {"Q4_0": ("Q4_0",), "Q4_K-Q6_K": ("Q4_K", "Q6_K", "Q4_K"), "Q4_1-Q8_0": ("Q4_1", "Q8_0"), "F16": ("F16",)}
ALL = [*((name, "Q4_K-Q6_K") for name in configs())]
SOME = [("qwen3moe", kinds) for kinds in TYPES if kinds != "Q4_K-Q6_K"]
MXFP4 = ("gpt-oss", "MXFP4-Q8_0")
QUICK = [("qwen3moe", "Q4_K-Q6_K"), ("qwen35moe", "Q4_K-Q6_K"), MXFP4]


def slow_unless(quick: list[tuple[str, str]], cases: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "cache_folder", lambda: tmp_path / "cache")


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


def save(folder: Path, name: str, kinds: str) -> tuple[Path, Path]:
    """Makes a file; returns it and the dense folder."""
    types = [KINDS[kind] for kind in TYPES.get(kinds) or kinds.split("-")]
    path = folder / "tiny.gguf"
    return path, save_gguf_model(path, name, configs()[name], types)


@pytest.mark.parametrize(("name", "kinds"), slow_unless([*QUICK, ("lfm2", "Q4_K-Q6_K")], [*ALL, *SOME, MXFP4]))
def test_parameters_are_those_that_were_converted(name: str, kinds: str, tmp_path: Path) -> None:
    path, dense = save(tmp_path, name, kinds)
    network = load_network(resolve_model(str(path)), torch.float32, torch.device("cpu"))[0]
    expected: Any = AutoModelForCausalLM.from_pretrained(str(dense), dtype=torch.float32)
    for of_experts in coded_experts(network):
        assert isinstance(of_experts, FloatWeight if of_experts.bits == 4 and "MXFP4" in kinds else QuantizedWeight)
    assert any(True for _ in coded_experts(network)) == (
        "Q" in kinds and hasattr(configs()[name], "num_experts_per_tok")
    )
    make_dense(network, torch.float32)
    expand_experts(network)
    found, wanted = network.state_dict(), expected.state_dict()
    assert found.keys() == wanted.keys()
    for parameter, weight in wanted.items():
        exact = torch.equal(found[parameter], weight)
        assert exact or torch.allclose(found[parameter], weight, rtol=1e-5, atol=1e-6), parameter
    ours, theirs = network.config.to_dict(), expected.config.to_dict()
    for field in ("layer_types", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "sliding_window"):
        assert ours.get(field) == theirs.get(field), field


@pytest.mark.parametrize(("name", "kinds"), slow_unless([MXFP4], [*ALL, MXFP4]))
def test_logits_and_tokens_are_those_of_the_dequantized_model(name: str, kinds: str, tmp_path: Path) -> None:
    path, dense = save(tmp_path, name, kinds)
    network: Any = AutoModelForCausalLM.from_pretrained(str(dense), dtype=torch.float32, attn_implementation="eager")
    model = load_model(resolve_model(str(path)), dtype_name="float32", backend_name="cpu", device_name="cpu")
    assert isinstance(model.forward, NativeForward)
    assert model.description.weight_dtype == "quantized"
    if model.forward.states is not None:
        model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        model.forward.states.reserve(StateSizes(3, 0, 5))
        with torch.inference_mode():
            expected = network(torch.tensor([TOKENS[:LENGTH]])).logits[0]
        whole = logits_of(model, 0, (LENGTH,))
        # Of Qwen3-Next, those of transformers are 2.0e-4 from its own in float64, ours 1.6e-4 (also dense).
        assert relative_distance(whole, expected) < (3e-4 if name == "qwen3next" else 1e-4)
        assert torch.equal(logits_of(model, 1, CHUNKS[0]), whole)
        return
    prompts = [[5, 9, 33, 7, 8, 21, 60, 12, 80, 41], [40, 3]]
    for prompt, output in zip(prompts, generate_together(model, prompts, 8, 4), strict=True):
        assert_same(output, generate_alone(network, prompt, 8))
    with torch.inference_mode():
        expected = network(torch.tensor([prompts[0]])).logits[0]
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    assert float((one_by_one(model, prompts[0], 1) - expected).abs().max()) <= 1e-4


@pytest.mark.parametrize("name", ["olmoe", "glm4moe", "lfm2moe", "qwen3next"])
def test_tokenizer_of_an_architecture_that_transformers_does_not_read_is_made(name: str, tmp_path: Path) -> None:
    path, _ = save(tmp_path, name, "F16")
    tokenizer: Any = load_tokenizer(resolve_model(str(path)))
    assert tokenizer.decode(tokenizer.encode("Hello, 12\n\n", add_special_tokens=False)) == "Hello, 12\n\n"


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("qwen3moe", {"expert_weights_norm": False}, "qwen3moe.expert_weights_norm = False is not supported"),
        ("gpt-oss", {"expert_gating_func": 2}, "gpt-oss.expert_gating_func = 2 is not supported"),
        ("olmoe", {"attention.clamp_kqv": 8.0}, "olmoe.attention.clamp_kqv = 8.0 is not supported"),
    ],
)
def test_key_that_cannot_be_applied_is_refused(name: str, keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    save_gguf_model(path, name, configs()[name], [KINDS["Q8_0"]], keys)
    with pytest.raises(ModelError, match=message):
        load_network(resolve_model(str(path)), torch.float32, torch.device("cpu"))
