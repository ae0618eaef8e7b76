"""Forward pass of the decoder families on a CPU: weights packed for decoder.cpp, and a step as one call into it.

This module passes tensors as pointers. The computation and the layout of the weights are described in decoder.h and
matmul.h.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Iterator
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from inflight.common.machine import return_free_memory
from inflight.executor.adapters.weights import AdapterMatrix, AdapterWeights
from inflight.executor.attention.backend import LayerKv
from inflight.executor.checkpoint.decoder_weights import (
    CLAMPED,
    GELU_TANH,
    SQUARED_RELU,
    DecoderShape,
    DecoderWeights,
    LayerWeights,
)
from inflight.executor.checkpoint.quantized_weight import Coded, FloatWeight, Matrix, dense_matrix
from inflight.executor.checkpoint.shards import WHOLE, Shard
from inflight.executor.cpu.coded_weights import CodedWeight, encode, is_supported
from inflight.executor.cpu.logits import address, addresses_of
from inflight.executor.cpu.states import MixerLayout, NativeStates, mixer_layout
from inflight.executor.cpu.streams import DEFAULT_STREAM, TRIAL_BYTES, TrialShape, WeightStream, choose_stream
from inflight.executor.native.library import NativeLibrary
from inflight.executor.native.memory import huge_zeros
from inflight.executor.native.pool import NativePool
from inflight.executor.recurrent.mixer import MixerWeights
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling_columns import SamplingBatch

LANES = 16
# Columns of a block of matmul.h.
BLOCK_COLUMNS = 32
# `ProductScratch::TILE_NUMBERS` of product.h, which holds a row.
MAX_WIDTH = 64 << 10
# The parts of a step that are timed separately, in the order of decoder.h.
PARTS = ("embed", "norm", "qkv", "attention", "output", "gate_up", "down", "head", "exchange")
# Type of `AllGather` of decoder.h: a function of the address of all ranks' parts and the bytes of one.
ALL_GATHER = ctypes.CFUNCTYPE(c_int64, c_void_p, c_int64)
STEP_INCOMPLETE = 2


class Packed(IntEnum):
    """`Packed` of decoder.cpp."""

    EMBEDDING = 0
    HEAD = 1
    FINAL_NORM = 2
    QKV = 3
    OUTPUT = 4
    GATE_UP = 5
    DOWN = 6
    INPUT_NORM = 7
    POST_ATTENTION_NORM = 8
    QUERY_NORM = 9
    KEY_NORM = 10
    QKV_BIAS = 11
    OUTPUT_BIAS = 12
    ATTENTION_OUTPUT_NORM = 13
    FEED_FORWARD_OUTPUT_NORM = 14
    ROUTER = 15
    EXPERT_GATE_UP = 16
    EXPERT_DOWN = 17
    MIXER = 18
    ROUTER_CORRECTION = 19
    SHARED_GATE = 20
    ROUTER_BIAS = 21
    EXPERT_GATE_UP_BIAS = 22
    EXPERT_DOWN_BIAS = 23
    SINKS = 24


# Parts of which a layer has one for each expert.
EXPERTS = (Packed.EXPERT_GATE_UP, Packed.EXPERT_DOWN)
# Projections from a layer's inputs to attention and mixers, whose rows are never rounded to 8 bits: rounding them
# changed an answer of the default model that it gives with exact rows.
EXACT_ROWS = (Packed.QKV, Packed.MIXER)


class HeadNorms(IntEnum):
    """`HeadNorms` of decoder.h."""

    NONE = 0
    OF_ONE_HEAD = 1
    OF_ALL_HEADS = 2


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """What determines the layout of the weights in memory. With `expands_quantized` no matrix stays quantized; with
    `rounds_rows` those that do multiply rows rounded to 8 bits."""

    shape: DecoderShape
    dtype: torch.dtype
    has_int8_weights: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_input_norms: bool
    has_output_norms: bool
    head_norms: HeadNorms
    has_router_correction: bool = False
    has_shared_gate: bool = False
    has_router_bias: bool = False
    has_expert_biases: bool = False
    expands_quantized: bool = False
    rounds_rows: bool = False


def unsupported_reason(shape: DecoderShape) -> str | None:
    """Returns why the kernels cannot run a model of this shape; None if they can."""
    if shape.head_dim % LANES:
        return f"heads of {shape.head_dim} numbers are not a multiple of {LANES}"
    if shape.head_dim > 512:
        return f"heads of {shape.head_dim} numbers are larger than 512"
    if max(shape.hidden_size, shape.num_heads * shape.head_dim) > MAX_WIDTH:
        return f"rows of more than {MAX_WIDTH} numbers are not supported"
    if shape.routing.num_groups > 1:
        return "its router chooses among groups of experts"
    mixer = shape.mixer
    if mixer is not None and (mixer.key_dim % LANES or mixer.value_dim % LANES):
        return f"heads of {mixer.key_dim} and {mixer.value_dim} numbers are not multiples of {LANES}"
    if mixer is not None and mixer.depth > MAX_WIDTH:
        return f"rows of more than {MAX_WIDTH} numbers are not supported"
    return None


class ExchangeError(Exception):
    """A step is incomplete, because other ranks did not take part."""


class NativeDecoder:
    """A packed model or shard, computed on the threads of `pool`. One step at a time.

    With several ranks `all_gather`, an `ALL_GATHER`, or `shared_parts`, the address of `SharedParts` of exchange.h,
    must be set before the first step.
    """

    def __init__(
        self,
        library: NativeLibrary,
        pool: NativePool,
        form: DecoderForm,
        stream: WeightStream | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.form = form
        self.shard = shard
        self._has_window = [window is not None for window in form.shape.sliding_windows]
        mixer, recurrent = shard.shape(form.shape).mixer, form.shape.recurrent_layers
        # The memory of recurrent layers, as far as this rank has them; None if there are none.
        self.states = None if mixer is None else NativeStates(mixer, recurrent, form.shape.num_layers, form.dtype)
        # The place of each layer's KV; None if it has none.
        places = iter(range(form.shape.num_layers))
        self._kv_places = [None if layer in recurrent else next(places) for layer in range(form.shape.num_layers)]
        self.all_gather: Any = None
        self.shared_parts: int | None = None
        self.stream = stream or stream_for(library, pool, form)
        # Seconds that the steps so far spent in each of PARTS.
        self.part_seconds = np.zeros(len(PARTS))
        # Processor seconds of all threads in each of PARTS, without waiting, once a benchmark has set an array.
        self.processor_seconds: np.ndarray[tuple[int], np.dtype[np.float64]] | None = None
        calls = _declared(library.calls)
        layout, kept = _layout(form, shard)
        decoder = calls.inflight_decoder_new(
            ctypes.byref(layout),
            form.dtype == torch.bfloat16,
            form.has_int8_weights,
            self.stream.is_interleaved,
            self.stream.prefetch_from_rows,
        )
        del kept
        if not decoder:
            raise MemoryError("not enough memory for the decoder")
        self._calls, self._decoder, self._pool = calls, decoder, pool
        weakref.finalize(self, calls.inflight_decoder_free, decoder)

    def pack(self, weights: DecoderWeights, *, frees_quantized: bool = False) -> None:
        """Packs a model, once. Quantized matrices stay so, except with a form that expands them, in products of int8
        and in unusual groups. With `frees_quantized` the memory of each of them is freed when it is packed."""
        for layer, part, first, matrix in _matrices(weights, self.shard):
            if self._keeps_codes(matrix):
                coded, kept = _coded_part(matrix, first, self.form.dtype, self._rounds_rows(part))
                self._calls.inflight_decoder_declare(self._decoder, layer, part, ctypes.byref(coded))
                del kept
        if self._calls.inflight_decoder_allocate(self._decoder):
            raise MemoryError("not enough memory for the packed weights")
        for layer, part, vector in _vectors(weights, self.shard):
            numbers = vector.detach().float().contiguous()
            self._calls.inflight_decoder_pack(self._decoder, layer, part, numbers.data_ptr(), 0, numbers.shape[0])
        for layer, part, matrices in _fused_matrices(weights, self.shard):
            for first, matrix in _with_first_columns(matrices):
                self._pack_matrix(layer, part, first, matrix)
            # The matrix of an expert shares its memory with those of the others.
            for matrix in matrices if frees_quantized and part not in EXPERTS else ():
                if not isinstance(matrix, Tensor):
                    matrix.free()
            if frees_quantized and part is Packed.EXPERT_DOWN and (layer + 1) % self.form.shape.num_experts == 0:
                _free_experts(weights.layers[layer // self.form.shape.num_experts])
            if frees_quantized and part is Packed.DOWN:
                return_free_memory()

    def _rounds_rows(self, part: Packed) -> bool:
        return self.form.rounds_rows and part not in EXACT_ROWS

    def _keeps_codes(self, matrix: Matrix) -> TypeGuard[Coded]:
        if self.form.has_int8_weights or self.form.expands_quantized:
            return False
        return not isinstance(matrix, Tensor) and is_supported(matrix)

    def _pack_matrix(self, layer: int, part: Packed, first: int, matrix: Matrix) -> None:
        if self._keeps_codes(matrix):
            coded, kept = _coded_part(matrix, first, self.form.dtype, self._rounds_rows(part))
            self._calls.inflight_decoder_pack_codes(self._decoder, layer, part, ctypes.byref(coded))
            del kept
            return
        numbers = dense_matrix(matrix, self.form.dtype).contiguous()
        self._calls.inflight_decoder_pack(self._decoder, layer, part, numbers.data_ptr(), first, numbers.shape[0])

    @property
    def num_matrix_bytes(self) -> int:
        """Memory of the weights that a step reads if it uses all experts: everything but the embedding."""
        return int(self._calls.inflight_decoder_matrix_bytes(self._decoder))

    def read_bytes_per_s(self, num_bytes: int, num_tries: int = 5) -> float:
        """Measures how fast the pool's threads read memory, the best of some tries. It bounds the speed of a step of
        few tokens."""
        memory = huge_zeros((num_bytes,), torch.uint8)
        memory.fill_(1)
        seconds = []
        for _ in range(num_tries):
            began = time.perf_counter()
            self._calls.inflight_read_memory(self._pool.address, memory.data_ptr(), num_bytes)
            seconds.append(time.perf_counter() - began)
        return num_bytes / min(seconds)

    @property
    def row_part_bytes(self) -> int:
        """The most bytes of a row of activations that a rank gives the others at once."""
        return int(self._calls.inflight_decoder_row_part_bytes(self._decoder))

    @property
    def shape(self) -> DecoderShape:
        """The shape of the whole model."""
        return self.form.shape

    def adapter_slot_bytes(self, max_rank: int) -> int:
        """Returns the memory of a slot for adapters of ranks up to `max_rank`."""
        return int(self._calls.inflight_decoder_adapter_slot_bytes(self._decoder, max_rank))

    def reserve_adapters(self, num_slots: int, max_rank: int) -> None:
        """Makes the adapter slots, once."""
        if self._calls.inflight_decoder_reserve_adapters(self._decoder, num_slots, max_rank):
            raise MemoryError(f"not enough memory for {num_slots} adapter slots")

    def load_adapter(self, slot: int, weights: AdapterWeights) -> None:
        """Packs an adapter into a slot. Steps may run meanwhile, but none of a sequence whose adapter was in this
        slot."""
        layers = weights.part_of(self.shard, self.form.shape).layers
        matrices = [_adapter_matrix(matrix, self.form.dtype) for layer in layers for matrix in layer]
        entries = (_AdapterMatrix * len(matrices))(*(entry for entry, _ in matrices))
        if self._calls.inflight_decoder_load_adapter(self._decoder, slot, ctypes.addressof(entries)):
            raise ValueError(f"an adapter of rank {weights.rank} does not fit a slot")

    def logits(self, batch: StepBatch, kv: tuple[LayerKv, ...]) -> Tensor:
        """Computes the logits `[R, vocabulary]` float32 of the rows that yield a token; those of the shard's tokens."""
        logits = torch.empty((batch.logit_rows.shape[0], self._num_tokens))
        self._run(batch, kv, logits=logits.data_ptr())
        return logits

    def largest(self, batch: StepBatch, kv: tuple[LayerKv, ...]) -> tuple[Tensor, Tensor]:
        """Computes the largest of the shard's logits `[R]` and their ids, which begin at 0. They are not changed
        before."""
        num_rows = batch.logit_rows.shape[0]
        logits, ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
        self._run(batch, kv, greedy_ids=ids.data_ptr(), greedy_logits=logits.data_ptr())
        return logits, ids

    def greedy(self, batch: StepBatch, kv: tuple[LayerKv, ...], sampling: SamplingBatch | None = None) -> Tensor:
        """Computes the ids `[R]` int64 of the largest logits, the lowest among equals, after the changes of `sampling`,
        none of which is a mask. A row without one has `NO_TOKEN` or `ALL_EXCLUDED`. The logits are never stored."""
        num_rows = batch.logit_rows.shape[0]
        ids = torch.empty(num_rows, dtype=torch.int64)
        if sampling is None or not sampling.excludes:
            self._run(batch, kv, greedy_ids=ids.data_ptr())
            return ids
        if sampling.num_rows != num_rows:
            raise ValueError(f"{num_rows} rows of logits for {sampling.num_rows} rows that sample")
        processed, bans = addresses_of(sampling.processed, num_rows), len(sampling.banned_ids) > 0
        self._run(
            batch,
            kv,
            greedy_ids=ids.data_ptr(),
            processed=None if processed is None else ctypes.addressof(processed),
            banned_ids=address(sampling.banned_ids, np.int32) if bans else None,
            banned_starts=address(sampling.banned_starts, np.int32) if bans else None,
        )
        return ids

    def _of_layers(self, addresses: tuple[int, int]) -> list[int]:
        """Returns the address for each layer: the first without a window, the second with one."""
        if addresses[0] == addresses[1]:
            return [addresses[0]] * len(self._has_window)
        return [addresses[has_window] for has_window in self._has_window]

    @property
    def _num_tokens(self) -> int:
        """Tokens of the vocabulary whose logits this shard computes."""
        columns = self.shard.columns(self.form.shape.vocabulary_size)
        return int(columns.stop - columns.start)

    def _run(self, batch: StepBatch, kv: tuple[LayerKv, ...], **results: int | None) -> None:
        assert self.shard.num_ranks == 1 or self.all_gather is not None or self.shared_parts is not None
        count = self.form.shape.num_layers
        layers = [None if place is None else kv[place] for place in self._kv_places]
        states = None if self.states is None else self.states.of_step(batch)
        windows = batch.for_windows
        logit_rows = batch.logit_rows if batch.hidden is None else torch.cat([batch.logit_rows, batch.hidden_rows])
        slots = batch.slot_mapping.data_ptr(), windows.slot_mapping.data_ptr()
        tables = batch.block_tables.data_ptr(), windows.block_tables.data_ptr()
        step = _Step(
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=(c_void_p * count)(*self._of_layers(slots)),
            query_starts=batch.query_starts.data_ptr(),
            context_lengths=batch.context_lengths.data_ptr(),
            block_tables=(c_void_p * count)(*self._of_layers(tables)),
            table_rows=batch.table_rows.data_ptr(),
            logit_rows=logit_rows.data_ptr(),
            hidden=None if batch.hidden is None else batch.hidden.data_ptr(),
            keys=(c_void_p * count)(*(None if layer is None else layer.keys.data_ptr() for layer in layers)),
            values=(c_void_p * count)(*(None if layer is None else layer.values.data_ptr() for layer in layers)),
            is_int8=(c_int64 * count)(*(layer is not None and layer.is_int8 for layer in layers)),
            adapter_slots=None if batch.adapter_slots is None else batch.adapter_slots.data_ptr(),
            part_seconds=self.part_seconds.ctypes.data,
            processor_seconds=None if self.processor_seconds is None else self.processor_seconds.ctypes.data,
            all_gather=None if self.all_gather is None else ctypes.cast(self.all_gather, c_void_p),
            shared_parts=self.shared_parts,
            states=None if states is None else ctypes.addressof(states),
            num_tokens=batch.num_tokens,
            num_sequences=batch.num_sequences,
            num_logits=batch.logit_rows.shape[0],
            table_stride=batch.block_tables.stride(0),
            block_size=batch.block_size,
            num_hidden=0 if batch.hidden is None else batch.hidden_rows.shape[0],
            **results,
        )
        result = self._calls.inflight_decoder_step(self._decoder, self._pool.address, ctypes.byref(step))
        if result == STEP_INCOMPLETE:
            raise ExchangeError(f"a step of {batch.num_tokens} tokens is incomplete")
        if result:
            raise RuntimeError(f"not enough memory for a step of {batch.num_tokens} tokens")


