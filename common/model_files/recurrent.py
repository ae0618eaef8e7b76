"""Model families with recurrent layers, which executors run, and the memory of those layers by their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# By `model_type` of the configuration of the decoder: the kinds of its layers, as in `layer_types`, that are recurrent.
SHORT_CONVOLUTIONS = ("lfm2", "lfm2_moe")
GATED_DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
MAMBA2 = ("granitemoehybrid", "nemotron_h")
RECURRENT_LAYERS = {
    **dict.fromkeys(SHORT_CONVOLUTIONS, frozenset({"conv"})),
    **dict.fromkeys((*GATED_DELTA_NETS, *MAMBA2), frozenset({"linear_attention"})),
}
# The same of those that are a feed-forward layer alone.
FEED_FORWARD_LAYERS = {"nemotron_h": frozenset({"mlp", "moe"})}
# Names of Mamba 2 in configurations: in older ones `layer_types` are called otherwise, or a letter each.
OLD_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
TYPE_OF_LETTER = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
# Of a gated delta net and of Mamba 2: tokens between two boundaries, and positions that a slot keeps behind one.
DELTA_GRID = 64
DELTA_PLACES = 2 * DELTA_GRID


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The recurrent layers of a model. `num_feed_forward` are neither these nor attention.

    A slot without drafts and a checkpoint have `input_numbers` of the type of the activations in all layers; besides
    these a slot has `slot_bytes` and a checkpoint `checkpoint_bytes`. `extra_weights` are the numbers of the model's
    matrices beyond those of a Llama of the same sizes.
    """

    num_layers: int
    input_numbers: int
    slot_bytes: int
    checkpoint_bytes: int
    grid_tokens: int
    extra_weights: int
    num_feed_forward: int = 0


def recurrent_shape(config: Mapping[str, Any], num_layers: int) -> RecurrentShape | None:
    """Returns the recurrent layers by the configuration of a decoder; None if there are none. The defaults are those of
    transformers."""
    kind = config.get("model_type")
    if kind not in RECURRENT_LAYERS:
        return None
    hidden, num_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // num_heads)
    attention = 2 * hidden * head_dim * (num_heads + int(config.get("num_key_value_heads") or num_heads))
    if kind in SHORT_CONVOLUTIONS:
        count = _layer_types(config, num_layers).count("conv")
        num_inputs = count * (int(config.get("conv_L_cache") or 3) - 1) * hidden
        return RecurrentShape(count, num_inputs, 0, 0, 1, count * (4 * hidden**2 - attention))
    if kind in MAMBA2:
        return _mamba2_shape(config, num_layers, attention)
    count = _layer_types(config, num_layers).count("linear_attention")
    heads, key_heads = (int(config.get(name) or default) for name, default in DELTA_HEADS)
    value_dim, key_dim = (int(config.get(name) or 128) for name in ("linear_value_head_dim", "linear_key_head_dim"))
    weights = hidden * (2 * key_heads * key_dim + 3 * heads * value_dim + 2 * heads)
    return _with_states(
        count,
        int(config.get("linear_conv_kernel_dim") or 4),
        (key_heads, heads, key_dim, value_dim),
        # The queries of attention have a gate.
        extra_weights=count * (weights - attention) + (num_layers - count) * hidden * num_heads * head_dim,
    )


def _with_states(
    count: int, conv_width: int, heads: tuple[int, int, int, int], extra_weights: int, num_feed_forward: int = 0
) -> RecurrentShape:
    """Returns layers with a matrix for each head: `heads` are how many have keys and values, and their sizes."""
    num_key_heads, num_heads, key_dim, value_dim = heads
    state = num_heads * key_dim * value_dim
    behind = DELTA_PLACES * (num_key_heads * key_dim + num_heads * value_dim + num_heads)
    return RecurrentShape(
        num_layers=count,
        input_numbers=count * (conv_width - 1) * (2 * num_key_heads * key_dim + num_heads * value_dim),
        # The position of the boundary is an int64.
        slot_bytes=count * (4 * (state + behind) + 8),
        checkpoint_bytes=count * 4 * state,
        grid_tokens=DELTA_GRID,
        extra_weights=extra_weights,
        num_feed_forward=num_feed_forward,
    )


