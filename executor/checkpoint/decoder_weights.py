"""Weights of the common decoder family by role: Llama, Mistral, Qwen2, Qwen3 and models with their classes.

These models differ little: biases on the projections, norms on queries and keys, a sliding window. This is all that a
native forward pass needs. A model that is not known to be computed this way is left to transformers. Tensors are the
network's own; a fused weight is a copy, made on access.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from executor.attention.transformers_hook import Layer

FAMILY = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and constants.

    `rope_scaling` multiplies cosines and sines of positions times `inverse_frequencies[head_dim / 2]`. A window of None
    is the whole context.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocabulary_size: int
    norm_epsilon: float
    attention_scale: float
    rope_scaling: float
    sliding_windows: tuple[int | None, ...]
    inverse_frequencies: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Weights are `[out, in]` as in `nn.Linear`; biases and norms of heads are None where the model has
    none."""

    input_norm: Tensor
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_attention_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor

    @property
    def qkv(self) -> Tensor:
        """Weights of queries, keys and values in one: `[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]`."""
        return torch.cat([linear.weight for linear in (self.query, self.key, self.value)])

    @property
    def qkv_bias(self) -> Tensor | None:
        """The bias of `qkv`."""
        biases: list[Any] = [linear.bias for linear in (self.query, self.key, self.value)]
        return None if biases[0] is None else torch.cat(biases)

    @property
    def gate_up(self) -> Tensor:
        """The gate's rows, then those of the up projection: `[2 * intermediate_size, hidden_size]`."""
        return torch.cat([self.gate, self.up])


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A whole model. `embedding` and `head` are `[vocabulary, hidden_size]` and may be the same tensor."""

    shape: DecoderShape
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor


def read_decoder(network: PreTrainedModel, layers: Sequence[Layer]) -> DecoderWeights | str:
    """Returns the weights of a network of the family, or the reason why it is not of it. `layers` is the attention of
    its layers."""
    name = type(network).__name__
    if name not in FAMILY:
        return f"{name} is not one of {', '.join(sorted(FAMILY))}"
    body: Any = network.model
    config = network.config
    if (activation := config.hidden_act) not in ("silu", "swish"):
        return f"its activation is {activation}"
    frequencies = body.rotary_emb.inv_freq
    head_dim = layers[0].shape.head_dim
    if frequencies.ndim != 1 or 2 * frequencies.shape[0] != head_dim:
        return "its rotary embedding covers a part of each head"
    if any(layer.scoring.softcap is not None or layer.shape != layers[0].shape for layer in layers):
        return "its attention caps scores or differs between layers"
    read = tuple(_read_layer(module) for module in body.layers)
    if any(module.mlp.down_proj.bias is not None for module in body.layers):
        return "its feed-forward layers have biases"
    head: Any = network.get_output_embeddings()
    if head.bias is not None:
        return "its output layer has a bias"
    return DecoderWeights(
        shape=DecoderShape(
            num_layers=len(read),
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=layers[0].shape.num_kv_heads,
            head_dim=head_dim,
            intermediate_size=read[0].up.shape[0],
            vocabulary_size=head.weight.shape[0],
            norm_epsilon=float(config.rms_norm_eps),
            attention_scale=layers[0].scoring.scale,
            rope_scaling=float(body.rotary_emb.attention_scaling),
            sliding_windows=tuple(layer.scoring.sliding_window for layer in layers),
            inverse_frequencies=tuple(frequencies.float().tolist()),
        ),
        embedding=body.embed_tokens.weight,
        layers=read,
        final_norm=body.norm.weight,
        head=head.weight,
    )


def _read_layer(module: Any) -> LayerWeights:
    attention, mlp = module.self_attn, module.mlp
    query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    return LayerWeights(
        input_norm=module.input_layernorm.weight,
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        query_norm=None if query_norm is None else query_norm.weight,
        key_norm=None if key_norm is None else key_norm.weight,
        output=attention.o_proj.weight,
        output_bias=attention.o_proj.bias,
        post_attention_norm=module.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
    )