def form_of(weights: DecoderWeights, dtype: torch.dtype, has_int8_weights: bool) -> DecoderForm:
    """Returns the form in which these weights are packed."""
    layers = weights.layers
    # Recurrent layers have no norms of heads, and biases of their own. A bias that a layer has not is 0.
    query_norm = next((layer.query_norm for layer in layers if layer.mixer is None), None)
    return DecoderForm(
        weights.shape,
        dtype,
        has_int8_weights,
        has_qkv_bias=any(layer.has_qkv_bias for layer in layers),
        has_output_bias=any(layer.output_bias is not None for layer in layers),
        has_input_norms=layers[0].input_norm is not None,
        has_output_norms=layers[0].attention_output_norm is not None,
        head_norms=_head_norms(query_norm, weights.shape),
        has_router_correction=any(layer.router_correction is not None for layer in layers),
        has_shared_gate=any(layer.shared_gate is not None for layer in layers),
        has_router_bias=any(layer.router_bias is not None for layer in layers),
        has_expert_biases=any(layer.gate_up_bias is not None for layer in layers),
    )


def _head_norms(query_norm: Tensor | None, shape: DecoderShape) -> HeadNorms:
    if query_norm is None:
        return HeadNorms.NONE
    return HeadNorms.OF_ONE_HEAD if query_norm.numel() == shape.head_dim else HeadNorms.OF_ALL_HEADS


