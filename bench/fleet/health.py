"""The health of a system: whether all of it serves, and whether the load left anything behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from inflight import AsyncClient
from inflight.bench.fleet.fleet import Fleet
from inflight.bench.fleet.metrics import metric_sum
from inflight.errors import InflightError
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.functions import ScriptCalls, compose_library, shared_source
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.settings import LedgerSettings

LOOK_EVERY_S = 0.1
CALL_TIMEOUT_S = 3.0
# The calls of the check at the end fail the run, so a machine that stands still for some seconds does not end them.
LAST_CALL_TIMEOUT_S = 60.0
COUNT_PINS = """
script('pins', function()
  local num_pins = 0
  for _, text in ipairs(redis.call('HVALS', EXECUTORS)) do
    for _, count in pairs(adapters.pins_of(unpack_executor(text))) do
      num_pins = num_pins + count
    end
  end
  return num_pins
end, {})
"""
HELD_ADAPTERS = "inflight_adapter_slots_held"


@dataclass(frozen=True, slots=True)
class Leak:
    """What is left after all requests have ended. `num_pins` are placements that pin an adapter in the ledger,
    `num_held_adapters` adapters that sequences of executors hold."""

    used_blocks: int
    reserved_blocks: int
    num_requests: int
    num_pins: int = 0
    num_held_adapters: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that sequences hold or the ledger has promised."""
        return self.used_blocks + self.reserved_blocks

    def __bool__(self) -> bool:
        return bool(self.num_blocks or self.num_requests or self.num_pins or self.num_held_adapters)


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
        metrics = [executor.http_address for executor in self._fleet.executors]
        return await leak_of(self._clients[0], self._fleet.redis_process.url(), self._pool, timeout_s, metrics)

    async def adapter_hashes(self) -> dict[str, str]:
        """The content hashes of all adapters by name."""
        (model,) = await self._clients[0].list_models(timeout=LAST_CALL_TIMEOUT_S)
        return {adapter.name: adapter.hash for adapter in model.adapters}

    async def wait_until_listed(self, hashes: Mapping[str, str], timeout_s: float) -> None:
        """Returns when every router lists these adapters and no others, each on every executor. Raises
        `TimeoutError`."""
        due = {(name, content, len(self._fleet.executors)) for name, content in hashes.items()}
        async with asyncio.timeout(timeout_s):
            for client in self._clients:
                # Another process's state sets no event here.
                while await _listed(client) != due:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_EVERY_S)

    async def _sees_all_executors(self, client: AsyncClient) -> bool:
        num_executors = len(self._fleet.executors)
        try:
            capacity = await client.capacity(timeout=CALL_TIMEOUT_S)
            models = await client.list_models(timeout=CALL_TIMEOUT_S)
        except InflightError:
            return False
        accepting = [executor for executor in capacity.executors if executor.accepting]
        return len(accepting) == num_executors and all(model.num_executors == num_executors for model in models)


async def _listed(client: AsyncClient) -> set[tuple[str, str, int]] | None:
    """Name and hash of the adapters that a router lists, and how many executors serve them; None if it is not there."""
    try:
        models = await client.list_models(timeout=CALL_TIMEOUT_S)
    except InflightError:
        return None
    return {(one.name, one.hash, one.num_executors) for model in models for one in model.adapters}


async def leak_of(
    client: AsyncClient, redis_url: str, pool: str, timeout_s: float, metrics_addresses: Sequence[str] = ()
) -> Leak:
    """What is left in a pool, once nothing is or after `timeout_s` seconds. The adapters that executors hold are looked
    up in their metrics."""
    redis = connect_node(redis_url, LedgerSettings(call_timeout_ms=round(LAST_CALL_TIMEOUT_S * 1000)))
    try:
        ends_s = time.monotonic() + timeout_s
        while True:
            leak = await _look(client, redis, pool, metrics_addresses)
            if not leak or time.monotonic() >= ends_s:
                return leak
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        await redis.aclose()


async def _look(client: AsyncClient, redis: Any, pool: str, metrics_addresses: Sequence[str]) -> Leak:
    executors = (await client.capacity(timeout=LAST_CALL_TIMEOUT_S)).executors
    keys = PoolKeys(pool)
    pool_keys = keys.for_script(())
    held = await asyncio.gather(
        *(metric_sum(address, HELD_ADAPTERS, LAST_CALL_TIMEOUT_S) for address in metrics_addresses)
    )
    return Leak(
        sum(executor.blocks_used for executor in executors),
        sum(executor.blocks_reserved for executor in executors),
        int(await redis.hlen(keys.key("requests"))),
        int(
            await ScriptCalls(redis, compose_library(shared_source(), {"pins": COUNT_PINS})).run("pins", pool_keys, ())
        ),
        round(sum(held)),
    )
