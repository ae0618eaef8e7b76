"""CUDA graphs of steps, one for each bucket of sizes.

A replay costs the host one call, whereas launching the same kernels one by one would take longer than they run. The
graph of a step of decodes contains the draw of the next tokens. That of any other step ends before the logits, whose
number varies: its rows may yield no token, one, or one for each draft, and may score a prompt.

The graphs share one memory pool, since no two run at a time. The largest is captured first, so that the others fit into
its memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

# Numbers of sequences in the buckets of steps that are not of decodes alone. A sequence that is missing costs programs
# of attention that end at once.
MIN_SEQUENCES = 16
SEQUENCES_FACTOR = 4


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """The sizes of a captured step. `is_decodes`: each sequence has one token and yields one."""

    num_tokens: int
    num_sequences: int
    is_decodes: bool

    @classmethod
    def of_decodes(cls, num_rows: int) -> Bucket:
        return cls(num_rows, num_rows, True)

    def __str__(self) -> str:
        if self.is_decodes:
            return f"{self.num_sequences} decodes"
        return f"{self.num_tokens} tokens of {self.num_sequences} sequences"


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Computes the step for the inputs that are in the captured tensors now."""
        ...


class Capture(Protocol):
    """Captures `compute(bucket)` for every bucket, after `fill(bucket)` has made inputs for a run before it."""

    def __call__(
        self, fill: Callable[[Bucket], None], compute: Callable[[Bucket], None], buckets: Iterable[Bucket]
    ) -> Mapping[Bucket, Graph]: ...


def decode_buckets(max_num_sequences: int) -> tuple[Bucket, ...]:
    """Returns 1, 2, 4, 8, then every 8th to 64, every 16th to 256 and every 32nd beyond. The last is
    `max_num_sequences`."""
    sizes = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, max_num_sequences, 32))
    return tuple(map(Bucket.of_decodes, _up_to(max_num_sequences, sizes)))


def mixed_buckets(max_num_tokens: int, max_num_sequences: int) -> tuple[Bucket, ...]:
    """Returns buckets of 16, 32, 64 tokens, every 64th to 512, then four to each doubling; the last is
    `max_num_tokens`. Each has several numbers of sequences, at most its tokens or `max_num_sequences`.

    None if `max_num_tokens` is 0.
    """
    if not max_num_tokens:
        return ()
    return tuple(
        Bucket(num_tokens, num_sequences, False)
        for num_tokens in _up_to(max_num_tokens, _token_sizes())
        for num_sequences in _up_to(min(num_tokens, max_num_sequences), _sequence_sizes())
    )


def bucket_of(buckets: Iterable[Bucket], num_tokens: int, num_sequences: int) -> Bucket | None:
    """Returns the smallest bucket that holds so many tokens and sequences; None if there is none. The buckets are in
    ascending order."""
    return next((b for b in buckets if b.num_tokens >= num_tokens and b.num_sequences >= num_sequences), None)


def capture(
    fill: Callable[[Bucket], None], compute: Callable[[Bucket], None], buckets: Iterable[Bucket]
) -> Mapping[Bucket, torch.cuda.CUDAGraph]:
    """Captures `compute(bucket)` for every bucket. The tensors that it reads and writes must keep their addresses.

    It runs once before it is captured, so that kernels are compiled and cuBLAS allocates its workspace.
    """
    # With ranks, a thread of NCCL asks for events of earlier steps meanwhile, which `global` forbids to every thread.
    mode = "thread_local" if torch.distributed.is_initialized() else "global"
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    graphs: dict[Bucket, torch.cuda.CUDAGraph] = {}
    with frozen_garbage():
        for bucket in sorted(buckets, reverse=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                fill(bucket)
                compute(bucket)
            torch.cuda.synchronize()
            graphs[bucket] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[bucket], pool=pool, stream=stream, capture_error_mode=mode):
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


def _up_to(most: int, sizes: Iterable[int]) -> Iterator[int]:
    """Yields the ascending sizes below `most`, and `most`."""
    for size in sizes:
        if size >= most:
            break
        yield size
    yield most


def _token_sizes() -> Iterator[int]:
    yield from (16, 32)
    size = 64
    while True:
        yield size
        size += max(64, 1 << (size.bit_length() - 3))


def _sequence_sizes() -> Iterator[int]:
    size = MIN_SEQUENCES
    while True:
        yield size
        size *= SEQUENCES_FACTOR
