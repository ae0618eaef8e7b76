"""Forward pass on several GPUs, as the leader sees it: its own part, and each step sent to the workers' runners."""

from __future__ import annotations

import json

from torch import Tensor

from inflight.executor.device import free_device_bytes
from inflight.executor.engine.runner import DeviceLostError, StepSizes
from inflight.executor.forward.forward import AdapterMemory, Forward, Kv
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.runner import FollowedStep, GpuRunner
from inflight.executor.gpu.step_layout import Words
from inflight.executor.parallel.device_messages import pack_launch, pack_sizes, pack_upload
from inflight.executor.parallel.leader import WorkerGroup
from inflight.executor.parallel.messages import Kind, Want, pack_step
from inflight.executor.step.batch import StepBatch


class GpuRanks(Forward):
    """`Forward` of all ranks, and the `Followers` of the leader's runner. The ranks have joined `group`."""

    has_window_pools = False

    def __init__(self, own: GpuForward, group: WorkerGroup) -> None:
        self.own, self.layout, self._group = own, own.layout, group
        own.decoder.ranks = self._exchange = group.open_device_exchange(own.layout.device)

    @property
    def backend_name(self) -> str:
        return self.own.backend_name

    @property
    def adapters(self) -> AdapterMemory | None:
        return self.own.adapters

    @property
    def routes_by_itself(self) -> bool:
        return self.own.routes_by_itself

    def free_device_bytes(self, sizes: StepSizes) -> int | None:
        if free_device_bytes(self.layout.device) is None:
            return None
        # All ranks measure at the same time, because steps exchange.
        self._group.send(Kind.MEASURE, pack_sizes(sizes))
        return self._exchange.least(self.own.free_device_bytes(sizes) or 0)

    def allocate_kv(self, num_blocks: int, block_size: int, num_window_blocks: int | None = None) -> Kv:
        content = {"num_blocks": num_blocks, "block_size": block_size}
        self._group.send(Kind.ALLOCATE, json.dumps(content).encode())
        return self.own.allocate_kv(num_blocks, block_size, num_window_blocks)

    def logits(self, batch: StepBatch, kv: Kv) -> Tensor:
        self._group.send(Kind.STEP, pack_step(batch, Want.LOGITS))
        return self.own.logits(batch, kv)

    def start_runner(self, kv: Kv, sizes: StepSizes) -> GpuRunner:
        self.start_runners(sizes)
        return self.own.start_runner(kv, sizes, self)

    def start_runners(self, sizes: StepSizes) -> None:
        """Lets the workers make and prepare their runners, while this rank prepares its own."""
        self._group.send(Kind.RUNNER, pack_sizes(sizes))

    def upload(self, words: Words, first: int, count: int) -> None:
        self._group.send(Kind.UPLOAD, pack_upload(words, first, count))

    def launch(self, step: FollowedStep) -> None:
        self._group.send(Kind.LAUNCH, pack_launch(step))

    def check(self) -> None:
        if self._group.failure:
            raise DeviceLostError(self._group.failure)

    def lost(self, error: Exception) -> DeviceLostError:
        return DeviceLostError(self._group.cause(f"{type(error).__name__}: {error}"))
