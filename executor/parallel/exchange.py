"""The two ways in which ranks on CPUs exchange activations and results: memory that they share, and torch.distributed.

Both give the same bits, because nothing is computed on the way. Ranks on one machine share memory, which takes a few
microseconds where gloo takes a millisecond.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import socket
from ctypes import c_double, c_int64, c_uint32, c_void_p
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed does not export them to type checkers

from inflight.executor.checkpoint.shards import Shard
from inflight.executor.cpu.decoder import ALL_GATHER, STEP_INCOMPLETE, ExchangeError, NativeDecoder
from inflight.executor.native.library import NativeLibrary

log = logging.getLogger(__name__)


class Connected(Protocol):
    """A way to other ranks, as what opens and ends it sees it."""

    def abandon(self) -> None:
        """Ends a wait for other ranks, from another thread."""
        ...

    def close(self) -> None:
        """Ends the exchange. No thread may be in it."""
        ...


class Exchange(Connected, Protocol):
    """How a rank reaches the others. All ranks call the same functions in the same order."""

    def connect(self, decoder: NativeDecoder) -> None:
        """Lets a decoder exchange activations."""
        ...

    def gather(self, own: Tensor) -> list[Tensor]:
        """Returns every rank's tensor on rank 0, and nothing elsewhere. All have the same shape and type."""
        ...


class _Header(ctypes.Structure):
    """`SharedParts` of exchange.h."""

    _fields_ = (
        *(("num_arrived", c_uint32), ("_0", c_uint32 * 15)),
        *(("round", c_uint32), ("_1", c_uint32 * 15)),
        *(("is_broken", c_uint32), ("_2", c_uint32 * 15)),
        *(("half_bytes", c_int64), ("timeout_s", c_double), ("_3", c_uint32 * 12)),
    )


class SharedMemory:
    """Memory that ranks on one machine share: the halves of exchange.h, and behind them room for each rank's results.

    Only what is written takes memory.
    """

    def __init__(
        self, fd: int, shard: Shard, library: NativeLibrary, half_bytes: int, result_bytes: int, timeout_s: float
    ) -> None:
        self._shard = shard
        self._result_bytes = result_bytes
        self._results_at = ctypes.sizeof(_Header) + 2 * half_bytes
        self._memory = mmap.mmap(fd, self.num_bytes(shard.num_ranks, half_bytes, result_bytes))
        self._header = _Header.from_buffer(self._memory)
        if shard.rank == 0:
            self._header.half_bytes, self._header.timeout_s = half_bytes, timeout_s
        self._meet = library.calls.inflight_shared_parts_meet
        self._meet.argtypes, self._meet.restype = (c_void_p, c_int64), c_int64

    @staticmethod
    def num_bytes(num_ranks: int, half_bytes: int, result_bytes: int) -> int:
        """Returns the size of the memory."""
        return ctypes.sizeof(_Header) + 2 * half_bytes + num_ranks * result_bytes

    def connect(self, decoder: NativeDecoder) -> None:
        decoder.shared_parts = ctypes.addressof(self._header)

    def gather(self, own: Tensor) -> list[Tensor]:
        own = own.contiguous()
        assert own.nbytes <= self._result_bytes
        # Rank 0 has read the previous results, because every step begins with an exchange.
        self._result(self._shard.rank, own).copy_(own)
        if self._meet(ctypes.addressof(self._header), self._shard.num_ranks) == STEP_INCOMPLETE:
            raise ExchangeError("not all ranks have brought their results")
        if self._shard.rank:
            return []
        return [self._result(rank, own) for rank in range(self._shard.num_ranks)]

    def abandon(self) -> None:
        self._header.is_broken = 1

    def close(self) -> None:
        pass  # the memory goes with the process

    def _result(self, rank: int, like: Tensor) -> Tensor:
        if like.numel() == 0:  # no row yields a token; torch has no empty view of a buffer
            return torch.empty_like(like)
        offset = self._results_at + rank * self._result_bytes
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)


class ProcessGroup:
    """Ranks that exchange by gloo, of torch.distributed."""

    def __init__(self, store: Store, shard: Shard, timeout_s: float) -> None:
        self._shard = shard
        dist.init_process_group(
            "gloo",
            store=store,
            rank=shard.rank,
            world_size=shard.num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )

    def connect(self, decoder: NativeDecoder) -> None:
        decoder.all_gather = ALL_GATHER(self._all_gather)

    def gather(self, own: Tensor) -> list[Tensor]:
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(self._shard.num_ranks)] if self._shard.rank == 0 else None
        try:
            dist.gather(own, parts)
        except RuntimeError as error:
            raise ExchangeError(f"not all ranks have brought their results: {error}") from error
        return parts or []

    def abandon(self) -> None:
        pass  # the connections to a rank that is killed end by themselves, and others have the timeout

    def close(self) -> None:
        dist.destroy_process_group()

    def _all_gather(self, address: int, num_bytes: int) -> int:
        """Is called from C++, on any thread, and may not raise."""
        try:
            parts = self._parts(address, num_bytes)
            dist.all_gather(parts, parts[self._shard.rank].clone())
        except BaseException as error:
            log.error("an exchange between ranks has failed: %s", error)
            return 1
        return 0

    def _parts(self, address: int, num_bytes: int) -> list[Tensor]:
        memory: Any = (ctypes.c_uint8 * (self._shard.num_ranks * num_bytes)).from_address(address)
        return list(torch.frombuffer(memory, dtype=torch.uint8).view(self._shard.num_ranks, num_bytes))


def open_store(host: str, port: int | None, num_ranks: int, timeout_s: float) -> tuple[Store, int]:
    """Returns the store through which ranks of a `ProcessGroup` find each other, and its port. Without a port this is
    rank 0, which serves it."""
    timeout = timedelta(seconds=timeout_s)
    if port is not None:
        return TCPStore(host, port, num_ranks, is_master=False, timeout=timeout), port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    own_port: int = listening.getsockname()[1]
    store = TCPStore(
        host,
        own_port,
        num_ranks,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
    return store, own_port


def prefer_loopback() -> None:
    """Lets gloo and NCCL listen on the loopback interface only, unless their environment says otherwise."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
