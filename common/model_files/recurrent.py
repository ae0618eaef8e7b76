"""Model families with recurrent layers, which executors run, and the memory of those layers by their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# By `model_type` of the configuration of the decoder: the kinds of its layers, as in `layer_types`, that are recurrent.
SHORT_CONVOLUTIONS = ("lfm2", "lfm2_moe")
GATED_DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
RECURRENT_LAYERS = {
    **dict.fromkeys(SHORT_CONVOLUTIONS, frozenset({"conv"})),
    **dict.fromkeys(GATED_DELTA_NETS, frozenset({"linear_attention"})),
}
# Of a gated delta net: tokens between two boundaries, and positions that a slot keeps behind one.
DELTA_GRID = 64
DELTA_PLACES = 2 * DELTA_GRID


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The recurrent layers of a model.

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
    count = _layer_types(config, num_layers).count("linear_attention")
    heads, key_heads = (int(config.get(name) or default) for name, default in DELTA_HEADS)
    value_dim, key_dim = (int(config.get(name) or 128) for name in ("linear_value_head_dim", "linear_key_head_dim"))
    channels = 2 * key_heads * key_dim + heads * value_dim
    state = heads * key_dim * value_dim
    behind = DELTA_PLACES * (key_heads * key_dim + heads * value_dim + heads)
    weights = hidden * (channels + 2 * heads * value_dim + 2 * heads)
    return RecurrentShape(
        num_layers=count,
        input_numbers=count * (int(config.get("linear_conv_kernel_dim") or 4) - 1) * channels,
        # The position of the boundary is an int64.
        slot_bytes=count * (4 * (state + behind) + 8),
        checkpoint_bytes=count * 4 * state,
        grid_tokens=DELTA_GRID,
        # The queries of attention have a gate.
        extra_weights=count * (weights - attention) + (num_layers - count) * hidden * num_heads * head_dim,
    )


DELTA_HEADS = (("linear_num_value_heads", 32), ("linear_num_key_heads", 16))


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str]:
    if given := config.get("layer_types"):
        return list(given[:num_layers])
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
