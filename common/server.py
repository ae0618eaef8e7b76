"""A gRPC server's life: start, serve, drain, stop. Shared by router and executor.

Owns listening, health (with `Watch`), reflection and signals; knows no service. The first SIGTERM or SIGINT drains, the
second exits at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.grpc_status import ErrorInterceptor

log = logging.getLogger(__name__)

# Keepalive: both ends agree, so that neither answers the other's pings with GOAWAY too_many_pings.
KEEPALIVE_TIME_MS = 30_000
KEEPALIVE_TIMEOUT_MS = 10_000
MIN_PING_INTERVAL_MS = 10_000

# Above the largest prompt that validation lets through, so that too large a prompt gets validation's own answer.
MAX_RECEIVE_BYTES = 32 * 1024 * 1024

# Calls that wait to be taken up by the loop. gRPC's own limits, of 1,000 by chance and 3,000 for certain, answer one
# burst of a single client with CANCELLED, and whoever else calls then too; what may wait is the queue's to say.
MAX_PENDING_CALLS = 100_000


class ListenError(Exception):
    """The address cannot be listened on. The text says why."""


def channel_options() -> list[tuple[str, int]]:
    """Options for every channel that this project opens."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.max_send_message_length", MAX_RECEIVE_BYTES),
    ]


def _server_options() -> list[tuple[str, int]]:
    return [
        *channel_options(),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        # Without this a second server on the same port would start and silently take half of the connections.
        ("grpc.so_reuseport", 0),
    ]


def check_listen(listen: str) -> None:
    """Fails early, before minutes of loading, where `listen` cannot be had.

    Raises:
        ListenError: the port is in use, or the address is not this machine's.
    """
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, ValueError) as error:
        raise ListenError(f"cannot listen on {listen}: {error}") from error


class GrpcServer:
    """A listening gRPC server with health and reflection for the services named."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self.grpc = grpc.aio.server(interceptors=[ErrorInterceptor()], options=_server_options())
        self._service_names = ("", *service_names)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)

    async def start(self, listen: str) -> str:
        """Listens on `host:port` (port 0 takes a free one) and returns the address with its port.

        Raises:
            ListenError: the port is in use, or the address is not this machine's.
        """
        await self.set_serving(False)
        host, _, _ = listen.rpartition(":")
        try:
            port = self.grpc.add_insecure_port(listen)
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {listen}: the port is in use or the address is not local") from error
        if port == 0:
            raise ListenError(f"cannot listen on {listen}: not an address")
        await self.grpc.start()
        return f"{host}:{port}"

    async def set_serving(self, serving: bool) -> None:
        """Sets the health status of every service; watchers are told."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in self._service_names:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Refuses new RPCs, lets running ones end for `grace_s` seconds, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)


class Signals:
    """First SIGTERM or SIGINT sets `drain`; the second ends the process at once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.drain = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self.drain.is_set():
            log.warning("second signal: exiting at once")
            logging.shutdown()
            os._exit(128 + number)
        log.info("%s: draining; a second signal exits at once", signal.Signals(number).name)
        self.drain.set()
