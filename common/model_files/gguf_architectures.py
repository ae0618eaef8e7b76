"""Architectures of GGUF files with experts or recurrent layers: their metadata as fields of a configuration of
transformers.

The keys and what they mean are those of llama.cpp (gguf-py/gguf/constants.py, src/models). Scaling of rotary
embeddings and the keys that all architectures share are applied by `inflight.executor.checkpoint.gguf_metadata`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from inflight.common.model_files.gguf_header import GgufHeader

SIZES = {
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
}
CHOICE = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
EXPERTS = CHOICE | {"expert_feed_forward_length": "moe_intermediate_size"}
LOCAL_EXPERTS = CHOICE | {"expert_count": "num_local_experts"}
SHARED = EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
DELTA_NET = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
}
# Tensors of a layer whose last dimension a file may give instead of a key.
SIZE_TENSORS = {
    "moe_intermediate_size": "ffn_down_exps.weight",
    "shared_expert_intermediate_size": "ffn_down_shexp.weight",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a configuration has besides `SIZES`: `fields` by key, `constants` by field, and what `complete` adds to the
    fields of a file. `applied` are keys that the constants or `complete` cover; a file may have no other value of those
    with one here."""

    model_type: str
    fields: Mapping[str, str]
    constants: Mapping[str, Any]
    complete: Callable[[dict[str, Any], GgufHeader], None]
    applied: Mapping[str, tuple[Any, ...]]


def architecture_of(header: GgufHeader) -> Architecture | None:
    """Returns the architecture of a file; None for those whose configuration transformers reads."""
    name = header.architecture
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return ARCHITECTURES["mixtral"]
    return None if name == "mixtral" else ARCHITECTURES.get(name)


def configuration_of(header: GgufHeader, architecture: Architecture) -> dict[str, Any]:
    """Returns the fields of a configuration, with `model_type`.

    Raises:
        KeyError: the file lacks a key, which is the argument.
    """
    metadata, prefix = header.metadata, f"{header.architecture}."
    config: dict[str, Any] = {"model_type": architecture.model_type}
    for key, field in {**SIZES, **architecture.fields}.items():
        if (value := metadata.get(prefix + key)) is not None:
            config[field] = list(value) if isinstance(value, tuple) else value
    config["num_hidden_layers"] -= int(str(metadata.get(f"{prefix}nextn_predict_layers", 0)))
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    config["vocab_size"] = shapes["token_embd.weight"][0]
    for field, leaf in SIZE_TENSORS.items():
        of_layers = [shape for name, shape in shapes.items() if name.endswith(f".{leaf}")]
        if field in architecture.fields.values() and field not in config and of_layers:
            config[field] = of_layers[0][-1]
    theta = metadata.get(f"{prefix}rope.freq_base", 10000.0)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{name}_token_id")
    config["pad_token_id"] = metadata.get("tokenizer.ggml.padding_token_id")
    config |= architecture.constants
    architecture.complete(config, header)
    return config


def has_tensor(header: GgufHeader, leaf: str, layer: int | None = None) -> bool:
    """Returns whether a layer, or any, has a tensor."""
    names = {tensor.name for tensor in header.tensors}
    return any(name.endswith(f".{leaf}") for name in names) if layer is None else f"blk.{layer}.{leaf}" in names


def _nothing(config: dict[str, Any], header: GgufHeader) -> None:
    """Leaves the fields as they are."""


def _gpt_oss(config: dict[str, Any], header: GgufHeader) -> None:
    """Adds the size of experts and which layers have a window. Whether the frequencies are truncated is no key; those
    of gpt-oss are not."""
    shapes = [tensor.shape for tensor in header.tensors if tensor.name.endswith(".ffn_down_exps.weight")]
    config["intermediate_size"] = shapes[0][-1]
    kinds = ("sliding_attention", "full_attention")
    config["layer_types"] = [kinds[layer % 2] for layer in range(config["num_hidden_layers"])]
    config["rope_parameters"]["truncate"] = False


def _glm4(config: dict[str, Any], header: GgufHeader) -> None:
    config["use_qk_norm"] = has_tensor(header, "attn_q_norm.weight")
    config["attention_bias"] = has_tensor(header, "attn_q.bias")