def _mamba2_shape(config: Mapping[str, Any], num_layers: int, attention: int) -> RecurrentShape | None:
    """Returns layers of Mamba 2; `attention` are the numbers of a layer's matrices of attention."""
    hidden, types = int(config["hidden_size"]), _layer_types(config, num_layers)
    count, names = types.count("linear_attention"), MAMBA2_NAMES[config["model_type"]]
    num_heads, groups, key_dim, conv_width = (
        int(config.get(name) or config.get(old) or default) for name, old, default in names
    )
    head_dim = config.get("mamba_head_dim") or config.get("mamba_d_head") or "auto"
    depth = int(config.get("mamba_expand") or 2) * hidden if head_dim == "auto" else num_heads * int(head_dim)
    mixer = hidden * (3 * depth + 2 * groups * key_dim + num_heads)
    heads = groups, num_heads, key_dim, depth // num_heads
    inner = int(config.get("intermediate_size") or 4 * hidden)
    if config["model_type"] == "granitemoehybrid":
        if not count:
            return None  # Granite 4 without "H" in its name is attention only
        shared = int(config.get("shared_intermediate_size") or 1024)
        dense = 0 if config.get("num_local_experts") else inner
        extra = count * (mixer - attention) + num_layers * 3 * hidden * (shared - dense)
        return _with_states(count, conv_width, heads, extra)
    num_mlp, num_moe = types.count("mlp"), types.count("moe")
    of_expert, of_shared = (
        int(config.get(name) or 7688) for name in ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    num_experts = int(config.get("n_routed_experts") or 8)
    extra = count * mixer + types.count("full_attention") * attention + num_mlp * 2 * hidden * inner
    extra += num_moe * hidden * (num_experts * (2 * of_expert + 1) + 2 * of_shared)
    # A Llama has attention and three matrices more in each layer.
    extra -= len(types) * (attention + 3 * hidden * inner)
    return _with_states(count, conv_width, heads, extra, num_mlp + num_moe)


# Heads, groups, numbers of a key, positions of the convolution: each with an older name and the default.
MAMBA2_NAMES = {
    "granitemoehybrid": (
        ("mamba_n_heads", "mamba_n_heads", 128),
        ("mamba_n_groups", "mamba_n_groups", 1),
        ("mamba_d_state", "mamba_d_state", 256),
        ("mamba_d_conv", "mamba_d_conv", 4),
    ),
    "nemotron_h": (
        ("mamba_num_heads", "mamba_num_heads", 128),
        ("n_groups", "mamba_n_groups", 8),
        ("ssm_state_size", "mamba_d_state", 128),
        ("conv_kernel", "mamba_d_conv", 4),
    ),
}
DELTA_HEADS = (("linear_num_value_heads", 32), ("linear_num_key_heads", 16))


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    if given := config.get("layer_types") or config.get("layers_block_type"):
        return [OLD_TYPES.get(name, name) for name in given[:num_layers]]
    if pattern := config.get("hybrid_override_pattern"):
        return [TYPE_OF_LETTER[letter] for letter in pattern]
    if config["model_type"] in MAMBA2:
        return ["linear_attention"] * num_layers
    if config["model_type"] in SHORT_CONVOLUTIONS:
        attention = config.get("full_attn_idxs") or range(num_layers)
        return ["full_attention" if layer in attention else "conv" for layer in range(num_layers)]
    interval = int(config.get("full_attention_interval") or 4)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(num_layers)]


def lfm2_inner_size(config: Mapping[str, Any]) -> int:
    """Returns the size of a feed-forward layer of LFM2, whose configuration gives it before it is adjusted."""
    size = int(config.get("block_ff_dim") or config.get("intermediate_size") or 12288)
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(float(config.get("block_ffn_dim_multiplier") or 1.0) * (2 * size // 3))
    multiple = int(config.get("block_multiple_of") or 256)
    return -(-size // multiple) * multiple
