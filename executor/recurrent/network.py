"""Recurrent layers of transformers' networks, replaced by mixers that keep their state in slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from inflight.common.model_files.recurrent import (
    FEED_FORWARD_LAYERS,
    GATED_DELTA_NETS,
    RECURRENT_LAYERS,
    SHORT_CONVOLUTIONS,
)
from inflight.executor.recurrent.gated_delta import GatedDeltaNet
from inflight.executor.recurrent.mamba2 import Mamba2
from inflight.executor.recurrent.mixer import Mixer
from inflight.executor.recurrent.short_conv import ShortConvolution


class RecurrentStep(Protocol):
    """What `inflight_step` must provide for a recurrent layer."""

    def mix(self, layer: int, mixer: Mixer, inputs: Tensor) -> Tensor:
        """Computes a layer for `inputs[T, hidden_size]`; returns the same shape."""
        ...


class RecurrentLayer(nn.Module):
    """Stands in a network in place of a recurrent layer, whose arguments it takes."""

    def __init__(self, mixer: ShortConvolution | GatedDeltaNet | Mamba2, layer: int) -> None:
        super().__init__()
        self.mixer = mixer
        self.layer = layer

    def forward(self, hidden_states: Tensor, *, inflight_step: RecurrentStep, **others: Any) -> Tensor:
        """Computes `hidden_states[1, T, hidden_size]`."""
        return inflight_step.mix(self.layer, self.mixer, hidden_states[0])[None]


@dataclass(frozen=True, slots=True)
class _Kind:
    """Where a layer has its recurrent module, and what replaces it."""

    attribute: str
    make: Callable[[Any], ShortConvolution | GatedDeltaNet | Mamba2]


# By `model_type`.
KINDS = {
    **dict.fromkeys(SHORT_CONVOLUTIONS, _Kind("conv", ShortConvolution)),
    **dict.fromkeys(GATED_DELTA_NETS, _Kind("linear_attn", GatedDeltaNet)),
    "granitemoehybrid": _Kind("mamba", Mamba2),
    "nemotron_h": _Kind("mixer", Mamba2),
}


def recurrent_layers(network: PreTrainedModel) -> tuple[int, ...]:
    """Returns the numbers of the recurrent layers."""
    return _layers_of_kinds(network, RECURRENT_LAYERS)


def attention_layers(network: PreTrainedModel) -> tuple[int, ...]:
    """Returns the numbers of the layers that are attention."""
    recurrent = recurrent_layers(network)
    return tuple(layer for layer in mixing_layers(network) if layer not in recurrent)


def mixing_layers(network: PreTrainedModel) -> tuple[int, ...]:
    """Returns the numbers of the layers that are recurrent or attention, with which native layers begin."""
    others = _layers_of_kinds(network, FEED_FORWARD_LAYERS)
    count = network.config.get_text_config(decoder=True).num_hidden_layers
    return tuple(layer for layer in range(count) if layer not in others)


def _layers_of_kinds(network: PreTrainedModel, of_types: Mapping[str, frozenset[str]]) -> tuple[int, ...]:
    config = network.config.get_text_config(decoder=True)
    kinds = of_types.get(str(config.model_type), frozenset())
    layer_types = getattr(config, "layer_types", None) or ()
    return tuple(layer for layer, kind in enumerate(layer_types[: config.num_hidden_layers]) if kind in kinds)


def replace_recurrent_layers(network: PreTrainedModel) -> dict[int, Mixer]:
    """Replaces the recurrent layers of a network. Returns their mixers by the number of the layer."""
    body: Any = network.get_decoder()
    mixers: dict[int, Mixer] = {}
    for layer in recurrent_layers(network):
        kind = KINDS[network.config.get_text_config(decoder=True).model_type]
        module = body.layers[layer]
        mixer = kind.make(getattr(module, kind.attribute))
        setattr(module, kind.attribute, RecurrentLayer(mixer, layer))
        mixers[layer] = mixer
    return mixers
