"""A worker's side of a GPU forward pass: a runner that follows the leader's."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from inflight.executor.attention.backend import LayerKv
from inflight.executor.engine.runner import StepSizes
from inflight.executor.gpu.decoder import GpuDecoder
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.parallel.device_exchange import DeviceExchange
from inflight.executor.parallel.device_messages import unpack_launch, unpack_sizes, unpack_upload
from inflight.executor.parallel.messages import Kind, unpack_step
from inflight.executor.step.batch import StepBatch


class GpuModel(Protocol):
    """The part of a `PagedModel` that a worker uses."""

    @property
    def kv(self) -> tuple[LayerKv, ...]: ...

    def allocate_kv(self, num_blocks: int, block_size: int) -> None: ...

    def logits(self, batch: StepBatch) -> Tensor: ...


class GpuShard:
    """A rank's model, and its runner once the leader has started one. `measure` returns the device memory that is free
    beside steps of some sizes."""

    def __init__(
        self, model: GpuModel, decoder: GpuDecoder, exchange: DeviceExchange, measure: Callable[[StepSizes], int]
    ) -> None:
        decoder.ranks = exchange
        self._model, self._decoder, self._exchange, self._measure = model, decoder, exchange, measure
        self._runner: GpuRunner | None = None

    def execute(self, kind: Kind, content: bytes) -> None:
        """Executes a message of the leader."""
        if kind is Kind.ALLOCATE:
            self._model.allocate_kv(**json.loads(content))
        elif kind is Kind.STEP:
            self._model.logits(unpack_step(content)[1])
        elif kind is Kind.MEASURE:
            self._exchange.least(self._measure(unpack_sizes(content)))
        elif kind is Kind.RUNNER:
            self._runner = self._prepared(unpack_sizes(content))
        elif kind is Kind.UPLOAD:
            assert self._runner is not None
            self._runner.receive(*unpack_upload(content))
        elif kind is Kind.LAUNCH:
            assert self._runner is not None
            self._runner.follow(unpack_launch(content))

    def _prepared(self, sizes: StepSizes) -> GpuRunner:
        runner = GpuRunner(
            self._decoder,
            self._model.kv,
            sizes.limits,
            sizes.block_size,
            uses_graphs=sizes.uses_graphs,
            max_graph_tokens=sizes.max_graph_tokens,
        )
        runner.prepare()
        return runner
