"""Forward pass of any model on a GPU, by the code of transformers with Triton's attention; importing it needs triton.

Its runner samples on the device and uploads a step in one copy, as that of the decoder families does. It has no graphs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from inflight.executor.engine.runner import StepSizes
from inflight.executor.forward.forward import Kv
from inflight.executor.forward.gpu_memory import free_beside_steps
from inflight.executor.forward.transformers import TransformersForward
from inflight.executor.gpu.network import NetworkDecoder
from inflight.executor.gpu.runner import GpuRunner


@dataclass(frozen=True, slots=True, eq=False)
class GpuNetworkForward(TransformersForward):
    """`Forward` of a network without a native forward pass on a GPU."""

    vocabulary_size: int

    @property
    def has_window_pools(self) -> bool:
        return False

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