def stream_for(library: NativeLibrary, pool: NativePool, form: DecoderForm) -> WeightStream:
    """Returns how to read the weights of a form, by its largest matrices."""
    shape = form.shape
    trial = TrialShape(2 * shape.intermediate_size, shape.hidden_size, 2, form.dtype, form.has_int8_weights)
    if trial.num_bytes * shape.num_layers < TRIAL_BYTES // 2:
        return DEFAULT_STREAM
    return choose_stream(library, pool, trial)


def _layout(form: DecoderForm, shard: Shard) -> tuple[_Shape, tuple[Any, ...]]:
    """Returns the form as C++ takes it, and the arrays that it points to."""
    shape = shard.shape(form.shape)
    windows = np.array([window or 0 for window in shape.sliding_windows], np.int64)
    layer_ropes = np.array(shape.layer_ropes, np.int64)
    without_experts = {*shape.dense_layers, *shape.bare_layers}
    has_experts = np.array([layer not in without_experts for layer in range(shape.num_layers)], np.int64)
    is_recurrent = np.array([layer in shape.recurrent_layers for layer in range(shape.num_layers)], np.int64)
    is_bare = np.array([layer in shape.bare_layers for layer in range(shape.num_layers)], np.int64)
    frequencies = np.array([rope.inverse_frequencies for rope in shape.ropes], np.float32)
    scalings = np.array([rope.scaling for rope in shape.ropes], np.float32)
    layout = _Shape(
        *(getattr(shape, name) for name in _SHAPE_SIZES),
        len(shape.ropes),
        *(int(getattr(form, name)) for name in _FORM_FLAGS),
        shape.activation == GELU_TANH,
        form.head_norms,
        shard.num_ranks,
        shard.rank,
        form.shape.num_kv_heads,
        shape.dense_size,
        shape.shared_size,
        shape.routing.has_sigmoid,
        form.has_router_correction,
        form.has_shared_gate,
        shape.has_output_gate,
        shape.has_sinks,
        form.has_router_bias,
        form.has_expert_biases,
        shape.activation == CLAMPED,
        shape.activation == SQUARED_RELU,
        mixer_layout(form.shape.mixer, shard),
        *(getattr(shape, name) or 0.0 for name in _SHAPE_FACTORS),
        shape.routing.epsilon,
        shape.routing.scale,
        shape.gate_factor,
        shape.gate_limit,
        windows.ctypes.data,
        layer_ropes.ctypes.data,
        has_experts.ctypes.data,
        is_recurrent.ctypes.data,
        is_bare.ctypes.data,
        frequencies.ctypes.data,
        scalings.ctypes.data,
    )
    return layout, (windows, layer_ropes, has_experts, is_recurrent, is_bare, frequencies, scalings)


