"""Model families with recurrent layers, which executors run, and the memory of those layers by their configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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


# A rank's channels of a short convolution are a multiple of this: numbers of the smallest vector of the C++ code.
CHANNELS_MULTIPLE = 16


# Heads or channels, and the numbers of each.
Part = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MixerShape:
    """Sizes of a recurrent layer: a convolution of `channels` over `conv_width` positions and, in a gated delta net,
    `num_heads` states of `key_dim` times `value_dim` numbers on `num_key_heads` heads of keys. Without it, in a short
    convolution, these are 0. Mamba 2 is a gated delta net whose tokens are not corrected (`corrects`): its heads of
    keys are its groups."""

    conv_width: int
    channels: int
    num_key_heads: int = 0
    num_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    corrects: bool = True

    @property
    def depth(self) -> int:
        """Numbers of a position before the output projection."""
        return self.num_heads * self.value_dim or self.channels

    @property
    def conv_parts(self) -> tuple[Part, ...]:
        """The channels of the convolution: queries, keys and values of a gated delta net; x, B and C of Mamba 2."""
        if not self.num_heads:
            return ((self.channels, 1),)
        keys, values = (self.num_key_heads, self.key_dim), (self.num_heads, self.value_dim)
        return (keys, keys, values) if self.corrects else (values, keys, keys)

    @property
    def input_parts(self) -> tuple[Part, ...]:
        """The rows of the projections in front of it: B, C and x of a short convolution; beside the channels z, b and a
        of a gated delta net, or z and dt of Mamba 2."""
        if not self.num_heads:
            return self.conv_parts * 3
        values, numbers = (self.num_heads, self.value_dim), (self.num_heads, 1)
        return (*self.conv_parts, values, numbers, numbers) if self.corrects else (values, *self.conv_parts, numbers)

    def indivisible_reason(self, num_ranks: int) -> str | None:
        """Returns why it cannot be divided between so many ranks; None if it can. Ranks may have the same keys of
        Mamba 2, whose heads add to their states independently."""
        if num_ranks == 1:
            return None
        if not self.num_heads:
            if self.channels % (num_ranks * CHANNELS_MULTIPLE) == 0:
                return None
            channels = f"{self.channels} channels of convolutions"
            return f"{channels} cannot be divided by {num_ranks} into multiples of {CHANNELS_MULTIPLE}"
        num_key_heads = self.num_key_heads
        if self.corrects:
            if num_key_heads % num_ranks == 0:
                return None
            return f"{num_key_heads} heads of keys of gated delta nets cannot be divided by {num_ranks}"
        if self.num_heads % num_ranks == 0 and (num_key_heads % num_ranks == 0 or num_ranks % num_key_heads == 0):
            return None
        return f"{self.num_heads} heads of Mamba 2 in {num_key_heads} groups cannot be divided by {num_ranks}"

    def of_rank(self, num_ranks: int) -> MixerShape:
        """Returns the heads, or channels, that each rank has. Ranks may have the same keys of Mamba 2."""
        if not self.num_heads:
            return replace(self, channels=self.channels // num_ranks)
        num_key_heads = max(1, self.num_key_heads // num_ranks)
        own = replace(self, num_key_heads=num_key_heads, num_heads=self.num_heads // num_ranks)
        return replace(own, channels=sum(count * size for count, size in own.conv_parts))


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The `num_layers` recurrent layers of a model, and the memory of their states.

    `extra_weights` are the numbers of the model's matrices beyond those of a Llama of the same sizes.
    `num_feed_forward` layers are neither these nor attention.
    """

    mixer: MixerShape
    num_layers: int
    extra_weights: int
    num_feed_forward: int = 0

    @property
    def input_numbers(self) -> int:
        """Numbers of the type of the activations that a slot without drafts and a checkpoint have in all layers."""
        return self.num_layers * (self.mixer.conv_width - 1) * self.mixer.channels

    @property
    def checkpoint_bytes(self) -> int:
        """The memory of a checkpoint besides."""
        mixer = self.mixer
        return self.num_layers * 4 * mixer.num_heads * mixer.key_dim * mixer.value_dim

    @property
    def slot_bytes(self) -> int:
        """The memory of a slot besides."""
        mixer = self.mixer
        if not mixer.num_heads:
            return 0
        behind = mixer.num_key_heads * mixer.key_dim + mixer.num_heads * mixer.value_dim + mixer.num_heads
        # The position of the boundary is an int64.
        return self.checkpoint_bytes + self.num_layers * (4 * DELTA_PLACES * behind + 8)

    @property
    def grid_tokens(self) -> int:
        """A checkpoint can be taken at multiples of it."""
        return DELTA_GRID if self.mixer.num_heads else 1

    def of_rank(self, num_ranks: int) -> RecurrentShape:
        """Returns the part of each rank."""
        return replace(self, mixer=self.mixer.of_rank(num_ranks))


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
        mixer = MixerShape(int(config.get("conv_L_cache") or 3), hidden)
        return RecurrentShape(mixer, count, count * (4 * hidden**2 - attention))
    if kind in MAMBA2:
        return _mamba2_shape(config, num_layers, attention)
    count = _layer_types(config, num_layers).count("linear_attention")
    heads, key_heads = (int(config.get(name) or default) for name, default in DELTA_HEADS)
    value_dim, key_dim = (int(config.get(name) or 128) for name in ("linear_value_head_dim", "linear_key_head_dim"))
    weights = hidden * (2 * key_heads * key_dim + 3 * heads * value_dim + 2 * heads)
    conv_width, channels = int(config.get("linear_conv_kernel_dim") or 4), 2 * key_heads * key_dim + heads * value_dim
    return RecurrentShape(
        MixerShape(conv_width, channels, key_heads, heads, key_dim, value_dim),
        count,
        # The queries of attention have a gate.
        count * (weights - attention) + (num_layers - count) * hidden * num_heads * head_dim,
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
    channels = depth + 2 * groups * key_dim
    mixer = MixerShape(conv_width, channels, groups, num_heads, key_dim, depth // num_heads, corrects=False)
    weights = hidden * (3 * depth + 2 * groups * key_dim + num_heads)
    inner = int(config.get("intermediate_size") or 4 * hidden)
    if config["model_type"] == "granitemoehybrid":
        if not count:
            return None  # Granite 4 without "H" in its name is attention only
        shared = int(config.get("shared_intermediate_size") or 1024)
        dense = 0 if config.get("num_local_experts") else inner
        extra = count * (weights - attention) + num_layers * 3 * hidden * (shared - dense)
        return RecurrentShape(mixer, count, extra)
    num_mlp, num_moe = types.count("mlp"), types.count("moe")
    of_expert, of_shared = (
        int(config.get(name) or 7688) for name in ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
    )
    num_experts = int(config.get("n_routed_experts") or 8)
    extra = count * weights + types.count("full_attention") * attention + num_mlp * 2 * hidden * inner
    extra += num_moe * hidden * (num_experts * (2 * of_expert + 1) + 2 * of_shared)
    # A Llama has attention and three matrices more in each layer.
    extra -= len(types) * (attention + 3 * hidden * inner)
    return RecurrentShape(mixer, count, extra, num_mlp + num_moe)


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
