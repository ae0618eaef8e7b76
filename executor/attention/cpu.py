"""Paged attention by the C++ kernels (native/attention.cpp), for bfloat16 and float32 on a CPU.

This module passes tensors as pointers and strides. Layout and arithmetic are described in native/attention.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from inflight.executor.attention.backend import KvShape, LayerKv, Scoring
from inflight.executor.device import is_gpu
from inflight.executor.native.library import NativeLibrary
from inflight.executor.native.memory import HUGE_PAGE_BYTES, huge_zeros
from inflight.executor.native.pool import NativePool
from inflight.executor.step.batch import StepBatch

# Tokens per group of the layout; block sizes are multiples of it, head sizes are rounded up to it.
LANES = 16
SUFFIXES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
SCALE_BYTES = 4
PAGE_BYTES = 4096
# Multiples of it, modulo 1, are spread evenly however many there are.
GOLDEN_RATIO = 0.6180339887


class CpuAttention:
    """Calls the kernels on the threads of `pool`."""

    name = "cpu"
    quantized_kv_dtypes: tuple[torch.dtype, ...] = (torch.int8,)

    def __init__(self, library: NativeLibrary, pool: NativePool) -> None:
        calls = library.calls
        self._write = {dtype: _entry(calls, f"inflight_write_kv_{name}") for dtype, name in SUFFIXES.items()}
        self._attend = {dtype: _entry(calls, f"inflight_attend_{name}") for dtype, name in SUFFIXES.items()}
        # One step runs at a time, so the other kernels of a step may share the threads.
        self.library = library
        self.pool = pool
        self.max_head_dim = max_head_dim(library)
        # Keys and values of layers that were allocated.
        self._num_tensors = 0

    def allocate(
        self, shape: KvShape, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LayerKv:
        assert block_size % LANES == 0 and shape.head_dim <= self.max_head_dim and not is_gpu(device)
        dim = -(-shape.head_dim // LANES) * LANES
        # The scales of a group of int8 follow its numbers.
        num_bytes = LANES * SCALE_BYTES if dtype == torch.int8 else 0
        sizes = (num_blocks * (block_size // LANES), shape.num_kv_heads, LANES * dim + num_bytes)
        return LayerKv(shape, self._zeros(sizes, dtype), self._zeros(sizes, dtype), num_blocks)

    def _zeros(self, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns the keys or values of a layer. The system allocates a huge page at the first write to it, which takes
        milliseconds. Blocks are taken in the same order in every tensor, so the tensors begin at different places
        within a page: otherwise all of them would reach their next page in the same step."""
        share = self._num_tensors * GOLDEN_RATIO % 1
        self._num_tensors += 1
        return huge_zeros(sizes, dtype, int(share * HUGE_PAGE_BYTES) // PAGE_BYTES * PAGE_BYTES)

    def write(self, kv: LayerKv, keys: Tensor, values: Tensor, batch: StepBatch) -> None:
        keys, values = _with_contiguous_heads(keys), _with_contiguous_heads(values)
        call = _WriteCall(
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            cached_keys=kv.keys.data_ptr(),
            cached_values=kv.values.data_ptr(),
            slots=batch.slot_mapping.data_ptr(),
            key_token_stride=keys.stride(0),
            key_head_stride=keys.stride(1),
            value_token_stride=values.stride(0),
            value_head_stride=values.stride(1),
            num_tokens=keys.shape[0],
            num_kv_heads=kv.shape.num_kv_heads,
            head_dim=kv.shape.head_dim,
            is_int8=kv.is_int8,
        )
        _call(self._write[keys.dtype], self.pool, call)

    def attend(
        self, queries: Tensor, kv: LayerKv, batch: StepBatch, scoring: Scoring, sinks: Tensor | None = None
    ) -> Tensor:
        queries = _with_contiguous_heads(queries)
        sinks = None if sinks is None else sinks.float().contiguous()
        outputs = torch.empty(queries.shape, dtype=queries.dtype)
        call = _AttendCall(
            queries=queries.data_ptr(),
            outputs=outputs.data_ptr(),
            cached_keys=kv.keys.data_ptr(),
            cached_values=kv.values.data_ptr(),
            query_starts=batch.query_starts.data_ptr(),
            context_lengths=batch.context_lengths.data_ptr(),
            block_tables=batch.block_tables.data_ptr(),
            table_rows=batch.table_rows.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            query_token_stride=queries.stride(0),
            query_head_stride=queries.stride(1),
            table_stride=batch.block_tables.stride(0),
            num_sequences=batch.num_sequences,
            num_heads=queries.shape[1],
            num_kv_heads=kv.shape.num_kv_heads,
            head_dim=kv.shape.head_dim,
            block_size=batch.block_size,
            sliding_window=scoring.sliding_window or 0,
            is_int8=kv.is_int8,
            scale=scoring.scale,
            softcap=scoring.softcap or 0.0,
        )
        _call(self._attend[queries.dtype], self.pool, call)
        return outputs


def max_head_dim(library: NativeLibrary) -> int:
    """Returns the largest head size that the kernels support."""
    return int(library.calls.inflight_max_head_dim())


class _WriteCall(ctypes.Structure):
    """`WriteCall` of attention.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "cached_keys", "cached_values", "slots")),
        *((name, c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, c_int64) for name in ("num_tokens", "num_kv_heads", "head_dim", "is_int8")),
    )


class _AttendCall(ctypes.Structure):
    """`AttendCall` of attention.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "outputs", "cached_keys", "cached_values")),
        *((name, c_void_p) for name in ("query_starts", "context_lengths", "block_tables", "table_rows", "sinks")),
        *((name, c_int64) for name in ("query_token_stride", "query_head_stride", "table_stride")),
        *((name, c_int64) for name in ("num_sequences", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("block_size", "sliding_window", "is_int8")),
        *((name, c_float) for name in ("scale", "softcap")),
    )


def _entry(calls: ctypes.CDLL, name: str) -> ctypes._NamedFuncPointer:
    function = calls[name]
    function.argtypes = (c_void_p, c_void_p)
    function.restype = c_int64
    return function


def _call(function: ctypes._NamedFuncPointer, pool: NativePool, call: ctypes.Structure) -> None:
    if function(pool.address, ctypes.byref(call)):
        raise MemoryError("not enough memory for the attention threads")


def _with_contiguous_heads(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
