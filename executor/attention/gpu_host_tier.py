"""The host tier of a GPU. Blocks are gathered into a staging buffer on the device, which is copied to or from locked
host memory.

All copies are on the stream of the steps, and the host waits for none: a step may overwrite what was swapped out for
it, and read what was swapped in. A block is one row in host memory, so that the link carries pieces of a megabyte
instead of a layer's few kilobytes, and consecutive host blocks are copied together. Without a GPU the same copies run
immediately, as in the tests.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inflight.common.settings import SettingError
from inflight.executor.attention.backend import LayerKv
from inflight.executor.device import is_gpu, to_device
from inflight.executor.native.memory import huge_zeros

# Device memory for blocks in transit. Large enough for the link's full speed, small beside a pool.
STAGING_BYTES = 64 << 20
WORD_BYTES = 8

Pairs = Sequence[tuple[int, int]]


def staging_bytes(bytes_per_block: int, num_host_blocks: int) -> int:
    """Returns the device memory that the tier takes."""
    return bytes_per_block * min(num_host_blocks, max(1, STAGING_BYTES // bytes_per_block))


class GpuHostTier:
    def __init__(self, kv: Sequence[LayerKv], num_host_blocks: int) -> None:
        self._layers = [rows for layer in kv for rows in layer.rows()]
        self._device = self._layers[0].device
        self._widths = [rows.shape[1] for rows in self._layers]
        num_words = sum(self._widths)
        self._host = host_memory(num_host_blocks, num_words)
        if is_gpu(self._device):
            lock(self._host)
        num_staged = staging_bytes(WORD_BYTES * num_words, num_host_blocks) // (WORD_BYTES * num_words)
        self._staging = torch.empty((num_staged, num_words), dtype=torch.int64, device=self._device)

    def swap(self, swaps_out: Pairs, swaps_in: Pairs) -> None:
        for part in self._parts([(host_block, block) for block, host_block in swaps_out]):
            self._swap_out(part)
        for part in self._parts(swaps_in):
            self._swap_in(part)

    def _swap_out(self, pairs: Pairs) -> None:
        staged, blocks = self._staging[: len(pairs)], self._blocks_of(pairs)
        for rows, columns in zip(self._layers, staged.split(self._widths, 1), strict=True):
            torch.index_select(rows, 0, blocks, out=columns)
        for host, first, last in runs([host_block for host_block, _ in pairs]):
            self._host[host : host + last - first].copy_(staged[first:last], non_blocking=True)

    def _swap_in(self, pairs: Pairs) -> None:
        staged, blocks = self._staging[: len(pairs)], self._blocks_of(pairs)
        for host, first, last in runs([host_block for host_block, _ in pairs]):
            staged[first:last].copy_(self._host[host : host + last - first], non_blocking=True)
        for rows, columns in zip(self._layers, staged.split(self._widths, 1), strict=True):
            rows.index_copy_(0, blocks, columns)

    def _parts(self, pairs: Pairs) -> Iterator[Pairs]:
        """Yields (host block, device block) sorted by host block, in parts that fit the staging buffer."""
        pairs, most = sorted(pairs), len(self._staging)
        for first in range(0, len(pairs), most):
            yield pairs[first : first + most]

    def _blocks_of(self, pairs: Pairs) -> Tensor:
        """Returns the device blocks, on the device."""
        return to_device(torch.tensor([block for _, block in pairs]), self._device)


def runs(numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yields for each run of consecutive numbers its first number and its index range `[first, last)`."""
    first = 0
    for place in range(1, len(numbers) + 1):
        if place == len(numbers) or numbers[place] != numbers[place - 1] + 1:
            yield numbers[first], first, place
            first = place


def host_memory(num_host_blocks: int, num_words: int) -> Tensor:
    """Allocates a row of words for each host block.

    Raises:
        SettingError: the system does not provide that much memory.
    """
    try:
        return huge_zeros((num_host_blocks, num_words), torch.int64)
    except (OSError, MemoryError, OverflowError) as error:
        raise SettingError(
            f"kv_cache_host_memory_bytes: cannot allocate {num_host_blocks * num_words * WORD_BYTES} bytes of "
            f"host memory ({error}); ask for less"
        ) from error


def lock(memory: Tensor) -> None:
    """Locks memory until the tensor is freed, so that the GPU can copy it directly.

    torch's own pinned memory is rounded up to a power of two, which is too much for a large part of a machine's memory.
    """
    cuda = torch.cuda.cudart()
    failure = int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if failure:
        raise SettingError(
            f"kv_cache_host_memory_bytes: CUDA cannot lock {memory.nbytes} bytes of host memory (error {failure}); "
            "set a lower value"
        )
    weakref.finalize(memory, cuda.cudaHostUnregister, memory.data_ptr())
