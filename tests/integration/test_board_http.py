"""The board's page and stream on a real router's HTTP port, read without a browser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.http_port import HttpPort
from router.settings import RouterSettings
from tests.cluster import run_cluster

TIMEOUT_S = 30


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
    settings = RouterSettings(http_listen="127.0.0.1:0", no_executor_grace_s=1.0)
    async with run_cluster(redis_url, pool, executors=2, settings=settings) as cluster:
        parts = cluster.routers[0].parts
        async with started(parts.http) as address:
            async with reply(address, "/") as (status, page):
                assert status == 200
                assert b"<title>inflight board</title>" in await page.read()
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


async def test_router_without_a_board_serves_metrics_alone(redis_url: str, pool: str) -> None:
    settings = RouterSettings(http_listen="127.0.0.1:0", board=False, no_executor_grace_s=1.0)
    async with (
        run_cluster(redis_url, pool, settings=settings) as cluster,
        started(cluster.routers[0].parts.http) as address,
    ):
        for path, expected in {"/": 404, "/board/stats": 404, "/metrics": 200}.items():
            async with reply(address, path) as (status, _):
                assert status == expected, path
