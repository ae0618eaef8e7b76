"""The decoder of a leader: a step is sent to the workers, computed by all ranks, and their results are joined."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from inflight.executor.adapters.folder import KnownAdapter
from inflight.executor.adapters.peft_files import AdapterError
from inflight.executor.adapters.weights import AdapterWeights
from inflight.executor.attention.backend import LayerKv
from inflight.executor.attention.gpu_host_tier import Pairs
from inflight.executor.attention.host_tier import HostTier, open_host_tier
from inflight.executor.checkpoint.decoder_weights import DecoderShape
from inflight.executor.cpu.decoder import DecoderForm, ExchangeError, NativeDecoder
from inflight.executor.engine.runner import NO_TOKEN, DeviceLostError
from inflight.executor.parallel.exchange import Exchange
from inflight.executor.parallel.leader import WorkerGroup
from inflight.executor.parallel.messages import Kind, Want, pack_step, pack_swaps
from inflight.executor.parallel.results import gather_results
from inflight.executor.step.batch import StepBatch


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

    @property
    def shape(self) -> DecoderShape:
        """The shape of the whole model."""
        return self._own.form.shape

    def adapter_slot_bytes(self, max_rank: int) -> int:
        """Returns the memory that a slot for adapters takes on each rank. The leader's part is the largest."""
        return self._own.adapter_slot_bytes(max_rank)

    def reserve_adapters(self, num_slots: int, max_rank: int) -> None:
        """Makes the adapter slots of every rank, once."""
        sizes = {"num_slots": num_slots, "max_rank": max_rank}
        self._group.send(Kind.RESERVE_ADAPTERS, json.dumps(sizes).encode())
        self._own.reserve_adapters(num_slots, max_rank)
        self._group.reserved_bytes += num_slots * self.adapter_slot_bytes(max_rank)

    def load_adapter(self, slot: int, adapter: KnownAdapter, weights: AdapterWeights) -> None:
        """Loads an adapter into a slot of every rank, from the rank's own folder. Steps may run meanwhile, as in
        `NativeDecoder.load_adapter`. Raises `AdapterError` if a rank cannot load it, once every rank has tried. The
        slot may then have any content and be loaded again."""
        asked = {"slot": slot, "name": adapter.name, "hash": adapter.hash}
        self._group.send(Kind.LOAD_ADAPTER, json.dumps(asked).encode())
        try:
            self._own.load_adapter(slot, weights)
        finally:
            reasons = self._group.wait_for_adapter()
        if reasons:
            raise AdapterError("; ".join(reasons))

    def allocate_kv(self, num_blocks: int, block_size: int, num_window_blocks: int | None) -> None:
        """Lets the workers allocate their KV."""
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_window_blocks": num_window_blocks}
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
