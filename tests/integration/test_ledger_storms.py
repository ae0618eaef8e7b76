"""Bursts of thousands of requests that leave the queue or return to it: none is mistaken for an outage."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from unittest.mock import patch

import pytest
from redis.asyncio import Redis

from inflight.common.errors import RequestError
from inflight.router.dispatch import dispatcher as dispatching
from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.ledger.connection import close, connect_node, connect_reader
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    Demand,
    ExecutorReport,
    LeaseLapsed,
    LedgerCall,
    LedgerEvent,
    Placement,
    Queued,
    SubmitOutcome,
)
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2
from tests.support.ledger.store_pool import START_MS, steered_scripts
from tests.support.stack.cluster import PATIENCE_S

# Few connections. The router's own calls come when it starts, and when a test makes them.
SETTINGS = LedgerSettings(
    max_connections=4,
    call_timeout_ms=60_000,
    renew_interval_ms=3_600_000,
    reap_interval_ms=3_600_000,
    mailbox_block_ms=50,
)
NUM_REQUESTS = 2000
# Of calls of a Redis that falls silent. A machine that stands still for less time fails no other call.
CALL_TIMEOUT_MS = 2000
REPORT = ExecutorReport("x", 1, 1, 10, 10, 1, accepting=True)


@dataclasses.dataclass
class Storm:
    """A router's dispatcher on a real ledger, whose only seat another router has taken."""

    redis: Redis
    dispatcher: Dispatcher
    own: RedisLedger
    other: RedisLedger
    num_reports: int = 0
    num_lapses: int = 0
    failed_calls: list[LedgerCall] = dataclasses.field(default_factory=list)

    async def take_the_seat(self) -> None:
        """The other router tells the ledger of the executor, and has its seat."""
        await self.report()
        assert isinstance(await self.other.submit(Demand("in the way", 2, 1)), Placement)

    async def report(self) -> None:
        self.num_reports += 1
        await self.other.report(dataclasses.replace(REPORT, seq=self.num_reports))

    async def queue(self, num_requests: int) -> list[RequestStream]:
        """Requests that wait."""
        streams = [new_stream(f"r{number:05}") for number in range(num_requests)]
        for start in range(0, num_requests, 100):
            outcomes = await asyncio.gather(*(self.dispatcher.submit(one) for one in streams[start : start + 100]))
            assert all(isinstance(outcome, Queued) for outcome in outcomes)
        return streams

    async def num_waiting(self) -> int:
        return sum((await self.other.snapshot()).num_waiting)

    async def until_waiting(self, num_requests: int) -> None:
        async with asyncio.timeout(240):
            while await self.num_waiting() != num_requests:
                await asyncio.sleep(0.05)


def new_stream(request_id: str) -> RequestStream:
    submit = executor_pb2.Submit(request_id=request_id, prompt_ids=[1])
    return RequestStream(Demand(request_id, 2, 1), submit, 0.0)


@asynccontextmanager
async def storm(redis_url: str, admin: Redis, pool: str, settings: LedgerSettings = SETTINGS) -> AsyncIterator[Storm]:
    """The dispatcher runs. It waits 0 s for an executor that the ledger does not know. The ledger's clock stands still,
    so however slow the machine is, no lease lapses by time."""
    await admin.set(clock_of(pool), START_MS)
    redis, stores, calls = connect_node(redis_url, settings), list[RedisLedger](), list[LedgerCall]()

    def open_ledger(on_event: Callable[[LedgerEvent], None]) -> RedisLedger:
        def counting(event: LedgerEvent) -> None:
            here.num_lapses += isinstance(event, LeaseLapsed) and event.is_certain
            on_event(event)

        reader = connect_reader(redis_url, settings)
        scripts = steered_scripts()
        stores.append(RedisLedger(redis, pool, "a", settings, counting, scripts, on_call=calls.append, reader=reader))
        return stores[0]

    def ignore(event: LedgerEvent) -> None:
        pass

    dispatcher = Dispatcher(open_ledger, 3, no_executor_grace_s=0.0)
    other_redis = connect_node(redis_url, SETTINGS)
    other = RedisLedger(other_redis, pool, "b", SETTINGS, ignore, steered_scripts())
    here = Storm(redis, dispatcher, stores[0], other)
    await here.take_the_seat()
    running = asyncio.create_task(dispatcher.run())
    await stores[0].renew()
    try:
        with patch.object(dispatching, "SUBMIT_TURN_S", PATIENCE_S):
            yield here
    finally:
        here.failed_calls = [call for call in calls if not call.succeeded]
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await dispatcher.close()
        await close(redis, other_redis)


