"""Addresses `host:port`: their host, and whether other machines can reach them."""

from __future__ import annotations

import ipaddress


def host_of(address: str) -> str:
    """Returns the host without brackets; empty if the address means every interface."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Returns whether only this machine reaches the address. A name other than `localhost` may resolve to any
    address."""
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
