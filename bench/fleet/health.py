"""The health of a system: whether all of it serves, and whether the load left anything behind."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from bench.fleet.fleet import Fleet
from inflight import AsyncClient
from inflight.errors import InflightError
from router.store.connection import connect
from router.store.keys import PoolKeys
from router.store.settings import StoreSettings

LOOK_EVERY_S = 0.1
CALL_TIMEOUT_S = 3.0
# The calls of the check at the end fail the run, so a machine that stands still for some seconds does not end them.
LAST_CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Leak:
    """What is left after all requests have ended."""

    used_blocks: int
    reserved_blocks: int
    num_requests: int

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences hold or the ledger has promised."""
        return self.used_blocks + self.reserved_blocks

    def __bool__(self) -> bool:
        return bool(self.num_blocks or self.num_requests)


class Observer:
    """Asks every router for its state. `async with Observer(fleet) as observer`."""

    def __init__(self, fleet: Fleet, pool: str) -> None:
        self._fleet = fleet
        self._pool = pool
        self._open = AsyncExitStack()
        self._clients: list[AsyncClient] = []

    async def __aenter__(self) -> Observer:
        for address in self._fleet.addresses:
            self._clients.append(await self._open.enter_async_context(AsyncClient(address, retries=False)))
        return self

    async def __aexit__(self, *ended: object) -> None:
        await self._open.aclose()

    async def wait_until_whole(self, timeout_s: float) -> None:
        """Returns when every process serves and every router sees every executor. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            await self._fleet.wait_until_serving(timeout_s)
            for client in self._clients:
                # Another process's state sets no event here.
                while not await self._sees_all_executors(client):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_EVERY_S)

    async def leak(self, timeout_s: float) -> Leak:
        """What is left, once nothing is or after `timeout_s` seconds."""
        return await leak_of(self._clients[0], self._fleet.redis_process.url(), self._pool, timeout_s)

    async def _sees_all_executors(self, client: AsyncClient) -> bool:
        num_executors = len(self._fleet.executors)
        try:
            capacity = await client.capacity(timeout=CALL_TIMEOUT_S)
            models = await client.list_models(timeout=CALL_TIMEOUT_S)
        except InflightError:
            return False
        accepting = [executor for executor in capacity.executors if executor.accepting]
        return len(accepting) == num_executors and all(model.num_executors == num_executors for model in models)


async def leak_of(client: AsyncClient, redis_url: str, pool: str, timeout_s: float) -> Leak:
    """What is left in a pool, once nothing is or after `timeout_s` seconds."""
    redis = connect(redis_url, StoreSettings(call_timeout_ms=round(LAST_CALL_TIMEOUT_S * 1000)))
    try:
        ends_s = time.monotonic() + timeout_s
        # Another process's state sets no event here.
        while (leak := await _look(client, redis, pool)) and time.monotonic() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_EVERY_S)
        return leak
    finally:
        await redis.aclose()


async def _look(client: AsyncClient, redis: Any, pool: str) -> Leak:
    executors = (await client.capacity(timeout=LAST_CALL_TIMEOUT_S)).executors
    return Leak(
        sum(executor.blocks_used for executor in executors),
        sum(executor.blocks_reserved for executor in executors),
        int(await redis.hlen(PoolKeys(pool).key("requests"))),
    )
