"""A stand-in for grpc_health_probe, a Go program that is not always installed: the same bytes, the same exit codes.

Knows the protocol only as bytes, so that no code is shared: field 1 of the request is the service's name, field 1 of
the answer the status, of which 1 is SERVING.

    python -m tests.clients.health_probe ADDRESS [SERVICE]
"""

from __future__ import annotations

import sys
from typing import Any

import grpc

CHECK = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"
CONNECT_TIMEOUT_S = 60
RPC_TIMEOUT_S = 60

# Of grpc_health_probe's README.
EXIT_SERVING, EXIT_BAD_ARGUMENTS, EXIT_NO_CONNECTION, EXIT_RPC_FAILED, EXIT_NOT_SERVING = range(5)


def main(arguments: list[str]) -> int:
    """Asks once; returns the exit code."""
    if not 1 <= len(arguments) <= 2:
        return EXIT_BAD_ARGUMENTS
    address, service = arguments[0], "".join(arguments[1:]).encode()
    with grpc.insecure_channel(address) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_TIMEOUT_S)
        except grpc.FutureTimeoutError:
            return EXIT_NO_CONNECTION
        check: Any = channel.unary_unary(CHECK)
        request = bytes([0x0A, len(service)]) + service if service else b""
        try:
            answer = check(request, timeout=RPC_TIMEOUT_S)
        except grpc.RpcError:
            return EXIT_RPC_FAILED
        return EXIT_SERVING if answer == SERVING else EXIT_NOT_SERVING


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
