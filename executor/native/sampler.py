"""Sampling on a CPU by our C++ code (sampler.h): columns in, token ids out.

It chooses what executor/sampling.py chooses, whose torch code is the oracle: the random words are the same bits, and
the ids differ only where two tokens' scores differ by rounding.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_int64, c_void_p

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from executor.native.build import BuildFailure
from executor.native.library import NativeLibrary, load_native
from executor.native.pool import NativePool
from executor.sampling_batch import SamplingBatch

log = logging.getLogger(__name__)


class NativeSampler:
    """Calls the sampler, on the threads of `pool` if there is one, else on the caller's."""

    def __init__(self, library: NativeLibrary, pool: NativePool | None = None) -> None:
        self._sample_rows = library.calls.inflight_sample_rows
        self._sample_rows.argtypes = (c_void_p, c_void_p)
        self._sample_rows.restype = None
        self._pool = pool

    def sample(self, logits: Tensor, sampling: SamplingBatch) -> Tensor:
        """Returns the token ids `[R]` int64 of `logits[R, vocabulary]` float32, which it leaves as they are."""
        num_rows, vocabulary_size = logits.shape
        assert logits.device.type == "cpu" and logits.dtype is torch.float32
        assert sampling.num_rows == num_rows and vocabulary_size > 0
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        call = _SampleCall(
            logits=logits.data_ptr(),
            temperatures=_address(sampling.temperature, np.float32),
            top_ks=_address(sampling.top_k, np.int32),
            top_ps=_address(sampling.top_p, np.float64),
            seeds=_address(sampling.seed, np.uint64),
            output_indices=_address(sampling.output_index, np.int64),
            banned_ids=_address(sampling.banned_ids, np.int32),
            banned_starts=_address(sampling.banned_starts, np.int32),
            token_ids=token_ids.data_ptr(),
            num_rows=num_rows,
            vocabulary_size=vocabulary_size,
            row_stride=logits.stride(0),
        )
        self._sample_rows(None if self._pool is None else self._pool.address, ctypes.byref(call))
        return token_ids


def choose_sampler(
    device: torch.device, instructions: str = "auto", pool: NativePool | None = None
) -> NativeSampler | None:
    """The faster sampler where it can run on the device's logits; says in the log why if it should but cannot."""
    if device.type != "cpu":
        return None
    library = load_native(instructions)
    if isinstance(library, BuildFailure):
        log.warning("sampling is slow, because %s", library.reason)
        return None
    return NativeSampler(library, pool)


class _SampleCall(ctypes.Structure):
    """`SampleCall` of sampler.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "temperatures", "top_ks", "top_ps", "seeds")),
        *((name, c_void_p) for name in ("output_indices", "banned_ids", "banned_starts", "token_ids")),
        *((name, c_int64) for name in ("num_rows", "vocabulary_size", "row_stride")),
    )


def _address(column: npt.NDArray[np.generic], dtype: type[np.generic]) -> int:
    assert column.dtype == dtype and column.flags.c_contiguous
    return column.ctypes.data
