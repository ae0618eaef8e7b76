"""Tensors of GGUF files as the parameters of transformers' networks, by architecture.

llama.cpp's conversion (convert_hf_to_gguf.py) changes more than names, and what it changes is undone here: the order of
rows of queries and keys (Llama), of the heads of values in gated delta nets (Qwen3.5), of the parts of their projection
(Qwen3-Next); norms that count from 1; A_log, which a file has as -exp(A_log); dimensions of size 1. All of it but an
order of columns leaves codes as they are, and that becomes the `column_order` of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from inflight.common.model_files.gguf_header import GgufHeader
from inflight.common.model_source import ModelError
from inflight.executor.checkpoint.expert_matrices import ExpertMatrices
from inflight.executor.checkpoint.quantized_weight import (
    Coded,
    FloatWeight,
    Matrix,
    QuantizedWeight,
    dense_matrix,
    pack_halves,
    taken,
    unpack_halves,
)

Read = Matrix | ExpertMatrices
# Makes a parameter of what a file has, with the configuration.
Make = Callable[[Sequence[Any], Any], Read]


@dataclass(frozen=True, slots=True)
class Rule:
    """A parameter, below its layer, and the tensors of the layer that it is made of."""

    parameter: str
    tensors: tuple[str, ...]
    make: Make


def the_same(parts: Sequence[Any], config: Any) -> Read:
    """Takes a tensor as it is."""
    found: Read = parts[0]
    return found


def rules_of(header: GgufHeader) -> tuple[Sequence[Rule], Sequence[Rule]] | None:
    """Returns the rules of the network and those of a layer; None for an architecture without any."""
    name = header.architecture
    if name == "llama" and header.metadata.get("llama.expert_count"):
        name = "mixtral"
    layer = LAYERS.get(name)
    return None if layer is None else (NETWORKS.get(name, NETWORK), layer)


def _renamed(names: Mapping[str, str], make: Make = the_same) -> tuple[Rule, ...]:
    """Returns rules for modules by the names of their tensors."""
    return tuple(
        Rule(f"{module}.{leaf}", (f"{tensor}.{leaf}",), make)
        for tensor, module in names.items()
        for leaf in ("weight", "bias")
    )


def _heads_of_llama(parts: Sequence[Any], num_heads: int) -> Read:
    """Returns queries or keys in transformers' order: the halves of a head one after the other, where llama.cpp has
    them alternate."""
    num_rows = parts[0].shape[0]
    if num_rows % (2 * num_heads):
        raise ModelError(f"{num_rows} rows of queries or keys do not belong to {num_heads} heads")
    return taken(parts[0], torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).flatten())


def _joined(parts: Sequence[Any], config: Any) -> Matrix:
    """Returns matrices one below the other."""
    alike = _alike(parts)
    if isinstance(alike[0], Tensor):
        return torch.cat([part for part in alike if isinstance(part, Tensor)])
    return _concatenated([(part, 1) for part in alike])


def _joined_experts(parts: Sequence[Any], config: Any) -> Read:
    """Returns the matrices of each expert one below the other: its gate, and what it gates."""
    first: ExpertMatrices = parts[0]
    alike = _alike([part.matrix for part in parts])
    if isinstance(alike[0], Tensor):
        return replace(first, matrix=torch.cat([part for part in alike if isinstance(part, Tensor)], 1))
    return replace(first, matrix=_concatenated([(part, first.num_experts) for part in alike]))


def _concatenated(parts: Sequence[tuple[Any, int]]) -> Coded:
    """Returns matrices of one form as one, in which the parts of each of so many blocks of rows follow each other."""

    def cat(name: str) -> Tensor:
        rows = [getattr(part, name) for part, _ in parts]
        dtype = rows[0].dtype
        blocks = [
            (one.view(torch.uint8) if one.itemsize == 1 else one).unflatten(0, (count, -1))
            for one, (_, count) in zip(rows, parts, strict=True)
        ]
        return torch.cat(blocks, 1).flatten(0, 1).view(dtype)

    first = parts[0][0]
    found: Coded = replace(first, codes=cat("codes"), scale=cat("scale"))
    return replace(found, offset=cat("offset")) if isinstance(found, QuantizedWeight) else found


def _alike(parts: Sequence[Matrix]) -> list[Matrix]:
    """Returns matrices in a form that all can have, with the same numbers: codes of 8 bits and the smallest groups if
    they differ, or dense if one is."""
    if any(isinstance(part, Tensor) for part in parts):
        dtype = next(part.dtype for part in parts if isinstance(part, Tensor))
        return [
            part if isinstance(part, Tensor) else dense_matrix(part, dtype).view(_dense_shape(part, parts))
            for part in parts
        ]
    if all(isinstance(part, FloatWeight) for part in parts):
        return list(parts)
    whole = [part.to_whole_numbers() if isinstance(part, FloatWeight) else part for part in parts]
    coded = [part for part in whole if isinstance(part, QuantizedWeight)]
    bits, size = max(part.bits for part in coded), min(part.group_size for part in coded)
    return [_in_form(part, bits, size) for part in coded]


def _dense_shape(matrix: Matrix, parts: Sequence[Matrix]) -> tuple[int, ...]:
    """Returns the shape of a matrix among those of experts, of which a dense one is `[experts, out, in]`."""
    dense = next(part for part in parts if isinstance(part, Tensor))
    return (*dense.shape[:-2], -1, matrix.shape[-1])


def _in_form(weight: QuantizedWeight, bits: int, group_size: int) -> QuantizedWeight:
    times = weight.group_size // group_size
    codes = unpack_halves(weight.codes) if weight.bits == 4 else weight.codes
    scale, offset = (part.repeat_interleave(times, 1) for part in (weight.scale, weight.offset))
    return QuantizedWeight(pack_halves(codes) if bits == 4 else codes, scale, offset, bits, group_size)


def _alternating_biases(parts: Sequence[Any], config: Any) -> Tensor:
    """Returns the biases of experts, each of a gate followed by that of what it gates."""
    return torch.stack(list(parts), -1).flatten(-2)


def _less_one(parts: Sequence[Any], config: Any) -> Tensor:
    """Returns the weights of a norm that adds 1 to them."""
    weights: Tensor = parts[0].float() - 1
    return weights


def _with_channel(parts: Sequence[Any], config: Any) -> Tensor:
    """Returns the taps of a convolution `[channels, 1, taps]`."""
    taps: Tensor = parts[0]
    return taps[:, None]


def _as_row(parts: Sequence[Any], config: Any) -> Tensor:
    """Returns the gate of a shared expert `[1, hidden_size]`."""
    gate: Tensor = parts[0]
    return gate.view(1, -1)


def _logarithm(parts: Sequence[Any], config: Any) -> Tensor:
    """Returns A_log."""
    numbers: Tensor = parts[0].float()
    return torch.log(-numbers)


def _heads_by_key(config: Any, size: int, first: int = 0) -> Tensor:
    """Returns where the numbers of each head of values are, the heads of a key one after the other, where llama.cpp has
    the first ones of all keys, and then the second ones. A head has `size` numbers; `first` numbers come before."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    places = torch.arange(heads * size).view(heads // keys, keys, size).transpose(0, 1).flatten()
    return torch.cat((torch.arange(first), first + places))


