"""Sampling on a CPU by our C++ code (sampler.h): columns in, token ids out.

It chooses what executor/sampling.py chooses, whose torch code is the oracle: the random words are the same bits, and
the ids differ only where two tokens' scores differ by rounding. It runs on the caller's thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.native.build import BuildFailure, load_library

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """How R rows of logits are sampled. Row i bans `banned_ids[banned_starts[i] : banned_starts[i + 1]]`.

    Greedy is a temperature of 0; `top_ks` 0 and `top_ps` 1 keep every token.
    """

    temperatures: NDArray[np.float32]  # [R]
    top_ks: NDArray[np.int32]  # [R]
    top_ps: NDArray[np.float64]  # [R]
    seeds: NDArray[np.uint64]  # [R]
    output_indices: NDArray[np.int64]  # [R]
    banned_starts: NDArray[np.int32]  # [R + 1]
    banned_ids: NDArray[np.int32]


class NativeSampler:
    """Calls the sampler. `library` is the loaded library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._sample_rows = library.inflight_sample_rows
        self._sample_rows.argtypes = (c_void_p,)
        self._sample_rows.restype = None

    def sample(self, logits: Tensor, columns: SamplingColumns) -> Tensor:
        """Returns the token ids `[R]` int64 of `logits[R, vocabulary]` float32, which it leaves as they are."""
        num_rows, vocabulary_size = logits.shape
        assert logits.device.type == "cpu" and logits.dtype is torch.float32
        assert columns.temperatures.shape[0] == num_rows and vocabulary_size > 0
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        call = _SampleCall(
            logits=logits.data_ptr(),
            temperatures=columns.temperatures.ctypes.data,
            top_ks=columns.top_ks.ctypes.data,
            top_ps=columns.top_ps.ctypes.data,
            seeds=columns.seeds.ctypes.data,
            output_indices=columns.output_indices.ctypes.data,
            banned_ids=columns.banned_ids.ctypes.data,
            banned_starts=columns.banned_starts.ctypes.data,
            token_ids=token_ids.data_ptr(),
            num_rows=num_rows,
            vocabulary_size=vocabulary_size,
            row_stride=logits.stride(0),
        )
        self._sample_rows(ctypes.byref(call))
        return token_ids


def load_sampler(flags: Sequence[str] = ()) -> ctypes.CDLL | BuildFailure:
    """The library that `NativeSampler` calls."""
    return load_library("sampler", [FOLDER / "sampler.cpp"], [FOLDER / "sampler.h", FOLDER / "noise.h"], flags)


class _SampleCall(ctypes.Structure):
    """`SampleCall` of sampler.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "temperatures", "top_ks", "top_ps", "seeds")),
        *((name, c_void_p) for name in ("output_indices", "banned_ids", "banned_starts", "token_ids")),
        *((name, c_int64) for name in ("num_rows", "vocabulary_size", "row_stride")),
    )
