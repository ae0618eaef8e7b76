"""Forward pass of any model, by the code of transformers with paged attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.attention.transformers_hook import PagedStep
from inflight.executor.forward.forward import Forward, Kv
from inflight.executor.step.batch import StepBatch


@dataclass(frozen=True, slots=True, eq=False)
class TransformersForward(Forward):
    """`Forward` of a network that calls attention through transformers' interface."""

    network: PreTrainedModel
    layout: KvLayout

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
