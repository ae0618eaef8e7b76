"""Loss of Redis' newest writes without a broken connection: every request still ends, with the right tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from inflight.bench.simulation.store_link import REMEMBER, RESTORE
from inflight.local.redis_server import PrivateRedis
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.keys import PoolKeys
from tests.fuzz.served import check_unharmed
from tests.integration.test_requests import expected_ids, ids_of, rest
from tests.support.ledger.store_pool import PATIENT
from tests.support.stack.cluster import Cluster, ExecutorShape, run_cluster, token_request

PATIENCE_S = 60.0


@dataclass
class Stale:
    """A cluster of one seat per executor, and a Redis that can be rolled back under it."""

    cluster: Cluster
    redis: Any
    keys: str

    async def remember(self) -> None:
        """To be rolled back to."""
        await self.redis.eval(REMEMBER, 0, self.keys, "kept:")

    async def roll_back(self) -> None:
        """What was written since then is gone, and no call fails."""
        await self.redis.eval(RESTORE, 0, self.keys, "kept:")

    async def generate(self, router: int, token: int, num_tokens: int) -> Any:
        """A request that waits when this returns."""
        request = token_request([token], num_tokens, want_queue_events=True)
        call = self.cluster.routers[router].stub.Generate(request)
        first = asyncio.ensure_future(call.read())
        async with asyncio.timeout(PATIENCE_S):
            while not (await asyncio.wait({first}, timeout=1.0))[0]:
                # If reports were late for seconds, the ledger may place it on a full executor, which is told between
                # steps and refuses it.
                for executor in self.cluster.executors:
                    executor.permit_for_commands()
        assert (await first).event.HasField("queued")
        return call

    async def run(self, executor_of: int, token: int, num_tokens: int) -> Any:
        """A request that runs when this returns, and stands still where that executor is held."""
        call = self.cluster.routers[executor_of].stub.Generate(token_request([token], num_tokens))
        await call.read()
        return call


@asynccontextmanager
async def stale_cluster(folder: Path, pool: str, executors: int = 1) -> AsyncIterator[Stale]:
    """Two routers, and executors that are held."""
    with PrivateRedis.start(folder / "redis.log", unix_socket=folder / "redis.sock") as server:
        shape = ExecutorShape(max_num_sequences=1)
        async with (
            aclosing(connect_node(server.admin_url, PATIENT)) as redis,
            run_cluster(server.url, pool, executors=executors, routers=2, shape=shape) as cluster,
        ):
            for executor in cluster.executors:
                executor.brake.hold()
            yield Stale(cluster, redis, PoolKeys(pool).key("*"))


@pytest.mark.parametrize("name", ["requests", "executors", "placements", "state", "waiting:2", "mailbox"])
async def test_key_of_another_type_ends_no_request_and_keeps_no_seat(tmp_path: Path, pool: str, name: str) -> None:
    async with stale_cluster(tmp_path, pool, executors=2) as stale:
        running = [await stale.run(number, 1, 8) for number in range(2)]
        waiting = [await stale.generate(number % 2, 2, 4 + number) for number in range(6)]
        key = PoolKeys(pool).mailbox(f"{pool}-router-0") if name == "mailbox" else PoolKeys(pool).key(name)
        await stale.redis.delete(key)
        await (stale.redis.rpush(key, "x") if name == "state" else stale.redis.set(key, "x"))
        for executor in stale.cluster.executors:
            executor.brake.release()
        async with asyncio.timeout(PATIENCE_S):
            for call in running:
                assert ids_of(await rest(call)) == expected_ids([1], 8)
            for number, call in enumerate(waiting):
                assert ids_of(await rest(call)) == expected_ids([2], 4 + number)
        await check_unharmed(stale.cluster)


async def test_requests_submitted_in_the_lost_interval_are_put_in_line_again(tmp_path: Path, pool: str) -> None:
    async with stale_cluster(tmp_path, pool) as stale:
        running = await stale.run(0, 1, 8)
        before = await stale.generate(0, 2, 5)
        await stale.remember()
        lost = [await stale.generate(number % 2, 3, 4 + number) for number in range(6)]

        await stale.roll_back()
        stale.cluster.executors[0].brake.release()

        async with asyncio.timeout(PATIENCE_S):
            assert ids_of(await rest(running)) == expected_ids([1], 8)
            assert ids_of(await rest(before)) == expected_ids([2], 5)
            for number, call in enumerate(lost):
                assert ids_of(await rest(call)) == expected_ids([3], 4 + number)


async def test_requests_handed_back_in_the_lost_interval_are_put_in_line_again(tmp_path: Path, pool: str) -> None:
    async with stale_cluster(tmp_path, pool, executors=2) as stale:
        calls = [await stale.run(number, 1 + number, 9) for number in range(2)]
        await stale.remember()
        # When one executor dies, the request that ran there goes back in line, and the ledger forgets that
        dead = stale.cluster.executors.pop()
        await dead.stop()
        waiting = await stale.generate(0, 3, 4)
        await stale.roll_back()
        stale.cluster.executors[0].brake.release()

        async with asyncio.timeout(PATIENCE_S):
            for number, call in enumerate(calls):
                assert ids_of(await rest(call)) == expected_ids([1 + number], 9)
            assert ids_of(await rest(waiting)) == expected_ids([3], 4)


async def test_requests_placed_and_ended_in_the_lost_interval_disturb_nothing(tmp_path: Path, pool: str) -> None:
    async with stale_cluster(tmp_path, pool) as stale:
        brake = stale.cluster.executors[0].brake
        first = await stale.run(0, 1, 4)
        second, third = await stale.generate(0, 2, 4), await stale.generate(1, 3, 30)
        await stale.remember()
        brake.release()
        async with asyncio.timeout(PATIENCE_S):
            assert ids_of(await rest(first)) == expected_ids([1], 4)
            assert ids_of(await rest(second)) == expected_ids([2], 4)
            brake.hold()
            await third.read()
            # The ledger has the first where the third runs, and the others in line.
            await stale.roll_back()
            fourth = stale.cluster.routers[0].stub.Generate(token_request([4], 5))
            brake.release()
            assert ids_of(await rest(third)) == expected_ids([3], 30)
            assert ids_of(await rest(fourth)) == expected_ids([4], 5)
