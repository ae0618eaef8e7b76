"""`ExecutorService` as a router, or an operator, calls it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from inflight.v1 import executor_pb2, executor_pb2_grpc
from tests.integration.test_requests import collect, expected_ids, ids_of, rest
from tests.support.stack.cluster import run_cluster, token_request


async def hello_only(hello: executor_pb2.Hello) -> AsyncIterator[executor_pb2.ServeRequest]:
    yield executor_pb2.ServeRequest(hello=hello)


async def test_drain_lets_the_running_end_and_takes_no_new_request(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, executors=2) as cluster:
        router = cluster.routers[0]
        for executor in cluster.executors:
            executor.brake.hold()
        running = router.stub.Generate(token_request([1], 6))
        await running.read()
        async with grpc.aio.insecure_channel(cluster.executors[0].address) as channel:
            stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
            held = (await stub.Drain(executor_pb2.DrainRequest(timeout_s=0))).num_held
            assert held == cluster.executors[0].scheduler.num_held
            later = asyncio.create_task(collect(router, token_request([2], 5)))
            for executor in cluster.executors:
                executor.brake.release()
            assert ids_of(await rest(running)) == expected_ids([1], 6)
            assert ids_of(await later) == expected_ids([2], 5)
            assert (await stub.Drain(executor_pb2.DrainRequest(timeout_s=10))).num_held == 0
        # The one that drains has boarded no request since.
        assert len(cluster.executors[0].device.boarded) == held
        assert len(cluster.executors[1].device.boarded) == 2 - held


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (executor_pb2.Hello(protocol_version=1, generation=99), grpc.StatusCode.FAILED_PRECONDITION),
        (executor_pb2.Hello(protocol_version=7, generation=1), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_router_that_means_another_executor_is_refused(
    redis_url: str, pool: str, hello: executor_pb2.Hello, code: grpc.StatusCode
) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.executors[0].address) as channel,
    ):
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Serve(hello_only(hello)).read()
    assert error.value.code() is code
