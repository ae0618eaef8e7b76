"""Forward pass of the decoder families on a CPU, by the C++ code."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from inflight.executor.attention.host_tier import HostTier, open_host_tier
from inflight.executor.attention.kv_layout import KvLayout
from inflight.executor.cpu.decoder import NativeDecoder
from inflight.executor.engine.runner import StepSizes
from inflight.executor.forward.forward import AdapterMemory, Kv
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling_columns import SamplingBatch


@dataclass(frozen=True, slots=True, eq=False)
class NativeForward:
    """`Forward` of a packed model, or the part of a rank in `NativeRanks`."""

    decoder: NativeDecoder
    layout: KvLayout

    has_window_pools = True

    @property
    def backend_name(self) -> str:
        return self.layout.backend.name

    @property
    def adapters(self) -> AdapterMemory:
        return AdapterMemory.of(self.decoder)

    @property
    def routes_by_itself(self) -> bool:
        return self.decoder.shape.num_experts > 0

    def free_device_bytes(self, sizes: StepSizes) -> None:
        return None

    def allocate_kv(self, num_blocks: int, block_size: int, num_window_blocks: int | None = None) -> Kv:
        return self.layout.allocate(num_blocks, block_size, num_window_blocks)

    def open_host_tier(self, kv: Kv, num_host_blocks: int) -> HostTier:
        return open_host_tier(kv, num_host_blocks)

    def logits(self, batch: StepBatch, kv: Kv) -> Tensor:
        return self.decoder.logits(batch, kv)

    def greedy(self, batch: StepBatch, kv: Kv, sampling: SamplingBatch) -> Tensor | None:
        return self.decoder.greedy(batch, kv, sampling) if sampling.takes_largest else None

    def start_runner(self, kv: Kv, sizes: StepSizes) -> None:
        return None
