"""Limits of one connection to a server: a client that exceeds them gets the documented answer, and others are not
affected."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inflight.common.rpc.options import (
    CHANNEL_KEEPALIVE_TIMEOUT_MS,
    KEEPALIVE_TIME_MS,
    MAX_METADATA_BYTES,
    channel_options,
)
from inflight.common.rpc.server import MIN_PING_INTERVAL_MS, ConnectionLimits, GrpcServer
from inflight.common.rpc.tls import TlsFiles, TlsPaths
from inflight.local.certificates import make_certificates
from inflight.local.ports import free_ports
from inflight.local.ready import wait_until_serving
from inflight.local.stack import ROUTER_SERVICE

SERVICE = "some.Service"
TIMEOUT_S = 60.0
FIVE_PINGS_S = 5.0
FAKE_SERVER = Path(__file__).with_name("fake_server.py")

# HTTP/2: what a client says first, with empty settings, and a frame of type 6 with eight bytes.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PING = b"\x00\x00\x08\x06\x00\x00\x00\x00\x00" + b"inflight"
PING_FRAME, GOAWAY_FRAME, ACK_FLAG = 6, 7, 1
ENHANCE_YOUR_CALM = 11


@asynccontextmanager
async def serving(limits: ConnectionLimits, tls: TlsFiles | None = None) -> AsyncIterator[str]:
    server = GrpcServer([SERVICE], limits=limits, tls=tls)
    address = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    try:
        yield address
    finally:
        await server.stop(0)


@asynccontextmanager
async def channel_to(
    address: str, *, keepalive_ms: int = KEEPALIVE_TIME_MS, answer_ms: int = CHANNEL_KEEPALIVE_TIMEOUT_MS
) -> AsyncIterator[tuple[grpc.aio.Channel, Any]]:
    """A channel with a connection of its own, and a stub. It pings after `keepalive_ms` and waits `answer_ms`."""
    options = dict(channel_options())
    times = {
        "grpc.keepalive_time_ms": keepalive_ms,
        "grpc.keepalive_timeout_ms": answer_ms,
        "grpc.http2.ping_timeout_ms": answer_ms,
    }
    assert times.keys() < options.keys()
    options |= times
    own = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=[*options.items(), *own]) as channel:
        yield channel, health_pb2_grpc.HealthStub(channel)


async def check(stub: Any, **call: Any) -> grpc.StatusCode:
    """How a small call ends."""
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S, **call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def until_disconnected(channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        state = channel.get_state()
        while state is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
            state = channel.get_state()


async def test_call_beyond_the_most_of_a_connection_waits_until_another_ends() -> None:
    async with (
        serving(ConnectionLimits(max_streams=2)) as address,
        channel_to(address) as (_, stub),
        channel_to(address) as (_, other),
    ):
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        first, second = stub.Watch(request), stub.Watch(request)
        await asyncio.gather(first.read(), second.read())
        third = asyncio.create_task(check(stub))
        # Another connection has its own two.
        assert await check(other) is grpc.StatusCode.OK
        assert not third.done()
        first.cancel()
        assert await third is grpc.StatusCode.OK
        second.cancel()


async def test_message_beyond_the_most_is_refused_and_the_connection_lives() -> None:
    async with serving(ConnectionLimits(max_receive_bytes=1000)) as address, channel_to(address) as (_, stub):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        await watch.read()
        with pytest.raises(grpc.aio.AioRpcError, match=r"RESOURCE_EXHAUSTED[\s\S]*larger than max"):
            await stub.Check(health_pb2.HealthCheckRequest(service="x" * 1001), timeout=TIMEOUT_S)
        assert await check(stub) is grpc.StatusCode.OK
        assert not watch.done()
        watch.cancel()


async def test_headers_beyond_the_most_are_refused_and_the_connection_lives() -> None:
    async with serving(ConnectionLimits()) as address, channel_to(address) as (_, stub):
        just_fits = (("authorization", "x" * (MAX_METADATA_BYTES - 1024)),)
        too_large = (("authorization", "x" * (MAX_METADATA_BYTES + 1)),)
        assert await check(stub, metadata=just_fits) is grpc.StatusCode.OK
        assert await check(stub, metadata=too_large) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await check(stub) is grpc.StatusCode.OK


async def test_connection_without_a_call_is_closed_and_opened_again_for_the_next() -> None:
    async with (
        serving(ConnectionLimits(max_idle_s=0.05)) as address,
        channel_to(address) as (idle, stub),
        channel_to(address) as (_, busy),
    ):
        watch = busy.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        await watch.read()
        assert await check(stub) is grpc.StatusCode.OK
        await until_disconnected(idle)
        assert not watch.done()
        assert await check(stub) is grpc.StatusCode.OK
        watch.cancel()


async def test_old_connection_takes_no_new_call_and_lets_its_stream_end() -> None:
    async with serving(ConnectionLimits(max_age_s=0.05)) as address, channel_to(address) as (channel, stub):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        await watch.read()
        await until_disconnected(channel)
        assert not watch.done()
        assert await check(stub) is grpc.StatusCode.OK
        watch.cancel()


async def test_connection_that_says_nothing_is_closed_and_others_are_served() -> None:
    async with serving(ConnectionLimits(handshake_timeout_s=0.1)) as address, channel_to(address) as (_, stub):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await check(stub, wait_for_ready=True) is grpc.StatusCode.OK
        async with asyncio.timeout(TIMEOUT_S):
            while await reader.read(1024):  # its own settings come first
                pass
        writer.close()
        assert await check(stub, wait_for_ready=True) is grpc.StatusCode.OK


async def test_connection_that_never_ends_its_tls_handshake_is_closed(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    tls = TlsFiles.open(TlsPaths(made.certificate("router"), made.key("router")))
    async with serving(ConnectionLimits(handshake_timeout_s=0.1), tls) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01\x02\x00")  # the beginning of a ClientHello
        # A server that has closed before the client's bytes came resets the connection.
        async with asyncio.timeout(TIMEOUT_S):
            with suppress(ConnectionResetError):
                assert await reader.read(1024) == b""
        writer.close()


async def ping_until_answered(address: str, num_pings: int) -> list[int]:
    """Pings so many times, each after the answer to the one before; returns GOAWAY's error codes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE)
    goaways: list[int] = []
    try:
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(num_pings):
                writer.write(PING)
                while not goaways:
                    head = await reader.readexactly(9)
                    payload = await reader.readexactly(int.from_bytes(head[:3]))
                    if head[3] == GOAWAY_FRAME:
                        goaways.append(int.from_bytes(payload[4:8]))
                    if head[3] == PING_FRAME and head[4] & ACK_FLAG:
                        break
    finally:
        writer.close()
    return goaways


