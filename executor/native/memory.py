"""Zeroed memory in huge pages, where the system has them.

A step reads the KV of every sequence from blocks scattered over the pool. With pages of 4 KB nearly every block costs a
walk through the page tables, which in a virtual machine takes longer than reading the block.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20


def huge_zeros(sizes: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Returns a tensor of zeros that begins `offset` bytes after the start of a huge page. The system allocates each
    page at the first write to it."""
    assert 0 <= offset < HUGE_PAGE_BYTES
    num_bytes = math.prod(sizes) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes + 2 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES + offset
    return whole[start : start + num_bytes].view(dtype).view(sizes)
