"""Stands for `inflight router` and `inflight executor` in tests of the local stack: health, signals, exit codes.

Run as a program: `fake_server.py ROLE --listen HOST:PORT [--behave HOW]`; other flags are ignored. HOW is one of
`serve`, `bad-setting`, `crash`, `never-ready`, `deaf` (ignores SIGTERM) and `port-taken=FILE`, which reports a taken
port as long as FILE is there, and removes it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from common.server import GrpcServer, Signals

SERVICES = {"executor": "inflight.v1.ExecutorService", "router": "inflight.v1.InferenceService"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=SERVICES)
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
    return asyncio.run(serve(flags.role, flags.listen, how))


async def serve(role: str, listen: str, how: str) -> int:
    loop = asyncio.get_running_loop()
    signals = Signals(loop)
    if how == "deaf":
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    server = GrpcServer([SERVICES[role]])
    await server.start(listen)
    await server.set_serving(how != "never-ready")
    print(f"{role} serves", file=sys.stderr, flush=True)
    await signals.drain.wait()
    await server.stop(grace_s=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
