"""The way from transformers' attention modules to our KV: the attention function that every layer calls.

transformers looks the function up by name and hands it what the caller of the model passed as `inflight_step`,
untouched. So no state is global: a step carries batch, KV and backend with it. Two things can be carried: a
`PagedStep` computes, a `LayerProbe` learns the shapes of the layers before there is any KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from common.model_source import ModelError
from executor.attention.backend import AttentionBackend, KvShape, LayerKv, Scoring
from executor.step.batch import StepBatch

# Free of the substrings that transformers gives a meaning of its own (flash, sdpa, flex_attention, paged|). It is not
# in its registry of masks, so no mask is made.
ATTENTION_NAME = "inflight"


@dataclass(frozen=True, slots=True)
class Layer:
    """What attention needs to know of a layer."""

    shape: KvShape
    scoring: Scoring


class AttentionStep(Protocol):
    """What the attention function is given."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
        """Queries, keys and values are `[T, heads, head_dim]`; returns the same shape as `queries`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """Attention of one step through the paged KV."""

    backend: AttentionBackend
    layers: Sequence[Layer]
    kv: Sequence[LayerKv]
    batch: StepBatch

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
        """Writes the new keys and values, then attends to all of them."""
        self.backend.write(self.kv[layer], keys, values, self.batch)
        return self.backend.attend(queries, self.kv[layer], self.batch, self.layers[layer].scoring)


class LayerProbe:
    """Notes what each layer asks for, computes nothing, and refuses what no backend does."""

    def __init__(self) -> None:
        self._layers: dict[int, Layer] = {}

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
        """Returns zeros."""
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
            ),
        )
        return torch.zeros_like(queries)

    def layers(self, config: PretrainedConfig) -> tuple[Layer, ...]:
        """The layers in order, checked against what the configuration says of them."""
        count = config.num_hidden_layers
        if sorted(self._layers) != list(range(count)):
            raise ModelError(f"{len(self._layers)} of {count} layers call attention")
        layers = tuple(self._layers[i] for i in range(count))
        for layer, is_sliding in zip(layers, _sliding_layers(config), strict=True):
            if is_sliding and layer.scoring.sliding_window is None:
                raise ModelError("its code does not pass the sliding window on to attention")
            if getattr(config, "attn_logit_softcapping", None) and layer.scoring.softcap is None:
                raise ModelError("its code does not pass the soft cap of scores on to attention")
        return layers


def register_attention() -> None:
    """Makes our attention known to transformers; again and again is fine."""
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
    """transformers' signature: tensors are `[1, heads, T, head_dim]`, the result is `[1, T, heads, head_dim]`."""
    layer = module.layer_idx
    if inflight_step is None or attention_mask is not None or not isinstance(layer, int):
        raise ModelError("its code calls attention in a way of its own")
    options.setdefault("is_causal", getattr(module, "is_causal", None))
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return inflight_step.attend(layer, queries, keys, values, options)[None], None


def _check_call(queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> None:
    if keys.shape != values.shape or keys.shape[2] != queries.shape[2]:
        raise ModelError("its keys and values have heads of different sizes")
    if keys.shape[0] != queries.shape[0] or queries.shape[1] % keys.shape[1]:
        raise ModelError("its attention is not grouped-query self-attention")
    if options.get("s_aux") is not None:
        raise ModelError("it has attention sinks")
    if options.get("is_causal") is False:
        raise ModelError("its attention is not causal")


def _sliding_layers(config: PretrainedConfig) -> list[bool]:
    """Which layers see a window only, as far as the configuration says."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return [layer_type == "sliding_attention" for layer_type in layer_types[: config.num_hidden_layers]]
    everywhere = bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)
    return [everywhere] * config.num_hidden_layers