def _vectors(weights: DecoderWeights, shard: Shard) -> Iterator[tuple[int, Packed, Tensor]]:
    """Yields what is packed in float32: layer, part, numbers."""
    yield 0, Packed.FINAL_NORM, weights.final_norm
    for index, layer in enumerate(weights.layers):
        optional = (
            (Packed.INPUT_NORM, layer.input_norm),
            (Packed.POST_ATTENTION_NORM, layer.post_attention_norm),
            (Packed.QUERY_NORM, layer.query_norm),
            (Packed.KEY_NORM, layer.key_norm),
            (Packed.QKV_BIAS, _qkv_bias(weights, layer, shard)),
            (Packed.OUTPUT_BIAS, layer.output_bias),
            (Packed.ATTENTION_OUTPUT_NORM, layer.attention_output_norm),
            (Packed.FEED_FORWARD_OUTPUT_NORM, layer.feed_forward_output_norm),
            (Packed.ROUTER, layer.router),
            (Packed.ROUTER_CORRECTION, layer.router_correction),
            (Packed.SHARED_GATE, layer.shared_gate),
            (Packed.ROUTER_BIAS, layer.router_bias),
            (Packed.EXPERT_GATE_UP_BIAS, layer.gate_up_bias),
            (Packed.EXPERT_DOWN_BIAS, layer.down_bias),
            (Packed.SINKS, None if layer.sinks is None else shard.sinks(weights.shape, layer.sinks)),
            (Packed.MIXER, None if layer.mixer is None else _mixer_vectors(layer.mixer, shard)),
        )
        for part, tensor in optional:
            if tensor is not None:
                yield index, part, tensor


