"""`inflight healthcheck`: checks once whether a process serves, for a container's health check.

Exit codes: 0 it serves, 1 it does not serve or does not answer, 2 a wrong flag.
"""

from __future__ import annotations

import argparse
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inflight.cli.console import EXIT_FAILURE, EXIT_USAGE, CommandError
from inflight.cli.flags import add_run_dir_flag, resolve_run_dir
from inflight.cli.parser import CommandParser
from inflight.common.rpc.addresses import host_of
from inflight.common.rpc.options import NO_PROXY
from inflight.local.state import StackState, read_state

HEALTH_LISTEN_VARIABLE = "INFLIGHT_HEALTH_LISTEN"
# A port on `[::]` also takes IPv4, and takes only that where the container has no IPv6.
LOOPBACK_OF = dict.fromkeys(("0.0.0.0", "", "::"), "127.0.0.1")
HTTP = "http://"


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    address, ca_file = address_to_ask(flags.address, os.environ), ""
    if address is None:
        stack = _local_stack(flags)
        address, ca_file = stack.address, stack.ca_file
    if address.startswith(HTTP):
        problem = _ask_http(address, flags.timeout_s)
    else:
        problem = _ask_grpc(address, flags.service, flags.timeout_s, ca_file)
    if problem is None:
        return 0
    print(f"{address}: {problem}")
    return EXIT_FAILURE


def address_to_ask(given: str | None, environment: Mapping[str, str]) -> str | None:
    """Returns the address of the flag, else the health port of this container's process on loopback; None without
    both."""
    if given:
        return given
    listen = environment.get(HEALTH_LISTEN_VARIABLE)
    if not listen:
        return None
    host = host_of(listen)
    port = listen.rpartition(":")[2]
    return f"{LOOPBACK_OF[host]}:{port}" if host in LOOPBACK_OF else listen


def _local_stack(flags: argparse.Namespace) -> StackState:
    run_dir = resolve_run_dir(flags)
    stack = read_state(run_dir)
    if stack is None:
        raise CommandError(
            f"no local stack runs in {run_dir}; start one with `inflight up`, or name a process with --address or "
            f"{HEALTH_LISTEN_VARIABLE}",
            EXIT_USAGE,
        )
    return stack


def _channel(address: str, ca_file: str) -> grpc.Channel:
    options = [NO_PROXY]
    if not ca_file:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(Path(ca_file).read_bytes()), options)


def _ask_grpc(address: str, service: str, timeout_s: float, ca_file: str = "") -> str | None:
    """Returns the problem; None if the service is SERVING."""
    with _channel(address, ca_file) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _ask_http(address: str, timeout_s: float) -> str | None:
    """Returns the problem; None if the status is a success."""
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
    parser = CommandParser(
        prog="inflight healthcheck",
        description="Checks once whether a process serves: by gRPC health without TLS on its health_listen, or by GET "
        "of an http:// address. The default is the local stack's router. The exit status is 0 if it serves, else 1.",
    )
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help=f"host:port or http://…; default: the port of {HEALTH_LISTEN_VARIABLE} on this machine, else the local "
        "stack's router",
    )
    add_run_dir_flag(parser)
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help="health service, such as inflight.v1.InferenceService or live; default: the whole process",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=3.0, metavar="S", help="seconds to wait for the answer (default: 3)"
    )
    return parser
