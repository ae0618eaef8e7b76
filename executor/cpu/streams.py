"""Choice of how the threads read packed weights, by measuring on this machine (trial.cpp).

Which way is the fastest depends on the processor's prefetchers, which its instruction set does not tell. The choice
changes the time of a step alone: the results are the same bit by bit.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from ctypes import c_double, c_int64, c_void_p
from dataclasses import astuple, dataclass
from typing import Any

import torch

from inflight.executor.native.library import NativeLibrary
from inflight.executor.native.pool import NativePool

NEVER = 2**62
# Each number of rows is in the range that one of the thresholds below decides on.
TRIAL_ROWS = (1, 8, 32)
TRIAL_ROUNDS = 5
# Larger than caches that belong to this machine alone.
TRIAL_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class WeightStream:
    """`WeightStream` of product.h."""

    # Whether the two panels of a step are interleaved by unit, so that a vector unit reads weights in order.
    is_interleaved: bool
    # A step of so many rows prefetches the weights that follow.
    prefetch_from_rows: int

    def prefetches(self, num_rows: int) -> bool:
        """Whether a step of so many rows prefetches."""
        return num_rows >= self.prefetch_from_rows

    def __str__(self) -> str:
        panels = "interleaved panels" if self.is_interleaved else "panels apart"
        if self.prefetch_from_rows == NEVER:
            return f"{panels}, no prefetch"
        return f"{panels}, prefetch from {self.prefetch_from_rows} row{'s' if self.prefetch_from_rows > 1 else ''}"


@dataclass(frozen=True, slots=True)
class TrialCodes:
    """Weights of 4 or 8 bits with a scale of 16 bits, and perhaps a shift, for each group of the depth. They multiply
    rows as they are, or rounded to 8 bits, except those of FP8."""

    bits: int
    group_size: int
    has_shifts: bool
    has_rounded_rows: bool = False
    is_float: bool = False

    @property
    def bits_per_weight(self) -> float:
        """Bits that are read for a weight."""
        return self.bits + (32 if self.has_shifts else 16) / self.group_size


@dataclass(frozen=True, slots=True)
class TrialShape:
    """The product that is timed: a matrix `[columns, depth]`, of whose blocks of 32 columns a task has some."""

    columns: int
    depth: int
    blocks_at_once: int
    dtype: torch.dtype
    has_int8_weights: bool
    codes: TrialCodes | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed matrix."""
        if self.codes is not None:
            return int(self.columns * (self.depth * self.codes.bits_per_weight / 8 + 4))
        # int8 has a float32 scale for 64 numbers.
        return (
            self.columns * self.depth * 17 // 16
            if self.has_int8_weights
            else self.columns * self.depth * self.dtype.itemsize
        )


# The fastest on the measured processors without AMX. The first is for models whose weights stay in a cache.
STREAMS = tuple(WeightStream(together, rows) for together in (True, False) for rows in (5, 1, NEVER))
DEFAULT_STREAM = STREAMS[0]


class ProductTrial:
    """Matrices of one shape that are multiplied one after the other, as the layers of a model are."""

    def __init__(
        self, library: NativeLibrary, pool: NativePool, shape: TrialShape, num_bytes: int, most_rows: int
    ) -> None:
        calls = _declared(library.calls)
        self.num_matrices = max(2, -(-num_bytes // shape.num_bytes))
        layout = _Shape(
            self.num_matrices,
            shape.columns,
            shape.depth,
            shape.blocks_at_once,
            most_rows,
            shape.dtype == torch.bfloat16,
            shape.has_int8_weights,
            *((0, 0, 0, 0, 0) if shape.codes is None else astuple(shape.codes)),
        )
        trial = calls.inflight_trial_new(ctypes.byref(layout))
        if not trial:
            raise MemoryError("not enough memory for a trial of products")
        self._calls, self._trial, self._pool = calls, trial, pool
        self._end = weakref.finalize(self, calls.inflight_trial_free, trial)

    def seconds(self, num_rows: int, stream: WeightStream) -> float:
        """Processor seconds per thread of `num_rows` rows times all matrices, in which other processes do not count."""
        return float(
            self._calls.inflight_trial_seconds(
                self._trial, self._pool.address, num_rows, stream.is_interleaved, stream.prefetch_from_rows
            )
        )

    def read_seconds(self) -> float:
        """Processor seconds per thread of reading all matrices."""
        return float(self._calls.inflight_trial_read_seconds(self._trial, self._pool.address))

    def close(self) -> None:
        """Frees the matrices."""
        self._end()


def choose_stream(library: NativeLibrary, pool: NativePool, shape: TrialShape) -> WeightStream:
    """Returns the fastest way to read matrices of this shape. Takes about half a second."""
    trial = ProductTrial(library, pool, shape, TRIAL_BYTES, max(TRIAL_ROWS))
    seconds: dict[tuple[int, bool, bool], float] = {}
    for _ in range(TRIAL_ROUNDS):
        for num_rows in TRIAL_ROWS:
            for stream in (WeightStream(together, rows) for together in (True, False) for rows in (1, NEVER)):
                case = num_rows, stream.is_interleaved, stream.prefetches(num_rows)
                seconds[case] = min(trial.seconds(num_rows, stream), seconds.get(case, float("inf")))
    trial.close()
    return fastest_stream(seconds)


def fastest_stream(seconds: Mapping[tuple[int, bool, bool], float]) -> WeightStream:
    """Returns the stream with the least time, given that of each number of rows, layout, and whether it prefetches.

    Each number of rows weighs the same. Among equals the first of `STREAMS` wins.
    """
    best = {rows: min(time for case, time in seconds.items() if case[0] == rows) for rows in TRIAL_ROWS}

    def cost(stream: WeightStream) -> float:
        return sum(seconds[rows, stream.is_interleaved, stream.prefetches(rows)] / best[rows] for rows in TRIAL_ROWS)

    return min(STREAMS, key=cost)


class _Shape(ctypes.Structure):
    """`TrialShape` of trial.cpp."""

    _fields_ = (
        *((name, c_int64) for name in ("num_matrices", "columns", "depth", "blocks_at_once", "most_rows")),
        *((name, c_int64) for name in ("is_bfloat16", "is_int8", "bits", "group_size", "has_shifts")),
        *((name, c_int64) for name in ("has_rounded_rows", "is_float")),
    )


def _declared(library: Any) -> Any:
    library.inflight_trial_new.restype = c_void_p
    library.inflight_trial_new.argtypes = (c_void_p,)
    library.inflight_trial_free.argtypes = (c_void_p,)
    library.inflight_trial_seconds.restype = c_double
    library.inflight_trial_seconds.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int64)
    library.inflight_trial_read_seconds.restype = c_double
    library.inflight_trial_read_seconds.argtypes = (c_void_p, c_void_p)
    return library
