"""GGUF files of tiny models with experts or recurrent layers, and the dense models that they stand for.

The tensors are arranged as llama.cpp does (convert_hf_to_gguf.py). An arrangement is a function of a tensor, and also
applied to the places of the numbers, so that what is quantized can be put back where it came from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from tests.support.checkpoints.gpt_oss import save_gpt_oss
from tests.support.checkpoints.quantized_checkpoints import NUM_TOKENS, add_keys, add_vocabulary, random_blocks
from tests.support.checkpoints.tiny_models import save_model

Kind = gguf.GGMLQuantizationType
RENAMED = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "operator_norm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "feed_forward.experts.down_proj": "ffn_down_exps.weight",
    "mlp.experts.down_proj_bias": "ffn_down_exps.bias",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
for _of_shared in ("mlp.shared_expert", "mlp.shared_experts"):
    RENAMED |= {f"{_of_shared}.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}
# Architectures whose files name the norm before the feed-forward layer after attention.
POST_NORM = ("glm4moe", "gpt-oss", "qwen3next", "qwen35", "qwen35moe")
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")


def save_gguf_model(
    path: Path, architecture: str, config: PretrainedConfig, kinds: Sequence[Kind], keys: dict[str, Any] | None = None
) -> Path:
    """Makes a file with matrices of these types in turn, those whose rows have no whole blocks in float32. `keys` are
    added. Returns the folder of the dense model in float32."""
    config.vocab_size = NUM_TOKENS
    save: Any = save_gpt_oss if architecture == "gpt-oss" else _save
    dense: Path = save(path.with_name(f"{path.stem}-dense"), config)
    network: Any = AutoModelForCausalLM.from_pretrained(str(dense), dtype=torch.float32)
    network.requires_grad_(False)
    weights = network.state_dict()
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    writer = gguf.GGUFWriter(path, "llama" if architecture == "mixtral" else architecture)
    add_vocabulary(writer)
    add_keys(writer, writer.arch, _keys(architecture, config) | (keys or {}))
    generator, count = np.random.default_rng(0), 0
    for name, weight in weights.items():
        places = torch.arange(weight.numel()).view(weight.shape)
        for (stored, numbers), (_, of_numbers) in zip(
            _converted(architecture, config, name, weight), _converted(architecture, config, name, places), strict=True
        ):
            kind = kinds[count % len(kinds)]
            if _is_plain(stored, numbers, kind):
                changed = _changed(architecture, name, numbers).float().contiguous().numpy()
                writer.add_tensor(stored, changed)
                continue
            count += 1
            if kind is Kind.F16:
                blocks = numbers.half().contiguous().numpy()
                writer.add_tensor(stored, blocks)
            else:
                largest = 0.0003 if kind.name.endswith("_K") else 0.01
                blocks = random_blocks(generator, kind, numbers.shape[:-1].numel(), numbers.shape[-1], largest)
                writer.add_tensor(stored, blocks.reshape(*numbers.shape[:-1], -1), raw_dtype=kind)
            weight.view(-1)[of_numbers.flatten()] = torch.from_numpy(gguf.dequantize(blocks, kind)).flatten()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    network.save_pretrained(str(dense))
    return dense


def _save(folder: Path, config: PretrainedConfig) -> Path:
    return save_model(config, folder, has_random_vectors=True)


def _is_plain(stored: str, numbers: Tensor, kind: Kind) -> bool:
    """Whether llama.cpp keeps a tensor in float32, or its rows have no whole blocks."""
    is_small = numbers.ndim < 2 or any(name in stored for name in ("ffn_gate_inp", "shortconv.conv", "conv1d", ".bias"))
    return is_small or numbers.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] != 0


def _changed(architecture: str, name: str, numbers: Tensor) -> Tensor:
    """Returns the numbers of a tensor in float32 as they are stored."""
    if name.endswith("A_log"):
        return -torch.exp(numbers)
    if architecture in DELTA_NETS and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return numbers + 1
    return numbers


def _converted(architecture: str, config: Any, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a parameter by their names in a file."""
    prefix, module = "", name
    if name.startswith("model.layers."):
        _, _, number, module = name.split(".", 3)
        prefix = f"blk.{number}."
    if module.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
        yield from _gate_up(architecture, f"{prefix}ffn_{{}}_exps.{'bias' if '_bias' in module else 'weight'}", weight)
        return
    if module == "linear_attn.in_proj_qkvz.weight":
        qkv, gates = _by_part(config, weight)
        yield f"{prefix}attn_qkv.weight", qkv
        yield f"{prefix}attn_gate.weight", gates
        return
    stem, _, leaf = module.rpartition(".")
    stored = RENAMED[module] if module in RENAMED else f"{RENAMED[stem]}.{leaf}"
    if architecture in POST_NORM:
        stored = stored.replace("ffn_norm", "post_attention_norm")
    yield prefix + stored, _arranged(architecture, config, module, weight)


