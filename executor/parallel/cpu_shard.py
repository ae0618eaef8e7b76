"""A worker's side of the native forward pass on CPUs: its model and its adapters."""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from inflight.common.model_source import ModelError
from inflight.executor.adapters.folder import AdapterFolder
from inflight.executor.adapters.weights import AdapterLimits
from inflight.executor.attention.backend import LayerKv
from inflight.executor.attention.host_tier import HostTier, open_host_tier
from inflight.executor.cpu.decoder import NativeDecoder
from inflight.executor.parallel.exchange import Exchange
from inflight.executor.parallel.messages import Kind, unpack_step, unpack_swaps
from inflight.executor.parallel.results import gather_results
from inflight.executor.recurrent.host_slots import HostSlots
from inflight.executor.recurrent.mixer import StateSizes

log = logging.getLogger(__name__)


class ShardModel(Protocol):
    """The part of a `PagedModel` that a worker uses."""

    @property
    def kv(self) -> tuple[LayerKv, ...]: ...

    def allocate_kv(self, num_blocks: int, block_size: int, num_window_blocks: int | None = None) -> None: ...


class CpuShard:
    """A rank's model. Adapters are read from `adapter_folder`; `reply` sends a message to the leader."""

    def __init__(
        self,
        model: ShardModel,
        decoder: NativeDecoder,
        exchange: Exchange,
        adapter_folder: Path | None,
        reply: Callable[[Kind, bytes], None],
    ) -> None:
        exchange.connect(decoder)
        self._model, self._decoder, self._exchange = model, decoder, exchange
        self._adapter_folder, self._reply = adapter_folder, reply
        self._adapters_to_load: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._host_tier: HostTier | None = None
        self._host_slots: HostTier | None = None

    def execute(self, kind: Kind, content: bytes) -> None:
        """Executes a message of the leader."""
        if kind is Kind.ALLOCATE:
            sizes = json.loads(content)
            self._model.allocate_kv(sizes["num_blocks"], sizes["block_size"], sizes["num_window_blocks"])
        elif kind is Kind.RESERVE_ADAPTERS:
            self._reserve_adapters(**json.loads(content))
        elif kind is Kind.LOAD_ADAPTER:
            self._adapters_to_load.put(content)
        elif kind is Kind.HOST_TIER:
            self._host_tier = open_host_tier(self._model.kv, json.loads(content)["num_host_blocks"])
        elif kind is Kind.SWAP:
            assert self._host_tier is not None
            self._host_tier.swap(*unpack_swaps(content))
        elif kind is Kind.RESERVE_STATES:
            assert self._decoder.states is not None
            self._decoder.states.reserve(StateSizes(**json.loads(content)))
        elif kind is Kind.HOST_SLOTS:
            assert self._decoder.states is not None
            self._host_slots = HostSlots(self._decoder.states.slots(), json.loads(content)["num_host_slots"])
        elif kind is Kind.SWAP_STATES:
            assert self._host_slots is not None
            self._host_slots.swap(*unpack_swaps(content))
        elif kind is Kind.STEP:
            want, batch = unpack_step(content)
            gather_results(want, batch, self._decoder, self._model.kv, self._exchange)

    def _reserve_adapters(self, num_slots: int, max_rank: int) -> None:
        if self._adapter_folder is None:
            raise ModelError("the leader serves adapters, and adapter_folder is not set for this rank")
        self._decoder.reserve_adapters(num_slots, max_rank)
        folder = AdapterFolder(self._adapter_folder, AdapterLimits(self._decoder.shape, max_rank))
        threading.Thread(target=self._load_adapters, args=(folder,), name="adapters", daemon=True).start()

    def _load_adapters(self, folder: AdapterFolder) -> None:
        """Loads the adapters that the leader asks for, beside the steps. Any error is the leader's to judge."""
        while True:
            asked = json.loads(self._adapters_to_load.get())
            reason = ""
            try:
                self._decoder.load_adapter(asked["slot"], folder.read_same(asked["name"], asked["hash"]))
            except Exception as error:
                log.error("adapter %s cannot be loaded: %s", asked["name"], error)
                reason = str(error) or type(error).__name__
            try:
                self._reply(Kind.ADAPTER_LOADED, reason.encode())
            except OSError:
                return  # the receiving thread ends the process
