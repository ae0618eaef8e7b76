"""A stand-in for `inflight router`, `executor` and `gateway` in tests of the local stack: health, signals, exit codes.

Run as a program: `fake_server.py ROLE --listen HOST:PORT [--behave HOW]`; other flags are ignored. HOW is one of
`serve`, `bad-setting`, `crash`, `never-ready`, `deaf` (ignores SIGTERM) and `port-taken=FILE`, which reports a taken
port as long as FILE is there, and removes it.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from inflight.common.http.port import HttpPort
from inflight.common.rpc.server import GrpcServer, ListenError, Signals

Stop = Callable[[], Awaitable[None]]
SERVICES = {"executor": "inflight.v1.ExecutorService", "router": "inflight.v1.InferenceService"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=[*SERVICES, "gateway"])
    parser.add_argument("--listen", required=True)
    parser.add_argument("--behave", default="serve")
    flags, _ = parser.parse_known_args()
    how, _, file = flags.behave.partition("=")
    if how == "bad-setting":
        print("error: --batching: 'sideways' is not allowed; allowed: one of inflight, static", file=sys.stderr)
        return 2
    if how == "crash":
        raise RuntimeError("this machine is too warm")
    if how == "port-taken" and Path(file).exists():
        Path(file).unlink()
        print(f"error: cannot listen on {flags.listen}: the port is in use", file=sys.stderr)
        return 3
    try:
        return asyncio.run(serve(flags.role, flags.listen, how))
    except ListenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


async def serve(role: str, listen: str, how: str) -> int:
    loop = asyncio.get_running_loop()
    signals = Signals(loop)
    if how == "deaf":
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stop = await start_gateway(listen) if role == "gateway" else await start_grpc(role, listen, how != "never-ready")
    print(f"{role} serves", file=sys.stderr, flush=True)
    await signals.drain.wait()
    await stop()
    return 0


async def start_grpc(role: str, listen: str, serves: bool) -> Stop:
    server = GrpcServer([SERVICES[role]])
    await server.start(listen)
    await server.set_serving(serves)
    return functools.partial(server.stop, grace_s=0)


async def start_gateway(listen: str) -> Stop:
    async def ready(_: Request) -> PlainTextResponse:
        return PlainTextResponse("ready")

    port = HttpPort(Starlette(routes=[Route("/ready", ready)]))
    await port.start(listen)
    return port.stop


if __name__ == "__main__":
    sys.exit(main())
