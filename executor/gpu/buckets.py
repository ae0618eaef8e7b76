"""The sizes of batch for which a step of decodes is captured in a CUDA graph. Pure.

A captured step runs for exactly as many rows as it was captured with, so a batch is padded to the next bucket. The
buckets lie close enough that padding costs little: a decode reads all weights anyway, and a padding row one KV slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain


def decode_buckets(max_num_sequences: int) -> tuple[int, ...]:
    """1, 2, 4, 8, from there every 8th to 64, every 16th to 256 and every 32nd beyond; the last is the most seats."""
    sizes = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, max_num_sequences, 32))
    return (*(size for size in sizes if size < max_num_sequences), max_num_sequences)


def bucket_of(buckets: Sequence[int], num_rows: int) -> int | None:
    """The smallest bucket that holds so many rows; None if there is none."""
    index = bisect_left(buckets, num_rows)
    return buckets[index] if index < len(buckets) else None
