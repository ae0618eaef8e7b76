"""KV blocks in host memory, for the KV of preempted sequences and of evicted prefixes.

A host block is one row of memory with the content of a block of the pool in every layer, keys and values, whatever the
backend's layout. Host blocks are numbered from 0. The tier only copies: the scheduler assigns the blocks, and the
runner calls in the order of the steps, before the forward pass of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from inflight.executor.attention.backend import LayerKv
from inflight.executor.attention.gpu_host_tier import GpuHostTier, Pairs, host_memory
from inflight.executor.device import is_gpu

Words = npt.NDArray[np.int64]


class HostTier(Protocol):
    """Copies blocks. After `swap` the next operation on the device may overwrite what was swapped out, and read what
    was swapped in."""

    def swap(self, swaps_out: Pairs, swaps_in: Pairs) -> None:
        """Copies first the device block of each (device block, host block) to the host, then the host block of each
        (host block, device block) to the device."""
        ...


def open_host_tier(kv: Sequence[LayerKv], num_host_blocks: int) -> HostTier:
    """Returns the tier for the device that the pool is on."""
    return GpuHostTier(kv, num_host_blocks) if is_gpu(kv[0].keys.device) else CpuHostTier(kv, num_host_blocks)


class CpuHostTier:
    """Host tier of a pool in host memory. It copies immediately, on the caller's thread.

    It copies piece by piece with numpy, without extra memory. For SmolLM2 (60 pieces of 6 kB) that takes 80 to 200 us a
    block. torch's index operations, on two cores, take 50 for many blocks at once and 1000 for one.
    """

    def __init__(self, kv: Sequence[LayerKv], num_host_blocks: int) -> None:
        self._layers: list[Words] = [rows.numpy() for layer in kv for rows in layer.rows()]
        num_words = sum(rows.shape[1] for rows in self._layers)
        host = host_memory(num_host_blocks, num_words).numpy()
        ends = np.cumsum([rows.shape[1] for rows in self._layers])
        # The columns of each layer's keys or values in the rows.
        self._hosts: list[Words] = np.split(host, ends[:-1], axis=1)

    def swap(self, swaps_out: Pairs, swaps_in: Pairs) -> None:
        if swaps_out:
            _copy(self._layers, self._hosts, swaps_out)
        if swaps_in:
            _copy(self._hosts, self._layers, swaps_in)


def _copy(sources: list[Words], targets: list[Words], pairs: Pairs) -> None:
    for source, target in zip(sources, targets, strict=True):
        for source_block, target_block in pairs:
            target[target_block] = source[source_block]
