"""Clients that read slowly, not at all, vanish, or come by the thousand: they harm only themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.lifecycle.events import LifecycleState
from inflight.router.settings import RouterSettings
from inflight.router.stream.relay import TimedWriter
from inflight.v1 import inference_pb2, inference_pb2_grpc
from tests.fuzz.served import HANG_S, check_unharmed, until_empty
from tests.fuzz.statuses import status_of
from tests.integration.test_requests import collect, expected_ids, ids_of, rest
from tests.support.stack.cluster import Cluster, ExecutorShape, RunningRouter, run_cluster, token_request

# 5,000 clients and what serves them share one loop here, and the machine with whatever else runs.
BUSY_S = 200.0

# As little as a client can offer, so that a few events fill it.
NO_WINDOW = (
    ("grpc.http2.lookahead_bytes", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.max_frame_size", 16384),
)


async def until(condition: Any, timeout_s: float = HANG_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_unread_write_ends_the_call_so_that_it_can_be_resumed() -> None:
    async def unread(event: str) -> None:
        await asyncio.Event().wait()

    with pytest.raises(RequestError, match=r"resume it") as error:
        await TimedWriter(unread, 0.001)("token")
    assert error.value.reason is Reason.STALLED


async def test_write_that_is_read_in_time_is_left_alone() -> None:
    written: list[str] = []

    async def read(event: str) -> None:
        written.append(event)

    await TimedWriter(read, 10.0)("token")
    assert written == ["token"]


async def stalled(router: RunningRouter, channel: grpc.aio.Channel) -> Any:
    """Returns a stream that a client has begun to read and then left, with more text than a connection holds unread."""
    request = token_request([3, 1], 40, metadata={}, session_id="stalled")
    stream: Any = channel.unary_stream(
        "/inflight.v1.InferenceService/Generate",
        request_serializer=inference_pb2.GenerateRequest.SerializeToString,
        response_deserializer=inference_pb2.GenerateResponse.FromString,
    )
    return stream(request)


async def test_slow_reader_costs_no_steps_and_no_blocks(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address, options=NO_WINDOW) as channel,
    ):
        router, executor = cluster.routers[0], cluster.executors[0]
        slow = await stalled(router, channel)
        # When the one is not read, the other gets its tokens
        assert ids_of(await collect(router, token_request([2], 30), HANG_S)) == expected_ids([2], 30)
        await until_empty(cluster)
        # Then it took no more steps than one of them takes after the other, and the blocks are free without a reader
        assert executor.engine.num_steps <= 40 + 30 + 4
        assert executor.scheduler.pool.num_used == 0
        assert ids_of(await rest(slow)) == expected_ids([3, 1], 40)


@pytest.mark.slow
async def test_one_connection_that_opens_5000_streams_keeps_no_client_out(redis_url: str, pool: str) -> None:
    settings = RouterSettings(no_executor_grace_s=60.0, max_queue_requests=500)
    async with (
        run_cluster(redis_url, pool, settings=settings, shape=ExecutorShape(max_num_sequences=4)) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        router, executor = cluster.routers[0], cluster.executors[0]
        executor.brake.hold()
        greedy: Any = inference_stub(channel)
        calls = [greedy.Generate(token_request([1], 8, tenant="greedy")) for _ in range(5000)]
        # When more wait than may, or come than the store can be asked for at once, the rest is refused as documented
        ended = [asyncio.create_task(status(call)) for call in calls]
        await until(lambda: sum(one.done() for one in ended) >= 4000, BUSY_S)
        await until(lambda: is_settled(cluster, ended), BUSY_S)
        refused = {one.result() for one in ended if one.done()}
        # On busy cores the event loop that all of this shares is late with a report, so that no executor is known for
        # a moment, or with accepting calls, of which gRPC cancels those that have waited for 30 s.
        unavailable = {("UNAVAILABLE", reason) for reason in ("STORE_UNAVAILABLE", "NO_EXECUTOR")}
        assert refused <= {("RESOURCE_EXHAUSTED", "QUEUE_FULL"), *unavailable, ("CANCELLED", "–")}
        # And when one that waits has gone (of five that leave, four at most have a seat), another tenant is served at
        # once: fair shares go by tenant
        for call in [call for call, one in zip(calls, ended, strict=True) if not one.done()][-5:]:
            call.cancel()
        async with asyncio.timeout(BUSY_S):
            while sum((await dispatcher_of(cluster).snapshot()).num_waiting) >= settings.max_queue_requests:
                await asyncio.sleep(0.01)
        executor.brake.release()
        assert ids_of(await collect(router, token_request([2], 6), HANG_S)) == expected_ids([2], 6)
        for call in calls:
            call.cancel()
        await asyncio.gather(*ended)
        await check_unharmed(cluster)


def is_settled(cluster: Cluster, ended: list[asyncio.Task[tuple[str, str]]]) -> bool:
    """Whether each call has ended at its client, or waits or has a seat at the router.

    A call that the router has not accepted yet, and a stream that has not gone yet though its call has ended, must not
    make up for each other: so each stream is asked for its state, at the instant at which both are counted.
    """
    streams = list(dispatcher_of(cluster).streams)
    settled = (LifecycleState.WAITING, LifecycleState.PLACED)
    return all(stream.life.state in settled for stream in streams) and len(streams) == sum(
        not one.done() for one in ended
    )


def inference_stub(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceServiceStub(channel)


async def status(call: Any) -> tuple[str, str]:
    """How a call ends, read or not."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except asyncio.CancelledError:
        return "CANCELLED", ""
    except grpc.aio.AioRpcError as error:
        return status_of(error)
    return "OK", ""


def dispatcher_of(cluster: Cluster) -> Any:
    (pool,) = cluster.routers[0].pools.by_name.values()
    return pool.dispatcher


@contextmanager
def suppress_unavailable() -> Iterator[None]:
    """Where the one loop that all of this shares is late with the ledger's answers, clients are told to come again."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise


async def test_clients_that_reconnect_all_at_once_are_served(redis_url: str, pool: str) -> None:
    # A channel of its own, so a connection of its own
    options = (("grpc.use_local_subchannel_pool", 1),)

    async def come_and_go(address: str, number: int) -> list[int]:
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            with suppress_unavailable():
                await inference_stub(channel).Generate(token_request([number % 5], 12)).read()
        while True:
            async with grpc.aio.insecure_channel(address, options=options) as channel:
                with suppress_unavailable():
                    return ids_of(await rest(inference_stub(channel).Generate(token_request([number % 5], 6))))

    async with run_cluster(redis_url, pool, shape=ExecutorShape(max_num_sequences=8)) as cluster:
        address = cluster.routers[0].address
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(come_and_go(address, i) for i in range(100)))
        assert answers == [expected_ids([i % 5], 6) for i in range(100)]
        await check_unharmed(cluster)
