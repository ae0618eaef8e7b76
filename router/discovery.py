"""Executor addresses: static ones, and all addresses of DNS names, which are resolved periodically. Of a name with
IPv4 and IPv6 addresses, the IPv4 ones are used."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence

log = logging.getLogger(__name__)

DNS_PREFIX = "dns:///"
LOOKUP_TIMEOUT_S = 5.0


class AddressError(ValueError):
    """An executor address is malformed."""


def check_address(address: str) -> None:
    """Raises `AddressError` unless the address is `host:port` or `dns:///name:port`."""
    host, separator, port = address.removeprefix(DNS_PREFIX).rpartition(":")
    if not (host and separator and port.isdigit() and 0 < int(port) < 65536):
        raise AddressError(f"{address!r} is not host:port or dns:///name:port")


async def watch(addresses: Sequence[str], interval_s: float) -> AsyncIterator[frozenset[str]]:
    """Yields the set of `host:port` addresses, first at once and then whenever it has changed.

    A name that cannot be resolved keeps its addresses: a failed resolver must not disconnect executors.
    """
    found: dict[str, frozenset[str]] = {a: frozenset({a}) for a in addresses if not a.startswith(DNS_PREFIX)}
    names = [a for a in addresses if a.startswith(DNS_PREFIX)]
    previous: frozenset[str] | None = None
    while True:
        for name in names:
            found[name] = await _look_up(name, found.get(name, frozenset()))
        current = frozenset().union(*found.values())
        if current != previous:
            yield current
            previous = current
        if not names:
            return
        await asyncio.sleep(interval_s)


async def _look_up(name: str, known: frozenset[str]) -> frozenset[str]:
    host, _, port = name.removeprefix(DNS_PREFIX).rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            answers = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, TimeoutError, UnicodeError) as error:
        log.warning("cannot resolve %s: %s", name, error)
        return known
    # A host with addresses of both families is one executor. It may listen on IPv4 alone.
    used = min((family for family, *_ in answers), key=lambda family: family != socket.AF_INET)
    return frozenset(_join(str(address[0]), int(address[1])) for family, *_, address in answers if family == used)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