def _qkv_bias(weights: DecoderWeights, layer: LayerWeights, shard: Shard) -> Tensor | None:
    bias = layer.qkv_bias
    if bias is None:
        return None
    return shard.qkv_bias(weights.shape, bias) if layer.mixer is None else shard.mixer_bias(layer.mixer.shape, bias)


def _mixer_vectors(mixer: MixerWeights, shard: Shard) -> Tensor:
    """Returns `MixerVectors` of recurrent.h."""
    return torch.cat([vector.flatten() for vector in shard.mixer_vectors(mixer)])


def _matrices(weights: DecoderWeights, shard: Shard) -> Iterator[tuple[int, Packed, int, Matrix]]:
    """Yields the matrices: layer (for a matrix of an expert, its index among those of all layers), part, which of the
    part's columns is the matrix's first, and the matrix."""
    for layer, part, matrices in _fused_matrices(weights, shard):
        for first, matrix in _with_first_columns(matrices):
            yield layer, part, first, matrix


def _with_first_columns(matrices: tuple[Matrix, ...]) -> Iterator[tuple[int, Matrix]]:
    """Yields which column of the product of several matrices is the first of each, and the matrix."""
    first = 0
    for matrix in matrices:
        # The last ranks may have no columns.
        if matrix.shape[0]:
            yield first, matrix
        first += matrix.shape[0]


