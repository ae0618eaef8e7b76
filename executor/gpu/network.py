"""A network of transformers in the place of `GpuDecoder`: models outside the decoder families have the same inputs, the
same sampling and the same overlap as those, without graphs, ranks and adapters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from inflight.executor.attention.backend import LayerKv, StepAttention
from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.attention.transformers_hook import PagedStep
from inflight.executor.gpu.decoder import Ranks
from inflight.executor.gpu.row_groups import RowGroups
from inflight.executor.step.batch import StepBatch


class NetworkDecoder:
    """A network that calls attention through transformers' interface. It has what a `GpuRunner` without graphs needs of
    a decoder."""

    num_adapter_slots = 0
    ranks: Ranks | None = None

    def __init__(self, network: PreTrainedModel, layout: KvLayout, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self.head = network.get_output_embeddings().weight
        self.group = network.config.num_attention_heads // layout.layers[0].shape.num_kv_heads
        self._network, self._layout = network, layout

    def forward(
        self,
        batch: StepBatch,
        kv: Sequence[LayerKv],
        logits: Tensor | None = None,
        groups: RowGroups | None = None,
        attention: StepAttention | None = None,
    ) -> Tensor:
        """Computes a step like `GpuDecoder.forward`, with the attention of the backend."""
        layout = self._layout
        computed: Tensor = self._network(
            input_ids=batch.token_ids[None].long(),
            position_ids=batch.positions[None].long(),
            use_cache=False,
            logits_to_keep=batch.logit_rows.long(),
            inflight_step=PagedStep(layout.backend, layout.layers, kv, batch),
        ).logits[0]
        return computed if logits is None else logits.copy_(computed)