def _gate_up(architecture: str, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields gates and what they gate, which alternate in gpt-oss, whose matrices are transposed."""
    if architecture != "gpt-oss":
        halves = weight.chunk(2, 1)
    else:
        rows = weight.transpose(1, 2) if weight.ndim == 3 else weight
        halves = rows[:, ::2], rows[:, 1::2]
    yield from ((name.format(part), half) for part, half in zip(("gate", "up"), halves, strict=True))


def _by_part(config: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns queries, keys and values of Qwen3-Next, and gates, each of all heads of keys."""
    of_values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim] * 2 + [of_values] * 2
    parts = weight.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, 1)
    flat = [part.flatten(0, 1) for part in parts]
    return torch.cat(flat[:3]), flat[3]


def _arranged(architecture: str, config: Any, module: str, weight: Tensor) -> Tensor:
    if architecture == "mixtral" and module.startswith(("self_attn.q_proj", "self_attn.k_proj")):
        num_heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
        rows: Tensor = weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        return rows
    if module == "mlp.experts.down_proj" and architecture == "gpt-oss":
        return weight.transpose(1, 2)
    if "conv" in module and weight.ndim == 3:
        weight = weight.squeeze(1)
    if module == "mlp.shared_expert_gate.weight":
        return weight.squeeze(0)
    return _tiled(config, module, weight) if architecture in ("qwen35", "qwen35moe") else weight


def _tiled(config: Any, module: str, weight: Tensor) -> Tensor:
    """Returns the first head of values of each head of keys, then the second ones, and so on."""
    keys, per_key = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads

    def tiled(part: Tensor, dim: int = 0) -> Tensor:
        rows: Tensor = part.unflatten(dim, (keys, per_key, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
        return rows

    first = 2 * keys * config.linear_key_head_dim
    if module.startswith(("linear_attn.in_proj_qkv", "linear_attn.conv1d")):
        return torch.cat((weight[:first], tiled(weight[first:])))
    if module == "linear_attn.out_proj.weight":
        return tiled(weight, 1)
    if module.startswith("linear_attn.") and not module.startswith("linear_attn.norm"):
        return tiled(weight)
    return weight


def _keys(architecture: str, config: Any) -> dict[str, Any]:
    """Returns the metadata that llama.cpp's conversion writes."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", None) or config.norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    fields = {
        "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
        "expert_used_count": ("num_experts_per_tok",),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
        "expert_shared_count": ("n_shared_experts",),
        "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
        "ssm.conv_kernel": ("linear_conv_kernel_dim",),
        "ssm.state_size": ("linear_key_head_dim",),
        "ssm.group_count": ("linear_num_key_heads",),
        "ssm.time_step_rank": ("linear_num_value_heads",),
        "shortconv.l_cache": ("conv_L_cache",),
    }
    for key, names in fields.items():
        if (value := next((getattr(config, name) for name in names if hasattr(config, name)), None)) is not None:
            keys[key] = value
    if architecture in DELTA_NETS:
        keys["ssm.inner_size"] = config.linear_num_value_heads * config.linear_value_head_dim
        keys["full_attention_interval"] = 4
    if architecture in ("qwen35", "qwen35moe"):
        keys["rope.dimension_sections"] = [2, 1, 1, 0]
    return keys | _keys_of_few(architecture, config)


def _keys_of_few(architecture: str, config: Any) -> dict[str, Any]:
    if architecture == "glm4moe":
        return {
            "expert_gating_func": 2,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_group_count": 1,
            "expert_group_used_count": 1,
        }
    if architecture == "gpt-oss":
        return {
            "attention.sliding_window": config.sliding_window,
            "expert_feed_forward_length": config.intermediate_size,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": config.rope_parameters["factor"],
            "rope.scaling.original_context_length": config.rope_parameters["original_max_position_embeddings"],
        }
    if architecture.startswith("lfm2"):
        heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        return {"attention.head_count_kv": heads} | ({"expert_gating_func": 2} if architecture == "lfm2moe" else {})
    return {}
