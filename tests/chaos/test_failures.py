"""Each row of the table of failures (docs/failures.md), with real processes that are killed, stopped or cut off.

Every stream is checked token by token. How long it paused is reported as a property of the test, `longest_pause_s`;
nothing is asserted about time but that it passes.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import grpc
import pytest

from inflight import AsyncClient
from inflight.bench.chaos.inject import KEPT, KEYS
from inflight.bench.chaos.load import Load, Manner
from inflight.bench.chaos.requests import SampleKind, SampleRequest
from inflight.bench.fleet.proxy import Weather
from inflight.bench.simulation.store_link import REMEMBER, RESTORE
from inflight.errors import InflightError
from inflight.router.ledger.connection import connect_node
from tests.chaos.poisoned import POISON
from tests.chaos.system import LONG, PATIENCE_S, SHORT, Reading, System, numbered
from tests.support.ledger.store_pool import PATIENT

pytestmark = pytest.mark.asyncio(loop_scope="module")

Record = Callable[[str, object], None]
FOUR = [numbered(LONG, number) for number in range(4)]


def has_news(reading: Reading, _: object) -> bool:
    """Whether anything has come: that it waits, at first."""
    return reading.changed.is_set()


async def test_killed_executor_loses_no_token(system: System, record_property: Record) -> None:
    readings = await system.read_running(FOUR)
    system.executor_of(readings[0]).send(signal.SIGKILL)
    record_property("longest_pause_s", await system.finish(readings))
    assert readings[0].observed.migrated_s
    await system.whole()


async def test_hung_executor_is_replaced_and_what_it_says_later_is_dropped(
    system: System, record_property: Record
) -> None:
    readings = await system.read_running(FOUR)
    hung = system.executor_of(readings[0])
    hung.send(signal.SIGSTOP)
    try:
        record_property("longest_pause_s", await system.finish(readings))
    finally:
        hung.send(signal.SIGCONT)
    assert readings[0].observed.migrated_s
    # Its late frames have no reader, and its placements are void.
    await system.whole()
    await system.finish(await system.read_running(FOUR))


async def test_client_goes_on_by_itself_when_a_router_is_killed(system: System, record_property: Record) -> None:
    readings = await system.read_running(FOUR)
    for router in system.fleet.routers:
        if any(reading.stream.num_resumes for reading in readings):
            break
        router.send(signal.SIGKILL)
        await system.step_until(readings, 60)
    record_property("longest_pause_s", await system.finish(readings))
    assert any(reading.stream.num_resumes for reading in readings)
    await system.whole()


async def test_client_goes_on_when_router_and_executor_are_killed(system: System, record_property: Record) -> None:
    readings = await system.read_running(FOUR)
    system.executor_of(readings[0]).send(signal.SIGKILL)
    for router in system.fleet.routers:
        router.send(signal.SIGKILL)
    record_property("longest_pause_s", await system.finish(readings))
    assert all(reading.stream.num_resumes for reading in readings)
    await system.whole()


@pytest.mark.parametrize("keeps", [False, True], ids=["empty", "with what it held"])
async def test_streams_and_waiting_requests_outlive_a_restart_of_redis(
    system: System, record_property: Record, keeps: bool
) -> None:
    # Eight on the seats, four in line
    waiting = [numbered(SHORT, number) for number in range(4)]
    await system.learn(*waiting)
    readings = await system.read_running([numbered(LONG, number) for number in range(8)])
    queued = [system.read(sample) for sample in waiting]
    if not keeps:
        system.fleet.redis_process.forget()
    system.fleet.redis.send(signal.SIGKILL)
    died_s = time.monotonic()
    record_property("longest_pause_s", await system.finish(readings))
    await system.finish(queued)
    await system.whole()
    record_property("ledger_whole_within_s", time.monotonic() - died_s)


async def test_requests_in_line_outlive_a_redis_that_forgets_its_newest_writes(
    system: System, record_property: Record
) -> None:
    waiting = [numbered(SHORT, number) for number in range(4)]
    await system.learn(*waiting)
    # Eight on the seats, four in line, and these come when Redis forgets what it is told
    readings = await system.read_running([numbered(LONG, number) for number in range(8)])
    async with aclosing(connect_node(system.fleet.redis_process.url(), PATIENT)) as redis:
        await redis.eval(REMEMBER, 0, KEYS, KEPT)
        queued = [system.read(sample, want_queue_events=True) for sample in waiting]
        for reading in queued:
            await reading.until(functools.partial(has_news, reading))
        await redis.eval(RESTORE, 0, KEYS, KEPT)
    forgotten_s = time.monotonic()
    record_property("longest_pause_s", await system.finish(readings))
    await system.finish(queued)
    await system.whole()
    record_property("ledger_whole_within_s", time.monotonic() - forgotten_s)


async def refused(address: str) -> InflightError:
    """What new work is told, by a client that does not try again."""
    async with AsyncClient(address, retries=False, resume=False) as client:
        with pytest.raises(InflightError) as caught:
            await client.send(SHORT.request()).result()
    return caught.value


async def hang(system: System) -> None:
    system.fleet.redis.send(signal.SIGSTOP)


async def unhang(system: System) -> None:
    system.fleet.redis.send(signal.SIGCONT)


async def cut(system: System) -> None:
    for store in system.fleet.stores:
        store.set_weather(Weather.CUT)


async def mend(system: System) -> None:
    for store in system.fleet.stores:
        store.set_weather(Weather.FAIR)


Change = Callable[[System], Awaitable[None]]


@pytest.mark.parametrize(("begin", "end"), [(hang, unhang), (cut, mend)], ids=["hangs", "is unreachable"])
async def test_streams_go_on_and_new_work_is_told_to_come_again_while_redis(
    system: System, record_property: Record, begin: Change, end: Change
) -> None:
    readings = await system.read_running(FOUR)
    await begin(system)
    try:
        error = await refused(system.fleet.addresses[0])
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.retry_after_s is not None
        record_property("longest_pause_s", await system.finish(readings))
    finally:
        await end(system)
    await system.finish(await system.read_running([SHORT]))
    await system.whole()


@pytest.mark.parametrize("when", ["running", "queued", "prefilling"])
async def test_blocks_are_free_when_a_client_disconnects(system: System, record_property: Record, when: str) -> None:
    others = await system.read_running([numbered(LONG, n) for n in range(8)]) if when == "queued" else []
    if when == "running":
        leaving = [reading.stream for reading in await system.read_running(FOUR)]
    else:
        reading = system.read(numbered(LONG, 99), want_queue_events=True)
        if when == "queued":
            await reading.until(lambda observed: reading.changed.is_set())
        leaving = [reading.stream]
    left_s = time.monotonic()
    for stream in leaving:
        stream.cancel()
    system.brake.release()
    await system.until_left(len(others))
    record_property("free_after_s", time.monotonic() - left_s)
    if others:
        await system.finish(others)
    await system.whole()


async def test_poison_prompt_convicts_only_itself(system: System) -> None:
    before = len(system.fleet.exits)
    others = await system.read_running([numbered(LONG, 1), numbered(LONG, 2)])
    system.brake.release()
    poison = SampleRequest("poison", SampleKind.IDS, 8, prompt_ids=POISON)
    with pytest.raises(InflightError) as caught:
        async with asyncio.timeout(PATIENCE_S):
            await system.client.send(poison.request()).result()
    assert caught.value.code is grpc.StatusCode.INTERNAL
    assert caught.value.reason == "ATTEMPTS_EXHAUSTED"
    await system.finish(others)
    await system.whole()
    assert [ended.role for ended in system.fleet.exits[before:]] == ["executor", "executor"]


async def test_rolling_restart_of_everything_fails_no_request(system: System, record_property: Record) -> None:
    samples = [numbered(SHORT, number) for number in range(8)]
    await system.learn(*samples)
    known = {sample: system.expected[sample] for sample in samples}
    load = Load(system.client, known, random.Random(1).randrange(100), [Manner.READ, Manner.WATCH_QUEUE])
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(num_clients=10))
        for member in (*system.fleet.routers, *system.fleet.executors):
            process = member.process
            assert process is not None
            member.send(signal.SIGTERM)
            assert await process.wait() == 0
            await system.observer.wait_until_whole(PATIENCE_S)
        load.stop()
    assert not [sent for sent in load.sent if sent.failed or sent.refused]
    pauses = [b - a for sent in load.sent for a, b in itertools.pairwise(sent.observed.arrivals_s)]
    record_property("longest_pause_s", max(pauses))
    await system.whole()
