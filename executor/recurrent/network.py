"""Recurrent layers of transformers' networks, replaced by mixers that keep their state in slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from inflight.common.model_files.recurrent import RECURRENT_LAYERS
from inflight.executor.recurrent.gated_delta import GatedDeltaNet
from inflight.executor.recurrent.mixer import Mixer
from inflight.executor.recurrent.short_conv import ShortConvolution


class RecurrentStep(Protocol):
    """What `inflight_step` must provide for a recurrent layer."""

    def mix(self, layer: int, mixer: Mixer, inputs: Tensor) -> Tensor:
        """Computes a layer for `inputs[T, hidden_size]`; returns the same shape."""
        ...


class RecurrentLayer(nn.Module):
    """Stands in a network in place of a recurrent layer, whose arguments it takes."""

    def __init__(self, mixer: ShortConvolution | GatedDeltaNet, layer: int) -> None:
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
    make: Callable[[Any], ShortConvolution | GatedDeltaNet]


KINDS = {
    "conv": _Kind("conv", ShortConvolution),
    "linear_attention": _Kind("linear_attn", GatedDeltaNet),
}


def recurrent_layers(network: PreTrainedModel) -> tuple[int, ...]:
    """Returns the numbers of the recurrent layers."""
    config = network.config.get_text_config(decoder=True)
    kinds = RECURRENT_LAYERS.get(str(config.model_type), frozenset())
    layer_types = getattr(config, "layer_types", None) or ()
    return tuple(layer for layer, kind in enumerate(layer_types[: config.num_hidden_layers]) if kind in kinds)


def replace_recurrent_layers(network: PreTrainedModel) -> dict[int, Mixer]:
    """Replaces the recurrent layers of a network. Returns their mixers by the number of the layer."""
    body: Any = network.get_decoder()
    mixers: dict[int, Mixer] = {}
    for layer in recurrent_layers(network):
        kind = KINDS[network.config.get_text_config(decoder=True).layer_types[layer]]
        module = body.layers[layer]
        mixer = kind.make(getattr(module, kind.attribute))
        setattr(module, kind.attribute, RecurrentLayer(mixer, layer))
        mixers[layer] = mixer
    return mixers
