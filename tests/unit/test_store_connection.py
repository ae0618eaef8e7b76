"""The store's behaviour when callers leave, and when Redis does."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import TimeoutError as RedisTimeoutError

from inflight.common.errors import Reason, RequestError
from inflight.local.redis_server import PrivateRedis
from inflight.router.ledger.connection import CallPool, ClusterClient, NotSentError, close, connect_node, connect_reader
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.mailbox import MAX_ENTRIES
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    Attempt,
    Cancelled,
    Demand,
    ExecutorReport,
    LeaseLapsed,
    LedgerCall,
    LedgerEvent,
    Placement,
    Queued,
)
from tests.property.crashing_pool import LossyRedis
from tests.support.ledger.store_pool import START_MS, StorePool, steered_scripts

# Quick in all that repeats, and patient with each call: a machine that stands still for seconds fails none.
FAST = LedgerSettings(
    call_timeout_ms=60_000,
    renew_interval_ms=20,
    reap_interval_ms=20,
    mailbox_block_ms=50,
    min_backoff_ms=5,
    max_backoff_ms=20,
)
HASTY = replace(FAST, call_timeout_ms=500)


def give_time(redis: Redis, settings: LedgerSettings) -> None:
    """Gives the client's connections, made and to be made, so much time for a call."""
    timeout_s = settings.call_timeout_ms / 1000
    pool = redis.connection_pool
    pool.connection_kwargs |= {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    for connection in pool._available_connections:
        connection.socket_timeout = connection.socket_connect_timeout = timeout_s


async def test_submit_whose_caller_leaves_is_withdrawn(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    for request_id, reserved_blocks in (("placed", 0), ("queued", 1)):
        submit = asyncio.create_task(a.store.submit(Demand(request_id, 2, blocks=1)))
        await asyncio.sleep(0)  # it has begun
        submit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submit
        await a.store.aclose()
        assert await store_pool.num_waiting() == 0
        assert await store_pool.reserved_blocks() == {"x": reserved_blocks}
        if not reserved_blocks:
            await a.place("in the way")
    assert await a.told() == []


async def test_no_reply_reaches_another_caller(store_pool: StorePool) -> None:
    """Half of the callers leave at a random moment; the others must get answers to their own questions."""
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=5000, sequences=500))
    rng = random.Random(1)

    async def ask(number: int) -> None:
        result = await a.store.submit(Demand(f"r{number}", 2, blocks=number + 1))
        assert result == Placement(f"r{number}", 1, "x", 1)
        record = await a.store.cancel(f"r{number}")
        assert record.placement == result

    callers = [asyncio.create_task(ask(number)) for number in range(60)]
    for caller in callers[::2]:
        for _ in range(rng.randrange(8)):
            await asyncio.sleep(0)
        caller.cancel()
    results = await asyncio.gather(*callers, return_exceptions=True)
    await a.store.aclose()

    assert [type(result) for result in results[1::2]] == [type(None)] * 30
    # Who leaves late has its answer already.
    withdrawn = [result for result in results[::2] if result is not None]
    assert withdrawn
    assert all(isinstance(result, asyncio.CancelledError) for result in withdrawn)


