"""Functions of every server besides its service: health with `Watch`, reflection, and finding executors by name."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from inflight.common.http.port import HttpPort
from inflight.common.rpc.server import GrpcServer, ListenError, bind, check_listen
from inflight.local.ready import wait_until_http_ready, wait_until_serving
from inflight.router.discovery import AddressError, check_address, watch
from tests.integration.test_requests import collect, expected_ids, ids_of
from tests.support.stack.cluster import (
    ExecutorShape,
    run_cluster,
    run_router,
    start_executor,
    token_request,
    until_ready,
)

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_watch_tells_every_change() -> None:
    server = GrpcServer(["some.Service"])
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watching = stub.Watch(health_pb2.HealthCheckRequest(service="some.Service"))
        assert (await watching.read()).status == NOT_SERVING
        await server.set_serving(True)
        assert (await watching.read()).status == SERVING
        await server.set_serving(False)
        assert (await watching.read()).status == NOT_SERVING
        watching.cancel()
    await server.stop(0)


async def test_reflection_lists_the_services(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        call.cancel()
    assert {"inflight.v1.InferenceService", "grpc.health.v1.Health"} <= names


async def test_second_server_on_a_port_is_refused() -> None:
    first = GrpcServer([])
    address = await first.start("127.0.0.1:0")
    with pytest.raises(ListenError, match=address):
        check_listen(address)
    with pytest.raises(ListenError, match=address):
        await GrpcServer([]).start(address)
    await first.stop(0)


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536", "127.0.0.1:-1", ""])
def test_what_is_no_address_to_listen_on_is_refused(listen: str) -> None:
    with pytest.raises(ListenError, match=f"^cannot listen on '{listen}': not an address host:port"):
        check_listen(listen)


async def test_executor_is_found_by_its_dns_name(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        port = cluster.executors[0].address.rpartition(":")[2]
        found = watch([f"dns:///localhost:{port}"], interval_s=60)
        addresses = await anext(aiter(found))
        await found.aclose()  # type: ignore[attr-defined]
        assert f"127.0.0.1:{port}" in addresses
        assert ids_of(await collect(cluster.routers[0], token_request([2], 4))) == expected_ids([2], 4)


async def test_name_that_cannot_be_looked_up_keeps_the_addresses_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[str] | None] = [["10.0.0.1", "10.0.0.2"], None, ["10.0.0.3"]]

    async def look_up(host: str, port: int, **_: object) -> list[Any]:
        answer = answers.pop(0)
        if answer is None:
            raise socket.gaierror("the resolver is down")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (ip, port)) for ip in answer]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    seen = []
    async for addresses in watch(["dns:///executors:7", "10.9.9.9:1"], interval_s=0):
        seen.append(addresses)
        if len(seen) == 2:
            break
    assert seen == [{"10.0.0.1:7", "10.0.0.2:7", "10.9.9.9:1"}, {"10.0.0.3:7", "10.9.9.9:1"}]


async def test_host_with_addresses_of_both_families_is_one_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {
        "both": [(socket.AF_INET6, "fd00::1"), (socket.AF_INET, "10.0.0.1"), (socket.AF_INET, "10.0.0.2")],
        "six": [(socket.AF_INET6, "fd00::1"), (socket.AF_INET6, "fd00::2")],
    }

    async def look_up(host: str, port: int, **_: object) -> list[Any]:
        return [(family, socket.SOCK_STREAM, 0, "", (ip, port)) for family, ip in addresses[host]]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    found = watch(["dns:///both:7", "dns:///six:7"], interval_s=60)
    assert await anext(aiter(found)) == {"10.0.0.1:7", "10.0.0.2:7", "[fd00::1]:7", "[fd00::2]:7"}
    await found.aclose()  # type: ignore[attr-defined]


async def until_they_answer(grpc_port: str, http_port: str, host: str) -> None:
    """Waits until both ports answer at this host."""
    await wait_until_serving(f"{host}:{grpc_port}", "", 60)
    await wait_until_http_ready(f"{host}:{http_port}", 60)


@pytest.mark.parametrize("listen", ["[::]:0", ":0"])
async def test_every_interface_is_that_of_ipv4_and_ipv6(listen: str) -> None:
    server = GrpcServer([])
    http = HttpPort(Starlette(routes=[Route("/ready", lambda _: PlainTextResponse("ready"))]))
    grpc_port = (await server.start(listen)).rpartition(":")[2]
    http_port = (await http.start(listen)).rpartition(":")[2]
    await server.set_serving(True)
    await until_they_answer(grpc_port, http_port, "127.0.0.1")
    if socket.has_dualstack_ipv6():
        await until_they_answer(grpc_port, http_port, "[::1]")
        with pytest.raises(ListenError, match="in use"):
            check_listen(f"[::]:{grpc_port}")
    await server.stop(0)
    await http.stop()


async def test_every_interface_is_that_of_ipv4_on_a_system_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    port = bind("[::]:0")
    assert port.family == socket.AF_INET
    port.close()


async def test_cluster_on_ipv6_alone_serves(redis_url: str, pool: str) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    async with AsyncExitStack() as stack:
        executor = await start_executor("executor", pool, ExecutorShape(), host="[::1]")
        stack.push_async_callback(executor.stop)
        router = await stack.enter_async_context(
            run_router(f"{pool}-router", pool, redis_url, [executor.address], host="[::1]")
        )
        await until_ready(router, 1)
        assert ids_of(await collect(router, token_request([2], 4))) == expected_ids([2], 4)


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:port", "host:70000", "dns:///host"])
def test_malformed_executor_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="host:port"):
        check_address(address)
