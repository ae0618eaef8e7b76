"""The resources that the processes of a stack hold: memory, files, threads, keys in Redis, blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from inflight import AsyncClient
from inflight.bench.measures.processes import PROC, resident_bytes
from inflight.bench.targets.target import TargetError
from inflight.errors import InflightError
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.settings import LedgerSettings

BYTES_PER_MIB = 1 << 20
REDIS = "redis"
CALL_TIMEOUT_S = 5.0

Series = dict[tuple[str, str], list[float]]
"""Readings at even intervals, by process and figure."""


class Readings:
    """Reads `pids`, Redis and, through a router, the executors' blocks. `async with`."""

    def __init__(self, pids: Mapping[str, int], redis_url: str, client: AsyncClient) -> None:
        self._pids = pids
        self._redis = connect_node(redis_url, LedgerSettings())
        self._client = client
        self.at_s: list[float] = []
        self.series: Series = defaultdict(list)
        self.num_missed = 0

    async def __aenter__(self) -> Readings:
        return self

    async def __aexit__(self, *ended: object) -> None:
        await self._redis.aclose()

    async def read(self, at_s: float) -> None:
        """One reading of everything. Raises `TargetError` if a process is gone."""
        self.at_s.append(at_s)
        for name, pid in self._pids.items():
            self._read_process(name, pid)
        await self._read_redis()
        await self._read_blocks()

    def _read_process(self, name: str, pid: int) -> None:
        resident = resident_bytes(pid)
        if resident is None:
            raise TargetError(f"{name} cannot be read: it ended, or there is no /proc")
        self.series[name, "resident MiB"].append(resident / BYTES_PER_MIB)
        self.series[name, "open files"].append(num_open_files(pid))
        self.series[name, "threads"].append(num_threads(pid))

    async def _read_redis(self) -> None:
        known = await self._redis.info()
        self.series[REDIS, "keys"].append(await self._redis.dbsize())
        self.series[REDIS, "used MiB"].append(known["used_memory"] / BYTES_PER_MIB)
        self.series[REDIS, "clients"].append(known["connected_clients"])

    async def _read_blocks(self) -> None:
        try:
            capacity = await self._client.capacity(timeout=CALL_TIMEOUT_S)
        except InflightError:
            self.num_missed += 1  # a busy moment; an hour's run does not end for it
            return
        for executor in capacity.executors:
            self.series[executor.executor_id, "used blocks"].append(executor.blocks_used)
            self.series[executor.executor_id, "reserved blocks"].append(executor.blocks_reserved)


def num_open_files(pid: int, proc: Path = PROC) -> int:
    """Open descriptors of a process of this user."""
    return sum(1 for _ in (proc / str(pid) / "fd").iterdir())


def num_threads(pid: int, proc: Path = PROC) -> int:
    return sum(1 for _ in (proc / str(pid) / "task").iterdir())
