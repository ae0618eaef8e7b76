"""What an address `host:port` says about who can reach it."""

from __future__ import annotations

import ipaddress


def host_of(address: str) -> str:
    """The host without brackets; empty where the address means every interface."""
    return address.rpartition(":")[0].strip("[]")


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches the address. A name other than `localhost` may lead anywhere."""
    host = host_of(address)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
