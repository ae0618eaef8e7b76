"""Sampling on a CPU by the C++ code (sampler.h): columns in, token ids out.

It samples like executor/step/sampling.py, whose torch code is the reference. The random words have the same bits. The
ids differ only where two tokens' scores differ by rounding.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from ctypes import c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from inflight.executor.cpu.logits import address, addresses_of
from inflight.executor.device import is_gpu
from inflight.executor.native.build import BuildFailure
from inflight.executor.native.library import NativeLibrary, load_native
from inflight.executor.native.pool import NativePool
from inflight.executor.step.sampling import min_p_logs
from inflight.executor.step.sampling_columns import NUMBERS, SamplingBatch

log = logging.getLogger(__name__)


class NativeSampler:
    """Calls the sampler, on the threads of `pool` if there is one, else on the caller's. Thread buffers are kept
    between calls, and one call runs at a time."""

    def __init__(self, library: NativeLibrary, pool: NativePool | None = None) -> None:
        new, free = library.calls.inflight_sampler_new, library.calls.inflight_sampler_free
        new.argtypes, new.restype = (), c_void_p
        free.argtypes, free.restype = (c_void_p,), None
        self._sample_rows = library.calls.inflight_sample_rows
        self._sample_rows.argtypes = (c_void_p, c_void_p, c_void_p)
        self._sample_rows.restype = c_int64
        self._pool = pool
        self._sampler = new()
        if not self._sampler:
            raise MemoryError("not enough memory for the sampler")
        weakref.finalize(self, free, self._sampler)

    def sample(self, logits: Tensor, sampling: SamplingBatch, *, may_change: bool = False) -> Tensor:
        """Returns the token ids `[R]` int64 of `logits[R, vocabulary]` float32. With `may_change` the logits are
        undefined afterwards; otherwise rows that are restricted or changed are copied first."""
        num_rows, vocabulary_size = logits.shape
        # The C++ code gets only addresses, so types and shapes are checked here.
        if logits.device.type != "cpu" or logits.dtype is not torch.float32 or vocabulary_size == 0:
            raise ValueError(f"logits are {logits.dtype} {tuple(logits.shape)} on {logits.device}, not float32 on cpu")
        if sampling.num_rows != num_rows:
            raise ValueError(f"{num_rows} rows of logits for {sampling.num_rows} rows that sample")
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        min_p = sampling.numbers["min_p"]
        least = min_p_logs(min_p) if min_p.any() else None
        processed = addresses_of(sampling.processed, num_rows)
        call = _SampleCall(
            logits=logits.data_ptr(),
            numbers=address(sampling.numbers, NUMBERS),
            output_indices=address(sampling.output_index, np.int64),
            banned_ids=address(sampling.banned_ids, np.int32),
            banned_starts=address(sampling.banned_starts, np.int32),
            min_p_logs=None if least is None else address(least, np.float32),
            processed=None if processed is None else ctypes.addressof(processed),
            token_ids=token_ids.data_ptr(),
            num_rows=num_rows,
            vocabulary_size=vocabulary_size,
            row_stride=logits.stride(0),
            may_change=may_change,
        )
        pool = None if self._pool is None else self._pool.address
        if self._sample_rows(self._sampler, pool, ctypes.byref(call)):
            raise MemoryError(f"not enough memory to sample {num_rows} rows")
        return token_ids


def choose_sampler(
    device: torch.device, instructions: str = "auto", pool: NativePool | None = None
) -> NativeSampler | None:
    """Returns the C++ sampler if it can run on the device's logits. Logs the reason if it should run but cannot."""
    if is_gpu(device):
        return None
    library = load_native(instructions)
    if isinstance(library, BuildFailure):
        log.warning("sampling is slow, because %s", library.reason)
        return None
    return NativeSampler(library, pool)


class _SampleCall(ctypes.Structure):
    """`SampleCall` of sampler.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "numbers", "output_indices")),
        *((name, c_void_p) for name in ("banned_ids", "banned_starts", "min_p_logs", "processed")),
        ("token_ids", c_void_p),
        *((name, c_int64) for name in ("num_rows", "vocabulary_size", "row_stride", "may_change")),
    )
