"""Metadata of GGUF files: what llama.cpp computes with is applied to the configuration, or refused by its key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch

import inflight.common.model_source as model_source
from inflight.common.model_source import ModelError, load_tokenizer, read_gguf, resolve_model
from inflight.executor.checkpoint.gguf import import_configuration
from inflight.executor.formats.gguf_blocks import BLOCK_TYPES
from inflight.executor.formats.loading import load_network
from tests.support.checkpoints.quantized_checkpoints import NUM_TOKENS, add_keys, add_vocabulary, save_gguf

KINDS: Any = gguf.GGMLQuantizationType
Q8 = [KINDS["Q8_0"]]
HEAD_DIM = 64
PLAIN = 10000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "cache_folder", lambda: tmp_path / "cache")


def load(path: Path) -> Any:
    return load_network(resolve_model(str(path)), torch.float32, torch.device("cpu"))[0]


def import_densely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes files of Q8_0 ones that only transformers reads."""
    monkeypatch.delitem(cast(Any, BLOCK_TYPES), KINDS["Q8_0"].value)


def yarn_frequencies(factor: float, original: int, beta_fast: float, beta_slow: float) -> np.ndarray[Any, Any]:
    """Frequencies as ggml computes them (`rope_yarn`, `ggml_rope_yarn_corr_dims`)."""

    def dimension(rotations: float) -> float:
        return HEAD_DIM * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(10000.0))

    low = max(0, math.floor(dimension(beta_fast)))
    high = min(HEAD_DIM - 1, math.ceil(dimension(beta_slow)))
    ramp = 1 - np.clip((np.arange(HEAD_DIM // 2) - low) / max(0.001, high - low), 0, 1)
    return PLAIN / factor * (1 - ramp) + PLAIN * ramp


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 256}
DIVISORS = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
SCALED: dict[str, tuple[dict[str, Any], dict[str, Any], Any, float]] = {
    "linear": ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}, PLAIN / 4, 1.0),
    "linear without a type": ({"rope.scaling.factor": 4.0}, {}, PLAIN / 4, 1.0),
    "linear, the old key": ({"rope.scale_linear": 4.0}, {}, PLAIN / 4, 1.0),
    "none": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}, PLAIN, 1.0),
    "yarn": (YARN, {}, yarn_frequencies(4, 256, 32, 1), 0.1 * math.log(4) + 1),
    "yarn with all keys": (
        YARN
        | {f"rope.scaling.{key}": value for key, value in (("yarn_beta_fast", 16.0), ("yarn_beta_slow", 2.0))}
        | {"rope.scaling.attn_factor": 0.5},
        {},
        yarn_frequencies(4, 256, 16, 2),
        0.5 * (0.1 * math.log(4) + 1),
    ),
    "divisors": ({}, {"rope_freqs.weight": DIVISORS}, PLAIN / DIVISORS, 1.0),
    "divisors and linear": ({"rope.scaling.factor": 2.0}, {"rope_freqs.weight": DIVISORS}, PLAIN / DIVISORS / 2, 1.0),
    "longrope": (
        {
            "rope.scaling.type": "longrope",
            "rope.scaling.factor": 8.0,
            "rope.scaling.attn_factor": 1.25,
            "rope.scaling.original_context_length": 512,
        },
        {"rope_factors_short.weight": DIVISORS, "rope_factors_long.weight": 2 * DIVISORS},
        PLAIN / DIVISORS,
        1.25,
    ),
}


