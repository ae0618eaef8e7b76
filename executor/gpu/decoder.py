"""The forward pass of the decoder families on a GPU: five matrix products per layer, and Triton kernels between them.

Queries, keys and values are one product, gate and up projection another; experts are in `executor.experts`. The host
never waits for the device, and no shape depends on the content of a device tensor, so a step can be captured in a CUDA
graph.

Of several ranks, each has some columns of every matrix, and the KV heads that belong to its query heads. The ranks
exchange what they have computed wherever the next operation needs whole rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from inflight.common.model_files.layer_sizes import PART_COLUMNS, PART_INNER_COLUMNS
from inflight.common.model_source import ModelError
from inflight.executor.adapters.weights import AdapterWeights
from inflight.executor.attention.backend import AttentionBackend, LayerKv, Scoring, StepAttention
from inflight.executor.checkpoint import fp8_weight
from inflight.executor.checkpoint.decoder_weights import (
    GELU_TANH,
    SQUARED_RELU,
    DecoderShape,
    DecoderWeights,
    LayerWeights,
    Rope,
    joined,
)
from inflight.executor.checkpoint.fp8_weight import Fp8Weight
from inflight.executor.checkpoint.quantized_weight import Matrix, taken
from inflight.executor.checkpoint.shards import WHOLE, Shard
from inflight.executor.experts.layer import ExpertLayer
from inflight.executor.gpu.adapters import AdapterSlots, Product, slot_bytes
from inflight.executor.gpu.layers import (
    Fp8Rows,
    Projected,
    Weight,
    dense,
    fp8_product,
    gated,
    gated_fp8,
    linear,
    residual_norm,
    residual_norm_fp8,
    rope_write,
    rotation_table,
    squared_relu,
    squared_relu_fp8,
)
from inflight.executor.gpu.row_groups import RowGroups
from inflight.executor.products.coded import CodedWeight, coded_weight
from inflight.executor.recurrent.gpu_mixer import GpuMixer
from inflight.executor.recurrent.gpu_states import GpuStates
from inflight.executor.step.batch import StepBatch


class Ranks(Protocol):
    """The exchange between ranks, on the stream of the step. All ranks call the same functions in the same order."""

    def all_gather(self, part: Tensor) -> Tensor:
        """Returns every rank's tensor, `[ranks, *part.shape]`. All have the same shape and type."""
        ...

    def broadcast(self, values: Tensor) -> None:
        """Overwrites `values` by those of rank 0."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayer:
    """The weights of a layer, fused for multiplication. A recurrent layer has a `mixer` in place of attention, whose
    projections are `qkv` and `output`. With gates of what heads of attention yield, these are the last `num_gates`
    columns of `qkv`. `head_norms` are those of queries and keys. `rotations` are
    those of `rope_write`. Gate, up and down projection are those of a shared expert if there are `experts`, or None,
    as `experts` are too where a layer has no feed-forward layer; `inner_size` is the width between them, of all
    ranks."""

    input_norm: Tensor | None
    qkv: Weight
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None
    output: Weight
    output_bias: Tensor | None
    attention_output_norm: Tensor | None
    post_attention_norm: Tensor | None
    gate_up: Weight | None
    down: Weight | None
    inner_size: int
    experts: ExpertLayer | None
    feed_forward_output_norm: Tensor | None
    scoring: Scoring
    sinks: Tensor | None
    rotations: Tensor
    mixer: GpuMixer | None
    num_gates: int


def undivided_reason(weights: DecoderWeights) -> str | None:
    """Returns why ranks cannot divide a model for this forward pass; None if they can."""
    norm = weights.layers[0].query_norm
    if norm is not None and norm.numel() != weights.shape.head_dim:
        return "its norms of queries and keys cover the heads of all ranks"
    return None


class GpuDecoder:
    """A model of the family. It takes over the network's weights: those that it fuses become views in the network, and
    of matrices of codes, which stay so, the network has none afterwards.

    With `has_fp8_weights` the matrices of layers are rounded to FP8, and the network's own have no memory afterwards.

    A `shard` of several ranks has the `weights` that `divide` returns. Its `ranks` must be set before the first step.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        backend: AttentionBackend,
        context_length: int,
        *,
        has_fp8_weights: bool = False,
        shard: Shard = WHOLE,
    ) -> None:
        self.shape = shape = weights.shape
        self.shard = shard
        self.ranks: Ranks | None = None
        self._epsilon = shape.norm_epsilon
        self._embedding, self._final_norm = weights.embedding, weights.final_norm
        # In FP8 the output layer is dense.
        self._head: Tensor | CodedWeight = _fused([weights.head])
        self._backend = backend
        tables = [_rotations(rope, context_length, self.device) for rope in shape.ropes]
        scorings = [
            Scoring(shape.attention_scale, window, shape.softcap, shape.has_sinks) for window in shape.sliding_windows
        ]
        rotations = [tables[rope] for rope in shape.layer_ropes]
        fuse: Callable[[Sequence[Matrix]], Weight] = _round if has_fp8_weights else _fused
        self._layers = tuple(
            _fuse(shape, number, layer, scoring, table, fuse)
            for number, (layer, scoring, table) in enumerate(zip(weights.layers, scorings, rotations, strict=True))
        )
        self._adapters: AdapterSlots | None = None
        self._recurrent_states = None
        if shape.mixer is not None:
            self._recurrent_states = GpuStates(shape.mixer, len(shape.recurrent_layers), self.dtype, self.device)

    @property
    def recurrent_states(self) -> GpuStates | None:
        """The memory of recurrent layers; None if there are none."""
        return self._recurrent_states

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """That of activations and logits."""
        return self._embedding.dtype

    @property
    def hidden_size(self) -> int:
        """Numbers of a state."""
        return self.shape.hidden_size

    @property
    def head(self) -> Tensor | CodedWeight:
        """`[vocabulary, hidden]`; of a shard only its tokens."""
        return self._head

    @property
    def vocabulary_size(self) -> int:
        """Logits of a position, of all ranks."""
        return self.shape.vocabulary_size

    @property
    def own_ids(self) -> slice:
        """The tokens of the vocabulary whose logits this rank computes."""
        return self.shard.columns(self.shape.vocabulary_size)

    @property
    def scorings(self) -> tuple[Scoring, ...]:
        """The different scorings of the layers."""
        return tuple(dict.fromkeys(layer.scoring for layer in self._layers))

    @property
    def num_adapter_slots(self) -> int:
        """Slots for adapters, once they are reserved."""
        return 0 if self._adapters is None else self._adapters.num_slots

    def adapter_slot_bytes(self, max_rank: int) -> int:
        """Returns the memory of a slot for adapters of ranks up to `max_rank`."""
        return slot_bytes(self.shape, max_rank, self.dtype)

    def reserve_adapters(self, num_slots: int, max_rank: int) -> None:
        """Makes the adapter slots, once and before the first step."""
        self._adapters = AdapterSlots(self.shape, num_slots, max_rank, self.dtype, self.device)

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """See `AdapterSlots.load`."""
        assert self._adapters is not None
        self._adapters.load(slot, weights)

    def forward(
        self,
        batch: StepBatch,
        kv: Sequence[LayerKv],
        logits: Tensor | None = None,
        groups: RowGroups | None = None,
        attention: StepAttention | None = None,
    ) -> Tensor:
        """Computes every token of a batch on the device, stores its KV, and returns the logits `[R + Q, vocabulary]`.

        They have the weights' dtype, and are written to `logits` if that is given, of which a rank then writes
        `own_ids` only. Without `groups`, rows with adapters are grouped here, on the host. `attention` takes the place
        of the backend's.
        """
        hidden, delta = self._compute_layers(batch, kv, groups, attention or self._backend)
        if batch.hidden is not None:
            states = residual_norm(hidden, delta, self._final_norm, self._epsilon)
            batch.hidden.copy_(states[batch.hidden_rows])
            return self.logits(states[batch.logit_rows], logits)
        if batch.logit_rows.shape[0] != batch.num_tokens or batch.target_ids.shape[0]:
            hidden, delta = hidden[batch.logit_rows], dense(delta)[batch.logit_rows]
        return self.logits(residual_norm(hidden, delta, self._final_norm, self._epsilon), logits)

    def states(self, batch: StepBatch, kv: Sequence[LayerKv], groups: RowGroups | None = None) -> Tensor:
        """Computes every token of a batch like `forward`, and returns its state before the output layer, `[T,
        hidden]`."""
        hidden, delta = self._compute_layers(batch, kv, groups, self._backend)
        return residual_norm(hidden, delta, self._final_norm, self._epsilon)

    def separate_layers(self, inputs: Tensor, batch: StepBatch, kv: Sequence[LayerKv]) -> tuple[Tensor, Tensor]:
        """Computes every layer of `inputs[layer]`, the residual stream `[T, hidden]` before it, instead of what the
        layer before yields. Returns the streams after the layers, `[layers, T, hidden]`, and the last one's logits."""
        outputs = []
        for index, (hidden, layer_kv) in enumerate(zip(inputs.clone(), self._of_layers(kv), strict=True)):
            delta = self._compute_layer(index, hidden, torch.zeros_like(hidden), batch, layer_kv, None, self._backend)
            outputs.append(hidden + dense(delta))
        return torch.stack(outputs), self.logits(residual_norm(hidden, delta, self._final_norm, self._epsilon))

    def logits(self, states: Tensor, logits: Tensor | None = None) -> Tensor:
        """Returns the logits of states. With `logits` a rank writes its own there, and leaves the others."""
        own = None if logits is None else logits[:, self.own_ids]
        if isinstance(self._head, Tensor):
            own = torch.mm(states, self._head.t(), out=own)
        else:
            own = self._head.product(states, own)
        own = self._scaled(own)
        return self._whole(own, self.shape.vocabulary_size) if logits is None else logits

    def gather_logits(self, logits: Tensor) -> None:
        """Fills in the logits that other ranks have computed."""
        if self.ranks is not None:
            logits.copy_(self._whole(logits[:, self.own_ids], self.shape.vocabulary_size))

    def _compute_layers(
        self, batch: StepBatch, kv: Sequence[LayerKv], groups: RowGroups | None, attention: StepAttention
    ) -> tuple[Tensor, Projected]:
        """Returns the residual stream `[T, hidden]` and what is to be added to it."""
        if groups is None and batch.adapter_slots is not None:
            groups = RowGroups.of(batch, self.num_adapter_slots, self.device)
        shape = self.shape
        hidden = self._whole(functional.embedding(batch.token_ids, self._embedding), shape.hidden_size)
        if shape.embedding_scale != 1.0:
            hidden *= shape.embedding_scale
        delta: Projected | None = None
        windows = batch.for_windows
        for index, (layer, layer_kv) in enumerate(zip(self._layers, self._of_layers(kv), strict=True)):
            of_layer = batch if layer.scoring.sliding_window is None else windows
            delta = self._compute_layer(index, hidden, delta, of_layer, layer_kv, groups, attention)
        assert delta is not None
        return hidden, delta

    def _compute_layer(
        self,
        index: int,
        hidden: Tensor,
        delta: Projected | None,
        batch: StepBatch,
        kv: LayerKv | None,
        groups: RowGroups | None,
        attention: StepAttention,
    ) -> Projected:
        """Adds `delta` and what attention yields to the residual stream, in place. Returns what the feed-forward layer
        adds, or without one what attention adds."""
        layer, shape = self._layers[index], self.shape
        # Adapters read activations that are not rounded.
        is_rounded = isinstance(layer.qkv, Fp8Weight) and groups is None
        normed = self._add(hidden, delta, layer.input_norm, is_rounded)
        qkv = self._project(index, Product.QKV, normed, layer.qkv, layer.qkv_bias, groups)
        if layer.mixer is None:
            assert kv is not None
            attended = self._attend(layer, qkv, batch, kv, attention)
            attended = self._whole(attended, shape.num_heads * shape.head_dim, shape.head_dim)
        else:
            assert self._recurrent_states is not None
            attended = layer.mixer.mix(dense(qkv), batch, self._recurrent_states.tensors, self._epsilon)
        product = self._project(index, Product.OUTPUT, attended, layer.output, layer.output_bias, groups)
        delta = self._delta(product, layer.attention_output_norm)
        if layer.down is None and layer.experts is None:
            return delta
        normed = self._add(hidden, delta, layer.post_attention_norm, is_rounded)
        fed: Projected | None = None
        if layer.gate_up is not None and layer.down is not None:
            gate_up = self._project(index, Product.GATE_UP, normed, layer.gate_up, None, groups)
            inner = self._activated(gate_up, is_rounded, layer.inner_size)
            fed = self._project(index, Product.DOWN, inner, layer.down, None, groups)
        if layer.experts is not None:
            assert isinstance(normed, Tensor)
            fed = layer.experts.compute(normed, None if fed is None else dense(fed), self._whole_inner)
        assert fed is not None
        return self._delta(fed, layer.feed_forward_output_norm)

    def _whole_inner(self, part: Tensor) -> Tensor:
        """Returns all columns of what is between the two products of experts."""
        return self._whole(part, self.shape.intermediate_size, PART_INNER_COLUMNS)

    def _project(
        self,
        layer: int,
        name: Product,
        inputs: Tensor | Fp8Rows,
        weight: Weight,
        bias: Tensor | None,
        groups: RowGroups | None,
    ) -> Projected:
        """Computes a product with a bias and the adapters' changes. One in FP8 without them is left to the kernel that
        reads it."""
        if isinstance(weight, Fp8Weight) and bias is None and groups is None:
            return fp8_product(inputs, weight)
        outputs = linear(inputs, weight, bias)
        if groups is not None and self._adapters is not None:
            assert isinstance(inputs, Tensor)
            self._adapters.add(layer, name, inputs, outputs, groups)
        return outputs

    def _whole(self, part: Tensor, num_columns: int, multiple: int = PART_COLUMNS) -> Tensor:
        """Returns rows of `num_columns`, of which each rank has computed a part, as `Shard.columns` divides them."""
        if self.ranks is None:
            return part
        first = self.shard.of(0).columns(num_columns, multiple)
        if num_missing := first.stop - part.shape[1]:
            # The parts of the last ranks may be smaller.
            part = functional.pad(part, (0, num_missing))
        parts = self.ranks.all_gather(part.contiguous())
        return parts.transpose(0, 1).flatten(1)[:, :num_columns].contiguous()

    def _activated(self, gate_up: Projected, is_rounded: bool, size: int) -> Tensor | Fp8Rows:
        """Returns the inputs of a layer's last product, whole rows; with `is_rounded` in FP8, unless ranks exchange
        them."""
        is_squared, has_gelu = self.shape.activation == SQUARED_RELU, self.shape.activation == GELU_TANH
        if is_rounded and self.ranks is None:
            return squared_relu_fp8(gate_up) if is_squared else gated_fp8(gate_up, has_gelu)
        inner = squared_relu(dense(gate_up)) if is_squared else gated(dense(gate_up), has_gelu)
        return self._whole(inner, size, PART_INNER_COLUMNS)

    def _add(self, hidden: Tensor, delta: Projected | None, norm: Tensor | None, is_rounded: bool) -> Tensor | Fp8Rows:
        """Adds to the residual stream in place; returns its norm, with `is_rounded` in FP8, or, without a norm, the
        stream itself."""
        if norm is not None:
            return (residual_norm_fp8 if is_rounded else residual_norm)(hidden, delta, norm, self._epsilon)
        return hidden if delta is None else hidden.add_(dense(delta))

    def _delta(self, product: Projected, norm: Tensor | None) -> Projected:
        """Returns what is added to the residual stream for a sublayer's last product."""
        if self.ranks is not None:
            product = self._whole(dense(product), self.shape.hidden_size)
        if norm is not None:
            product = residual_norm(dense(product), None, norm, self._epsilon)
        return product if self.shape.residual_scale == 1.0 else dense(product).mul_(self.shape.residual_scale)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Scales and caps logits in place."""
        if self.shape.logit_scale != 1.0:
            logits *= self.shape.logit_scale
        if (cap := self.shape.logit_softcap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _attend(
        self, layer: FusedLayer, qkv: Projected, batch: StepBatch, kv: LayerKv, attention: StepAttention
    ) -> Tensor:
        """Computes attention of all heads, `[T, num_heads * head_dim]`."""
        positions, slots = batch.positions, batch.slot_mapping
        norms, gates = layer.head_norms, None
        if layer.num_gates:
            qkv, gates = dense(qkv).tensor_split([-layer.num_gates], 1)
        if norms is not None and norms[0].numel() != self.shape.head_dim:
            # Norms of all heads together; the kernel's are those of one head.
            qkv, first = dense(qkv), 0
            for norm in norms:
                part = qkv[:, first : (first := first + norm.numel())]
                part.copy_(residual_norm(part.contiguous(), None, norm, self._epsilon))
            norms = None
        queries = rope_write(qkv, norms, positions, slots, layer.rotations, kv, self._epsilon)
        attended = attention.attend(queries, kv, batch, layer.scoring, layer.sinks).flatten(1)
        return attended if gates is None else attended.mul_(gates.sigmoid())

    def _of_layers(self, kv: Sequence[LayerKv]) -> list[LayerKv | None]:
        """Returns the KV of each layer, None of recurrent ones."""
        of_attention = iter(kv)
        return [next(of_attention) if layer.mixer is None else None for layer in self._layers]


def _rotations(rope: Rope, context_length: int, device: torch.device) -> Tensor:
    return rotation_table(torch.tensor(rope.inverse_frequencies, device=device), rope.scaling, context_length)


def _fuse(
    shape: DecoderShape,
    number: int,
    layer: LayerWeights,
    scoring: Scoring,
    rotations: Tensor,
    fuse: Callable[[Sequence[Matrix]], Weight],
) -> FusedLayer:
    has_experts = layer.router is not None
    parts, down = (layer.shared_gate_up_parts, layer.shared_down) if has_experts else (layer.gate_up_parts, layer.down)
    norms = None if layer.query_norm is None or layer.key_norm is None else (layer.query_norm, layer.key_norm)
    has_gates = shape.has_output_gate and layer.mixer is None
    if not parts:
        down = None  # there is no feed-forward layer, or no shared expert
    inner_size = 0 if down is None else down.shape[1]  # before `fuse`, which may take the storage of the matrix
    return FusedLayer(
        input_norm=layer.input_norm,
        qkv=fuse(_with_gates_last(shape, layer.qkv_matrices) if has_gates else layer.qkv_matrices),
        qkv_bias=layer.qkv_bias,
        head_norms=norms,
        output=fuse([layer.output]),
        output_bias=layer.output_bias,
        attention_output_norm=layer.attention_output_norm,
        post_attention_norm=layer.post_attention_norm,
        gate_up=fuse(parts) if parts else None,
        down=None if down is None else fuse([down]),
        inner_size=inner_size,
        experts=ExpertLayer.of(shape, layer) if has_experts else None,
        feed_forward_output_norm=layer.feed_forward_output_norm,
        scoring=scoring,
        sinks=None if layer.sinks is None else layer.sinks.float(),
        rotations=rotations,
        mixer=None if layer.mixer is None else GpuMixer.of(layer.mixer, shape.recurrent_layers.index(number)),
        num_gates=shape.num_heads * shape.head_dim if has_gates else 0,
    )


def _with_gates_last(shape: DecoderShape, matrices: Sequence[Matrix]) -> list[Matrix]:
    """Returns the matrices of queries with gates, keys and values as four, those of the gates last."""
    both, keys, values = matrices
    rows = torch.arange(both.shape[0]).view(shape.num_heads, 2, shape.head_dim)
    queries, gates = (taken(both, part.flatten()) for part in rows.unbind(1))
    # The network has none afterwards.
    if isinstance(both, Tensor):
        both.set_(both.new_empty(0).untyped_storage(), 0, (0,), (0,))
    else:
        both.free()
    return [queries, keys, values, gates]


def _dense(matrix: Matrix) -> Tensor:
    """Returns a matrix of a model whose quantized layers were made dense."""
    assert isinstance(matrix, Tensor)
    return matrix


def _fused(parts: Sequence[Matrix]) -> Tensor | CodedWeight:
    """Returns matrices as one, and replaces their own storage by views of it, so that the model is in memory once.
    Those of codes stay so, and cannot be used elsewhere any more."""
    if not all(isinstance(part, Tensor) for part in parts):
        return coded_weight(parts)
    dense = [*map(_dense, parts)]
    if len(dense) == 1:
        return dense[0]
    whole = joined(dense)
    for part, view in zip(dense, whole.split([part.shape[0] for part in dense]), strict=True):
        part.set_(view)
    return whole


def _round(parts: Sequence[Matrix]) -> Fp8Weight:
    """Returns matrices as one in FP8, and frees their own storage. Those of a checkpoint in FP8 keep their numbers.

    Raises:
        ModelError: they cannot be multiplied in FP8.
    """
    for part in parts:
        if reason := fp8_weight.unsupported_reason(part):
            raise ModelError(f"weight_dtype fp8: {reason}")
    rounded = []
    for part in parts:
        if fp8_weight.is_fp8_of_rows(part):
            rounded.append(fp8_weight.of_rows(part))
            continue
        dense = _dense(part)
        rounded.append(fp8_weight.round_rows(dense))
        # Its storage is left alone, which files and other tensors may share.
        dense.set_(dense.new_empty(0).untyped_storage(), 0, (0,), (0,))
    whole = fp8_weight.stacked(rounded)
    for part in parts:
        if not isinstance(part, Tensor):
            part.free()
    return whole
