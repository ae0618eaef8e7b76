"""Access to the routers: targets, channel options, TLS and credentials. Shared by both clients and the command line.

gRPC's own retries cover a stream until its first event. A router sends no headers before a request has a seat, so a
call to a router that stops or has no executor yet is retried transparently, on another router if there is one. Unary
calls are safe to repeat and are retried, too. No call is hedged: the router would end one of two streams of a request,
and a second request would need a second seat. `service_config.json` contains this policy, for any gRPC client: see
docs/client.md.

A key or token is sent with each call as `authorization: Bearer …`, over TLS or on this machine, never unencrypted to
another machine. No error or log of this library contains it.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypedDict

import grpc

from inflight.common.rpc.addresses import is_loopback
from inflight.common.rpc.options import NO_PROXY, channel_options

# The default timeout of unary calls, which a router answers without an executor. `Generate` has only the caller's
# timeout.
UNARY_TIMEOUT_S = 10.0

# Schemes of gRPC targets, which are passed to gRPC unchanged. gRPC would take another scheme, such as http, for a host
# name.
_SCHEME = re.compile(r"(?:dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):")
# What may precede the addresses of a target that names hosts.
_NUMERIC_OR_DNS = re.compile(r"^(?:dns:(?:///)?|ipv4:|ipv6:)")
MAX_PORT = 65_535

SERVICE_CONFIG = resources.files("inflight").joinpath("service_config.json")


def client_options(targets: Sequence[str], *, retries: bool, http_proxy: bool = True) -> list[tuple[str, int | str]]:
    """Returns channel options for these targets.

    gRPC asks a proxy also for this machine. Of several targets it asks for all addresses as one host.
    """
    options: list[tuple[str, int | str]] = [
        *channel_options(),
        ("grpc.enable_retries", int(retries)),
        ("grpc.service_config", SERVICE_CONFIG.read_text(encoding="utf-8")),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    if not http_proxy or len(targets) > 1 or is_this_machine(targets[0]):
        options.append(NO_PROXY)
    return options


def channel_target(targets: Sequence[str]) -> str:
    """Returns the gRPC target for the routers at `targets`, each `host:port`. Raises `ValueError`.

    A single target is returned unchanged, so that gRPC schemes (`dns:///name:port`, `unix:/path`) work. The host names
    of several targets are resolved here, once, because gRPC accepts a list of addresses but not of names.
    """
    if not targets:
        raise ValueError("a client needs at least one address host:port")
    for target in targets:
        if not target or target != target.strip():
            raise ValueError(f"not an address host:port: {target!r}")
    if len(targets) == 1:
        if not _SCHEME.match(targets[0]):
            _split(targets[0])
        return targets[0]
    numeric = [_lookup(target) for target in targets]
    families = {family for family, _ in numeric}
    if len(families) > 1:
        raise ValueError("IPv4 and IPv6 addresses cannot be mixed: " + ", ".join(targets))
    scheme = "ipv4" if families == {socket.AF_INET} else "ipv6"
    return f"{scheme}:" + ",".join(address for _, address in numeric)


def hosts_of(targets: Sequence[str]) -> set[str]:
    """Returns the hosts of addresses `host:port`."""
    return {_split(target)[0] for target in targets}


def is_this_machine(target: str) -> bool:
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    return all(map(is_loopback, _NUMERIC_OR_DNS.sub("", target).split(",")))


def _lookup(target: str) -> tuple[socket.AddressFamily, str]:
    host, port = _split(target)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"the host name of {target!r} cannot be resolved: {reason}") from None
    family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, f"{address[0]}:{port}" if family == socket.AF_INET else f"[{address[0]}]:{port}"


def _split(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    if not (host and "/" not in host and port.isascii() and port.isdigit() and 1 <= int(port) <= MAX_PORT):
        raise ValueError(f"not an address host:port of a router: {target!r}")
    return host.strip("[]"), int(port)


Metadata = tuple[tuple[str, str], ...]


class AccessOptions(TypedDict, total=False):
    """Keywords of both clients for credentials and TLS.

    - `api_key` is sent as a bearer token.
    - `token` is, too, and may be a function. The function is called for each call and must not block. It can return a
      short-lived token that other code renews.
    - `tls` enables TLS with gRPC's default certificate authorities.
    - `ca_file` is a file with PEM certificates of the authorities to trust. It implies `tls`.
    - `server_name` is the name expected in the router's certificate, if it is not the host of the address.
    - `credentials` are gRPC channel credentials, instead of `tls` and `ca_file`.
    - `http_proxy` False ignores the proxies that the environment names (`http_proxy`, `https_proxy`, `no_proxy`). They
      are never used for a router on this machine, nor for several targets.
    """

    api_key: str | None
    token: str | Callable[[], str] | None
    tls: bool
    ca_file: str | Path | None
    server_name: str | None
    credentials: grpc.ChannelCredentials | None
    http_proxy: bool


@dataclass(frozen=True, slots=True)
class Access:
    """The data for opening a channel and making calls on it. `credentials` None: no TLS."""

    target: str
    options: Sequence[tuple[str, int | str]]
    credentials: grpc.ChannelCredentials | None
    fixed_metadata: Metadata
    token: Callable[[], str] | None

    def metadata(self) -> Metadata:
        """Returns the metadata of a call that is made now, with the caller's trace context if there is one."""
        metadata = (*self.fixed_metadata, *_trace_metadata())
        if self.token is None:
            return metadata
        return (*metadata, ("authorization", f"Bearer {self.token()}"))


