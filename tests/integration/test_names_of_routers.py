"""Clients whose routers' name has no address at first, as that of a headless Service before its first pod is ready."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import inflight.aio_connection
import inflight.sync_connection
from inflight import AsyncClient, Client, InflightError
from inflight.errors import unresolved_target

NO_SUCH_NAME, NO_ADDRESS = 3, 0
TYPE_A = 1


class Dns(asyncio.DatagramProtocol):
    """A DNS server for one name: `failure` as the response code, and from `is_known` on the address 127.0.0.1."""

    def __init__(self, failure: int) -> None:
        self.is_known = False
        self._failure = failure
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, asked: bytes, address: tuple[str | None, int]) -> None:
        assert self._transport is not None
        end = asked.index(0, 12) + 5  # of the question: the name's labels, a type and a class
        (kind,) = struct.unpack(">H", asked[end - 4 : end - 2])
        answer = b"\xc0\x0c" + struct.pack(">HHIH4B", TYPE_A, 1, 0, 4, 127, 0, 0, 1)
        answers = answer if self.is_known and kind == TYPE_A else b""
        code = 0 if self.is_known else self._failure
        header = asked[:2] + struct.pack(">5H", 0x8180 | code, 1, int(bool(answers)), 0, 0)
        self._transport.sendto(header + asked[12:end] + answers, address)


@pytest.fixture(params=[NO_SUCH_NAME, NO_ADDRESS], ids=["no such name", "no address"])
async def dns(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Dns, str]]:
    """The DNS server, and a target of gRPC that asks it for a name, with the port of a server that is ready."""
    transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Dns(request.param), local_addr=("127.0.0.1", 0)
    )
    router = grpc.aio.server()
    status = health.aio.HealthServicer()
    await status.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(status, router)
    port = router.add_insecure_port("127.0.0.1:0")
    await router.start()
    yield server, f"dns://127.0.0.1:{transport.get_extra_info('sockname')[1]}/routers.test:{port}"
    await router.stop(None)
    transport.close()


async def test_client_finds_routers_whose_name_gets_an_address_later(
    dns: tuple[Dns, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, target = dns
    async with AsyncClient(target) as client:
        # Given calls that fail, until gRPC itself would ask DNS again only after a long time
        monkeypatch.setattr(inflight.aio_connection, "RESOLVE_AGAIN_S", 3600.0)
        assert not await client.is_serving()
        with pytest.raises(InflightError) as caught:
            await client.list_models()
        assert unresolved_target(caught.value)
        # When the name gets an address, and the time of a channel without one has passed
        server.is_known = True
        monkeypatch.setattr(inflight.aio_connection, "RESOLVE_AGAIN_S", 0.0)
        await client.is_serving()
        # Then the next call finds the router
        assert await client.is_serving()


async def test_blocking_client_finds_routers_whose_name_gets_an_address_later(
    dns: tuple[Dns, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, target = dns
    with Client(target) as client:
        assert not await asyncio.to_thread(client.is_serving)
        server.is_known = True
        monkeypatch.setattr(inflight.sync_connection, "RESOLVE_AGAIN_S", 0.0)
        await asyncio.to_thread(client.is_serving)
        assert await asyncio.to_thread(client.is_serving)
