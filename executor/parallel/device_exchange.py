"""The exchange between the ranks of a GPU forward pass: NCCL, or gloo where that computes on a CPU.

Operations of NCCL are put on the stream of the step like kernels, and may be captured in a CUDA graph. The timeout of
a step is long, because ranks compile kernels at their start, and a replay of a graph has none. A rank that is lost is
noticed by its connection to the leader, which then abandons the exchange.
"""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store  # torch.distributed does not export it to type checkers

from inflight.executor.checkpoint.shards import Shard
from inflight.executor.device import is_gpu

log = logging.getLogger(__name__)

TIMEOUT_S = 600.0
# Its first name is deprecated since torch 2.13.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class DeviceExchange:
    """`Ranks` of `GpuDecoder`. It is the only process group of this process."""

    def __init__(self, store: Store, shard: Shard, device: torch.device) -> None:
        self._num_ranks, self._device = shard.num_ranks, device
        self._has_nccl = is_gpu(device)
        dist.init_process_group(
            "nccl" if self._has_nccl else "gloo",
            store=store,
            rank=shard.rank,
            world_size=shard.num_ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
            # Connects at once, not in the first exchange, which may be in a capture.
            device_id=device if self._has_nccl else None,
        )

    def all_gather(self, part: Tensor) -> Tensor:
        parts = torch.empty((self._num_ranks, *part.shape), dtype=part.dtype, device=part.device)
        _all_gather(parts.view(-1), part.view(-1))
        return parts

    def broadcast(self, values: Tensor) -> None:
        dist.broadcast(values, 0)

    def least(self, number: int) -> int:
        """Returns the least number of all ranks."""
        numbers = torch.tensor([number], device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers.item())

    def abandon(self) -> None:
        """Lets kernels that wait for other ranks end, from another thread. What they yield has no meaning."""
        if self._has_nccl:
            threading.Thread(target=_abort, name="abort", daemon=True).start()

    def close(self) -> None:
        """Ends the exchange, without waiting for the other ranks."""
        if self._has_nccl:
            _abort()
        else:
            dist.destroy_process_group()


def _abort() -> None:
    try:
        dist.distributed_c10d._abort_process_group()
    except Exception as error:  # the process ends anyway
        log.warning("the exchange between ranks does not end: %s", error)