def _of_heads(parts: Sequence[Any], config: Any) -> Matrix:
    """Orders what has a number for each head of values."""
    return taken(parts[0], _heads_by_key(config, 1))


def _of_values(parts: Sequence[Any], config: Any) -> Matrix:
    """Orders what has a number for each number of a value."""
    return taken(parts[0], _heads_by_key(config, config.linear_value_head_dim))


def _of_all(parts: Sequence[Any], config: Any) -> Matrix:
    """Orders what has numbers for queries, keys and values."""
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return taken(parts[0], _heads_by_key(config, config.linear_value_head_dim, first))


def _columns_of_values(parts: Sequence[Any], config: Any) -> Matrix:
    """Orders the columns of what multiplies values."""
    order = _heads_by_key(config, config.linear_value_head_dim)
    matrix: Matrix = parts[0]
    if isinstance(matrix, FloatWeight):
        matrix = matrix.to_whole_numbers()
    if isinstance(matrix, Tensor):
        return matrix[:, order]
    # Column i of the file multiplies the number that has place i in the order of llama.cpp.
    return replace(matrix, column_order=torch.argsort(order).int())


def _by_key(parts: Sequence[Any], config: Any) -> Matrix:
    """Returns the projection of Qwen3-Next of queries, keys, values and gates, for each head of keys one after the
    other."""
    keys, per_key = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [per_key * config.linear_value_head_dim] * 2
    starts = [0, sizes[0] * keys, 2 * sizes[0] * keys, (2 * sizes[0] + sizes[2]) * keys]
    rows = [
        torch.arange(start, start + keys * size).view(keys, size) for start, size in zip(starts, sizes, strict=True)
    ]
    return taken(_joined(parts, config), torch.cat(rows, 1).flatten())


