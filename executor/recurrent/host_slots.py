"""Slots of recurrent state in host memory, for preempted sequences.

Like the host tier of KV blocks it only copies: the scheduler assigns the slots, and the runner calls in the order of
the steps, before the forward pass of each. A slot of the device is a row of each of some tensors, all of which is
copied, so a state that comes back has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from inflight.executor.attention.gpu_host_tier import WORD_BYTES, Pairs, host_memory, lock
from inflight.executor.device import is_gpu


class HostSlots:
    """`num_slots` slots of host memory for the slots of `tensors`, which are their first dimension."""

    def __init__(self, tensors: Sequence[Tensor], num_slots: int) -> None:
        self._device = [tensor.view(len(tensor), -1) for tensor in tensors if tensor.numel()]
        has_gpu = any(is_gpu(rows.device) for rows in self._device)
        self._host = [_host_rows(rows, num_slots, is_locked=has_gpu) for rows in self._device]

    def swap(self, swaps_out: Pairs, swaps_in: Pairs) -> None:
        """Copies first the device slot of each (device slot, host slot) to the host, then the host slot of each (host
        slot, device slot) to the device. On a GPU the host does not wait for the copies, and the next operation on the
        stream may overwrite what was copied out, and read what was copied in."""
        for device, host in zip(self._device, self._host, strict=True):
            for slot, host_slot in swaps_out:
                host[host_slot].copy_(device[slot], non_blocking=True)
            for host_slot, slot in swaps_in:
                device[slot].copy_(host[host_slot], non_blocking=True)


def _host_rows(rows: Tensor, num_slots: int, *, is_locked: bool) -> Tensor:
    """Returns memory for rows like these. Raises `SettingError`."""
    num_words = -(-rows.shape[1] * rows.itemsize // WORD_BYTES)
    memory = host_memory(num_slots, num_words)
    if is_locked:
        lock(memory)
    return memory.view(rows.dtype)[:, : rows.shape[1]]
