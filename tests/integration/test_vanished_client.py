"""A client whose machine or network goes away without a word: no FIN, no RST, just silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from inflight.common.rpc import server
from tests.fuzz.served import check_unharmed
from tests.integration.test_hostile_clients import dispatcher_of, inference_stub, until
from tests.integration.test_requests import collect, expected_ids, ids_of
from tests.support.stack.cluster import run_cluster, token_request

NUM_TOKENS = 40
# gRPC pings no more often than once a second. A client that stands still with the machine answers within 3 s.
PING_AFTER_MS = 1000
PING_TIMEOUT_MS = 3000


class Cable:
    """A TCP proxy that, once cut, keeps every connection open and passes nothing on."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._whole = asyncio.Event()
        self._whole.set()

    def cut(self) -> None:
        """From now on nothing gets through, either way."""
        self._whole.clear()

    @asynccontextmanager
    async def laid(self) -> AsyncIterator[str]:
        """The address at which it begins."""
        async with asyncio.TaskGroup() as tasks:
            running: list[asyncio.Task[None]] = []

            async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
                running.append(tasks.create_task(self._pass_on(reader, far_writer)))
                running.append(tasks.create_task(self._pass_on(far_reader, writer)))

            listening = await asyncio.start_server(connect, "127.0.0.1", 0)
            async with listening:
                host, port = listening.sockets[0].getsockname()
                try:
                    yield f"{host}:{port}"
                finally:  # closing the server waits for its connections since Python 3.12
                    for one in running:
                        one.cancel()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65536):
                await self._whole.wait()
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass  # the other end has closed it
        finally:
            writer.close()


@pytest.fixture
def _quick_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    real = server._server_options
    quick = {
        "grpc.keepalive_time_ms": PING_AFTER_MS,
        "grpc.keepalive_timeout_ms": PING_TIMEOUT_MS,
        "grpc.http2.ping_timeout_ms": PING_TIMEOUT_MS,
    }
    assert quick.keys() < dict(real(server.DEFAULT_LIMITS)).keys()
    monkeypatch.setattr(server, "_server_options", lambda limits: [*{**dict(real(limits)), **quick}.items()])


@pytest.mark.usefixtures("_quick_keepalive")
async def test_client_that_vanishes_is_noticed_by_keepalive_and_its_blocks_are_free(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        router, executor = cluster.routers[0], cluster.executors[0]
        executor.brake.hold()
        cable = Cable(router.address)
        async with cable.laid() as address, grpc.aio.insecure_channel(address) as channel:
            # Given a client in the middle of its output
            call = inference_stub(channel).Generate(token_request([3, 1], NUM_TOKENS))
            await call.read()
            executor.brake.permit(3)
            await until(lambda: executor.engine.num_steps == 3)
            assert executor.scheduler.pool.num_used > 0
            # When its cable is cut, the router notices after a ping without an answer (with only one of gRPC's two
            # timeouts that takes more than a minute)
            cable.cut()
            await until(lambda: all(stream.life.is_abandoned for stream in dispatcher_of(cluster).streams), 40)
            # Then its blocks are free two steps after the executor has heard of it
            await until(lambda: not executor.engine._inbox.empty())
            executor.brake.permit(2)
            await until(lambda: executor.scheduler.pool.num_used == 0)
            assert executor.engine.num_steps <= 5
            call.cancel()
        executor.brake.release()
        assert ids_of(await collect(router, token_request([2], 6))) == expected_ids([2], 6)
        await check_unharmed(cluster)
