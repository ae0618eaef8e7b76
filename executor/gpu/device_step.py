"""A step whose inputs are on the GPU: from the tokens of the step before to those of this one, without the host.

Everything it reads and writes lies at addresses that never change, so `compute` can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from executor.attention.backend import LayerKv
from executor.gpu.decoder import GpuDecoder
from executor.gpu.sampling import draw
from executor.gpu.step_buffers import StepBuffers
from executor.gpu.step_layout import StepLayout


class DeviceStep:
    """Model, KV and buffers. After `compute`, `logits[:R]` and `buffers.sampled_ids[:R]` are the step's."""

    def __init__(
        self, decoder: GpuDecoder, kv: Sequence[LayerKv], buffers: StepBuffers, block_size: int, max_num_logits: int
    ) -> None:
        self.buffers = buffers
        vocabulary_size = decoder.head.shape[0]
        self.logits = torch.empty(
            (max_num_logits, vocabulary_size), dtype=decoder.head.dtype, device=decoder.head.device
        )
        self._decoder = decoder
        self._kv = kv
        self._block_size = block_size

    def compute(self, layout: StepLayout, num_decodes: int) -> None:
        """Takes over carried tokens, computes the model, and draws the next tokens."""
        self.buffers.resolve(layout)
        batch = self.buffers.batch(layout, num_decodes, self._block_size)
        logits = self._decoder.forward(batch, self._kv, self.logits[: layout.num_logits])
        if layout.num_logits:
            draw(logits, self.buffers.draw_rows(layout), self.buffers.sampled_ids[: layout.num_logits])
