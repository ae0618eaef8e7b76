"""Whether the system is whole, and whether anything of the load is left in it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.chaos.fleet import Fleet
from client.aio import Client
from client.catalogue import Capacity
from client.errors import InflightError
from router.store.connection import connect
from router.store.keys import PoolKeys
from router.store.settings import StoreSettings

LOOK_EVERY_S = 0.1
CALL_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Leak:
    """What is left although nobody asks for anything."""

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
    """Asks every router how it stands. `async with Observer(fleet) as observer`."""

    def __init__(self, fleet: Fleet, pool: str) -> None:
        self._fleet = fleet
        self._pool = pool
        self._open = AsyncExitStack()
        self._clients: list[Client] = []

    async def __aenter__(self) -> Observer:
        for address in self._fleet.addresses:
            self._clients.append(await self._open.enter_async_context(Client(address, retries=False)))
        return self

    async def __aexit__(self, *ended: object) -> None:
        await self._open.aclose()

    async def wait_until_whole(self, timeout_s: float) -> None:
        """Returns when every process serves and every router sees every executor. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            await self._fleet.wait_until_serving(timeout_s)
            for client in self._clients:
                # Another process's state sets no event here.
                while not await self._sees_everybody(client):  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_EVERY_S)

    async def leak(self, timeout_s: float) -> Leak:
        """What is left, once nothing is or after `timeout_s` seconds."""
        leak = await self._look()
        try:
            async with asyncio.timeout(timeout_s):
                while leak:
                    await asyncio.sleep(LOOK_EVERY_S)
                    leak = await self._look()
        except TimeoutError:
            pass
        return leak

    async def capacity(self) -> Capacity:
        """How the first router sees things."""
        return await self._clients[0].capacity(timeout=CALL_TIMEOUT_S)

    async def _sees_everybody(self, client: Client) -> bool:
        num_executors = len(self._fleet.executors)
        try:
            capacity = await client.capacity(timeout=CALL_TIMEOUT_S)
            models = await client.list_models(timeout=CALL_TIMEOUT_S)
        except InflightError:
            return False
        accepting = [executor for executor in capacity.executors if executor.accepting]
        return len(accepting) == num_executors and all(model.num_executors == num_executors for model in models)

    async def _look(self) -> Leak:
        executors = (await self.capacity()).executors
        return Leak(
            sum(executor.blocks_used for executor in executors),
            sum(executor.blocks_reserved for executor in executors),
            await self._num_requests(),
        )

    async def _num_requests(self) -> int:
        redis = connect(self._fleet.redis_process.url(), StoreSettings())
        try:
            return int(await redis.hlen(PoolKeys(self._pool).key("requests")))
        finally:
            await redis.aclose()
