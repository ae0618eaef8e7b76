"""Forward pass on several CPUs, as the leader sees it: a step is sent to the workers, computed by all ranks, and their
results are joined."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import torch
from torch import Tensor

from inflight.executor.adapters.errors import AdapterError
from inflight.executor.adapters.folder import KnownAdapter
from inflight.executor.adapters.weights import AdapterWeights
from inflight.executor.attention.cpu import CpuAttention
from inflight.executor.attention.gpu_host_tier import Pairs
from inflight.executor.attention.host_tier import HostTier
from inflight.executor.cpu.decoder import ExchangeError
from inflight.executor.engine.runner import NO_TOKEN, DeviceLostError
from inflight.executor.forward.forward import AdapterMemory, Forward, Kv, StateMemory
from inflight.executor.forward.native import NativeForward
from inflight.executor.parallel.leader import WorkerGroup
from inflight.executor.parallel.messages import Kind, Want, pack_step, pack_swaps
from inflight.executor.parallel.results import gather_results
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling_columns import SamplingBatch


class NativeRanks(Forward):
    """`Forward` of all ranks. It computes like a `NativeForward` that has all weights: every logit has the same bits.
    The ranks have joined `group`."""

    def __init__(self, own: NativeForward, group: WorkerGroup) -> None:
        self.own, self.layout, self._group = own, own.layout, group
        backend = own.layout.backend
        assert isinstance(backend, CpuAttention)
        self._exchange = group.open_exchange(own.decoder, backend.library)
        self._exchange.connect(own.decoder)
        shards = [group.shard.of(rank) for rank in range(group.shard.num_ranks)]
        self._vocabulary_size = own.decoder.shape.vocabulary_size
        self._first_ids = torch.tensor([[shard.columns(self._vocabulary_size).start] for shard in shards])

    @property
    def routes_by_itself(self) -> bool:
        return self.own.routes_by_itself

    @property
    def adapters(self) -> AdapterMemory:
        # The leader's part is the largest.
        decoder = self.own.decoder
        return AdapterMemory(decoder.shape, decoder.adapter_slot_bytes, self.reserve_adapters, self.load_adapter)

    def reserve_adapters(self, num_slots: int, max_rank: int) -> None:
        """Makes the adapter slots of every rank, once."""
        sizes = {"num_slots": num_slots, "max_rank": max_rank}
        self._group.send(Kind.RESERVE_ADAPTERS, json.dumps(sizes).encode())
        self.own.decoder.reserve_adapters(num_slots, max_rank)
        self._group.reserved_bytes += num_slots * self.own.decoder.adapter_slot_bytes(max_rank)

    def load_adapter(self, slot: int, adapter: KnownAdapter, weights: AdapterWeights) -> None:
        """Loads an adapter into a slot of every rank, from the rank's own folder. Steps may run meanwhile, as in
        `NativeDecoder.load_adapter`. Raises `AdapterError` if a rank cannot load it, once every rank has tried. The
        slot may then have any content and be loaded again."""
        asked = {"slot": slot, "name": adapter.name, "hash": adapter.hash}
        self._group.send(Kind.LOAD_ADAPTER, json.dumps(asked).encode())
        try:
            self.own.decoder.load_adapter(slot, weights)
        finally:
            reasons = self._group.wait_for_adapter()
        if reasons:
            raise AdapterError("; ".join(reasons))

    @property
    def states(self) -> StateMemory | None:
        # Every rank has a part of each slot and checkpoint, of the same size.
        own = self.own.states
        if own is None:
            return None
        return replace(own, reserve=self._reserve_states, open_host_slots=self._open_host_slots)

    def _reserve_states(self, sizes: StateSizes) -> None:
        self._group.send(Kind.RESERVE_STATES, json.dumps(asdict(sizes)).encode())
        assert self.own.states is not None
        self.own.states.reserve(sizes)

    def _open_host_slots(self, num_host_slots: int) -> HostTier:
        self._group.send(Kind.HOST_SLOTS, json.dumps({"num_host_slots": num_host_slots}).encode())
        assert self.own.states is not None
        return _HostTiers(self._group, self.own.states.open_host_slots(num_host_slots), Kind.SWAP_STATES)

    def allocate_kv(self, num_blocks: int, block_size: int, num_window_blocks: int | None = None) -> Kv:
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_window_blocks": num_window_blocks}
        self._group.send(Kind.ALLOCATE, json.dumps(sizes).encode())
        return self.own.allocate_kv(num_blocks, block_size, num_window_blocks)

    def open_host_tier(self, kv: Kv, num_host_blocks: int) -> HostTier:
        self._group.send(Kind.HOST_TIER, json.dumps({"num_host_blocks": num_host_blocks}).encode())
        return _HostTiers(self._group, self.own.open_host_tier(kv, num_host_blocks), Kind.SWAP)

    def logits(self, batch: StepBatch, kv: Kv) -> Tensor:
        return torch.cat(self._compute(Want.LOGITS, batch, kv), 1)[:, : self._vocabulary_size]

    def greedy(self, batch: StepBatch, kv: Kv, sampling: SamplingBatch) -> Tensor | None:
        if not sampling.is_greedy:
            return None
        values, ids = torch.stack(self._compute(Want.LARGEST, batch, kv)).unbind(1)
        # The first rank of equals, which has the lowest ids.
        best = values.argmax(0, keepdim=True)
        chosen = (ids.long() + self._first_ids).gather(0, best)[0]
        return chosen.masked_fill(values.gather(0, best)[0] == float("-inf"), NO_TOKEN)

    def _compute(self, want: Want, batch: StepBatch, kv: Kv) -> list[Tensor]:
        self._group.send(Kind.STEP, pack_step(batch, want))
        try:
            return gather_results(want, batch, self.own.decoder, kv, self._exchange)
        except ExchangeError as error:
            raise DeviceLostError(self._group.cause(str(error))) from error


class _HostTiers:
    """The host tiers, or host slots, of all ranks; `kind` is the message of a copy."""

    def __init__(self, group: WorkerGroup, own: HostTier, kind: Kind) -> None:
        self._group, self._own, self._kind = group, own, kind

    def swap(self, swaps_out: Pairs, swaps_in: Pairs) -> None:
        if swaps_out or swaps_in:
            self._group.send(self._kind, pack_swaps(swaps_out, swaps_in))
            self._own.swap(swaps_out, swaps_in)