def _fused_matrices(weights: DecoderWeights, shard: Shard) -> Iterator[tuple[int, Packed, tuple[Matrix, ...]]]:
    """Yields layer, part, and the matrices that are one product. The layers are first: if they are freed when they are
    packed, there is memory for a packed embedding and output layer beside a tied one."""
    shape = weights.shape
    for index, layer in enumerate(weights.layers):
        if layer.mixer is None:
            yield index, Packed.QKV, shard.qkv(shape, layer.qkv_matrices)
        else:
            yield index, Packed.QKV, _in_whole_blocks(shard.mixer_inputs(layer.mixer.shape, layer.qkv_matrices))
        yield index, Packed.OUTPUT, (shard.hidden(shape, layer.output),)
        if not layer.gate_up_parts:
            continue
        if layer.router is None:
            yield index, Packed.GATE_UP, shard.gate_up(layer.gate_up_parts)
            yield index, Packed.DOWN, (shard.hidden(shape, layer.down),)
            continue
        for expert in range(shape.num_experts):
            index_of_all = index * shape.num_experts + expert
            gate_up = _of_expert(layer.gate_up_parts[0], expert, shape.num_experts, layer.gate_up_order)
            down = _of_expert(layer.down, expert, shape.num_experts, layer.down_order)
            yield index_of_all, Packed.EXPERT_GATE_UP, shard.gate_up((gate_up,))
            yield index_of_all, Packed.EXPERT_DOWN, (shard.hidden(shape, down),)
        if layer.shared_down is not None:
            yield index, Packed.GATE_UP, shard.gate_up(layer.shared_gate_up_parts)
            yield index, Packed.DOWN, (shard.hidden(shape, layer.shared_down),)
    yield 0, Packed.EMBEDDING, (shard.embedding(weights),)
    yield 0, Packed.HEAD, (shard.head(weights),)


