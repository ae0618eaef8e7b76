"""The board's page and stream on a real router's HTTP port, read without a browser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from inflight.common.http.port import HttpPort
from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2
from tests.support.stack.cluster import run_cluster, token_request

TIMEOUT_S = 60


@asynccontextmanager
async def reply(address: str, path: str) -> AsyncIterator[tuple[int, asyncio.StreamReader]]:
    """The status of a GET, and what follows its headers."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(f"GET {path} HTTP/1.1\r\nhost: board.test\r\nconnection: close\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            yield int(head.split()[1]), reader
    finally:
        writer.close()


@asynccontextmanager
async def started(http: HttpPort | None) -> AsyncIterator[str]:
    assert http is not None
    address = await http.start("127.0.0.1:0")
    try:
        yield address
    finally:
        await http.stop()


async def test_stream_of_a_router_tells_of_its_executors_and_ends_with_the_router(redis_url: str, pool: str) -> None:
    settings = RouterSettings(http_listen="127.0.0.1:0", no_executor_grace_s=60.0)
    async with run_cluster(redis_url, pool, executors=2, settings=settings) as cluster:
        parts = cluster.routers[0].parts
        async with started(parts.http) as address:
            async with reply(address, "/") as (status, page):
                assert status == 200
                assert b"<title>inflight dashboard</title>" in await page.read()
            async with reply(address, "/board/stats") as (status, stream):
                assert status == 200
                await stream.readline()  # the chunk's length
                message = json.loads(await stream.readline())
                assert message["routerId"] == parts.router_id
                assert [one["capacity"]["seatsTotal"] for one in message["executors"]] == [4, 4]
                # When the router has drained
                parts.stats.close()
                # Then the stream ends in good order
                assert (await stream.read()).endswith(b"0\r\n\r\n")


async def read_to_the_end(call: AsyncIterator[inference_pb2.GenerateResponse]) -> None:
    async for _ in call:
        pass


async def test_stream_tells_what_became_of_a_request_whose_executor_was_lost(redis_url: str, pool: str) -> None:
    settings = RouterSettings(http_listen="127.0.0.1:0", no_executor_grace_s=30.0)
    async with run_cluster(redis_url, pool, executors=2, settings=settings) as cluster:
        parts = cluster.routers[0].parts
        assert parts.sampler is not None
        for executor in cluster.executors:
            executor.brake.hold()
        request = token_request([1, 2, 3], 8, request_id="moving")
        call = cluster.routers[0].stub.Generate(request)
        reading = asyncio.create_task(read_to_the_end(call))
        timeline = parts.watching.requests.find(pool, "default", "moving")
        while timeline is None or not timeline.executor_id:
            await asyncio.sleep(0.01)
            timeline = parts.watching.requests.find(pool, "default", "moving")
        # When its executor is lost and the other may go on
        lost_id = timeline.executor_id
        lost = cluster.executors[int(lost_id[-1])]
        for executor in cluster.executors:
            if executor is not lost:
                executor.brake.release()
        await lost.stop()
        await asyncio.wait_for(reading, TIMEOUT_S)
        await parts.sampler.sample()
        async with started(parts.http) as address, reply(address, "/board/stats") as (_, stream):
            await stream.readline()  # the chunk's length
            board = json.loads(await stream.readline())["board"]
            parts.stats.close()
        assert f"{lost_id} lost, 1 request moved" in [one["text"] for one in board["events"]]
        (told,) = [one for one in board["requests"] if one["id"] == "moving"]
        stages = [one["stage"] for one in told["stages"]]
        assert stages[:2] == ["queued", "placed"]
        assert stages.count("queued") == 2
        assert stages[-1] == "decode"
        assert told["outcome"] == "length"
        assert board["samples"][-1]["models"][pool]["finished"] == {"length": 1}


async def test_router_without_a_board_serves_metrics_alone(redis_url: str, pool: str) -> None:
    settings = RouterSettings(http_listen="127.0.0.1:0", board=False, no_executor_grace_s=60.0)
    async with (
        run_cluster(redis_url, pool, settings=settings) as cluster,
        started(cluster.routers[0].parts.http) as address,
    ):
        for path, expected in {"/": 404, "/board/stats": 404, "/metrics": 200}.items():
            async with reply(address, path) as (status, _):
                assert status == expected, path
