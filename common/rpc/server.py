"""Lifecycle of a gRPC server: start, serve, drain, stop. Shared by router and executor.

It owns listening, the limits of connections, keepalive, health (with `Watch`), reflection and signals, and knows no
service. The first SIGTERM or SIGINT drains, the second exits at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inflight.common.rpc.options import MAX_RECEIVE_BYTES, keepalive_timeout, options_of_both_ends
from inflight.common.rpc.status import CheckCaller, CheckPeer, ErrorInterceptor
from inflight.common.rpc.tls import TlsFiles
from inflight.common.rpc.wire_counts import DEFAULT_LIMITS as DEFAULT_WIRE_LIMITS
from inflight.common.rpc.wire_counts import WireLimits

log = logging.getLogger(__name__)

# Longer than a client's, see `inflight.common.rpc.options`.
SERVER_KEEPALIVE_TIMEOUT_MS = 20_000

# A server counts pings closer together than this as abuse, from the third on, and ends the connection with GOAWAY
# too_many_pings. gRPC's default is 5 minutes, which forbids every useful keepalive. This is half of the interval above
# and of 10 s, the minimum of clients in other languages.
MIN_PING_INTERVAL_MS = 5_000

# One write carries what has collected for an executor, or all tokens of a request that is taken over. Both ends are
# authenticated by certificates, so this guards only against accidents.
MAX_LINK_BYTES = 256 * 1024 * 1024
# A submit has some 25 fields, a cancel 4.
LINK_WIRE_LIMITS = WireLimits(max_fields=2**18)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one connection may use of a server. None: no limit."""

    max_streams: int | None = None
    max_idle_s: float | None = None
    max_age_s: float | None = None
    handshake_timeout_s: float = 20.0
    max_receive_bytes: int = MAX_RECEIVE_BYTES
    min_ping_interval_ms: int = MIN_PING_INTERVAL_MS


DEFAULT_LIMITS = ConnectionLimits()

# Any client can reach the port of probes, and a health check is small.
PROBE_LIMITS = ConnectionLimits(max_streams=16, max_idle_s=60.0, max_receive_bytes=4096)

# Calls that wait to be started by the event loop. gRPC's own limits (1,000 at random, 3,000 for all) answer a burst of
# one client, and the calls of others at that time, with CANCELLED. The queue decides how many may wait.
MAX_PENDING_CALLS = 100_000

# `getaddrinfo` takes larger numbers, and cuts them off.
MAX_PORT = 65_535


# A separate health service for supervisors that restart a hanging process (Kubernetes' liveness). It does not depend on
# executors, Redis or draining, because a restart would not help.
LIVE_SERVICE = "live"


class ListenError(Exception):
    """The address cannot be listened on. The text contains the reason."""


def _server_options(limits: ConnectionLimits) -> list[tuple[str, int]]:
    options = [
        *options_of_both_ends(limits.max_receive_bytes),
        *keepalive_timeout(SERVER_KEEPALIVE_TIMEOUT_MS),
        # gRPC's headers call this MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, but that is not what it is read by.
        ("grpc.http2.min_ping_interval_without_data_ms", limits.min_ping_interval_ms),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_handshake_timeout_ms", round(limits.handshake_timeout_s * 1000)),
        # Without this a second server on the same port would start and silently take half of the connections.
        ("grpc.so_reuseport", 0),
    ]
    if limits.max_streams is not None:
        options.append(("grpc.max_concurrent_streams", limits.max_streams))
    if limits.max_idle_s is not None:
        options.append(("grpc.max_connection_idle_ms", round(limits.max_idle_s * 1000)))
    if limits.max_age_s is not None:
        # gRPC varies it by a tenth either way, and lets the running calls end, however long they take.
        options.append(("grpc.max_connection_age_ms", round(limits.max_age_s * 1000)))
    return options


