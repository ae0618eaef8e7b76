"""Weights of the decoder families that have a native forward pass, by role, and what distinguishes the families.

The families differ little: which norms a layer has, biases, parts of heads that are rotated, sliding windows, caps,
multipliers. All of it is described here as data, and this is all that a native forward pass needs. A model that is not
known to be computed this way is left to transformers. Tensors are the network's own; a fused weight is a copy, made on
access. Matrices of a quantized checkpoint are as `inflight.executor.formats` has read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from inflight.common.model_files.recurrent import MixerShape
from inflight.executor.attention.transformers_hook import Layer
from inflight.executor.checkpoint.expert_matrices import ExpertMatrices, alternates, parameters_of
from inflight.executor.checkpoint.quantized_linear import QuantizedLinear
from inflight.executor.checkpoint.quantized_weight import Matrix
from inflight.executor.recurrent.mixer import MixerWeights

# The projections of a layer with attention: of queries, keys, values and of what heads yield; gate, up and down. Their
# names are those of most families.
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
NUM_ATTENTION_PROJECTIONS = 4
# Which of them is behind attention; in a recurrent layer it is behind the mixer.
OUTPUT_PROJECTION = 3


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of a layer's norms: before and after attention, before and after the feed-forward layer; None where there
    is none."""

    attention_input: str | None = "input_layernorm"
    attention_output: str | None = None
    feed_forward_input: str | None = "post_attention_layernorm"
    feed_forward_output: str | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """How the network of a class differs from Llama's beyond what its modules show.

    `norm_offset` is added to the weights of norms. `has_multipliers`: the configuration multiplies embeddings, what is
    added to the residual stream, and logits. `caps_logits`: the configuration has a soft cap of logits. `is_rotated`
    tells from the attention of a layer whether it has a rotary embedding. `has_sigmoid_router`: experts are weighted by
    the sigmoids of their scores, not by the softmax of all, and `router_epsilon` is added to the sum of the weights of
    a token, by which they are divided. `has_clamped_gates`: the activation of experts is `CLAMPED`. `has_output_gate`:
    the projection of queries yields a gate behind each query. Without `has_gates` a feed-forward layer is an activation
    between two projections. `projections` are the names of `PROJECTIONS` in a layer.
    """

    norms: Norms = Norms()
    norm_offset: float = 0.0
    activation_name: str | None = "hidden_act"
    final_norm: str = "norm"
    has_multipliers: bool = False
    caps_logits: bool = False
    is_rotated: Callable[[Any], bool] = lambda attention: True
    has_sigmoid_router: bool = False
    has_clamped_gates: bool = False
    router_epsilon: float = 0.0
    has_output_gate: bool = False
    has_gates: bool = True
    projections: tuple[str, ...] = PROJECTIONS


AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = Norms("input_layernorm", AFTER.attention_output, "pre_feedforward_layernorm", AFTER.feed_forward_output)
GEMMA = Family(AROUND, norm_offset=1.0, activation_name="hidden_activation", caps_logits=True)
LFM2 = Family(
    Norms("operator_norm", None, "ffn_norm", None),
    activation_name=None,
    final_norm="embedding_norm",
    projections=(
        *PROJECTIONS[:3],
        "self_attn.out_proj",
        *(f"feed_forward.{name}" for name in ("w1", "w3", "w2")),
    ),
)
QWEN3_5 = Family(norm_offset=1.0, has_output_gate=True)
FAMILIES = {
    "Exaone4ForCausalLM": Family(
        AFTER, is_rotated=lambda attention: not attention.sliding_window or attention.is_sliding
    ),
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA,
    "Glm4MoeForCausalLM": Family(has_sigmoid_router=True),
    "GptOssForCausalLM": Family(has_clamped_gates=True),
    "GraniteForCausalLM": Family(has_multipliers=True),
    "GraniteMoeForCausalLM": Family(has_multipliers=True),
    "GraniteMoeHybridForCausalLM": Family(has_multipliers=True),
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": replace(LFM2, has_sigmoid_router=True, router_epsilon=1e-6),
    "LlamaForCausalLM": Family(),
    "MiniMaxM2ForCausalLM": Family(has_sigmoid_router=True),
    "Ministral3ForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "MixtralForCausalLM": Family(),
    "NemotronHForCausalLM": Family(
        activation_name="mlp_hidden_act", final_norm="norm_f", has_sigmoid_router=True, has_gates=False
    ),
    "Olmo2ForCausalLM": Family(AFTER),
    "Olmo3ForCausalLM": Family(AFTER),
    "OlmoeForCausalLM": Family(),
    "Phi3ForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(),
    "Qwen2MoeForCausalLM": Family(),
    "Qwen3ForCausalLM": Family(),
    "Qwen3MoeForCausalLM": Family(),
    "Qwen3NextForCausalLM": QWEN3_5,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5,
    "SeedOssForCausalLM": Family(),
    "SmolLM3ForCausalLM": Family(is_rotated=lambda attention: bool(attention.use_rope)),
}
SILU, GELU_TANH, CLAMPED, SQUARED_RELU = "silu", "gelu_pytorch_tanh", "clamped", "squared_relu"
# Names of a layer's feed-forward layer, or of its router with the experts; and of what is in place of attention.
FEED_FORWARDS = ("block_sparse_moe", "feed_forward", "mlp", "shared_mlp")
MIXERS = ("conv", "linear_attn", "mamba")
# Names of what is added to the squares of norms in a configuration.
EPSILONS = ("norm_eps", "rms_norm_eps", "layer_norm_epsilon")
# Names of what is added to the weights of experts for the choice, in a router or in what has it.
CORRECTIONS = ("e_score_correction_bias", "expert_bias")
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu_pytorch_tanh": GELU_TANH}
WITHOUT_GATES = {"relu2": SQUARED_RELU}


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding of the first `2 * len(inverse_frequencies)` numbers of a head. `scaling` multiplies cosines
    and sines of positions times frequencies."""

    inverse_frequencies: tuple[float, ...]
    scaling: float


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen and weighted, beyond a softmax of the router's scores.

    With `has_sigmoid` the weights are sigmoids of the scores. The experts are `num_groups` groups of neighbours; the
    `num_chosen_groups` whose two largest weights, each with its correction, have the largest sums take part. `scale`
    multiplies the weights; `epsilon` is added to the sum by which those that a token chooses are divided.
    """

    has_sigmoid: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    scale: float = 1.0
    epsilon: float = 0.0


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes and constants. A window of None is the whole context. `layer_ropes` are indices in `ropes`, which are of
    the same size.

    `intermediate_size` is that of an expert if there are experts. Their weights are the softmax of the router's scores
    over all experts, or with `normalizes_experts` over those that a token chooses; `routing` describes other ways.
    Beside them `shared_size` is the size of the shared expert of a layer, and `dense_size` that of `dense_layers`, the
    layers without experts; 0 where there are none.

    A soft cap c makes `c * tanh(x / c)` of scores and logits x; None leaves them. `logit_scale` is applied before. With
    `has_sinks` the softmax of attention has one more score for each head.

    The activation `CLAMPED` is, of a gate g up to `gate_limit` and u between plus and minus that, g * sigmoid(
    `gate_factor` * g) * (u + 1). With `SQUARED_RELU` there are no gates. `bare_layers` have no feed-forward layer.

    The layers `recurrent_layers` have a `mixer` in place of attention; None if there are none. With `has_output_gate`
    what a head of attention yields is multiplied by the sigmoid of its gate. `projections` are the names of
    `PROJECTIONS`, and `mixer_output` is that of the projection behind a mixer.
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
    sliding_windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]
    activation: str = SILU
    softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    num_experts: int = 0
    num_experts_per_token: int = 0
    normalizes_experts: bool = False
    routing: Routing = Routing()
    shared_size: int = 0
    dense_size: int = 0
    has_sinks: bool = False
    gate_factor: float = 1.0
    gate_limit: float = 0.0
    dense_layers: tuple[int, ...] = ()
    has_output_gate: bool = False
    recurrent_layers: tuple[int, ...] = ()
    mixer: MixerShape | None = None
    bare_layers: tuple[int, ...] = ()
    projections: tuple[str, ...] = PROJECTIONS
    mixer_output: str = ""

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated."""
        return 2 * len(self.ropes[0].inverse_frequencies)


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. Weights are `[out, in]` as in `nn.Linear`, and may be quantized, each in its own way; biases and norms
    are None where the model has none.

    `input_norm` and `post_attention_norm` are applied to what attention and the feed-forward layer read, and
    `attention_output_norm` and `feed_forward_output_norm` to what they yield. The norms of queries and keys are those
    of one head or, as long as all heads together, of all. `qkv_parts` are the projections of queries, keys and values,
    and `gate_up_parts` those of gate and up: separate, or one that is fused. Queries with gates are `[num_heads, 2,
    head_dim]`. In a recurrent layer `qkv_parts` are the projections in front of its `mixer`, and `output` is the one
    behind it. Without a feed-forward layer there are no `gate_up_parts`, and `down` is empty; without gates these are
    one, the projection in front of the activation.

    With experts there is a router `[num_experts, hidden_size]`, and `gate_up_parts`, which is one, and `down` have one
    dimension more, the experts, in front; those of codes have the rows of all experts, and `gate_up_order` and
    `down_order` are those of `ExpertMatrices`. `router_bias` `[num_experts]` is added to the router's scores, and
    `router_correction` to the weights of experts for the choice alone. `gate_up_bias` and `down_bias` `[num_experts,
    out]` are those of experts. What a shared expert yields is multiplied by the sigmoid of the product with
    `shared_gate` `[1, hidden_size]`, if there is one.

    `sinks` `[num_heads]` are scores of attention that belong to no key.
    """

    input_norm: Tensor | None
    qkv_parts: tuple[nn.Linear | QuantizedLinear, ...]
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Matrix
    output_bias: Tensor | None
    attention_output_norm: Tensor | None
    post_attention_norm: Tensor | None
    gate_up_parts: tuple[Matrix, ...]
    down: Matrix
    feed_forward_output_norm: Tensor | None
    router: Tensor | None = None
    router_correction: Tensor | None = None
    shared_gate_up_parts: tuple[Matrix, ...] = ()
    shared_down: Matrix | None = None
    shared_gate: Tensor | None = None
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    gate_up_order: Tensor | None = None
    down_order: Tensor | None = None
    sinks: Tensor | None = None
    mixer: MixerWeights | None = None

    @property
    def qkv_matrices(self) -> tuple[Matrix, ...]:
        """Weights of queries, keys and values: together `[(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]`,
        without gates."""
        return tuple(linear.weight for linear in self.qkv_parts)

    @property
    def has_qkv_bias(self) -> bool:
        """Whether the projections of queries, keys and values have biases."""
        return self.qkv_parts[0].bias is not None

    @property
    def qkv_bias(self) -> Tensor | None:
        """The bias of `qkv`."""
        biases: list[Any] = [linear.bias for linear in self.qkv_parts]
        return joined(biases) if self.has_qkv_bias else None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """A whole model. `embedding` and `head` are `[vocabulary, hidden_size]` and may be the same tensor. The head of a
    quantized checkpoint may be quantized also where the embedding has the same numbers."""

    shape: DecoderShape
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Matrix


