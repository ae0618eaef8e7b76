"""Ports for servers on this machine."""

from __future__ import annotations

import socket


def free_ports(host: str, num_ports: int) -> list[int]:
    """Returns different ports that are free now."""
    sockets = [socket.socket() for _ in range(num_ports)]
    try:
        for taken in sockets:
            taken.bind((host, 0))
        return [taken.getsockname()[1] for taken in sockets]
    finally:
        for taken in sockets:
            taken.close()
