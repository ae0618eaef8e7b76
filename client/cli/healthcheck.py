"""`inflight healthcheck`: asks a process once whether it serves, for a container's health check.

Exit codes: 0 it serves, 1 it does not or does not answer, 2 a wrong flag.
"""

from __future__ import annotations

import argparse
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from client.cli.outcome import EXIT_FAILURE, EXIT_USAGE, CommandError
from common.addresses import host_of

HEALTH_LISTEN_VARIABLE = "INFLIGHT_HEALTH_LISTEN"
LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}
HTTP = "http://"


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    address = address_to_ask(flags.address, os.environ)
    ask = _ask_http if address.startswith(HTTP) else _ask_grpc
    problem = ask(address, flags.service, flags.timeout_s)
    if problem is None:
        return 0
    print(f"{address}: {problem}")
    return EXIT_FAILURE


def address_to_ask(given: str | None, environment: Mapping[str, str]) -> str:
    """The flag's address, else where this container's process answers health checks, on loopback.

    Raises:
        CommandError: there is neither.
    """
    if given:
        return given
    listen = environment.get(HEALTH_LISTEN_VARIABLE)
    if not listen:
        raise CommandError(f"--address, or {HEALTH_LISTEN_VARIABLE} of the process to ask, is needed", EXIT_USAGE)
    host = host_of(listen)
    port = listen.rpartition(":")[2]
    return f"{LOOPBACK_OF[host]}:{port}" if host in LOOPBACK_OF else listen


def _ask_grpc(address: str, service: str, timeout_s: float) -> str | None:
    """What is wrong; None where the service is SERVING."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _ask_http(address: str, service: str, timeout_s: float) -> str | None:
    """What is wrong; None where the answer is a good one. There is no service to name."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(address, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return f"status {error.code}"
    except OSError as error:
        return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inflight healthcheck",
        description="Asks a process once whether it serves: over gRPC health in the clear, on its health_listen, or "
        "with an http:// address by a GET. Exits 0 if so, else 1.",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help=f"where to ask, host:port or http://…; default: the port of {HEALTH_LISTEN_VARIABLE} on this machine",
    )
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="health service, such as inflight.v1.InferenceService or live; default: the process as a whole",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=3.0, metavar="S", help="seconds to wait for the answer (default: 3)"
    )
    return parser