def read_decoder(
    network: PreTrainedModel, layers: Sequence[Layer], context_length: int | None = None
) -> DecoderWeights | str:
    """Returns the weights of a network of the families, or the reason why it is not of one. `layers` is the attention
    of its layers. Without `context_length` positions are not limited. Experts that transformers has in another order
    are as `order_experts` leaves them."""
    name = type(network).__name__
    if name not in FAMILIES:
        return f"{name} is not one of {', '.join(sorted(FAMILIES))}"
    family = FAMILIES[name]
    body: Any = network.model
    config = network.config
    head: Any = network.get_output_embeddings()
    embedding: Any = network.get_input_embeddings()
    modules = _modules(body)
    if isinstance(modules, str):
        return modules
    if obstacle := _obstacle(config, family, modules, head, layers) or _position_obstacle(config, context_length):
        return obstacle
    recurrent = tuple(number for number, module in enumerate(modules) if _attention(module) is None)
    ropes, layer_ropes = _read_ropes(body, modules, config, family, layers[0].shape.head_dim)
    if any(len(rope.inverse_frequencies) != len(ropes[0].inverse_frequencies) for rope in ropes):
        return "its rotary embeddings cover different parts of a head"
    read = tuple(_read_layer(module, family) for module in modules)
    fed = [layer for layer in read if layer.gate_up_parts]
    final_norm = _norm_weight(body, family.final_norm, family)
    assert final_norm is not None
    return DecoderWeights(
        shape=DecoderShape(
            num_layers=len(read),
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=layers[0].shape.num_kv_heads,
            head_dim=layers[0].shape.head_dim,
            intermediate_size=next((layer for layer in fed if layer.router is not None), fed[0]).down.shape[-1],
            vocabulary_size=head.weight.shape[0],
            norm_epsilon=float(next(getattr(config, name) for name in EPSILONS if hasattr(config, name))),
            attention_scale=layers[0].scoring.scale,
            sliding_windows=_of_all(tuple(layer.scoring.sliding_window for layer in layers), recurrent),
            ropes=ropes,
            layer_ropes=layer_ropes,
            softcap=layers[0].scoring.softcap,
            has_sinks=layers[0].scoring.has_sinks,
            **(_activation(config, family) or {}),
            has_output_gate=family.has_output_gate,
            recurrent_layers=recurrent,
            mixer=next((layer.mixer.shape for layer in read if layer.mixer is not None), None),
            bare_layers=tuple(number for number, layer in enumerate(read) if not layer.gate_up_parts),
            projections=family.projections,
            mixer_output=next((f"{_mixer_name(module)}.out_proj" for module in modules if not _attention(module)), ""),
            **_scales(config, family, embedding),
            **_experts(modules, family),
        ),
        embedding=embedding.weight,
        layers=read,
        final_norm=final_norm,
        head=head.weight,
    )