async def test_pings_are_abuse_only_below_the_interval_that_was_set() -> None:
    """The server's interval must be the one that gRPC reads: its default of five minutes fails the first of these."""
    async with serving(ConnectionLimits(min_ping_interval_ms=0)) as address:
        assert await ping_until_answered(address, 10) == []
    async with serving(ConnectionLimits()) as address, channel_to(address) as (_, stub):
        assert await ping_until_answered(address, 10) == [ENHANCE_YOUR_CALM]
        assert await check(stub) is grpc.StatusCode.OK


def test_our_own_pings_are_twice_as_far_apart_as_a_server_demands() -> None:
    assert KEEPALIVE_TIME_MS >= 2 * MIN_PING_INTERVAL_MS
    assert dict(channel_options())["grpc.keepalive_time_ms"] == KEEPALIVE_TIME_MS


async def test_idle_client_keeps_its_connection_through_many_pings() -> None:
    """The intervals are a tenth of the real ones; gRPC pings no more often than once a second."""
    async with (
        serving(ConnectionLimits(min_ping_interval_ms=MIN_PING_INTERVAL_MS // 10)) as address,
        channel_to(address, keepalive_ms=KEEPALIVE_TIME_MS // 10, answer_ms=60_000) as (channel, stub),
    ):
        assert await check(stub) is grpc.StatusCode.OK
        # Its third ping without data brought GOAWAY; by the fifth second there have been four.
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(FIVE_PINGS_S):
                await until_disconnected(channel)
        assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_stopped_server_is_noticed_by_keepalive() -> None:
    """Both times are a tenth of the real ones. With only one of gRPC's two timeouts it takes more than a minute."""
    (port,) = free_ports("127.0.0.1", 1)
    address = f"127.0.0.1:{port}"
    server = await asyncio.create_subprocess_exec(sys.executable, str(FAKE_SERVER), "router", "--listen", address)
    try:
        await wait_until_serving(address, ROUTER_SERVICE, TIMEOUT_S)
        tenth = {"keepalive_ms": KEEPALIVE_TIME_MS // 10, "answer_ms": CHANNEL_KEEPALIVE_TIMEOUT_MS // 10}
        async with channel_to(address, **tenth) as (_, stub):
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=ROUTER_SERVICE))
            await watch.read()
            server.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await asyncio.wait_for(watch.read(), 40)
    finally:
        server.kill()
        await server.wait()
