"""How a client gets in: TLS to the router, and what says who is calling. Shared by both clients and the command line.

A key or token goes with each call as `authorization: Bearer …`, over TLS or to this very machine; it is never sent in
the clear to another one, and is part of no text that this library makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import grpc

from common.telemetry.trace_context import metadata_of
from inflight.channel import channel_target, client_options, hosts_of, is_this_machine

Metadata = tuple[tuple[str, str], ...]


class AccessOptions(TypedDict, total=False):
    """Keywords of both clients about who calls and how the connection is protected.

    `api_key` and `token` differ only in that a token may be a function, which is called for each call and must answer
    at once, so that a short-lived token can be renewed elsewhere. `ca_file` holds PEM certificates of who may sign the
    router's; it implies `tls`, which without it trusts what gRPC trusts. `server_name` is the name that the router's
    certificate must bear, where that is not the host of its address. `credentials` replace all of TLS's options.
    """

    api_key: str | None
    token: str | Callable[[], str] | None
    tls: bool
    ca_file: str | Path | None
    server_name: str | None
    credentials: grpc.ChannelCredentials | None


@dataclass(frozen=True, slots=True)
class Access:
    """All that is needed to open a channel and to make a call on it. `credentials` None: in the clear."""

    target: str
    options: Sequence[tuple[str, int | str]]
    credentials: grpc.ChannelCredentials | None
    fixed_metadata: Metadata
    token: Callable[[], str] | None

    def metadata(self) -> Metadata:
        """What goes with a call that is made now, the caller's trace included where there is one."""
        metadata = (*self.fixed_metadata, *metadata_of())
        if self.token is None:
            return metadata
        return (*metadata, ("authorization", f"Bearer {self.token()}"))


def open_access(
    targets: Sequence[str], options: AccessOptions, *, metadata: Mapping[str, str] | None, retries: bool
) -> Access:
    """Checks that the options go together.

    Raises:
        ValueError: they do not, an address is none, or a file cannot be read.
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
        raise ValueError("server_name: is the name in a certificate; give tls or ca_file, too")
    if token is not None and credentials is None and not all(map(is_this_machine, targets)):
        raise ValueError(
            "an API key or token would travel in the clear to another machine: give tls or ca_file. Where something "
            "else encrypts the way there, pass metadata={'authorization': 'Bearer …'}"
        )
    channel_options = client_options(targets, retries=retries)
    if credentials is not None and (name := server_name or _common_name(targets)):
        channel_options.append(("grpc.ssl_target_name_override", name))
    return Access(target, channel_options, credentials, tuple((metadata or {}).items()), token)


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
    """The name to expect of routers whose addresses gRPC gets as numbers, which have no name of their own."""
    if len(targets) == 1:
        return None
    hosts = hosts_of(targets)
    if len(hosts) > 1:
        raise ValueError("server_name: needed with TLS to several hosts; the name that all their certificates bear")
    return hosts.pop()


def _read_certificates(path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"ca_file: {error.strerror}: {path}") from None