def _lfm2(config: dict[str, Any], header: GgufHeader) -> None:
    """Adds the kinds of layers: those with a convolution have no heads of keys."""
    heads = config["num_key_value_heads"]
    of_layers = heads if isinstance(heads, list) else [heads] * config["num_hidden_layers"]
    config["layer_types"] = ["full_attention" if count else "conv" for count in of_layers]
    config["num_key_value_heads"] = max(of_layers)
    config["norm_eps"] = config.pop("rms_norm_eps")
    config["conv_bias"] = has_tensor(header, "shortconv.in_proj.bias")
    config["use_expert_bias"] = has_tensor(header, "exp_probs_b.bias")


def _delta_net(config: dict[str, Any], header: GgufHeader) -> None:
    """Adds the kinds of layers and the size of a head of values, of which a file has that of all heads."""
    layers = range(config["num_hidden_layers"])
    config["layer_types"] = [
        "full_attention" if has_tensor(header, "attn_q.weight", layer) else "linear_attention" for layer in layers
    ]
    inner_size = int(str(header.metadata[f"{header.architecture}.ssm.inner_size"]))
    config["linear_value_head_dim"] = inner_size // config["linear_num_value_heads"]


def _qwen3_5(config: dict[str, Any], header: GgufHeader) -> None:
    """Adds the sections of positions in images; text has the same in each."""
    _delta_net(config, header)
    sections: Any = header.metadata[f"{header.architecture}.rope.dimension_sections"]
    config["rope_parameters"] |= {"mrope_section": [one for one in sections if one], "mrope_interleaved": True}


SIGMOID = {"expert_gating_func": (2,)}
OF_DELTA_NET = {"ssm.inner_size": (), "full_attention_interval": (), "expert_weights_norm": (True,)}
OF_QWEN3_5 = OF_DELTA_NET | {"rope.dimension_sections": (), "nextn_predict_layers": ()}
NORMALIZED = {"norm_topk_prob": True}
DENSE_LAYERS = "leading_dense_block_count"
# By `general.architecture`; Mixtral's is that of Llama.
ARCHITECTURES: Mapping[str, Architecture] = {
    "glm4moe": Architecture(
        "glm4_moe",
        EXPERTS
        | {"expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts"}
        | {DENSE_LAYERS: "first_k_dense_replace", "expert_weights_scale": "routed_scaling_factor"}
        | {"expert_weights_norm": "norm_topk_prob"},
        {"n_group": 1, "topk_group": 1},
        _glm4,
        SIGMOID | {"nextn_predict_layers": (), "expert_group_count": (0, 1), "expert_group_used_count": (0, 1)},
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        LOCAL_EXPERTS | {"attention.sliding_window": "sliding_window"},
        {},
        _gpt_oss,
        {"expert_gating_func": (3,), "expert_feed_forward_length": ()},
    ),
    "lfm2": Architecture("lfm2", {"shortconv.l_cache": "conv_L_cache"}, {"block_auto_adjust_ff_dim": False}, _lfm2, {}),
    "lfm2moe": Architecture(
        "lfm2_moe",
        EXPERTS | {"shortconv.l_cache": "conv_L_cache", DENSE_LAYERS: "num_dense_layers"},
        NORMALIZED,
        _lfm2,
        SIGMOID | {"expert_weights_norm": (True,)},
    ),
    "mixtral": Architecture("mixtral", LOCAL_EXPERTS, {"sliding_window": None}, _nothing, {}),
    "olmoe": Architecture("olmoe", CHOICE, {"norm_topk_prob": False}, _nothing, {"expert_weights_norm": (False,)}),
    "qwen2moe": Architecture(
        "qwen2_moe", SHARED, {"norm_topk_prob": False}, _nothing, {"expert_weights_norm": (False,)}
    ),
    "qwen3moe": Architecture("qwen3_moe", EXPERTS, NORMALIZED, _nothing, {"expert_weights_norm": (True,)}),
    "qwen3next": Architecture("qwen3_next", SHARED | DELTA_NET, NORMALIZED, _delta_net, OF_DELTA_NET),
    "qwen35": Architecture("qwen3_5_text", DELTA_NET, {}, _qwen3_5, OF_QWEN3_5),
    "qwen35moe": Architecture("qwen3_5_moe_text", SHARED | DELTA_NET, {}, _qwen3_5, OF_QWEN3_5),
}
