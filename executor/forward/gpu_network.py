"""Forward pass of any model on a GPU, by the code of transformers with Triton's attention; importing it needs triton.

Its runner samples on the device and uploads a step in one copy, as that of the decoder families does. It has no graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel

from inflight.executor.attention.backend import LayerKv, StepAttention
from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.attention.transformers_hook import PagedStep
from inflight.executor.engine.runner import StepSizes
from inflight.executor.forward.forward import Kv
from inflight.executor.forward.gpu_memory import free_beside_steps
from inflight.executor.forward.transformers import TransformersForward, writing_hidden
from inflight.executor.gpu.decoder import Ranks
from inflight.executor.gpu.row_groups import RowGroups
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.recurrent.gpu_states import GpuStates
from inflight.executor.step.batch import StepBatch


class NetworkDecoder:
    """`StepDecoder` of a network that calls attention through transformers' interface."""

    num_adapter_slots = 0
    ranks: Ranks | None = None
    recurrent_states: GpuStates | None = None

    def __init__(self, network: PreTrainedModel, layout: KvLayout, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size
        self.device, self.dtype = layout.device, network.dtype
        self.hidden_size = network.get_output_embeddings().in_features
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
        with writing_hidden(self._network, batch):
            computed: Tensor = self._network(
                input_ids=batch.token_ids[None].long(),
                position_ids=batch.positions[None].long(),
                use_cache=False,
                logits_to_keep=batch.logit_rows.long(),
                inflight_step=PagedStep(layout.backend, layout.layers, kv, batch),
            ).logits[0]
        return computed if logits is None else logits.copy_(computed)


@dataclass(frozen=True, slots=True, eq=False)
class GpuNetworkForward(TransformersForward):
    """`Forward` of a network without a native forward pass on a GPU."""

    vocabulary_size: int

    @property
    def has_window_pools(self) -> bool:
        return True

    def free_device_bytes(self, sizes: StepSizes) -> int | None:
        return free_beside_steps(self._decoder, self.layout, _without_graphs(sizes))

    def start_runner(self, kv: Kv, sizes: StepSizes) -> GpuRunner:
        runner = GpuRunner(self._decoder, kv, sizes.limits, sizes.block_size, uses_graphs=False)
        runner.prepare()
        return runner

    @property
    def _decoder(self) -> NetworkDecoder:
        return NetworkDecoder(self.network, self.layout, self.vocabulary_size)


def _without_graphs(sizes: StepSizes) -> StepSizes:
    return replace(sizes, uses_graphs=False, max_graph_tokens=0)