async def test_scripts_that_redis_forgot_are_loaded_again(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await store_pool.redis.execute_command("FUNCTION", "FLUSH")  # type: ignore[no-untyped-call]

    assert isinstance(await a.store.submit(Demand("r", 2, blocks=1)), Placement)


async def test_events_arrive_while_the_store_runs(redis_url: str, store_pool: StorePool) -> None:
    redis, pool, scripts = connect_node(redis_url, FAST), store_pool.keys.pool, steered_scripts()
    events: asyncio.Queue[LedgerEvent] = asyncio.Queue()
    readers = [connect_reader(redis_url, FAST) for _ in range(2)]
    a = RedisLedger(redis, pool, "a", FAST, lambda event: None, scripts, reader=readers[0])
    b = RedisLedger(redis, pool, "b", FAST, events.put_nowait, scripts, reader=readers[1])
    async with asyncio.TaskGroup() as group:
        running = [group.create_task(store.run()) for store in (a, b)]
        await a.report(ExecutorReport("x", 1, 1, 10, 10, 1, accepting=True))
        await a.submit(Demand("first", 2, blocks=1))
        assert await b.submit(Demand("second", 2, blocks=1)) == Queued(0)

        await a.settle([Attempt("first", 1)])

        assert await asyncio.wait_for(events.get(), 60) == Placement("second", 1, "x", 1)
        for one in running:
            one.cancel()
    await redis.aclose()


async def stop_clock(server: PrivateRedis) -> None:
    """Sets the time that `steered_scripts` see there: no report gets old, however slow the machine is."""
    async with connect_node(server.admin_url, FAST) as redis:
        await redis.set(PoolKeys("pool").key("executors:clock"), START_MS)


async def test_calls_are_refused_while_redis_is_away_and_work_when_it_is_back(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    server = PrivateRedis.start(tmp_path / "1.log", unix_socket=socket)
    redis = connect_node(server.url, FAST)
    events: asyncio.Queue[LedgerEvent] = asyncio.Queue()
    reader = connect_reader(server.url, FAST)
    a = RedisLedger(redis, "pool", "a", FAST, events.put_nowait, steered_scripts(), reader=reader)
    b = RedisLedger(redis, "pool", "b", FAST, lambda event: None, steered_scripts())
    await stop_clock(server)
    running = asyncio.create_task(a.run())
    report = ExecutorReport("x", 1, 1, 10, 10, 1, accepting=True)
    await a.report(report)
    # When Redis goes
    server.stop()
    with pytest.raises(RequestError) as refusal:
        await a.submit(Demand("r", 2, blocks=1))
    assert refusal.value.reason is Reason.STORE_UNAVAILABLE
    assert refusal.value.retry_after_ms == FAST.retry_after_ms
    # Then it is noticed when it is back, empty
    with PrivateRedis.start(tmp_path / "2.log", unix_socket=socket) as server:
        await stop_clock(server)
        assert await asyncio.wait_for(events.get(), 60) == LeaseLapsed()
        await b.report(report)
        await b.submit(Demand("first", 2, blocks=1))
        await a.submit(Demand("second", 2, blocks=1))
        await b.settle([Attempt("first", 1)])
        while (event := await asyncio.wait_for(events.get(), 60)) == LeaseLapsed():
            pass  # another call had failed meanwhile
        assert event == Placement("second", 1, "x", 1)
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])
        await redis.aclose()


async def test_redis_that_hangs_is_not_waited_for_and_its_late_reply_is_dropped(tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path / "redis.log", unix_socket=tmp_path / "redis.sock") as server:
        redis = connect_node(server.url, FAST)
        store = RedisLedger(redis, "pool", "a", FAST, lambda event: None)
        await store.report(ExecutorReport("x", 1, 1, 10, 10, 1, accepting=True))
        give_time(redis, HASTY)
        os.kill(server.pid, signal.SIGSTOP)

        with pytest.raises(RequestError, match="does not answer"):
            await store.renew()

        os.kill(server.pid, signal.SIGCONT)
        give_time(redis, FAST)
        # It waits if the executor's report is two seconds old by now
        assert await store.submit(Demand("r", 2, blocks=1)) in (Placement("r", 1, "x", 1), Queued(0))
        await redis.aclose()


async def test_mailbox_that_was_lost_is_read_from_its_beginning(store_pool: StorePool) -> None:
    redis, key = store_pool.redis, store_pool.keys.mailbox("a")
    mailbox = store_pool.router("a").mailbox
    await redis.xadd(key, {"kind": "cancelled", "request_id": "old"}, id="9-0")
    assert await mailbox.read() == [Cancelled("old")]

    await redis.delete(key)
    await redis.xadd(key, {"kind": "cancelled", "request_id": "new"}, id="5-0")  # a clock behind the old one's
    await mailbox.rewind_if_reset()

    assert await mailbox.read() == [Cancelled("new")]
    await mailbox.rewind_if_reset()
    assert await mailbox.read() == []


async def test_mailbox_that_began_again_behind_its_reader_is_read_where_no_call_failed(store_pool: StorePool) -> None:
    # Unread for ten minutes a mailbox is deleted; when the clock was set back, the next one's entries are older.
    redis, key = store_pool.redis, store_pool.keys.mailbox("a")
    was_read, is_new_read = asyncio.Event(), asyncio.Event()

    def on_event(event: LedgerEvent) -> None:
        was_read.set()
        if event == Cancelled("new"):
            is_new_read.set()

    running = asyncio.create_task(store_pool.router("a").mailbox.run(on_event, print))
    await redis.xadd(key, {"kind": "cancelled", "request_id": "old"}, id="9-0")
    await was_read.wait()

    await redis.delete(key)
    await redis.xadd(key, {"kind": "cancelled", "request_id": "new"}, id="5-0")

    await asyncio.wait_for(is_new_read.wait(), 60)
    running.cancel()


