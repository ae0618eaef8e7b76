"""Ports for servers on this machine.

They lie below the ephemeral range, from which the system chooses the ports of outgoing connections and of servers that
ask for any port. So only a server with a fixed port can take one of them before the server for which it was chosen.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

# The host of executors, which only the routers of a stack call, of Redis, and of HTTP, which has no TLS.
LOOPBACK_HOST = "127.0.0.1"
# Below the ephemeral ranges of Linux (from 32768), macOS and Windows (from 49152), and the node ports of Kubernetes.
PORTS = range(15_000, 30_000)
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# Of ports outside the ephemeral range; with fewer, the system chooses.
MIN_CHOICE = 1000


def free_ports(host: str, num_ports: int) -> list[int]:
    """Returns different ports that are free now, in random order."""
    candidates = _candidates()
    random.Random().shuffle(candidates)
    sockets: list[socket.socket] = []
    try:
        while len(sockets) < num_ports:
            taken = _bound(host, candidates.pop() if candidates else 0)
            if taken is not None:
                sockets.append(taken)
        return [taken.getsockname()[1] for taken in sockets]
    finally:
        for taken in sockets:
            taken.close()


def _candidates() -> list[int]:
    """Returns the ports outside the ephemeral range; none if this machine leaves too few."""
    try:
        low, high = map(int, EPHEMERAL_RANGE.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return list(PORTS)
    outside = [port for port in PORTS if not low <= port <= high]
    return outside if len(outside) >= MIN_CHOICE else []


def _bound(host: str, port: int) -> socket.socket | None:
    """Returns a socket that is bound to a port; 0: the system chooses one. None: the port is taken."""
    host = host.strip("[]")
    taken = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        taken.bind((host, port))
    except OSError:
        taken.close()
        if not port:
            raise
        return None
    return taken