@pytest.fixture
async def admin(redis_admin_url: str) -> AsyncIterator[Redis]:
    """The test's own connection."""
    redis = connect_node(redis_admin_url, SETTINGS)
    yield redis
    await close(redis)


def clock_of(pool: str) -> str:
    """The key that holds the ledger's time."""
    return PoolKeys(pool).key("executors:clock")


async def test_clients_that_leave_all_at_once_are_withdrawn_and_the_lease_holds(
    redis_url: str, admin: Redis, pool: str
) -> None:
    async with storm(redis_url, admin, pool) as here:
        streams = await here.queue(NUM_REQUESTS)
        for stream in streams:
            here.dispatcher.release(stream)
        await asyncio.sleep(0)
        await here.own.renew()  # between them
        await here.until_waiting(0)
        async with asyncio.timeout(60):  # the last answers are on their way
            await here.dispatcher.wait_until_empty()
    assert (here.num_lapses, here.failed_calls) == (0, [])


async def test_all_that_wait_are_put_in_line_again_when_the_ledger_was_lost(
    redis_url: str, admin: Redis, pool: str
) -> None:
    async with storm(redis_url, admin, pool) as here:
        streams = await here.queue(NUM_REQUESTS)
        # When Redis has lost the pool, and knows its executor and the other router again
        await admin.delete(*set(await admin.keys(PoolKeys(pool).key("*"))) - {clock_of(pool)})
        await here.take_the_seat()
        await here.own.renew()
        # Then few at a time are put in line again, until all of them wait, and none is told an error
        assert here.num_lapses == 1
        assert len(asyncio.all_tasks()) < 100
        await here.until_waiting(NUM_REQUESTS)
        assert [stream.error for stream in streams if stream.has_ended] == []
    assert (here.num_lapses, here.failed_calls) == (1, [])


@pytest.mark.parametrize(
    ("num_waiting", "num_cancelled"),
    [(2_000, 800), pytest.param(20_000, 8_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
)
async def test_clients_that_leave_while_redis_is_silent_cost_no_lease_and_no_other_request_its_place(
    redis_url: str,
    admin: Redis,
    pool: str,
    num_waiting: int,
    num_cancelled: int,
) -> None:
    settings = dataclasses.replace(SETTINGS, call_timeout_ms=CALL_TIMEOUT_MS, max_queue_requests=100_000)
    submitted_again: list[str] = []
    async with storm(redis_url, admin, pool, settings) as here:
        streams = await here.queue(num_waiting)
        submit = here.own.submit

        async def counting(demand: Demand) -> SubmitOutcome:
            submitted_again.append(demand.request_id)
            return await submit(demand)

        here.own.submit = counting  # type: ignore[method-assign]
        leaving, staying = streams[:num_cancelled], streams[num_cancelled:]
        server = int((await admin.info("server"))["process_id"])
        os.kill(server, signal.SIGSTOP)
        asyncio.get_running_loop().call_later(1.5 * CALL_TIMEOUT_MS / 1000, os.kill, server, signal.SIGCONT)
        for stream in leaving:
            here.dispatcher.release(stream)
        with suppress(RequestError):  # not answered, and answered only when Redis continues
            await here.own.renew()
        await here.until_waiting(len(staying))
        async with asyncio.timeout(600):
            await asyncio.gather(*(stream.forgotten.wait() for stream in leaving))
            await here.own.renew()  # whatever was concluded from lost replies has been checked against the ledger
            await here.own.find_forgotten([])
        assert here.num_lapses == 0
        assert not submitted_again
        assert [stream.error for stream in streams if stream.error is not None] == []
        assert {stream.request_id for stream in here.dispatcher.waiting()} == {one.request_id for one in staying}
        # And each of the others ends once, too
        for stream in staying:
            here.dispatcher.release(stream)
        await here.until_waiting(0)
        async with asyncio.timeout(600):
            await here.dispatcher.wait_until_empty()
        assert not submitted_again
        assert await admin.zcard(PoolKeys(pool).key("ended")) == num_waiting