def open_access(
    targets: Sequence[str], options: AccessOptions, *, metadata: Mapping[str, str] | None, retries: bool
) -> Access:
    """Checks the options and combines them into an `Access`.

    Raises:
        ValueError: options contradict each other, an address is invalid, or a file cannot be read.
    """
    target = channel_target(targets)
    token = _token(options)
    credentials = options.get("credentials")
    server_name = options.get("server_name")
    if options.get("tls") or options.get("ca_file"):
        if credentials is not None:
            raise ValueError("give either credentials or tls and ca_file")
        credentials = grpc.ssl_channel_credentials(_read_certificates(options.get("ca_file")))
    if server_name and credentials is None:
        raise ValueError("server_name: needs tls or ca_file")
    if token is not None and credentials is None and not all(map(is_this_machine, targets)):
        raise ValueError(
            "an API key or token would be sent unencrypted to another machine: give tls or ca_file. If something else "
            "encrypts the connection, pass metadata={'authorization': 'Bearer …'}"
        )
    channel_options = client_options(targets, retries=retries, http_proxy=options.get("http_proxy", True))
    if credentials is not None and (name := server_name or _common_name(targets)):
        channel_options.append(("grpc.ssl_target_name_override", name))
    return Access(target, channel_options, credentials, tuple((metadata or {}).items()), token)


def _trace_metadata() -> Metadata:
    """Returns the current trace context; empty if the program has not loaded OpenTelemetry's API."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from inflight.common.telemetry.trace_context import trace_metadata

    return trace_metadata()


def _token(options: AccessOptions) -> Callable[[], str] | None:
    api_key, token = options.get("api_key"), options.get("token")
    if api_key is not None and token is not None:
        raise ValueError("give either api_key or token")
    given = token if api_key is None else api_key
    if given is None or callable(given):
        return given
    fixed = given.strip()
    if not fixed.isascii() or not fixed.isprintable() or not fixed:
        raise ValueError(f"{'token' if api_key is None else 'api_key'}: must be printable ASCII and not empty")
    return lambda: fixed


def _common_name(targets: Sequence[str]) -> str | None:
    """Returns the host name that the certificates of several routers must have, because gRPC gets only their resolved
    addresses. None for a single router. Raises `ValueError` if the routers have different hosts."""
    if len(targets) == 1:
        return None
    hosts = hosts_of(targets)
    if len(hosts) > 1:
        raise ValueError("server_name: required for TLS to several hosts; a name that all their certificates have")
    return hosts.pop()


def _read_certificates(path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"ca_file: {error.strerror}: {path}") from None
