"""Layout of the KV of a model: which backend keeps that of each layer, where, and in which type."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inflight.executor.attention.backend import AttentionBackend, LayerKv
from inflight.executor.attention.quantized import kv_dtype_name
from inflight.executor.attention.transformers_hook import Layer


@dataclass(frozen=True, slots=True, eq=False)
class KvLayout:
    """The layers whose KV a process keeps, with the KV heads of its shard. `dtype` is that of activations and
    `layer_dtypes` are those of the layers' KV."""

    backend: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    layers: tuple[Layer, ...]
    layer_dtypes: tuple[torch.dtype, ...]

    @property
    def dtype_name(self) -> str:
        """Type of the KV, and which layers of a quantized one are excepted."""
        return kv_dtype_name(self.layer_dtypes, self.dtype)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer; None: the whole context."""
        return tuple(layer.scoring.sliding_window for layer in self.layers)

    def allocate(self, num_blocks: int, block_size: int, num_window_blocks: int | None = None) -> tuple[LayerKv, ...]:
        """Allocates blocks 1 to `num_blocks`, and the spare block 0. Layers with a sliding window have
        `num_window_blocks` instead, if that is not None; batches must then have window tables."""
        return self._allocate(
            num_blocks + 1, block_size, (num_blocks if num_window_blocks is None else num_window_blocks) + 1
        )

    def bytes_per_block(self, block_size: int) -> int:
        """Returns the memory of one more block in all layers."""
        return sum(self.bytes_per_group_block(block_size))

    def bytes_per_group_block(self, block_size: int) -> tuple[int, int]:
        """Returns the memory of one more block in the layers that attend to the whole context, and in those with a
        sliding window."""
        sizes = [0, 0]
        for layer, kv in zip(self.layers, self._allocate(1, block_size, 1), strict=True):
            sizes[layer.scoring.sliding_window is not None] += kv.num_bytes
        return sizes[0], sizes[1]

    def _allocate(self, num_blocks: int, block_size: int, num_window_blocks: int) -> tuple[LayerKv, ...]:
        return tuple(
            self.backend.allocate(
                layer.shape,
                num_blocks if layer.scoring.sliding_window is None else num_window_blocks,
                block_size,
                kv_dtype,
                self.device,
            )
            for layer, kv_dtype in zip(self.layers, self.layer_dtypes, strict=True)
        )