def _in_whole_blocks(matrices: tuple[Matrix, ...]) -> tuple[Matrix, ...]:
    """Returns the projections in front of a mixer, dense if they share a block of columns with another one, which may
    have other codes: those of a number for each head."""
    last = len(matrices) - 1
    return tuple(
        matrix.dequantized()
        if not isinstance(matrix, Tensor)
        and (first % BLOCK_COLUMNS or (matrix.shape[0] % BLOCK_COLUMNS and place < last))
        else matrix
        for place, (first, matrix) in enumerate(_with_first_columns(matrices))
    )


def _of_expert(matrices: Matrix, expert: int, num_experts: int, orders: Tensor | None) -> Matrix:
    """Returns the matrix of one expert, which shares memory with those of all."""
    if isinstance(matrices, Tensor):
        return matrices[expert]
    num_out = matrices.shape[0] // num_experts
    one = matrices.rows(expert * num_out, (expert + 1) * num_out)
    return one if orders is None or isinstance(one, FloatWeight) else replace(one, column_order=orders[expert])


def _free_experts(layer: LayerWeights) -> None:
    for matrices in (*layer.gate_up_parts, layer.down):
        if not isinstance(matrices, Tensor):
            matrices.free()
    return_free_memory()


def _coded_part(
    weight: Coded, first: int, dtype: torch.dtype, rounds_rows: bool = False
) -> tuple[_CodedPart, CodedWeight]:
    """Returns a matrix as C++ takes it, and the tensors that it points to."""
    coded = encode(weight, dtype)
    shifts, order = (None if tensor is None else tensor.data_ptr() for tensor in (coded.shifts, coded.order))
    numbers = (coded.codes.data_ptr(), coded.scales.data_ptr(), shifts, coded.factors.data_ptr(), order)
    sizes = (first, coded.codes.shape[0], coded.depth, coded.bits, coded.group_size, coded.scales.shape[1])
    has_rounded_rows = rounds_rows and coded.can_round_rows
    return _CodedPart(*numbers, *sizes, coded.center, coded.is_float, coded.scales.itemsize, has_rounded_rows), coded


def _adapter_matrix(matrix: AdapterMatrix | None, dtype: torch.dtype) -> tuple[_AdapterMatrix, tuple[Tensor, ...]]:
    """Returns a matrix as C++ takes it, and the tensors that it points to."""
    if matrix is None:
        return _AdapterMatrix(None, None, 0, 0.0, 0.0), ()
    a, b = matrix.a.to(dtype).contiguous(), matrix.b.to(dtype).contiguous()
    return _AdapterMatrix(a.data_ptr(), b.data_ptr(), matrix.rank, matrix.scale, 0.0), (a, b)


_SHAPE_SIZES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocabulary_size",
    "rotary_dim",
    "num_experts",
    "num_experts_per_token",
    "normalizes_experts",
)
_FORM_FLAGS = ("has_qkv_bias", "has_output_bias", "has_input_norms", "has_output_norms")
_SHAPE_FACTORS = (
    "norm_epsilon",
    "attention_scale",
    "softcap",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "logit_softcap",
)


