"""A wait for the executors of a local stack, which is ready as soon as its routers have one of them."""

from __future__ import annotations

import asyncio

from inflight import AsyncClient

WAIT_S = 120.0


async def wait_for_executors(address: str, num_executors: int) -> None:
    """Returns when so many executors take work of the router at this address. A test that kills one needs another."""
    async with AsyncClient(address) as client, asyncio.timeout(WAIT_S):
        while sum(one.accepting for one in (await client.capacity(timeout=WAIT_S)).executors) < num_executors:
            await asyncio.sleep(0.05)
