"""The gateway process: it builds everything, serves, drains and stops.

Exit codes: 0 after a drain, 2 for a setting that cannot be used, 3 for an address that cannot be listened on.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from inflight import AsyncClient
from inflight.access import is_this_machine
from inflight.common.http.connection import HttpLimits
from inflight.common.http.port import HttpPort
from inflight.common.machine import RESERVED_FILES, max_client_connections
from inflight.common.process import run_process
from inflight.common.rpc.addresses import host_of
from inflight.common.rpc.server import Signals, check_listen
from inflight.common.rpc.tls import TlsFiles, TlsPaths
from inflight.common.settings import SettingError, describe, load
from inflight.common.telemetry.logs import start_logging
from inflight.gateway.app import GatewayApp
from inflight.gateway.batches.batches import open_batches
from inflight.gateway.conversion import defaults_of
from inflight.gateway.metrics import Metrics
from inflight.gateway.responses.stored import stored_responses
from inflight.gateway.service import GatewayService
from inflight.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)

RESOLVE_TIMEOUT_S = 5.0
# Targets of gRPC that are no host names, such as unix:/path or ipv4:127.0.0.1:1.
_OTHER_SCHEME = re.compile(r"(?!dns:///)[a-z0-9+.-]+:(?!\d+$)")


def main(argv: Sequence[str]) -> int:
    """Runs a gateway until it is told to stop. Returns the exit code."""
    return run_process(lambda: _run_with_settings(argv))


def _run_with_settings(argv: Sequence[str]) -> int:
    settings = load(GatewaySettings, "inflight gateway", argv)
    start_logging("gateway", settings.log_level, settings.log_format)
    for line in describe(settings):
        log.info("setting %s", line)
    check_listen(settings.listen)
    check_connections(settings)
    return asyncio.run(run_gateway(settings))


async def run_gateway(settings: GatewaySettings) -> int:
    """Runs the process: start → serve → drain → stop."""
    signals = Signals(asyncio.get_running_loop())
    client = open_client(settings)
    metrics = Metrics()
    async with (
        stored_responses(client, settings, defaults_of(settings), metrics) as stored,
        open_batches(client, settings, metrics) as batches,
    ):
        app = GatewayApp(GatewayService(client, settings, metrics, stored, batches), settings, metrics)
        certificates = open_certificates(settings)
        port = open_port(app, settings, certificates)
        address = await port.start(settings.listen)
        log.info("gateway serves %s on %s", ", ".join(settings.routers), address)
        await warn_of_unknown_names(settings.routers)

        async with _following(certificates):
            await signals.drain.wait()

        app.drain()
        if stored is not None:
            await stored.background.leases.give_back()
        if batches is not None:
            await batches.leases.give_back()
        if num_open := await port.drain(settings.drain_timeout_s):
            log.warning("drain: %d connections are still in use; their requests are aborted", num_open)
        await port.stop()
    await client.close()
    log.info("stopped")
    return 0


async def warn_of_unknown_names(routers: Sequence[str]) -> None:
    """Warns of routers whose host name cannot be resolved. That is no error: in a cluster, the name of routers that
    are still starting may appear later."""
    for router in routers:
        if _OTHER_SCHEME.match(router):
            continue
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                await asyncio.get_running_loop().getaddrinfo(host_of(router.removeprefix("dns:///")), None)
        except TimeoutError:
            reason = "DNS does not answer"
        except (OSError, UnicodeError) as error:  # UnicodeError: it is no host name
            reason = getattr(error, "strerror", None) or str(error)
        else:
            continue
        log.warning(
            "--routers (INFLIGHT_ROUTERS): the host name of %r cannot be resolved (%s); requests are answered with 503 "
            "until it can",
            router,
            reason,
        )


@asynccontextmanager
async def _following(certificates: TlsFiles | None) -> AsyncIterator[None]:
    """Follows changes of the certificates during the block."""
    async with asyncio.TaskGroup() as tasks:
        task = None if certificates is None else tasks.create_task(certificates.follow(), name="certificates")
        yield
        if task is not None:
            task.cancel()


def open_client(settings: GatewaySettings) -> AsyncClient:
    """Opens the client of the routers. Raises `SettingError` if the settings do not allow one."""
    try:
        if settings.router_tls_ca_file is None:
            if not all(map(is_this_machine, settings.routers)):
                log.warning("the keys of clients are sent to routers without TLS: set router_tls_ca_file")
            return AsyncClient(*settings.routers, share_calls=settings.share_calls, http_proxy=False)
        return AsyncClient(
            *settings.routers,
            share_calls=settings.share_calls,
            http_proxy=False,
            credentials=_credentials(settings),
            server_name=settings.router_tls_name or None,
        )
    except ValueError as error:
        raise SettingError(f"--routers (INFLIGHT_ROUTERS): {error}") from None


def _credentials(settings: GatewaySettings) -> grpc.ChannelCredentials:
    assert settings.router_tls_ca_file is not None
    key, certificate = settings.router_tls_key_file, settings.router_tls_cert_file
    return grpc.ssl_channel_credentials(
        _read("router_tls_ca_file", settings.router_tls_ca_file),
        None if key is None else _read("router_tls_key_file", key),
        None if certificate is None else _read("router_tls_cert_file", certificate),
    )


def _read(setting: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingError(f"{setting}: cannot read {path}: {error.strerror}") from None


def open_certificates(settings: GatewaySettings) -> TlsFiles | None:
    """Returns the certificates to serve clients with; None for serving without TLS. Raises `SettingError`."""
    paths = TlsPaths.of(settings.tls_cert_file, settings.tls_key_file, None, prefix="")
    return None if paths is None else TlsFiles.open(paths)


def check_connections(settings: GatewaySettings) -> None:
    """Raises `SettingError` if this process has fewer file descriptors than concurrent requests need."""
    if settings.max_requests > max_client_connections():
        raise SettingError(
            f"--max-requests (INFLIGHT_MAX_REQUESTS): {settings.max_requests} need as many file descriptors and "
            f"{RESERVED_FILES} more; raise their limit (ulimit -n, LimitNOFILE=), or lower the setting to "
            f"{max_client_connections()}"
        )


def open_port(app: GatewayApp, settings: GatewaySettings, certificates: TlsFiles | None) -> HttpPort:
    """Opens the port for clients, with HTTPS if there are certificates. Raises `SettingError`."""
    # As many connections as requests may be idle. One address may be a proxy with all clients behind it. Streams have
    # their own, shorter limit for unread data.
    limits = HttpLimits(
        max_connections=2 * settings.max_requests,
        max_per_address=None,
        idle_s=settings.idle_timeout_s,
        write_s=settings.write_timeout_s + 1,
    )
    return HttpPort(app, limits=limits, tls=None if certificates is None else certificates.ssl_context())
