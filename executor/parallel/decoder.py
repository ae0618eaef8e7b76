"""The decoder of a leader: a step is sent to the workers, computed by all ranks, and their results are joined."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from executor.attention.backend import LayerKv
from executor.attention.gpu_host_tier import Pairs
from executor.attention.host_tier import HostTier, open_host_tier
from executor.cpu.decoder import DecoderForm, ExchangeError, NativeDecoder
from executor.engine.runner import NO_TOKEN, DeviceLostError
from executor.parallel.exchange import Exchange
from executor.parallel.leader import WorkerGroup
from executor.parallel.messages import Kind, Want, pack_step, pack_swaps
from executor.parallel.results import gather_results
from executor.step.batch import StepBatch


class ParallelDecoder:
    """Computes like a `NativeDecoder` that has all weights: every logit has the same bits."""

    def __init__(self, own: NativeDecoder, group: WorkerGroup, exchange: Exchange) -> None:
        exchange.connect(own)
        self._own, self._group, self._exchange = own, group, exchange
        shards = [group.shard.of(rank) for rank in range(group.shard.num_ranks)]
        self._first_ids = torch.tensor([[shard.columns(own.form.shape.vocabulary_size).start] for shard in shards])

    @property
    def form(self) -> DecoderForm:
        """The form of the whole model."""
        return self._own.form

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Lets the workers allocate their KV."""
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        self._group.send(Kind.ALLOCATE, json.dumps(sizes).encode())

    def open_host_tier(self, kv: tuple[LayerKv, ...], num_host_blocks: int) -> HostTier:
        """Opens a host tier on every rank."""
        self._group.send(Kind.HOST_TIER, json.dumps({"num_host_blocks": num_host_blocks}).encode())
        return _HostTiers(self._group, open_host_tier(kv, num_host_blocks))

    def logits(self, batch: StepBatch, kv: tuple[LayerKv, ...]) -> Tensor:
        """Computes the logits `[R, vocabulary]` float32 of the rows that yield a token."""
        parts = self._compute(Want.LOGITS, batch, kv)
        return torch.cat(parts, 1)[:, : self.form.shape.vocabulary_size]

    def greedy(self, batch: StepBatch, kv: tuple[LayerKv, ...]) -> Tensor:
        """Computes the ids `[R]` int64 of the largest logits, the lowest among equals. A row without one has
        `NO_TOKEN`."""
        values, ids = torch.stack(self._compute(Want.LARGEST, batch, kv)).unbind(1)
        # The first rank of equals, which has the lowest ids.
        best = values.argmax(0, keepdim=True)
        chosen = (ids.long() + self._first_ids).gather(0, best)[0]
        return chosen.masked_fill(values.gather(0, best)[0] == float("-inf"), NO_TOKEN)

    def _compute(self, want: Want, batch: StepBatch, kv: tuple[LayerKv, ...]) -> list[Tensor]:
        self._group.send(Kind.STEP, pack_step(batch, want))
        try:
            return gather_results(want, batch, self._own, kv, self._exchange)
        except ExchangeError as error:
            raise DeviceLostError(self._group.cause(str(error))) from error


class _HostTiers:
    """The host tiers of all ranks."""

    def __init__(self, group: WorkerGroup, own: HostTier) -> None:
        self._group, self._own = group, own

    def swap(self, swaps_out: Pairs, swaps_in: Pairs) -> None:
        if swaps_out or swaps_in:
            self._group.send(Kind.SWAP, pack_swaps(swaps_out, swaps_in))
            self._own.swap(swaps_out, swaps_in)
