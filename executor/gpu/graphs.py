"""CUDA graphs of a step of decodes, one for each bucket of rows.

A replay costs the host one call, whereas launching the same kernels one by one would take longer than they run. The
graphs share one memory pool, since no two run at a time. The largest is captured first, so that the others fit into its
memory.
"""

from __future__ import annotations

import gc
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

import torch


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Computes the step for the inputs that are in the captured tensors now."""
        ...


class Capture(Protocol):
    """Captures `compute(bucket)` for every bucket, after `fill(bucket)` has made inputs for a run before it."""

    def __call__(
        self, fill: Callable[[int], None], compute: Callable[[int], None], buckets: Sequence[int]
    ) -> Mapping[int, Graph]: ...


def decode_buckets(max_num_sequences: int) -> tuple[int, ...]:
    """Returns 1, 2, 4, 8, then every 8th to 64, every 16th to 256 and every 32nd beyond. The last is
    `max_num_sequences`."""
    sizes = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, max_num_sequences, 32))
    return (*(size for size in sizes if size < max_num_sequences), max_num_sequences)


def bucket_of(buckets: Sequence[int], num_rows: int) -> int | None:
    """Returns the smallest bucket with at least `num_rows` rows; None if there is none."""
    index = bisect_left(buckets, num_rows)
    return buckets[index] if index < len(buckets) else None


def capture(
    fill: Callable[[int], None], compute: Callable[[int], None], buckets: Sequence[int]
) -> Mapping[int, torch.cuda.CUDAGraph]:
    """Captures `compute(bucket)` for every bucket. The tensors that it reads and writes must keep their addresses.

    It runs once before it is captured, so that kernels are compiled and cuBLAS allocates its workspace.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs: dict[int, torch.cuda.CUDAGraph] = {}
    with frozen_garbage():
        for bucket in sorted(buckets, reverse=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                fill(bucket)
                compute(bucket)
            torch.cuda.synchronize()
            graphs[bucket] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[bucket], pool=pool, stream=stream):
                compute(bucket)
    torch.cuda.synchronize()
    return graphs


@contextmanager
def frozen_garbage() -> Iterator[None]:
    """Keeps the garbage collector from everything that exists before.

    torch collects before each capture, which would traverse the whole model each time. A collection during a capture
    could free device memory of an unrelated object, which CUDA forbids there.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
