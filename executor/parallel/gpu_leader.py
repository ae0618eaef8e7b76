"""The leader's side of a GPU forward pass with ranks: it sends each step of its runner to the workers' runners."""

from __future__ import annotations

import json
from collections.abc import Callable

from inflight.executor.engine.runner import DeviceLostError
from inflight.executor.gpu.runner import FollowedStep
from inflight.executor.gpu.step_layout import Words
from inflight.executor.parallel.device_exchange import DeviceExchange
from inflight.executor.parallel.device_messages import RunnerSizes, pack_launch, pack_upload
from inflight.executor.parallel.leader import WorkerGroup
from inflight.executor.parallel.messages import Kind, Want, pack_step
from inflight.executor.step.batch import StepBatch


class GpuRanks:
    """The other ranks. It is the `Followers` of the leader's runner."""

    def __init__(self, group: WorkerGroup, exchange: DeviceExchange) -> None:
        self._group, self._exchange = group, exchange

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Lets them allocate their KV."""
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        self._group.send(Kind.ALLOCATE, json.dumps(sizes).encode())

    def compute(self, batch: StepBatch) -> None:
        """Lets them compute a batch, which this rank then computes with them."""
        self._group.send(Kind.STEP, pack_step(batch, Want.LOGITS))

    def least_free_bytes(self, sizes: RunnerSizes, measure: Callable[[], int]) -> int:
        """Returns the device memory that is free beside steps of these sizes, the least of all ranks. All measure at
        the same time, because steps exchange."""
        self._group.send(Kind.MEASURE, sizes.pack())
        return self._exchange.least(measure())

    def start_runners(self, sizes: RunnerSizes) -> None:
        """Lets them make and prepare their runners, while this rank prepares its own."""
        self._group.send(Kind.RUNNER, sizes.pack())

    def upload(self, words: Words, first: int, count: int) -> None:
        self._group.send(Kind.UPLOAD, pack_upload(words, first, count))

    def launch(self, step: FollowedStep) -> None:
        self._group.send(Kind.LAUNCH, pack_launch(step))

    def check(self) -> None:
        if self._group.failure:
            raise DeviceLostError(self._group.failure)

    def lost(self, error: Exception) -> DeviceLostError:
        return DeviceLostError(self._group.cause(f"{type(error).__name__}: {error}"))