def bind(listen: str) -> socket.socket:
    """Returns a TCP socket bound to `host:port` that does not listen yet; port 0 takes a free one. The host `[::]`, or
    none, is every interface with IPv6 and IPv4, or with IPv4 alone where the system has no IPv6. gRPC does the same.

    Raises:
        ListenError: it is no address, the port is in use, or the address is not this machine's.
    """
    host, separator, number = listen.rpartition(":")
    if not (separator and number.isascii() and number.isdigit() and int(number) <= MAX_PORT):
        raise ListenError(f"cannot listen on {listen!r}: not an address host:port with a port of 0 to {MAX_PORT}")
    host = host.strip("[]")
    is_everywhere = host in ("", "::")
    if is_everywhere:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(number), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        port = socket.socket(family, kind, protocol)
        try:
            if is_everywhere and family == socket.AF_INET6:
                port.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            port.bind(address)
        except OSError:
            port.close()
            raise
    except (OSError, UnicodeError) as error:  # UnicodeError: the host is no name
        raise ListenError(f"cannot listen on {listen}: {_listen_failure(error)}") from error
    return port


def _listen_failure(error: OSError | UnicodeError) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)


def check_listen(listen: str) -> None:
    """Raises `ListenError` as `bind` does, before minutes of loading."""
    bind(listen).close()


class GrpcServer:
    """A listening gRPC server with health and reflection for the named services.

    With `tls` it serves only TLS. `check_peer` checks the sender of every call, health checks included. `check_caller`
    checks a call's metadata and method before the request is received. `wire_limits` apply to every received message.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        *,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        tls: TlsFiles | None = None,
        check_peer: CheckPeer | None = None,
        check_caller: CheckCaller | None = None,
        wire_limits: WireLimits = DEFAULT_WIRE_LIMITS,
    ) -> None:
        interceptor = ErrorInterceptor(check_peer, check_caller, wire_limits)
        self.grpc = grpc.aio.server(interceptors=[interceptor], options=_server_options(limits))
        self._tls = tls
        self._service_names = ("", *service_names)
        self._health = health.aio.HealthServicer()
        self._health_port: grpc.aio.Server | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)

    async def start(self, listen: str) -> str:
        """Listens on `host:port` (port 0 takes a free one) and returns the address with its port.

        Raises:
            ListenError: the port is in use, or the address is not this machine's.
        """
        await self.set_serving(False)
        await self.set_live(True)
        credentials = None if self._tls is None else self._tls.server_credentials()
        address = _add_port(self.grpc, listen, credentials)
        await self.grpc.start()
        return address

    async def start_health(self, listen: str) -> str:
        """Listens on another address without TLS, for health checks alone, since probes show no certificate.

        Raises:
            ListenError: see `start`.
        """
        self._health_port = grpc.aio.server(options=_server_options(PROBE_LIMITS))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_port)
        address = _add_port(self._health_port, listen, None)
        await self._health_port.start()
        return address

    async def set_serving(self, serving: bool) -> None:
        """Sets the health status of every service, and notifies watchers."""
        for name in self._service_names:
            await self._health.set(name, _status(serving))

    async def set_live(self, live: bool) -> None:
        """Sets the status of the service `LIVE_SERVICE`. Any answer shows that the event loop runs."""
        await self._health.set(LIVE_SERVICE, _status(live))

    async def stop(self, grace_s: float) -> None:
        """Refuses new RPCs, lets running ones end for `grace_s` seconds, then cancels them."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
        if self._health_port is not None:
            await self._health_port.stop(None)


def _status(good: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING


def _add_port(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> str:
    host, _, number = listen.rpartition(":")
    if not host:
        listen = f"[::]:{number}"
    try:
        port = server.add_insecure_port(listen) if credentials is None else server.add_secure_port(listen, credentials)
    except RuntimeError as error:
        raise ListenError(f"cannot listen on {listen}: the port is in use or the address is not local") from error
    if port == 0:
        raise ListenError(f"cannot listen on {listen}: not an address")
    return f"{host}:{port}"


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
