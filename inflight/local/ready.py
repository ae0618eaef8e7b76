"""Waits until a server is ready: by gRPC health `Watch`, or by polling over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inflight.common.rpc.options import NO_PROXY

# Fast enough to find a server that has just started to listen, slow enough for one that still loads.
_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    NO_PROXY,
]

HTTP_RETRY_S = 0.1


async def wait_until_serving(
    address: str, service: str, timeout_s: float, credentials: grpc.ChannelCredentials | None = None
) -> None:
    """Returns when `service` at `address` is SERVING. No credentials: no TLS.

    Raises:
        TimeoutError: it is not SERVING within `timeout_s` seconds.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    async with asyncio.timeout(timeout_s), _channel(address, credentials) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for response in stub.Watch(request, wait_for_ready=True):
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError as error:
                # The server has gone: `wait_for_ready` waits for the next.
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise


async def wait_until_http_ready(address: str, timeout_s: float) -> None:
    """Returns when the server at `address` answers `GET /ready` with 200.

    Raises:
        TimeoutError: it does not within `timeout_s` seconds.
    """
    async with asyncio.timeout(timeout_s):
        while not await _is_http_ready(address):  # noqa: ASYNC110 - another process sets no event here
            await asyncio.sleep(HTTP_RETRY_S)


async def _is_http_ready(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:
        return False
    try:
        writer.write(f"GET /ready HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()


def _channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, _OPTIONS)
    return grpc.aio.secure_channel(address, credentials, [*_OPTIONS, ("grpc.ssl_target_name_override", "localhost")])