def _experts(block: str, router: str = "gate") -> tuple[Rule, ...]:
    return (
        *_renamed({"ffn_gate_inp": f"{block}.{router}"}),
        Rule(f"{block}.experts.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), _joined_experts),
        Rule(f"{block}.experts.gate_up_proj", ("ffn_gate_up_exps.weight",), the_same),
        Rule(f"{block}.experts.down_proj", ("ffn_down_exps.weight",), the_same),
    )


def _shared(module: str) -> tuple[Rule, ...]:
    names = {"ffn_gate_shexp": "gate_proj", "ffn_up_shexp": "up_proj", "ffn_down_shexp": "down_proj"}
    return _renamed({tensor: f"mlp.{module}.{name}" for tensor, name in names.items()})


QUERIES = {"attn_q": "self_attn.q_proj"}
KEYS = {"attn_k": "self_attn.k_proj"}
ATTENTION_REST = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
ATTENTION = QUERIES | KEYS | ATTENTION_REST
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FEED_FORWARD = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
# Of newer conversions, where the norm after attention has its own name.
POST_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
LLAMA_ATTENTION = (
    *_renamed(QUERIES, lambda parts, config: _heads_of_llama(parts, config.num_attention_heads)),
    *_renamed(KEYS, lambda parts, config: _heads_of_llama(parts, config.num_key_value_heads)),
    *_renamed(ATTENTION_REST | NORMS),
)
QWEN = _renamed(ATTENTION | HEAD_NORMS | NORMS)
SHARED_OF_QWEN = (
    *_shared("shared_expert"),
    Rule("mlp.shared_expert_gate.weight", ("ffn_gate_inp_shexp.weight",), _as_row),
)
LFM2_MODULES = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
LFM2 = (
    *_renamed(LFM2_MODULES),
    Rule("conv.conv.weight", ("shortconv.conv.weight",), _with_channel),
    Rule("conv.conv.bias", ("shortconv.conv.bias",), the_same),
)
# Attention and norms of Qwen3-Next and Qwen3.5, and what their gated delta nets have in common.
QWEN_HYBRID = (
    *_renamed(ATTENTION),
    *_renamed(HEAD_NORMS | POST_NORMS, _less_one),
    *_renamed({"ssm_norm": "linear_attn.norm"}),
)
QWEN3_NEXT_DELTA = (
    *_renamed({"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}),
    Rule("linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), _by_key),
    *_renamed({"ssm_out": "linear_attn.out_proj"}),
    Rule("linear_attn.conv1d.weight", ("ssm_conv1d.weight",), _with_channel),
    Rule("linear_attn.A_log", ("ssm_a",), _logarithm),
    Rule("linear_attn.dt_bias", ("ssm_dt.bias",), the_same),
)
QWEN3_5_DELTA = (
    *_renamed({"attn_qkv": "linear_attn.in_proj_qkv"}, _of_all),
    *_renamed({"attn_gate": "linear_attn.in_proj_z"}, _of_values),
    *_renamed({"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"}, _of_heads),
    *_renamed({"ssm_out": "linear_attn.out_proj"}, _columns_of_values),
    Rule(
        "linear_attn.conv1d.weight",
        ("ssm_conv1d.weight",),
        lambda parts, config: _with_channel([_of_all(parts, config)], config),
    ),
    Rule("linear_attn.A_log", ("ssm_a",), lambda parts, config: _logarithm([_of_heads(parts, config)], config)),
    Rule("linear_attn.dt_bias", ("ssm_dt.bias",), _of_heads),
)
GPT_OSS = (
    *_renamed(ATTENTION | POST_NORMS),
    *_experts("mlp", "router"),
    Rule("self_attn.sinks", ("attn_sinks.weight",), the_same),
    Rule("mlp.experts.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), _alternating_biases),
    Rule("mlp.experts.down_proj_bias", ("ffn_down_exps.bias",), the_same),
)
LAYERS: Mapping[str, tuple[Rule, ...]] = {
    "llama": (*LLAMA_ATTENTION, *_renamed(FEED_FORWARD)),
    "mixtral": (*LLAMA_ATTENTION, *_experts("mlp")),
    "qwen2": (*QWEN, *_renamed(FEED_FORWARD)),
    "qwen3": (*QWEN, *_renamed(FEED_FORWARD)),
    "qwen2moe": (*QWEN, *_experts("mlp"), *SHARED_OF_QWEN),
    "qwen3moe": (*QWEN, *_experts("mlp")),
    "olmoe": (*QWEN, *_experts("mlp")),
    "glm4moe": (
        *_renamed(ATTENTION | HEAD_NORMS | POST_NORMS | FEED_FORWARD),
        *_experts("mlp"),
        *_shared("shared_experts"),
        Rule("mlp.gate.e_score_correction_bias", ("exp_probs_b.bias",), the_same),
    ),
    "gpt-oss": GPT_OSS,
    "lfm2": LFM2,
    "lfm2moe": (
        *LFM2,
        *_experts("feed_forward"),
        Rule("feed_forward.expert_bias", ("exp_probs_b.bias",), the_same),
    ),
    "qwen3next": (*QWEN_HYBRID, *QWEN3_NEXT_DELTA, *_experts("mlp"), *SHARED_OF_QWEN),
    "qwen35": (*QWEN_HYBRID, *QWEN3_5_DELTA, *_renamed(FEED_FORWARD)),
    "qwen35moe": (*QWEN_HYBRID, *QWEN3_5_DELTA, *_experts("mlp"), *SHARED_OF_QWEN),
}
EMBEDDINGS = {"token_embd": "model.embed_tokens", "output": "lm_head"}
NETWORK = _renamed(EMBEDDINGS | {"output_norm": "model.norm"})
NETWORKS: Mapping[str, tuple[Rule, ...]] = {
    **dict.fromkeys(("lfm2", "lfm2moe"), _renamed(EMBEDDINGS | {"token_embd_norm": "model.embedding_norm"})),
    **dict.fromkeys(
        ("qwen3next", "qwen35", "qwen35moe"),
        (*_renamed(EMBEDDINGS), *_renamed({"output_norm": "model.norm"}, _less_one)),
    ),
}
