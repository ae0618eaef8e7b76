"""TLS and credentials of a client. Shared by both clients and the command line.

A key or token is sent with each call as `authorization: Bearer …`, over TLS or on loopback, never unencrypted to
another machine. It is part of no text that this library produces.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import grpc

from inflight.channel import channel_target, client_options, hosts_of, is_this_machine

Metadata = tuple[tuple[str, str], ...]


class AccessOptions(TypedDict, total=False):
    """Keywords of both clients for credentials and TLS.

    `api_key` and `token` differ only in that a token may be a function. It is called for each call and must not block,
    so that a short-lived token can be renewed elsewhere. `ca_file` holds PEM certificates of the authorities to trust
    and implies `tls`, which alone trusts gRPC's default authorities. `server_name` is the name expected in the router's
    certificate if it is not the host of the address. `credentials` replace all TLS options.
    """

    api_key: str | None
    token: str | Callable[[], str] | None
    tls: bool
    ca_file: str | Path | None
    server_name: str | None
    credentials: grpc.ChannelCredentials | None


@dataclass(frozen=True, slots=True)
class Access:
    """Everything needed to open a channel and to make a call on it. `credentials` None: no TLS."""

    target: str
    options: Sequence[tuple[str, int | str]]
    credentials: grpc.ChannelCredentials | None
    fixed_metadata: Metadata
    token: Callable[[], str] | None

    def metadata(self) -> Metadata:
        """The metadata of a call that is made now, with the caller's trace context where there is one."""
        metadata = (*self.fixed_metadata, *_trace_metadata())
        if self.token is None:
            return metadata
        return (*metadata, ("authorization", f"Bearer {self.token()}"))


def open_access(
    targets: Sequence[str], options: AccessOptions, *, metadata: Mapping[str, str] | None, retries: bool
) -> Access:
    """Checks the options and combines them.

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
    channel_options = client_options(targets, retries=retries)
    if credentials is not None and (name := server_name or _common_name(targets)):
        channel_options.append(("grpc.ssl_target_name_override", name))
    return Access(target, channel_options, credentials, tuple((metadata or {}).items()), token)


def _trace_metadata() -> Metadata:
    """The current trace context. A program that has not loaded OpenTelemetry's API has none."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from common.telemetry.trace_context import metadata_of

    return metadata_of()


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
    """The name to expect of several routers, whose addresses gRPC gets as numbers."""
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
