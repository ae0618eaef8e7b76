"""The ledger while routers and executors work: order across routers, and never more promised than there is."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc.aio
import pytest

from inflight.executor.scheduler.scheduler import Batching
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.v1 import inference_pb2
from tests.integration.test_requests import DEFAULT_SALT, collect, expected_ids, ids_of, random_requests, rest
from tests.support.examples import examples
from tests.support.ledger.store_pool import PATIENT
from tests.support.stack.cluster import Cluster, ExecutorShape, RunningRouter, run_cluster, token_request


async def watch_ledger(
    redis_url: str, pool: str, most_sequences: int, seen: list[tuple[int, int]], *, shares: bool
) -> None:
    """Reads the ledger from Redis again and again; notes the largest promises and checks each.

    What standby may promise shrinks with the rate of ends, and what sharing saves when sequences end; promises made
    before that stand. Sequences that share have at least one block of their own.
    """
    redis = connect_node(redis_url, PATIENT)
    store = RedisLedger(redis, pool, "watcher", PATIENT, lambda event: None)
    try:
        while True:
            for executor in (await store.snapshot()).executors:
                if shares:
                    assert executor.budget_blocks <= executor.total_blocks * most_sequences
                else:
                    assert executor.reserved_blocks <= executor.budget_blocks <= executor.total_blocks
                assert executor.budget_sequences <= most_sequences
                assert executor.reserved_sequences <= most_sequences
                seen.append((executor.reserved_blocks, executor.reserved_sequences))
            await asyncio.sleep(0)
    finally:
        await redis.aclose()


async def collect_in_turn(
    router: RunningRouter, request: tuple[list[int], int], salt: str, turns: asyncio.Semaphore
) -> list[inference_pb2.StreamEvent]:
    """All events of a request. Only a few requests are sent at once, because a router refuses those that a slow machine
    delays on the way into the queue."""
    message = token_request(*request, want_queue_events=True, cache=inference_pb2.CacheOptions(salt=salt))
    async with turns:
        stream, first = await accepted(router, message)
    return [first, *await rest(stream)]


async def accepted(
    router: RunningRouter, message: inference_pb2.GenerateRequest
) -> tuple[Any, inference_pb2.StreamEvent]:
    """A stream and its first event. A slow machine can delay the reports of all executors for longer than a lease, and
    the ledger then refuses requests. The request is sent again, as clients do."""
    while True:
        stream: Any = router.stub.Generate(message)
        try:
            return stream, (await stream.read()).event
        except grpc.aio.AioRpcError as error:
            if error.details() != "no executor takes work":
                raise


@pytest.mark.parametrize("shares", [False, True])
async def test_reservations_never_exceed_the_budget_under_hundreds_of_requests(
    redis_url: str, pool: str, shares: bool
) -> None:
    shape = ExecutorShape(num_blocks=40, max_num_sequences=6, num_standby_sequences=2)
    requests = random_requests(examples(500), seed=3)
    salts = ["" if shares else str(number) for number in range(len(requests))]
    seen: list[tuple[int, int]] = []
    turns = asyncio.Semaphore(16)
    async with run_cluster(redis_url, pool, executors=2, routers=2, shape=shape) as cluster:
        watcher = asyncio.create_task(watch_ledger(redis_url, pool, 8, seen, shares=shares))
        answers = await asyncio.gather(
            *(
                collect_in_turn(cluster.routers[i % 2], request, salt, turns)
                for i, (request, salt) in enumerate(zip(requests, salts, strict=True))
            )
        )
        assert not watcher.done(), watcher.exception()
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
        await until_nothing_is_reserved(cluster)
    expected = [
        expected_ids(*request, DEFAULT_SALT + salt.encode()) for request, salt in zip(requests, salts, strict=True)
    ]
    assert [ids_of(events) for events in answers] == expected
    assert max(blocks for blocks, _ in seen) > 20, "the load must have filled the executors"


async def until_nothing_is_reserved(cluster: Cluster) -> None:
    """Waits until the last ends are settled."""
    async with asyncio.timeout(60):
        while True:
            capacity = await cluster.routers[0].stub.GetCapacity(inference_pb2.GetCapacityRequest())
            if not any(executor.blocks_reserved for executor in capacity.executors):
                return
            await asyncio.sleep(0.01)


async def test_waiting_requests_of_a_class_board_in_order_of_arrival_across_routers(redis_url: str, pool: str) -> None:
    # Given one seat that is taken, and requests that arrive in turn at two routers
    async with run_cluster(redis_url, pool, routers=2, shape=ExecutorShape(max_num_sequences=1)) as cluster:
        brake = cluster.executors[0].brake
        brake.hold()
        running = cluster.routers[0].stub.Generate(token_request([0], 1))
        await running.read()
        calls = []
        for number in range(12):
            request = token_request([number % 5], 1 + number % 3, request_id=f"{number:02}", want_queue_events=True)
            calls.append(cluster.routers[number % 2].stub.Generate(request))
            assert (await calls[-1].read()).event.queued.position == number
        # When the seat is free again and again
        brake.release()
        await asyncio.gather(*(rest(call) for call in calls))
        running.cancel()
    # Then they were served in order of arrival
    assert cluster.executors[0].device.boarded[1:] == [f"{number:02}" for number in range(12)]


async def test_interactive_requests_board_before_batch_requests(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2, shape=ExecutorShape(max_num_sequences=1)) as cluster:
        brake = cluster.executors[0].brake
        brake.hold()
        running = cluster.routers[0].stub.Generate(token_request([0], 1))
        await running.read()
        calls = []
        for name, priority in (("batch", "PRIORITY_CLASS_BATCH"), ("interactive", "PRIORITY_CLASS_INTERACTIVE")):
            request = token_request([1], 2, request_id=name, want_queue_events=True, priority=priority)
            calls.append(cluster.routers[0].stub.Generate(request))
            assert (await calls[-1].read()).event.HasField("queued")
        brake.release()
        await asyncio.gather(*(rest(call) for call in calls))
        running.cancel()
    assert cluster.executors[0].device.boarded[1:] == ["interactive", "batch"]


@pytest.mark.parametrize("batching", list(Batching))
async def test_requests_board_in_order_of_arrival_while_others_leave(
    redis_url: str, pool: str, batching: Batching
) -> None:
    shape = ExecutorShape(num_blocks=200, max_num_sequences=4, num_standby_sequences=4, batching=batching)
    async with run_cluster(redis_url, pool, shape=shape) as cluster:
        executor, router = cluster.executors[0], cluster.routers[0]
        executor.brake.hold()

        dispatcher = router.pools.by_name[pool].dispatcher
        tasks = []
        for number in range(40):
            request = token_request([number % 5], 1 + number * 7 % 23, request_id=f"{number:02}")
            # The same for all; what gRPC makes of it differs by milliseconds, which must not change the order.
            tasks.append(asyncio.create_task(collect(router, request, timeout_s=50)))
            async with asyncio.timeout(60):
                while len(dispatcher.streams) <= number or dispatcher.streams[-1].life.is_being_submitted:
                    await asyncio.sleep(0)
        executor.brake.release()
        await asyncio.gather(*tasks)
        # The ledger places them in this order, but its replies come on several connections and may overtake each other:
        # no request is overtaken by more than the executor holds
        boarded = [int(request_id) for request_id in executor.device.boarded]
        assert sorted(boarded) == list(range(40))
        assert max(abs(place - number) for place, number in enumerate(boarded)) <= 8
