"""`inflight healthcheck`: asks over gRPC health or HTTP, and says by its exit code what it heard."""

from __future__ import annotations

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from inflight.cli.deploy.healthcheck import address_to_ask
from inflight.cli.main import main
from inflight.common.http.port import HttpPort
from inflight.common.rpc.server import LIVE_SERVICE, GrpcServer

SERVICE = "inflight.v1.ExecutorService"


async def check(*arguments: str) -> int:
    return await asyncio.to_thread(main, ("healthcheck", *arguments))


async def test_process_that_loads_lives_and_does_not_serve_yet(capsys: pytest.CaptureFixture[str]) -> None:
    server = GrpcServer([SERVICE])
    await server.start("127.0.0.1:0")
    address = await server.start_health("127.0.0.1:0")
    assert await check("--address", address, "--service", LIVE_SERVICE) == 0
    assert await check("--address", address, "--service", SERVICE) == 1
    assert "NOT_SERVING" in capsys.readouterr().out
    await server.set_serving(True)
    assert await check("--address", address, "--service", SERVICE) == 0
    assert await check("--address", address) == 0
    # A standstill is something else than taking no new work
    await server.set_live(False)
    assert await check("--address", address, "--service", LIVE_SERVICE) == 1
    assert await check("--address", address, "--service", SERVICE) == 0
    assert await check("--address", address, "--service", "unknown") == 1
    await server.stop(0)
    assert await check("--address", address, "--timeout-s", "1") == 1


async def test_http_is_asked_by_a_get(capsys: pytest.CaptureFixture[str]) -> None:
    async def health(request: object) -> PlainTextResponse:
        return PlainTextResponse("ok")

    port = HttpPort(Starlette(routes=[Route("/health", health)]))
    address = await port.start("127.0.0.1:0")
    assert await check("--address", f"http://{address}/health") == 0
    assert await check("--address", f"http://{address}/other") == 1
    assert "status 404" in capsys.readouterr().out
    await port.stop()
    assert await check("--address", f"http://{address}/health") == 1


@pytest.mark.parametrize(
    ("listen", "asked"),
    [
        ("0.0.0.0:50052", "127.0.0.1:50052"),
        ("[::]:50052", "127.0.0.1:50052"),
        (":50052", "127.0.0.1:50052"),
        ("10.1.2.3:50052", "10.1.2.3:50052"),
    ],
)
def test_process_of_the_container_is_asked_on_loopback(listen: str, asked: str) -> None:
    assert address_to_ask(None, {"INFLIGHT_HEALTH_LISTEN": listen}) == asked
    assert address_to_ask("there:1", {"INFLIGHT_HEALTH_LISTEN": listen}) == "there:1"


def test_without_flag_and_variable_there_is_no_address() -> None:
    assert address_to_ask(None, {}) is None
