"""Forward pass of a model with recurrent layers: the code of transformers with paged attention and slots of state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.attention.transformers_hook import PagedStep
from inflight.executor.forward.forward import Forward, Kv, StateMemory
from inflight.executor.forward.transformers import writing_hidden
from inflight.executor.recurrent.host_slots import HostSlots
from inflight.executor.recurrent.mixer import LayerMemory, Mixer, StateSizes, StateStep
from inflight.executor.step.batch import StepBatch


class HybridStep:
    """A step: attention through the paged KV, recurrent layers with the state in their slots."""

    def __init__(
        self, paged: PagedStep, kv_places: Mapping[int, int], memories: Mapping[int, LayerMemory], states: StateStep
    ) -> None:
        self._paged = paged
        self._kv_places = kv_places
        self._memories = memories
        self._states = states

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
        """See `AttentionStep`. `layer` counts all layers, and the KV has those that are attention."""
        return self._paged.attend(self._kv_places[layer], queries, keys, values, options)

    def mix(self, layer: int, mixer: Mixer, inputs: Tensor) -> Tensor:
        """See `RecurrentStep`."""
        return mixer.mix(inputs, self._memories[layer], self._states)


class HybridForward(Forward):
    """`Forward` of a network whose recurrent layers have been replaced. `mixers` are these by number, and `attention`
    the numbers of the layers of `layout`. `states.reserve` must precede the first step."""

    def __init__(
        self, network: PreTrainedModel, layout: KvLayout, mixers: Mapping[int, Mixer], attention: Sequence[int]
    ) -> None:
        self.layout = layout
        self._network = network
        self._mixers = mixers
        self._kv_places = {number: place for place, number in enumerate(attention)}
        self._memories: dict[int, LayerMemory] = {}

    @property
    def states(self) -> StateMemory:
        return StateMemory(
            slot_bytes=lambda max_drafts: self._num_bytes(StateSizes(1, 0, max_drafts)),
            checkpoint_bytes=self._num_bytes(StateSizes(0, 1, 0)),
            grid_tokens=math.lcm(*(mixer.grid_tokens for mixer in self._mixers.values())),
            reserve=self._reserve,
            open_host_slots=lambda num_slots: HostSlots(
                [slot for memory in self._memories.values() for slot in memory.slots], num_slots
            ),
        )

    def logits(self, batch: StepBatch, kv: Kv) -> Tensor:
        layout = self.layout
        paged = PagedStep(layout.backend, layout.layers, kv, batch)
        with torch.inference_mode(), writing_hidden(self._network, batch):
            step = HybridStep(paged, self._kv_places, self._memories, StateStep(batch))
            logits: Tensor = self._network(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logit_rows,
                inflight_step=step,
            ).logits
            return logits[0].float()

    def _allocate(self, sizes: StateSizes) -> dict[int, LayerMemory]:
        layout = self.layout
        return {layer: mixer.allocate(sizes, layout.dtype, layout.device) for layer, mixer in self._mixers.items()}

    def _reserve(self, sizes: StateSizes) -> None:
        self._memories = self._allocate(sizes)

    def _num_bytes(self, sizes: StateSizes) -> int:
        return sum(memory.num_bytes for memory in self._allocate(sizes).values())
