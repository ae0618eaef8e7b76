"""Outage of Redis: running requests continue, new ones are refused at once with a retry hint until it is back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from inflight.local.redis_server import PrivateRedis
from tests.integration.test_requests import collect, expected_ids, ids_of, rest
from tests.support.stack.cluster import ExecutorShape, run_cluster, token_request, until_ready


async def test_streams_outlive_redis_and_new_work_is_refused_until_it_is_back(tmp_path: Path, pool: str) -> None:
    socket = tmp_path / "redis.sock"
    redis = PrivateRedis.start(tmp_path / "redis.log", unix_socket=socket)
    async with run_cluster(redis.url, pool) as cluster:
        router, brake = cluster.routers[0], cluster.executors[0].brake
        # Given a stream that runs
        brake.hold()
        running = router.stub.Generate(token_request([1, 2], 20))
        await running.read()
        # When Redis dies
        redis.stop()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(router, token_request([3], 5))
        # Then new work is refused with a hint, and the stream goes on
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        status = status_pb2.Status.FromString(dict(error.value.trailing_metadata())["grpc-status-details-bin"])
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.ToMilliseconds() > 0
        brake.release()
        assert ids_of(await rest(running)) == expected_ids([1, 2], 20)
        # When it is back, and empty
        with PrivateRedis.start(tmp_path / "redis-2.log", unix_socket=socket):
            await until_ready(router, 1)
            async with asyncio.timeout(60):
                assert ids_of(await collect(router, token_request([3], 5))) == expected_ids([3], 5)


async def test_waiting_requests_keep_waiting_when_redis_comes_back_empty(tmp_path: Path, pool: str) -> None:
    socket = tmp_path / "redis.sock"
    redis = PrivateRedis.start(tmp_path / "redis.log", unix_socket=socket)
    async with run_cluster(redis.url, pool, shape=ExecutorShape(max_num_sequences=1)) as cluster:
        router, brake = cluster.routers[0], cluster.executors[0].brake
        # Given one request on the only seat and one that waits
        brake.hold()
        running = router.stub.Generate(token_request([1, 2], 8))
        await running.read()
        waiting = router.stub.Generate(token_request([4], 6, want_queue_events=True))
        assert (await waiting.read()).event.HasField("queued")
        # When Redis is replaced by an empty one
        redis.stop()
        with PrivateRedis.start(tmp_path / "redis-2.log", unix_socket=socket):
            await until_ready(router, 1)
            brake.release()
            # Then both get their tokens
            assert ids_of(await rest(running)) == expected_ids([1, 2], 8)
            async with asyncio.timeout(60):
                assert ids_of(await rest(waiting)) == expected_ids([4], 6)