class _Shape(ctypes.Structure):
    """`DecoderShape` of decoder.h."""

    _fields_ = (
        *((name, c_int64) for name in _SHAPE_SIZES),
        *((name, c_int64) for name in ("num_ropes", *_FORM_FLAGS, "has_gelu", "head_norms")),
        *((name, c_int64) for name in ("num_ranks", "rank", "all_kv_heads", "dense_size", "shared_size")),
        *((name, c_int64) for name in ("has_sigmoid_router", "has_router_correction", "has_shared_gate")),
        *((name, c_int64) for name in ("has_output_gate", "has_sinks", "has_router_bias", "has_expert_biases")),
        *((name, c_int64) for name in ("has_clamped_gates", "has_squared_relu")),
        ("mixer", MixerLayout),
        *((name, c_float) for name in (*_SHAPE_FACTORS, "router_epsilon", "router_scale")),
        *((name, c_float) for name in ("gate_factor", "gate_limit")),
        *((name, c_void_p) for name in ("sliding_windows", "layer_ropes", "has_experts", "is_recurrent", "is_bare")),
        *((name, c_void_p) for name in ("inverse_frequencies", "rope_scalings")),
    )


class _CodedPart(ctypes.Structure):
    """`CodedPart` of codes.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("codes", "scales", "shifts", "factors", "order")),
        *((name, c_int64) for name in ("first_column", "num_columns", "depth", "bits", "group_size", "num_groups")),
        *((name, c_int64) for name in ("center", "is_float", "scale_size", "has_rounded_rows")),
    )


class _AdapterMatrix(ctypes.Structure):
    """`AdapterMatrix` of adapters.h."""

    _fields_ = (("a", c_void_p), ("b", c_void_p), ("rank", c_int64), ("scale", c_float), ("padding", c_float))


class _Step(ctypes.Structure):
    """`DecoderStep` of decoder.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "positions")),
        ("slots", ctypes.POINTER(c_void_p)),
        *((name, c_void_p) for name in ("query_starts", "context_lengths")),
        ("block_tables", ctypes.POINTER(c_void_p)),
        *((name, c_void_p) for name in ("table_rows", "logit_rows")),
        *((name, ctypes.POINTER(c_void_p)) for name in ("keys", "values")),
        ("is_int8", ctypes.POINTER(c_int64)),
        *((name, c_void_p) for name in ("logits", "greedy_ids", "greedy_logits", "hidden", "processed")),
        *((name, c_void_p) for name in ("banned_ids", "banned_starts")),
        *((name, c_void_p) for name in ("adapter_slots", "part_seconds", "processor_seconds")),
        *((name, c_void_p) for name in ("all_gather", "shared_parts", "states")),
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "num_logits", "table_stride", "block_size")),
        ("num_hidden", c_int64),
    )


def _declared(library: Any) -> Any:
    library.inflight_decoder_new.restype = c_void_p
    library.inflight_decoder_new.argtypes = (c_void_p, c_int64, c_int64, c_int64, c_int64)
    library.inflight_decoder_free.argtypes = (c_void_p,)
    library.inflight_decoder_declare.argtypes = (c_void_p, c_int64, c_int64, c_void_p)
    library.inflight_decoder_allocate.restype = c_int64
    library.inflight_decoder_allocate.argtypes = (c_void_p,)
    library.inflight_decoder_pack.argtypes = (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64)
    library.inflight_decoder_pack_codes.argtypes = (c_void_p, c_int64, c_int64, c_void_p)
    library.inflight_decoder_matrix_bytes.restype = c_int64
    library.inflight_decoder_matrix_bytes.argtypes = (c_void_p,)
    library.inflight_decoder_row_part_bytes.restype = c_int64
    library.inflight_decoder_row_part_bytes.argtypes = (c_void_p,)
    library.inflight_decoder_adapter_slot_bytes.restype = c_int64
    library.inflight_decoder_adapter_slot_bytes.argtypes = (c_void_p, c_int64)
    library.inflight_decoder_reserve_adapters.restype = c_int64
    library.inflight_decoder_reserve_adapters.argtypes = (c_void_p, c_int64, c_int64)
    library.inflight_decoder_load_adapter.restype = c_int64
    library.inflight_decoder_load_adapter.argtypes = (c_void_p, c_int64, c_void_p)
    library.inflight_read_memory.restype = c_int64
    library.inflight_read_memory.argtypes = (c_void_p, c_void_p, c_int64)
    library.inflight_decoder_step.restype = c_int64
    library.inflight_decoder_step.argtypes = (c_void_p, c_void_p, c_void_p)
    return library
