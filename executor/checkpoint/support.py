"""Check that a model runs correctly with the paged attention, by its configuration and code, before anything is
computed.

A model that is not known to work is refused with the reason. `inflight.executor.model.self_check` then compares logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from inflight.common.model_files.recurrent import FEED_FORWARD_LAYERS, RECURRENT_LAYERS
from inflight.common.model_source import OWN_CODE, ModelError
from inflight.executor.checkpoint.longrope import longrope_obstacles

# Attention kinds that a layer may have; other kinds keep state other than keys and values. Of these, executors have
# slots for RECURRENT_LAYERS.
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Their frequencies depend on the longest sequence in a batch, so a token's result would depend on the other sequences.
BATCH_DEPENDENT_ROPE = frozenset({"dynamic"})
# What configurations call the experts of a layer. 0 stands for none.
NUMBERS_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def check_configuration(config: PretrainedConfig) -> None:
    """Refuses a model by its configuration, before its weights are loaded."""
    for reason in _configuration_obstacles(config.get_text_config(decoder=True), config):
        raise ModelError(f"model architecture {config.model_type!r} is not supported: {reason}")


def network_class(config: PretrainedConfig) -> tuple[type[PreTrainedModel], PretrainedConfig]:
    """Returns the class of a model in transformers, and the configuration that it is made with."""
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        reason = OWN_CODE if hasattr(config, "auto_map") else "transformers has no decoder for it"
        raise ModelError(f"model architecture {config.model_type!r} is not supported: {reason}")
    text_config = config.get_text_config(decoder=True)
    return kind, text_config if kind.config_class is type(text_config) else config


def ignore_padding(config: PretrainedConfig) -> None:
    """Removes an id of padding that the embedding has no row for, which transformers would refuse. Batches here have no
    padding."""
    text_config = config.get_text_config(decoder=True)
    padding: Any = getattr(text_config, "pad_token_id", None)
    size: Any = getattr(text_config, "vocab_size", None)
    if padding is not None and size is not None and not 0 <= padding < size:
        text_config.pad_token_id = None


def check_network(network: PreTrainedModel) -> None:
    """Refuses a model by its code."""
    for reason in _network_obstacles(network):
        raise ModelError(f"model architecture {network.config.model_type!r} is not supported: {reason}")


def _configuration_obstacles(text_config: PretrainedConfig, config: PretrainedConfig) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    if getattr(text_config, "alibi", False) or getattr(text_config, "position_embedding_type", None) == "alibi":
        yield "it adds ALiBi biases to attention scores"
    if getattr(text_config, "kv_lora_rank", None):
        yield "it uses multi-head latent attention"
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    recurrent = RECURRENT_LAYERS.get(str(text_config.model_type), frozenset())
    without_attention = recurrent | FEED_FORWARD_LAYERS.get(str(text_config.model_type), frozenset())
    if layer_types and not layer_types - without_attention:
        yield "none of its layers is attention"
    layer_types -= LAYER_TYPES | without_attention
    if layer_types:
        yield f"it has {', '.join(sorted(layer_types))} layers"
    num_chosen = getattr(text_config, "num_experts_per_tok", None) or 0
    for name in NUMBERS_OF_EXPERTS:
        num_experts = getattr(text_config, name, None)
        if num_experts and num_chosen > num_experts:
            yield f"num_experts_per_tok is {num_chosen} and {name} {num_experts}"
    rope_types = _rope_types(getattr(text_config, "rope_parameters", None)) & BATCH_DEPENDENT_ROPE
    if rope_types:
        yield f"its {', '.join(sorted(rope_types))} rotary embedding depends on the other sequences of a batch"
    yield from longrope_obstacles(text_config)


def _network_obstacles(network: PreTrainedModel) -> Iterator[str]:
    # transformers sets these two by class and uses them for the same decision. Of models with recurrent layers of its
    # own it does not say the first, and the layers are replaced.
    if network.config.get_text_config(decoder=True).model_type not in RECURRENT_LAYERS:
        if not getattr(network, "_supports_attention_backend", False):
            yield "its code does not call attention through transformers' attention interface"
        if getattr(network, "_is_stateful", False):
            yield "it keeps state other than keys and values"
    if "logits_to_keep" not in inspect.signature(network.forward).parameters:
        yield "its forward cannot compute the logits of chosen tokens only"


def _rope_types(rope_parameters: Any) -> set[str]:
    """Returns the kinds of rotary embedding, of all layers or by layer type."""
    if not isinstance(rope_parameters, dict):
        return set()
    kinds = {str(rope_parameters[key]) for key in ("rope_type", "type") if key in rope_parameters}
    return kinds.union(*(_rope_types(value) for value in rope_parameters.values()))
