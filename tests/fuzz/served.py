"""A cluster under attack: calls of raw bytes from a test's own thread, and what must hold when all is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import grpc.aio

from tests.integration.test_requests import collect, expected_ids, ids_of
from tests.support.stack.cluster import Cluster, token_request

T = TypeVar("T")

# Nothing that is asked for here takes long: who waits so long waits for ever.
HANG_S = 60.0
SERVICE = "/inflight.v1.InferenceService/"
STREAMS = frozenset({"Generate", "Resume"})
ENDLESS = frozenset({"GetStats"})

Metadata = Sequence[tuple[str, str | bytes]]


class Loop:
    """Runs coroutines of a test's loop from the thread in which Hypothesis makes its examples."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Waits for the result. Raises `TimeoutError` for what hangs."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, HANG_S), self._loop).result()


async def call(channel: grpc.aio.Channel, rpc: str, request: bytes, metadata: Metadata = ()) -> bytes:
    """Calls an RPC to its end and returns all that it answers; of one without an end the first. Raises
    `AioRpcError`."""
    if rpc not in STREAMS | ENDLESS:
        unary: Any = channel.unary_unary(SERVICE + rpc)
        return bytes(await unary(request, metadata=metadata))
    stream: Any = channel.unary_stream(SERVICE + rpc)
    if rpc in ENDLESS:
        endless = stream(request, metadata=metadata)
        async for response in endless:
            endless.cancel()
            return bytes(response)
    return b"".join([response async for response in stream(request, metadata=metadata)])


async def until_empty(cluster: Cluster) -> None:
    """Waits until no request waits or runs and nothing is reserved; what never comes fails with what is left."""
    dispatchers = [pool.dispatcher for router in cluster.routers for pool in router.pools.by_name.values()]
    give_up = time.monotonic() + HANG_S
    while True:
        snapshot = await dispatchers[0].snapshot()
        left = {
            "held": sum(executor.scheduler.num_held for executor in cluster.executors),
            "streams": sum(len(dispatcher.streams) for dispatcher in dispatchers),
            "waiting": sum(snapshot.num_waiting),
            "reserved": sum(executor.reserved_blocks for executor in snapshot.executors),
        }
        if not any(left.values()):
            return
        assert time.monotonic() < give_up, left
        await asyncio.sleep(0.01)


async def check_unharmed(cluster: Cluster) -> None:
    """Every router serves as ever, every block is back, and nothing is left in the ledger."""
    await until_empty(cluster)
    for router in cluster.routers:
        assert ids_of(await collect(router, token_request([3, 1], 6), HANG_S)) == expected_ids([3, 1], 6)
    await until_empty(cluster)
    for executor in cluster.executors:
        executor.scheduler.check_when_idle()
        assert executor.scheduler.pool.num_used == 0
