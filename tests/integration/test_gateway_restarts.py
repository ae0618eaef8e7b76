"""Gateways as processes that are restarted in turn, under clients that keep their connections."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import ge
from pathlib import Path

import openai
import pytest

from inflight.local.ports import free_ports
from inflight.local.process import ChildProcess
from tests.integration.test_gateway import address_of, held_body, words
from tests.support.stack.cluster import Cluster

READY_S = 60.0
NUM_CLIENTS = 6
# Calls of each client before the next event.
NUM_CALLS = 3
PROMPT = [1, 2]
MAX_TOKENS = 9


class Balancer:
    """Spreads new connections over addresses, as kube-proxy does. One that is taken out keeps its connections."""

    def __init__(self, addresses: list[str]) -> None:
        self.addresses = addresses
        self.num_connections: Counter[str] = Counter()
        self._working: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        try:
            yield f"http://{host}:{port}/v1"
        finally:
            server.close()
            for working in self._working:
                working.cancel()
            await asyncio.gather(*self._working, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        working = asyncio.create_task(self._connect(reader, writer))
        self._working.add(working)
        working.add_done_callback(self._working.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = min(self.addresses, key=lambda one: self.num_connections[one])
        self.num_connections[address] += 1
        host, _, port = address.rpartition(":")
        from_server, to_server = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(copy(reader, to_server))
                both.create_task(copy(from_server, writer))
        finally:
            writer.close()
            to_server.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until either side ends the connection, and ends the other."""
    with contextlib.suppress(ConnectionError):
        while received := await reader.read(65536):
            writer.write(received)
            await writer.drain()
    writer.close()


class Clients:
    """Clients with a connection pool each that call without a pause."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self.failures: list[str] = []
        self._num_calls = [0] * NUM_CLIENTS
        self._has_ended = asyncio.Condition()

    @asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            calling = [group.create_task(self._call(number)) for number in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                for task in calling:
                    task.cancel()

    async def wait(self) -> None:
        """Returns when each client has ended `NUM_CALLS` more calls."""
        wanted = [num_calls + NUM_CALLS for num_calls in self._num_calls]
        async with self._has_ended:
            await self._has_ended.wait_for(lambda: all(map(ge, self._num_calls, wanted)))

    async def _call(self, number: int) -> None:
        body = held_body(self._model, MAX_TOKENS)
        body["extra_body"] = {"ignore_eos": body.pop("ignore_eos")}
        async with openai.AsyncOpenAI(base_url=self._url, api_key="none") as client:
            while True:
                try:
                    if number % 2:
                        text = (await client.completions.create(**body)).choices[0].text
                    else:
                        chunks = await client.completions.create(**body, stream=True)
                        text = "".join([chunk.choices[0].text async for chunk in chunks])
                    assert text == words(PROMPT, MAX_TOKENS)
                except openai.APIError as error:
                    self.failures.append(repr(error))
                self._num_calls[number] += 1
                async with self._has_ended:
                    self._has_ended.notify_all()


async def start_gateway(name: str, address: str, router: str, folder: Path) -> ChildProcess:
    command = [sys.executable, "-m", "inflight.cli.main", "gateway", "--listen", address, "--routers", router]
    child = await ChildProcess.start(name, "gateway", address, command, folder / f"{name}.log", {})
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(READY_S):
        while True:
            with contextlib.suppress(ConnectionError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return child
            assert child.exit_code is None, child.log_tail()
            await asyncio.sleep(0.05)


@asynccontextmanager
async def unfinished_request(address: str) -> AsyncIterator[None]:
    """A request whose body is still under way, so that a drain takes as long as the block."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")
    await reader.readuntil(b"100 Continue\r\n\r\n")
    yield
    writer.write(b"{}")
    assert b"model: is required" in await reader.read()
    writer.close()


@pytest.mark.slow
async def test_gateways_restarted_in_turn_fail_no_request_of_clients_that_keep_their_connections(
    cluster: Cluster, pool: str, tmp_path: Path
) -> None:
    router = address_of(cluster)
    addresses = [f"127.0.0.1:{port}" for port in free_ports("127.0.0.1", 2)]
    gateways = [await start_gateway(f"gateway-{number}", one, router, tmp_path) for number, one in enumerate(addresses)]
    try:
        balancer = Balancer(list(addresses))
        async with balancer.serving() as url:
            clients = Clients(url, pool)
            async with clients.calling():
                await clients.wait()
                for number, address in enumerate(addresses):
                    # Given a gateway that gets no new connections, as after `preStop`, and drains for a while
                    balancer.addresses.remove(address)
                    async with unfinished_request(address):
                        gateways[number].process.terminate()
                        await clients.wait()
                    # When it is replaced
                    async with asyncio.timeout(READY_S):
                        assert await gateways[number].wait() == 0
                    gateways[number] = await start_gateway(f"next-{number}", address, router, tmp_path)
                    balancer.addresses.append(address)
                    await clients.wait()
            # Then no client has noticed
            assert clients.failures == []
    finally:
        for gateway in gateways:
            await gateway.stop(10)
