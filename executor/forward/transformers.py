"""Forward pass of any model, by the code of transformers with paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inflight.executor.attention.host_tier import HostTier, open_host_tier
from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.attention.transformers_hook import PagedStep
from inflight.executor.device import free_device_bytes
from inflight.executor.engine.runner import StepSizes
from inflight.executor.forward.forward import Kv
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling_columns import SamplingBatch


@dataclass(frozen=True, slots=True, eq=False)
class TransformersForward:
    """`Forward` of a network that calls attention through transformers' interface."""

    network: PreTrainedModel
    layout: KvLayout

    adapters = None
    routes_by_itself = False

    @property
    def backend_name(self) -> str:
        return self.layout.backend.name

    @property
    def has_window_pools(self) -> bool:
        return self.layout.device.type == "cpu"

    def free_device_bytes(self, sizes: StepSizes) -> int | None:
        # Steps use what the fraction for the KV leaves free.
        return free_device_bytes(self.layout.device)

    def allocate_kv(self, num_blocks: int, block_size: int, num_window_blocks: int | None = None) -> Kv:
        return self.layout.allocate(num_blocks, block_size, num_window_blocks)

    def open_host_tier(self, kv: Kv, num_host_blocks: int) -> HostTier:
        return open_host_tier(kv, num_host_blocks)

    def logits(self, batch: StepBatch, kv: Kv) -> Tensor:
        layout = self.layout
        batch = batch.to(layout.device)
        with torch.inference_mode():
            logits: Tensor = self.network(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                inflight_step=PagedStep(layout.backend, layout.layers, kv, batch),
            ).logits
            return logits[0].float()

    def greedy(self, batch: StepBatch, kv: Kv, sampling: SamplingBatch) -> None:
        return None

    def start_runner(self, kv: Kv, sizes: StepSizes) -> None:
        return None