def test_url_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="redis://"):
        connect_node("http://127.0.0.1", FAST)


async def test_router_that_missed_a_reply_is_told_to_submit_again(store_pool: StorePool) -> None:
    """The reply may have said that its lease had lapsed, or where its requests were placed."""
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(sequences=1))
    await b.place("running")
    waiting = Demand("waiting", 2, blocks=1)
    await a.queue(waiting)
    lossy = LossyRedis(store_pool.redis, random.Random(2), loses=1.0)  # runs it, and loses the reply
    a.store._calls._redis = lossy
    with pytest.raises(RequestError, match="does not answer"):
        await a.store.settle([Attempt("running", 1)])
    a.store._calls._redis = store_pool.redis

    await a.store.renew()

    assert await a.told() == [LeaseLapsed()]
    assert await a.store.submit(waiting) == Placement("waiting", 1, "x", 1)
    await a.store.renew()
    assert await a.told() == []


async def test_cancel_that_comes_as_a_command_is_sent_ends_the_store(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.wait_for` of Python 3.11, by which redis-py sends, drops a cancel that comes when the command is out."""
    redis = connect_node(redis_url, FAST)
    store = RedisLedger(redis, pool, "a", FAST, lambda event: None, reader=connect_reader(redis_url, FAST))
    running = asyncio.create_task(store.run())
    send = AbstractConnection._send_packed_command

    async def send_and_cancel(connection: AbstractConnection, command: Iterable[bytes]) -> None:
        command = tuple(command)
        await send(connection, command)
        if b"XREAD" in b"".join(command) and not running.cancelling():
            running.cancel()

    monkeypatch.setattr(AbstractConnection, "_send_packed_command", send_and_cancel)
    ended, _ = await asyncio.wait((running,), timeout=60)
    assert ended
    assert running.cancelled()
    await redis.aclose()


@pytest.fixture
async def small_store(redis_url: str, pool: str) -> AsyncIterator[tuple[Redis, RedisLedger, list[LedgerEvent]]]:
    """A registered router's store with one connection for calls, and what it is told."""
    redis = connect_node(redis_url, replace(FAST, max_connections=1))
    told: list[LedgerEvent] = []
    store = RedisLedger(redis, pool, "a", FAST, told.append)
    await store.renew()
    yield redis, store, told
    await redis.aclose()


async def test_call_that_got_no_connection_is_no_lost_reply(
    small_store: tuple[Redis, RedisLedger, list[LedgerEvent]],
) -> None:
    redis, store, told = small_store
    taken = await redis.connection_pool.get_connection()  # type: ignore[no-untyped-call]
    cast(CallPool, redis.connection_pool).timeout = 0.2
    with pytest.raises(RequestError, match="No connection available"):
        await store.settle([Attempt("r", 1)])
    await redis.connection_pool.release(taken)
    await store.renew()
    assert told == []


async def test_call_that_could_not_connect_is_no_lost_reply(tmp_path: Path) -> None:
    socket = tmp_path / "redis.sock"
    with PrivateRedis.start(tmp_path / "redis.log", unix_socket=socket) as server:
        redis = connect_node(server.url, FAST)
        told: list[LedgerEvent] = []
        store = RedisLedger(redis, "pool", "a", FAST, told.append)
        await store.renew()
        await redis.connection_pool.disconnect()
        socket.rename(tmp_path / "elsewhere")
        with pytest.raises(RequestError, match="does not answer"):
            await store.renew()
        (tmp_path / "elsewhere").rename(socket)
        await store.renew()
        assert told == []
        await redis.aclose()


async def test_thousands_of_calls_at_once_wait_for_few_connections_while_redis_answers(
    redis_url: str, store_pool: StorePool
) -> None:
    # No call times out and no lease lapses by time, however slow the machine is: the ledger's clock stands still. That
    # a turn has no deadline is tested with a clock in test_turns.
    settings = replace(FAST, max_connections=4, renew_interval_ms=5, reap_interval_ms=5)
    redis, told, calls = connect_node(redis_url, settings), list[LedgerEvent](), list[LedgerCall]()
    pool, scripts = store_pool.keys.pool, steered_scripts()
    reader = connect_reader(redis_url, settings)
    store = RedisLedger(redis, pool, "a", settings, told.append, scripts, on_call=calls.append, reader=reader)
    running = asyncio.create_task(store.run())
    cancels = []
    for number in range(4000):
        cancels.append(asyncio.create_task(store.cancel(f"r{number}")))
        if number % 100 == 0:  # one turn of the loop for all of them would delay the first renewals
            await asyncio.sleep(0)
    outcomes = await asyncio.gather(*cancels, return_exceptions=True)
    running.cancel()
    await asyncio.wait((running,))
    await store.aclose()
    await redis.aclose()
    assert [one for one in outcomes if isinstance(one, BaseException)] == []
    assert told == []  # LeaseLapsed above all
    assert all(call.succeeded for call in calls)
    # The lease was renewed and executors were watched all the time, not after the last cancel
    order = [call.script for call in calls]
    last_cancel = len(order) - order[::-1].index("cancel")
    assert min(order[:last_cancel].count("renew"), order[:last_cancel].count("reap")) > 10


async def test_calls_that_wait_are_refused_when_redis_hangs(tmp_path: Path) -> None:
    settings = replace(HASTY, max_connections=2)
    with PrivateRedis.start(tmp_path / "redis.log", unix_socket=tmp_path / "redis.sock") as server:
        redis = connect_node(server.url, settings)
        give_time(redis, FAST)
        store = RedisLedger(redis, "pool", "a", settings, lambda event: None)
        await store.renew()
        give_time(redis, HASTY)
        os.kill(server.pid, signal.SIGSTOP)
        calls = [store.cancel(f"r{number}") for number in range(1000)]
        async with asyncio.timeout(60):  # one after the other they would take 500 s
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        os.kill(server.pid, signal.SIGCONT)
        give_time(redis, FAST)
        assert all(isinstance(one, RequestError) for one in outcomes)
        await store.renew()
        await redis.aclose()


async def test_closed_client_leaves_no_connection_open_whatever_is_under_way(redis_url: str, pool: str) -> None:
    redis = connect_node(redis_url, FAST)
    store = RedisLedger(redis, pool, "a", FAST, lambda event: None)
    await store.renew()
    calls = [asyncio.create_task(store.cancel(f"r{number}")) for number in range(100)]
    await asyncio.sleep(0.001)
    assert not all(call.done() for call in calls)
    await close(redis)
    await asyncio.gather(*calls, return_exceptions=True)
    with pytest.raises(RequestError, match="the connections are closed"):
        await store.renew()
    connections = redis.connection_pool
    assert connections._in_use_connections == set()
    assert not any(connection.is_connected for connection in connections._available_connections)


async def test_client_that_cannot_be_closed_does_not_keep_others_open() -> None:
    closed: list[str] = []

    class Client:
        def __init__(self, name: str, error: Exception | None = None) -> None:
            self._name, self._error = name, error

        async def aclose(self) -> None:
            if self._error is not None:
                raise self._error
            closed.append(self._name)

    await close(Client("first"), Client("hangs", RedisTimeoutError("Timed out closing connection")), Client("last"))
    assert closed == ["first", "last"]


async def test_call_that_one_node_of_a_cluster_may_have_run_was_sent() -> None:
    nodes = {("first", 1): RedisTimeoutError("no reply"), ("second", 1): NotSentError("refused")}

    class Client:
        def __init__(self, error: Exception) -> None:
            self._error = error

        async def execute_command(self, *args: object) -> None:
            raise self._error

    cluster = ClusterClient(tuple(nodes), lambda node: cast(Redis, Client(nodes[node])))
    with pytest.raises(RedisTimeoutError, match="no reply"):
        await cluster.execute_command("FCALL", "name", 1, "{pool}:key", keys=["{pool}:key"])


@pytest.mark.parametrize(("num_kept", "is_told"), [(MAX_ENTRIES + 1, False), (MAX_ENTRIES, True)])
async def test_reader_that_was_stopped_until_its_mailbox_was_trimmed_is_told(
    store_pool: StorePool, num_kept: int, is_told: bool
) -> None:
    a, key = store_pool.router("a"), store_pool.keys.mailbox("a")

    async def write(request_id: str) -> None:
        await store_pool.redis.xadd(key, {"kind": "cancelled", "request_id": request_id, "at_ms": "1"})

    await write("read")
    assert await a.mailbox.read() == [Cancelled("read")]
    for number in range(MAX_ENTRIES):
        await write(f"r{number}")
    await store_pool.redis.xtrim(key, maxlen=num_kept, approximate=False)  # the last one read is the oldest
    events = await a.mailbox.read()
    assert events[:MAX_ENTRIES] == [Cancelled(f"r{number}") for number in range(MAX_ENTRIES)]
    assert events[MAX_ENTRIES:] == ([LeaseLapsed()] if is_told else [])
    await write("next")
    assert await a.mailbox.read() == [Cancelled("next")]
