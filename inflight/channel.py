"""How a channel to the routers is opened: target, keepalive, retries. Shared by both clients.

gRPC's own retries cover everything before the first event of a stream: the router sends no headers before a request
has its seat, so a router that goes away or has no executor yet is retried unseen, on another router where there is one.
So are the calls with a single answer, which are safe to repeat. Nothing is hedged: of two streams of one request the
router would end one, and a second request would cost a second seat.

`service_config.json` says all that to gRPC, to this client and to any other: see docs/client.md.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from importlib import resources

from common.addresses import is_loopback
from common.rpc.server import channel_options

# For calls that are answered from what a router has at hand. `Generate` has no deadline but the caller's.
UNARY_TIMEOUT_S = 10.0

SERVICE_CONFIG = resources.files("inflight").joinpath("service_config.json")


def client_options(targets: Sequence[str], *, retries: bool) -> list[tuple[str, int | str]]:
    """Channel options for these targets."""
    options: list[tuple[str, int | str]] = [
        *channel_options(),
        ("grpc.enable_retries", int(retries)),
        ("grpc.service_config", SERVICE_CONFIG.read_text(encoding="utf-8")),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    if all(is_this_machine(target) for target in targets):
        options.append(("grpc.enable_http_proxy", 0))
    return options


def channel_target(targets: Sequence[str]) -> str:
    """gRPC's name for the routers at `targets`, each `host:port`.

    One target is passed on as it is, so that gRPC schemes (`dns:///name:port`, `unix:/path`) work. Of several, host
    names are looked up here, once: gRPC takes a list of addresses, not of names.
    """
    if not targets:
        raise ValueError("a client needs at least one address host:port")
    for target in targets:
        if not target or target != target.strip():
            raise ValueError(f"not an address host:port: {target!r}")
    if len(targets) == 1:
        return targets[0]
    numeric = [_lookup(target) for target in targets]
    families = {family for family, _ in numeric}
    if len(families) > 1:
        raise ValueError("IPv4 and IPv6 addresses cannot be mixed: " + ", ".join(targets))
    scheme = "ipv4" if families == {socket.AF_INET} else "ipv6"
    return f"{scheme}:" + ",".join(address for _, address in numeric)


def hosts_of(targets: Sequence[str]) -> set[str]:
    """The hosts of addresses `host:port`."""
    return {_split(target)[0] for target in targets}


def is_this_machine(target: str) -> bool:
    """Whether what is sent there never leaves this machine."""
    return target.startswith("unix:") or is_loopback(target.removeprefix("dns:///"))


def _lookup(target: str) -> tuple[socket.AddressFamily, str]:
    host, port = _split(target)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"cannot look up {target!r}: {error}") from None
    family, *_, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, f"{address[0]}:{port}" if family == socket.AF_INET else f"[{address[0]}]:{port}"


def _split(target: str) -> tuple[str, int]:
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"not an address host:port: {target!r}")
    return host.strip("[]"), int(port)