def _modules(body: Any) -> tuple[Any, ...] | str:
    """Returns the layers of a network: attention or a mixer each, and behind it a feed-forward layer, or none. Where
    transformers has one of these in a layer, they have the names of Llama's layers. Returns a reason if they are in
    another order."""
    if not all(hasattr(layer, "block_type") and hasattr(layer, "mixer") for layer in body.layers):
        return tuple(body.layers)
    modules: list[SimpleNamespace] = []
    for layer in body.layers:
        if layer.block_type in ("mlp", "moe"):
            if not modules or hasattr(modules[-1], "mlp"):
                return "two of its feed-forward layers follow each other, or one is the first layer"
            modules[-1].mlp, modules[-1].post_attention_layernorm = layer.mixer, layer.norm
        else:
            name = "self_attn" if layer.block_type == "full_attention" else "mamba"
            modules.append(SimpleNamespace(input_layernorm=layer.norm, **{name: layer.mixer}))
    return tuple(modules)


def _attention(module: Any) -> Any:
    """Returns the attention of a layer; None if it has a mixer."""
    return getattr(module, "self_attn", None)


def _mixer_name(module: Any) -> str:
    """Returns the name of what a layer has in place of attention."""
    return next(name for name in MIXERS if getattr(module, name, None) is not None)


