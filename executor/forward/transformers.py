"""Forward pass of any model, by the code of transformers with paged attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
        with torch.inference_mode(), writing_hidden(self.network, batch):
            logits: Tensor = self.network(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                inflight_step=PagedStep(layout.backend, layout.layers, kv, batch),
            ).logits
            return logits[0].float()


def hidden_size_of(network: PreTrainedModel) -> int:
    """Returns the numbers of a hidden state."""
    embedding: Any = network.get_input_embeddings()
    return int(network.config.get_text_config(decoder=True).hidden_size or embedding.weight.shape[1])


@contextmanager
def writing_hidden(network: PreTrainedModel, batch: StepBatch) -> Iterator[None]:
    """Writes the hidden states that a batch needs when the network computes it in the context. They are the input of
    the output layer, or what that is computed from."""
    hidden = batch.hidden
    if hidden is None:
        yield
        return

    def write(module: Any, args: Any, output: Any) -> None:
        hidden.copy_(output.last_hidden_state[0, batch.hidden_rows])

    hook = network.base_model.register_forward_hook(write)
    try:
        yield
    finally:
        hook.remove()
