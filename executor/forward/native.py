"""Forward pass of the decoder families on a CPU, by the C++ code."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.cpu.decoder import NativeDecoder
from inflight.executor.forward.forward import AdapterMemory, Forward, Kv, StateMemory
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling_columns import SamplingBatch


@dataclass(frozen=True, slots=True, eq=False)
class NativeForward(Forward):
    """`Forward` of a packed model, or the part of a rank in `NativeRanks`."""

    decoder: NativeDecoder
    layout: KvLayout

    @property
    def adapters(self) -> AdapterMemory:
        return AdapterMemory.of(self.decoder)

    @property
    def states(self) -> StateMemory | None:
        states = self.decoder.states
        if states is None:
            return None
        return StateMemory.of(states)

    @property
    def routes_by_itself(self) -> bool:
        return self.decoder.shape.num_experts > 0

    def logits(self, batch: StepBatch, kv: Kv) -> Tensor:
        return self.decoder.logits(batch, kv)

    def greedy(self, batch: StepBatch, kv: Kv, sampling: SamplingBatch) -> Tensor | None:
        return self.decoder.greedy(batch, kv, sampling) if sampling.takes_largest else None