def _of_all(windows: tuple[int | None, ...], recurrent: tuple[int, ...]) -> tuple[int | None, ...]:
    """Returns the windows of all layers, by those of the layers with attention."""
    of_attention = iter(windows)
    return tuple(None if number in recurrent else next(of_attention) for number in range(len(windows) + len(recurrent)))


def _activation(config: PretrainedConfig, family: Family) -> dict[str, Any] | None:
    """Returns the activation of feed-forward layers, and its constants; None if no native forward pass has it."""
    if family.has_clamped_gates:
        factor, limit = float(config.swiglu_alpha), float(config.swiglu_limit)
        return {"activation": CLAMPED, "gate_factor": factor, "gate_limit": limit}
    known = ACTIVATIONS if family.has_gates else WITHOUT_GATES
    name = SILU if family.activation_name is None else known.get(getattr(config, family.activation_name))
    return None if name is None else {"activation": name}


def _obstacle(
    config: PretrainedConfig, family: Family, modules: Sequence[Any], head: Any, layers: Sequence[Layer]
) -> str | None:
    if _activation(config, family) is None:
        return f"its activation is {getattr(config, str(family.activation_name))}"
    if family.has_output_gate and getattr(config, "attention_bias", False):
        return "its attention has gates and biases"
    if any(layer.shape != layers[0].shape for layer in layers):
        return "its attention differs between layers"
    if any(layer.scoring.softcap != layers[0].scoring.softcap for layer in layers):
        return "the soft cap of its scores differs between layers"
    if any(layer.scoring.has_sinks != layers[0].scoring.has_sinks for layer in layers):
        return "some of its layers have attention sinks and others have not"
    if any(layer.scoring.scale != layers[0].scoring.scale for layer in layers):
        return "the scale of its scores differs between layers"
    if getattr(config, "clip_qkv", None) is not None:
        return "its queries, keys and values are clipped"
    blocks = [block for module in modules if (block := _block(module)) is not None]
    if any(getattr(_down(getattr(block, "experts", block)), "bias", None) is not None for block in blocks):
        return "its feed-forward layers have biases"
    if any(isinstance(getattr(block, "fc1_latent_proj", None), nn.Linear) for block in blocks):
        return "its experts have projections in common"
    return None if head.bias is None else "its output layer has a bias"


