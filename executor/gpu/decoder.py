"""The forward pass of the common decoder family on a GPU: five matrix products per layer, and Triton kernels between
them.

Queries, keys and values are one product, gate and up projection another. The host never waits for the device, and no
shape depends on the content of a device tensor, so a step of decodes can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from executor.attention.backend import AttentionBackend, LayerKv, Scoring
from executor.checkpoint.decoder_weights import DecoderWeights, LayerWeights
from executor.gpu.layers import gated, residual_norm, rope_write, rotation_table
from executor.step.batch import StepBatch


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """The weights of a layer, fused for multiplication."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    output: Tensor
    output_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Tensor
    down: Tensor
    scoring: Scoring


class GpuDecoder:
    """A model of the family. It takes over the network's weights: those that it fuses become views in the network."""

    def __init__(self, weights: DecoderWeights, backend: AttentionBackend, context_length: int) -> None:
        self.shape = shape = weights.shape
        self._epsilon = shape.norm_epsilon
        self._embedding, self._head, self._final_norm = weights.embedding, weights.head, weights.final_norm
        self._backend = backend
        scorings = (Scoring(shape.attention_scale, window) for window in shape.sliding_windows)
        self._layers = tuple(_fuse(layer, scoring) for layer, scoring in zip(weights.layers, scorings, strict=True))
        frequencies = torch.tensor(shape.inverse_frequencies, device=self._head.device)
        self._rotations = rotation_table(frequencies, shape.rope_scaling, context_length)

    @property
    def head(self) -> Tensor:
        """`[vocabulary, hidden]`, in the dtype of the logits."""
        return self._head

    def forward(self, batch: StepBatch, kv: Sequence[LayerKv], logits: Tensor | None = None) -> Tensor:
        """Computes every token of a batch on the device, stores its KV, and returns the logits `[R + Q, vocabulary]`.

        They have the weights' dtype, and are written to `logits` if that is given.
        """
        hidden = functional.embedding(batch.token_ids, self._embedding)
        delta: Tensor | None = None
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            normed = residual_norm(hidden, delta, layer.input_norm, self._epsilon)
            attended = self._attend(layer, normed, batch, layer_kv)
            delta = functional.linear(attended, layer.output, layer.output_bias)
            normed = residual_norm(hidden, delta, layer.post_attention_norm, self._epsilon)
            delta = functional.linear(gated(functional.linear(normed, layer.gate_up)), layer.down)
        assert delta is not None
        if batch.logit_rows.shape[0] != batch.num_tokens or batch.target_ids.shape[0]:
            hidden, delta = hidden[batch.logit_rows], delta[batch.logit_rows]
        normed = residual_norm(hidden, delta, self._final_norm, self._epsilon)
        return torch.mm(normed, self._head.t(), out=logits)

    def _attend(self, layer: FusedLayer, normed: Tensor, batch: StepBatch, kv: LayerKv) -> Tensor:
        """Computes attention of all heads, `[T, num_heads * head_dim]`."""
        qkv = functional.linear(normed, layer.qkv, layer.qkv_bias)
        positions, slots = batch.positions, batch.slot_mapping
        queries = rope_write(qkv, layer.head_norms, positions, slots, self._rotations, kv, self._epsilon)
        return self._backend.attend(queries, kv, batch, layer.scoring).flatten(1)


def _fuse(layer: LayerWeights, scoring: Scoring) -> FusedLayer:
    qkv, qkv_bias, gate_up = layer.qkv, layer.qkv_bias, layer.gate_up
    _become_views([layer.query.weight, layer.key.weight, layer.value.weight], qkv)
    _become_views([layer.gate, layer.up], gate_up)
    norms = None if layer.query_norm is None or layer.key_norm is None else (layer.query_norm, layer.key_norm)
    return FusedLayer(
        input_norm=layer.input_norm,
        qkv=qkv,
        qkv_bias=qkv_bias,
        head_norms=norms,
        output=layer.output,
        output_bias=layer.output_bias,
        post_attention_norm=layer.post_attention_norm,
        gate_up=gate_up,
        down=layer.down,
        scoring=scoring,
    )


def _become_views(parts: Sequence[Tensor], whole: Tensor) -> None:
    """Replaces the parts' own storage by views, so that the model is in memory once."""
    for part, view in zip(parts, whole.split([part.shape[0] for part in parts]), strict=True):
        part.set_(view)