@pytest.mark.parametrize(
    ("family", "name", "how"),
    [
        *((family, name, "read directly") for family in ("llama", "qwen2") for name in SCALED),
        *(("llama", name, "imported as a dense model") for name in SCALED),
        *(("qwen2", name, "imported as a dense model") for name in ("yarn", "divisors")),
    ],
)
def test_scaling_of_the_rotary_embedding_is_that_of_llama_cpp(
    family: str, name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, tensors, frequencies, attention_scaling = SCALED[name]
    if how != "read directly":
        import_densely(monkeypatch)
    rotary = load(save_gguf(tmp_path / "tiny.gguf", family, Q8, keys=keys, tensors=tensors)).model.rotary_emb
    assert np.allclose(rotary.inv_freq.numpy(), frequencies, rtol=1e-5, atol=0)
    assert rotary.attention_scaling == pytest.approx(attention_scaling)


def test_theta_of_an_architecture_that_transformers_forgets_is_applied(tmp_path: Path) -> None:
    keys = {
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 1,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 4,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": 1e6,
    }
    assert configuration(tmp_path, "starcoder2", keys).rope_parameters["rope_theta"] == 1e6


def configuration(folder: Path, family: str, keys: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> Any:
    """Returns the imported configuration of a file that has metadata alone."""
    from transformers import AutoConfig

    writer = gguf.GGUFWriter(folder / "tiny.gguf", family)
    add_vocabulary(writer)
    add_keys(writer, family, keys)
    for name, numbers in ({"token_embd.weight": np.zeros((NUM_TOKENS, 4))} | dict(tensors or {})).items():
        writer.add_tensor(name, np.asarray(numbers, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return AutoConfig.from_pretrained(str(import_configuration(resolve_model(str(folder / "tiny.gguf")))))


SIZES = {
    "context_length": 128,
    "embedding_length": 64,
    "block_count": 6,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
GEMMA = SIZES | {"attention.key_length": 24, "attention.value_length": 24, "attention.sliding_window": 16}


def test_global_layers_of_gemma3_are_scaled_and_those_with_a_window_are_not(tmp_path: Path) -> None:
    keys = {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    config = configuration(tmp_path, "gemma3", GEMMA | keys)
    assert config.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert (config.query_pre_attn_scalar, config.sliding_window) == (24, 16)


@pytest.mark.parametrize(("family", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_attention_of_gemma_27b_is_scaled_by_the_width_of_the_model(
    family: str, num_layers: int, tmp_path: Path
) -> None:
    config = configuration(tmp_path, family, GEMMA | {"block_count": num_layers})
    assert config.query_pre_attn_scalar == 64 / 4


def test_other_windows_and_caps_of_gemma_are_applied(tmp_path: Path) -> None:
    keys = {
        "attention.sliding_window_pattern": 3,
        "rope.freq_base_swa": 5000.0,
        "final_logit_softcapping": 20.0,
    }
    config = configuration(tmp_path, "gemma3", GEMMA | keys)
    assert config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"] * 2
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 5000.0
    assert config.final_logit_softcapping == 20.0


def test_factors_and_rotated_part_of_phi_are_applied(tmp_path: Path) -> None:
    keys = {
        "context_length": 4096,
        "rope.dimension_count": 12,
        "rope.scaling.original_context_length": 512,
        "rope.scaling.attn_factor": 1.25,
        "attention.sliding_window": 100,
    }
    short, long = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    config = configuration(tmp_path, "phi3", SIZES | keys, tensors)
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["short_factor"], rope["long_factor"]) == ("longrope", short, long)
    assert (rope["original_max_position_embeddings"], rope["attention_factor"]) == (512, 1.25)
    assert (rope["partial_rotary_factor"], config.max_position_embeddings) == (0.75, 4096)
    assert config.sliding_window == 100


def test_sizes_of_experts_are_applied(tmp_path: Path) -> None:
    keys = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48, "attention.key_length": 16}
    assert configuration(tmp_path, "qwen3moe", SIZES | keys).moe_intermediate_size == 48


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope.scaling.type": "su"}, "llama.rope.scaling.type = su is not supported"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type = longrope needs the tensors rope_factors_short"),
        (YARN | {"rope.scaling.yarn_log_multiplier": 0.1}, "llama.rope.scaling.yarn_log_multiplier = 0.1"),
        (YARN | {"rope.scaling.yarn_ext_factor": 0.5}, "llama.rope.scaling.yarn_ext_factor = 0.5 is not supported"),
        ({"rope.scaling.alpha": 1000.0}, "llama.rope.scaling.alpha = 1000.0 is not supported"),
        ({"rope.scaling.attn_factor": 0.5}, "llama.rope.scaling.attn_factor = 0.5 is not supported with"),
        ({"rope.dimension_count": 32, "attention.key_length": 64}, "llama.rope.dimension_count = 32 is not supported"),
        ({"attention.value_length": 32}, "llama.attention.value_length = 32 differs from the length of keys, 64"),
        ({"attention.sliding_window": 100}, "llama.attention.sliding_window = 100 is not supported"),
        ({"attention.clamp_kqv": 8.0}, "llama.attention.clamp_kqv = 8.0 is not supported"),
        ({"logit_scale": 0.5}, "llama.logit_scale = 0.5 is not supported"),
    ],
    ids=str,
)
def test_key_that_cannot_be_applied_is_refused_by_name(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(f"GGUF key {message}")):
        load(save_gguf(tmp_path / "tiny.gguf", "llama", Q8, keys=keys))


def test_dense_layers_of_a_file_that_says_it_has_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tiny\.gguf cannot be loaded: it has the tensor blk\.0\.ffn_gate\.weight"):
        load(save_gguf(tmp_path / "tiny.gguf", "llama", Q8, keys={"expert_count": 8, "expert_used_count": 2}))


def test_keys_that_are_not_used_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {"pooling_type": 0, "rope.scaling.finetuned": True, "tokenizer.ggml.mask_token_id": 3}
    with caplog.at_level("INFO"):
        load(save_gguf(tmp_path / "tiny.gguf", "llama", Q8, keys=keys))
    assert "keys of tiny.gguf that are not used: llama.pooling_type, tokenizer.ggml.mask_token_id" in caplog.text


@pytest.mark.parametrize("how", ["read directly", "imported as a dense model"])
def test_tensor_without_a_place_is_refused_by_name(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if how != "read directly":
        import_densely(monkeypatch)
    path = save_gguf(tmp_path / "tiny.gguf", "llama", Q8, tensors={"blk.0.attn_q.bias": np.zeros(256)})
    with pytest.raises(ModelError, match=r"self_attn\.q_proj\.bias|blk\.0\.attn_q\.bias has no place"):
        load(path)


def test_dense_import_without_a_weight_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_densely(monkeypatch)
    path = save_gguf(tmp_path / "tiny.gguf", "llama", Q8, keys={"block_count": 3})
    with pytest.raises(ModelError, match=r"lacks 9 weights, such as model\.layers\.2"):
        load(path)


@pytest.mark.parametrize("how", ["read directly", "imported as a dense model"])
@pytest.mark.parametrize("given", ["tiny-Q8_0-00001-of-00003.gguf", "tiny-Q8_0-00003-of-00003.gguf", "."])
def test_parts_of_a_split_file_load_as_one(
    given: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how != "read directly":
        import_densely(monkeypatch)
    whole = load(save_gguf(tmp_path / "whole.gguf", "llama", Q8)).state_dict()
    (tmp_path / "split").mkdir()
    save_gguf(tmp_path / "split" / "tiny-Q8_0.gguf", "llama", Q8, tensors_per_file=8)
    source = resolve_model(str(tmp_path / "split" / given))
    assert (source.name, source.gguf_file) == ("tiny", tmp_path / "split" / "tiny-Q8_0-00001-of-00003.gguf")
    found = load(tmp_path / "split" / given).state_dict()
    assert found.keys() == whole.keys()
    for name, weight in whole.items():
        assert torch.equal(found[name], weight), name
    assert not [*(tmp_path / "cache").rglob("whole.gguf")]


def test_message_for_a_part_names_those_that_are_not_there(tmp_path: Path) -> None:
    save_gguf(tmp_path / "tiny.gguf", "llama", Q8, tensors_per_file=8)
    (tmp_path / "tiny-00002-of-00003.gguf").unlink()
    (tmp_path / "tiny-00001-of-00003.gguf").rename(tmp_path / "first.gguf")
    message = (
        r"tiny-00003-of-00003.gguf is one of 3 parts of a model; not found.*: tiny-00001-of-00003.gguf, tiny-00002"
    )
    with pytest.raises(ModelError, match=message):
        resolve_model(str(tmp_path / "tiny-00003-of-00003.gguf"))
    with pytest.raises(ModelError, match=message):
        read_gguf(tmp_path / "tiny-00003-of-00003.gguf")
    with pytest.raises(ModelError, match=r"is one of 3 parts of a model, whose names must end -00001-of-00003.gguf"):
        read_gguf(tmp_path / "first.gguf")


def test_revision_of_a_split_file_is_that_of_all_parts(tmp_path: Path) -> None:
    save_gguf(tmp_path / "tiny.gguf", "llama", Q8, tensors_per_file=8)
    first, last = tmp_path / "tiny-00001-of-00003.gguf", tmp_path / "tiny-00003-of-00003.gguf"
    revision = resolve_model(str(first)).revision
    assert resolve_model(str(last)).revision == revision
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert resolve_model(str(first)).revision != revision


# Pieces of this text by the rule of each name, where a space and a line feed are written as byte-level vocabularies do.
TEXT = "I've 12345 x1\n\n1"
PIECES = {
    "gpt-2": ["I", "'ve", "Ġ12345", "Ġx", "1", "Ċ", "Ċ", "1"],
    "smollm": ["I", "'ve", "Ġ", "1", "2", "3", "4", "5", "Ġx", "1", "ĊĊ", "1"],
    "qwen2": ["I", "'ve", "Ġ", "1", "2", "3", "4", "5", "Ġx", "1", "ĊĊ", "1"],
    "llama-bpe": ["I", "'ve", "Ġ", "123", "45", "Ġx", "1", "ĊĊ", "1"],
    "deepseek-v3": ["I", "'ve", "Ġ", "123", "45", "Ġx", "1", "ĊĊ", "1"],
    "deepseek-coder": ["I", "'", "ve", "Ġ", "1", "2", "3", "4", "5", "Ġx", "1", "Ċ", "Ċ", "1"],
    "falcon": ["I", "'", "ve", "Ġ", "123", "45", "Ġx", "1", "Ċ", "Ċ", "1"],
}
PIECES |= {"mellum": PIECES["gpt-2"], "command-r": PIECES["smollm"], "stablelm2": PIECES["qwen2"]}
PIECES |= {"glm4": PIECES["llama-bpe"], "hunyuan-dense": PIECES["deepseek-v3"]}


@pytest.mark.parametrize("name", PIECES)
def test_text_is_split_by_the_rule_of_the_vocabulary(name: str, tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", "llama", Q8, keys={"tokenizer.ggml.pre": name})
    tokenizer: Any = load_tokenizer(resolve_model(str(path)))
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    assert [piece for piece, _ in pieces] == PIECES[name]


def test_unknown_rule_to_split_text_is_refused_by_name(tmp_path: Path) -> None:
    path = save_gguf(tmp_path / "tiny.gguf", "llama", Q8, keys={"tokenizer.ggml.pre": "kimi-k2"})
    with pytest.raises(ModelError, match=r"tiny.gguf: tokenizer.ggml.pre = 'kimi-k2' is not a known rule"):
        load_tokenizer(resolve_model(str(path)))