def _position_obstacle(config: PretrainedConfig, context_length: int | None) -> str | None:
    """Returns the reason if queries are scaled by their position (Ministral 3). The factor is 1 up to the original
    context."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if not rope.get("llama_4_scaling_beta") or (context_length is not None and original and context_length <= original):
        return None
    return f"its queries are scaled by position beyond {original} tokens"


def _scales(config: PretrainedConfig, family: Family, embedding: Any) -> dict[str, Any]:
    """Returns the constants that multiply or cap embeddings, the residual stream and logits."""
    scales: dict[str, Any] = {}
    if family.has_multipliers:
        scales["embedding_scale"] = float(config.embedding_multiplier)
        scales["residual_scale"] = float(config.residual_multiplier)
        scales["logit_scale"] = 1.0 / float(config.logits_scaling)
    if (scale := getattr(embedding, "embed_scale", None)) is not None:
        # transformers rounds it to the dtype of the weights.
        scales["embedding_scale"] = float(scale.to(embedding.weight.dtype))
    if family.caps_logits and config.final_logit_softcapping is not None:
        scales["logit_softcap"] = float(config.final_logit_softcapping)
    return scales


def _experts(modules: Sequence[Any], family: Family) -> dict[str, Any]:
    """Returns how many experts a layer has, how many of them a token uses, and how they are weighted."""
    with_experts = [module for module in modules if hasattr(_block(module), "experts")]
    if not with_experts:
        return {}
    router, shared = _router(_block(with_experts[0])), _shared(with_experts[0])
    dense = {
        number: block
        for number, module in enumerate(modules)
        if (block := _block(module)) is not None and not hasattr(block, "experts")
    }
    return {
        "num_experts": router.num_experts,
        "num_experts_per_token": router.top_k,
        "normalizes_experts": getattr(router, "norm_topk_prob", True),
        "routing": Routing(
            family.has_sigmoid_router,
            getattr(router, "num_group", 1),
            getattr(router, "topk_group", 1),
            float(getattr(router, "routed_scaling_factor", 1.0)),
            family.router_epsilon,
        ),
        "shared_size": 0 if shared is None else _down(shared).weight.shape[1],
        "dense_size": next((_down(block).weight.shape[1] for block in dense.values()), 0),
        "dense_layers": tuple(dense),
    }


def _block(module: Any) -> Any:
    """Returns the feed-forward layer of a layer, or the router with the experts; None if there is none."""
    return next((block for name in FEED_FORWARDS if (block := getattr(module, name, None)) is not None), None)


def _router(block: Any) -> Any:
    return block.router if hasattr(block, "router") else block.gate


def _shared(module: Any) -> Any:
    """Returns the expert of a layer with experts that every token uses; None if there is none."""
    owners = ((_block(module), "shared_expert"), (_block(module), "shared_experts"), (module, "shared_mlp"))
    return next((getattr(owner, name) for owner, name in owners if hasattr(owner, name)), None)


def _read_ropes(
    body: Any, modules: Sequence[Any], config: PretrainedConfig, family: Family, head_dim: int
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """Returns the rotary embeddings, and which of them each layer uses."""
    rotary = getattr(body, "rotary_emb", getattr(body, "pos_emb", None))
    if rotary is None:
        # A rotation by the angle 0 leaves queries and keys as they are, to the bit.
        return (Rope((0.0,) * (head_dim // 2), 1.0),), (0,) * len(modules)
    ropes: tuple[Rope, ...]
    layer_ropes: tuple[int, ...]
    if hasattr(rotary, "inv_freq"):
        ropes, layer_ropes = (_read_rope(rotary, ""),), (0,) * len(modules)
    else:
        kinds = sorted(set(config.layer_types))
        ropes = tuple(_read_rope(rotary, f"{kind}_") for kind in kinds)
        layer_ropes = tuple(map(kinds.index, config.layer_types))
    rotated = [_attention(module) is None or family.is_rotated(module.self_attn) for module in modules]
    if all(rotated):
        return ropes, layer_ropes
    still = Rope((0.0,) * len(ropes[0].inverse_frequencies), 1.0)
    indices = (index if one else len(ropes) for index, one in zip(layer_ropes, rotated, strict=True))
    return (*ropes, still), tuple(indices)


def _read_rope(rotary: Any, prefix: str) -> Rope:
    frequencies, scaling = (getattr(rotary, prefix + name) for name in ("inv_freq", "attention_scaling"))
    return Rope(tuple(frequencies.float().tolist()), float(scaling))


def _read_layer(module: Any, family: Family) -> LayerWeights:
    norms, block = family.norms, _block(module)
    feed_forward = getattr(block, "experts", block)
    return LayerWeights(
        input_norm=_norm_weight(module, norms.attention_input, family),
        **(_read_mixer(module) if _attention(module) is None else _read_attention(module.self_attn, family)),
        attention_output_norm=_norm_weight(module, norms.attention_output, family),
        post_attention_norm=_norm_weight(module, norms.feed_forward_input, family),
        gate_up_parts=() if feed_forward is None else _gate_up_parts(feed_forward),
        down=torch.empty(0, 0) if feed_forward is None else _weight(_down(feed_forward)),
        feed_forward_output_norm=_norm_weight(module, norms.feed_forward_output, family),
        sinks=getattr(_attention(module), "sinks", None),
        **_read_routing(module),
    )


def _read_attention(attention: Any, family: Family) -> dict[str, Any]:
    """Returns the fields of `LayerWeights` that a layer with attention has."""
    fused = getattr(attention, "qkv_proj", None)
    output = attention.o_proj if hasattr(attention, "o_proj") else attention.out_proj
    query_norm, key_norm = (
        _norm_weight(
            attention, f"{name}_layernorm" if hasattr(attention, f"{name}_layernorm") else f"{name}_norm", family
        )
        for name in ("q", "k")
    )
    return {
        "qkv_parts": (attention.q_proj, attention.k_proj, attention.v_proj) if fused is None else (fused,),
        "query_norm": query_norm,
        "key_norm": key_norm,
        "output": output.weight,
        "output_bias": output.bias,
    }


def _read_mixer(module: Any) -> dict[str, Any]:
    """Returns the same of a recurrent layer, whose module has been replaced (`RecurrentLayer`)."""
    mixer: MixerWeights = getattr(module, _mixer_name(module)).mixer.weights()
    return {
        "qkv_parts": mixer.inputs,
        "query_norm": None,
        "key_norm": None,
        "output": mixer.output.weight,
        "output_bias": mixer.output.bias,
        "mixer": mixer,
    }


def _read_routing(module: Any) -> dict[str, Any]:
    """Returns the fields of `LayerWeights` that a layer with experts has besides."""
    block = _block(module)
    if not hasattr(block, "experts"):
        return {}
    router, shared, gate = _router(block), _shared(module), getattr(block, "shared_expert_gate", None)
    correction = next(
        (getattr(one, name) for one in (router, block) for name in CORRECTIONS if hasattr(one, name)), None
    )
    experts = block.experts
    gate_up_bias = getattr(experts, "gate_up_proj_bias", None)
    if gate_up_bias is not None and alternates(experts):
        gate_up_bias = torch.cat((gate_up_bias[:, ::2], gate_up_bias[:, 1::2]), 1)
    return {
        "router": router.weight,
        "router_bias": getattr(router, "bias", None),
        "gate_up_bias": gate_up_bias,
        "down_bias": getattr(experts, "down_proj_bias", None),
        "gate_up_order": getattr(getattr(experts, parameters_of(experts)[0]), "orders", None),
        "down_order": getattr(experts.down_proj, "orders", None),
        "router_correction": correction,
        "shared_gate_up_parts": () if shared is None else _gate_up_parts(shared),
        "shared_down": None if shared is None else _weight(_down(shared)),
        "shared_gate": None if gate is None else gate.weight,
    }


def _gate_up_parts(feed_forward: Any) -> tuple[Matrix, ...]:
    if hasattr(feed_forward, "w1"):
        return feed_forward.w1.weight, feed_forward.w3.weight
    for name in ("gate_up_proj", "input_linear"):
        if hasattr(feed_forward, name):
            return (_weight(getattr(feed_forward, name)),)
    if not hasattr(feed_forward, "gate_proj"):
        return (_weight(feed_forward.up_proj),)
    return feed_forward.gate_proj.weight, feed_forward.up_proj.weight


def _down(feed_forward: Any) -> Any:
    return next(
        getattr(feed_forward, name) for name in ("w2", "down_proj", "output_linear") if hasattr(feed_forward, name)
    )


def _weight(linear: Any) -> Any:
    """Returns the weight of a linear layer, or the weights of all experts, which are a parameter themselves."""
    return linear.matrix if isinstance(linear, ExpertMatrices) else getattr(linear, "weight", linear)


def _norm_weight(module: Any, name: str | None, family: Family) -> Tensor | None:
    """Returns the weight of a norm of a module, in float32 if something is added to it; None if there is no such
    norm."""
    norm = None if name is None else getattr(module, name, None)
    if norm is None:
        return None
    weight: Tensor = norm.weight
    return weight.float() + family.norm_offset if family.norm_offset else weight


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns matrices or vectors as one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
