"""Attention function that transformers' layers call, and which leads to the paged KV.

transformers looks the function up by name and passes on what the caller of the model gave as `inflight_step`,
unchanged. So no state is global: a step carries its batch, KV and backend. A `PagedStep` computes attention. A
`LayerProbe` finds out the shapes of the layers before there is any KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from inflight.common.model_source import ModelError
from inflight.executor.attention.backend import AttentionBackend, KvShape, LayerKv, Scoring
from inflight.executor.step.batch import StepBatch

# Contains none of the substrings with a meaning in transformers (flash, sdpa, flex_attention, paged|). It is not in its
# registry of masks, so no mask is made.
ATTENTION_NAME = "inflight"


@dataclass(frozen=True, slots=True)
class Layer:
    """Shape and scoring of a layer's attention."""

    shape: KvShape
    scoring: Scoring


class AttentionStep(Protocol):
    """What `inflight_step` must provide."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
        """Takes queries, keys and values `[T, heads, head_dim]`; returns the shape of `queries`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """Attention of one step through the paged KV."""

    backend: AttentionBackend
    layers: Sequence[Layer]
    kv: Sequence[LayerKv]
    batch: StepBatch

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
        """Writes the new keys and values, then attends over the context or its window."""
        scoring = self.layers[layer].scoring
        batch = self.batch if scoring.sliding_window is None else self.batch.for_windows
        self.backend.write(self.kv[layer], keys, values, batch)
        return self.backend.attend(queries, self.kv[layer], batch, scoring, options.get("s_aux"))


class LayerProbe:
    """Records the attention of each layer without computing it. Raises `ModelError` for what no backend supports."""

    def __init__(self) -> None:
        self._layers: dict[int, Layer] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
        _check_call(queries, keys, values, options)
        if layer in self._layers:
            raise ModelError("a layer calls attention more than once")
        scale = options.get("scaling")
        self._layers[layer] = Layer(
            KvShape(keys.shape[1], keys.shape[2]),
            Scoring(
                scale=float(queries.shape[2] ** -0.5 if scale is None else scale),
                sliding_window=options.get("sliding_window"),
                softcap=options.get("softcap"),
                has_sinks=options.get("s_aux") is not None,
            ),
        )
        return torch.zeros_like(queries)

    def mix(self, layer: int, mixer: object, inputs: Tensor) -> Tensor:
        """Passes a recurrent layer."""
        return torch.zeros_like(inputs)

    def layers(self, config: PretrainedConfig, numbers: Sequence[int] | None = None) -> tuple[Layer, ...]:
        """Returns the layers that are attention, in order, checked against the configuration: those of these numbers,
        by default all."""
        numbers = range(config.num_hidden_layers) if numbers is None else numbers
        if sorted(self._layers) != list(numbers):
            raise ModelError(f"{len(self._layers)} of {len(numbers)} layers call attention")
        layers = tuple(self._layers[number] for number in numbers)
        is_sliding_layer = _sliding_layers(config)
        for number, layer in zip(numbers, layers, strict=True):
            is_sliding = is_sliding_layer[number]
            if is_sliding and layer.scoring.sliding_window is None:
                raise ModelError("its code does not pass the sliding window on to attention")
            if getattr(config, "attn_logit_softcapping", None) and layer.scoring.softcap is None:
                raise ModelError("its code does not pass the soft cap of scores on to attention")
        return layers


def register_attention() -> None:
    """Registers the attention function with transformers. May be called repeatedly."""
    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    inflight_step: AttentionStep | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' signature: tensors are `[1, heads, T, head_dim]`, the result is `[1, T, heads,
    head_dim]`."""
    layer = module.layer_idx
    if inflight_step is None or attention_mask is not None or not isinstance(layer, int):
        raise ModelError("its code calls attention in an unsupported way")
    options.setdefault("is_causal", getattr(module, "is_causal", None))
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return inflight_step.attend(layer, queries, keys, values, options)[None], None


def _check_call(queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> None:
    if keys.shape != values.shape or keys.shape[2] != queries.shape[2]:
        raise ModelError("its keys and values have heads of different sizes")
    if keys.shape[0] != queries.shape[0] or queries.shape[1] % keys.shape[1]:
        raise ModelError("its attention is not grouped-query self-attention")
    sinks = options.get("s_aux")
    if sinks is not None and sinks.shape != queries.shape[1:2]:
        raise ModelError("its attention sinks are not one for each head")
    if options.get("is_causal") is False:
        raise ModelError("its attention is not causal")


def _sliding_layers(config: PretrainedConfig) -> list[bool]:
    """Returns which layers use a sliding window, as far as the configuration says."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return [layer_type == "sliding_attention" for layer_type in layer_types[: config.num_hidden_layers]]
    everywhere = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
    return [everywhere] * config.num_hidden_layers
