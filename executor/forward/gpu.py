"""Forward pass of the decoder families on a GPU, by Triton kernels and CUDA graphs; importing it needs triton.

Its runner samples on the device and replays graphs. FlashInfer takes the place of the kernels in some of its steps,
where the trial steps of the runner show that it is right and faster.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from inflight.executor.attention.flashinfer import NAME as FLASHINFER
from inflight.executor.attention.flashinfer import FlashInfer
from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.checkpoint.decoder_weights import SQUARED_RELU
from inflight.executor.engine.runner import StepSizes
from inflight.executor.forward.forward import AdapterMemory, Forward, Kv, StateMemory
from inflight.executor.forward.gpu_memory import free_beside_steps
from inflight.executor.gpu.decoder import GpuDecoder
from inflight.executor.gpu.runner import Followers, GpuRunner
from inflight.executor.step.batch import StepBatch


class GpuForward(Forward):
    """`Forward` of a `GpuDecoder`, or the part of a rank in `GpuRanks`."""

    def __init__(self, decoder: GpuDecoder, layout: KvLayout, flashinfer: FlashInfer | None = None) -> None:
        self.decoder, self.layout = decoder, layout
        # Its buffers are freed if the runner does not use it.
        self._flashinfer = flashinfer
        self._uses_flashinfer = False

    @property
    def backend_name(self) -> str:
        return FLASHINFER if self._uses_flashinfer else self.layout.backend.name

    @property
    def has_window_pools(self) -> bool:
        # FlashInfer's plans read one block table.
        return self._flashinfer is None

    @property
    def adapters(self) -> AdapterMemory | None:
        # Slots have no matrices for the gates of queries, and always those for the gates of feed-forward layers.
        shape = self.decoder.shape
        has_slots = not shape.has_output_gate and shape.activation != SQUARED_RELU
        return AdapterMemory.of(self.decoder) if has_slots else None

    @property
    def routes_by_itself(self) -> bool:
        return self.decoder.shape.num_experts > 0

    @property
    def states(self) -> StateMemory | None:
        states = self.decoder.recurrent_states
        if states is None:
            return None
        return StateMemory.of(states)

    def free_device_bytes(self, sizes: StepSizes) -> int | None:
        return free_beside_steps(self.decoder, self.layout, sizes)

    def logits(self, batch: StepBatch, kv: Kv) -> Tensor:
        with torch.inference_mode():
            return self.decoder.forward(self._on_device(batch), kv).float()

    def start_runner(self, kv: Kv, sizes: StepSizes, followers: Followers | None = None) -> GpuRunner:
        runner = GpuRunner(
            self.decoder,
            kv,
            sizes.limits,
            sizes.block_size,
            uses_graphs=sizes.uses_graphs,
            max_graph_tokens=sizes.max_graph_tokens,
            flashinfer=self._flashinfer,
            followers=followers,
        )
        runner.prepare()
        self._uses_flashinfer = runner.uses_flashinfer
        if not self._uses_flashinfer:
            self._flashinfer = None
        return runner

    def separate_layers(self, inputs: Tensor, batch: StepBatch, kv: Kv) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            return self.decoder.separate_layers(inputs, self._on_device(batch), kv)

    def _on_device(self, batch: StepBatch) -> StepBatch:
        """Returns a step with the rows of its states."""
        if (states := self.decoder.recurrent_states) is not None:
            batch = replace(batch, state_rows=torch.from_numpy(states.follow(batch)))
        return batch.to(self.layout.device)
