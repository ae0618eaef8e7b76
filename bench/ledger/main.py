"""How far the admission ledger scales: `make bench-admission QUEUED=1000000 EXECUTORS=1000`.

    python -m bench.ledger.main [--queued 10000] [--executors 100] [--redis-url URL]
    python -m bench.ledger.main --matrix [1x10,100x10000] [--out bench/reports]

A private Redis is filled with a line of waiting requests of 100 tenants and three classes, on executors whose seats
are all taken, by 16 routers. Then every end frees a seat that somebody who waits takes, and somebody new comes.
The last line says how many requests are admitted in a second when as much is sent as goes through, and how long
admission takes at half of that: the round trip of a submit, and from an end that frees a seat until the owner of the
request that gets it knows. With `--matrix` that is done at many sizes, and a report with charts is written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.ledger.figures import Point
from bench.ledger.matrix import WHOLE_MATRIX, cells, circumstances, run_matrix, write_matrix
from bench.ledger.measure import measure
from bench.ledger.scale import PoolScale
from bench.ledger.server import Server
from bench.ledger.traffic import TrafficError
from bench.ledger.wire import WireError
from inflight.local.redis_server import PrivateRedis, RedisStartError
from router.store.keys import PoolKeys

POOL = "bench-admission"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 where there is no Redis or it does not do what it should."""
    options = _parser().parse_args(argv)
    chosen = options.matrix or ((options.executors, options.queued),)

    def measured(scale: PoolScale) -> Point:
        point = measure_alone(scale, options.redis_url, options.seconds, options.seed)
        print(shown(point), flush=True)
        return point

    try:
        points = run_matrix(chosen, options.seats, measured, _say)
    except (RedisStartError, WireError, TrafficError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.matrix:
        words = circumstances(points, options.seconds, options.seed)
        paths = write_matrix(points, words, options.out)
        print("report: " + ", ".join(str(path) for path in paths))
    for point in points:
        print(point.line)
    return 0


def measure_alone(scale: PoolScale, url: str | None, seconds: float, seed: int) -> Point:
    """Measures in a Redis of its own, or in one that is there, which is left as it was."""
    if url is None:
        with tempfile.TemporaryDirectory() as folder, PrivateRedis.start(Path(folder) / "redis.log") as redis:
            return measure(redis.admin_url, POOL, scale, seconds, seed, _say)
    try:
        return measure(url, POOL, scale, seconds, seed, _say)
    finally:
        server = Server(url)
        server.delete_pool(PoolKeys(POOL).key("*"))
        server.close()


def shown(point: Point) -> str:
    """The figures in lines."""
    saturation, latency = point.saturation, point.latency
    lines = [
        f"Redis {point.redis_version}, {point.memory_bytes / 1e6:,.1f} MB, "
        f"{point.bytes_per_waiting:,.0f} bytes per waiting request; filled in {point.fill_s:.1f} s",
        f"{'script':<28}{'calls':>9}{'µs a call':>11}{'commands':>10}{'their µs':>10}",
    ]
    lines += [
        f"{name:<28}{cost.script.calls:>9,}{cost.us:>11.1f}{cost.num_commands:>10.1f}{cost.commands_us:>10.1f}"
        for name, cost in point.costs.items()
    ]
    lines += [
        "scripts alone, on one core: "
        + ", ".join(f"{rate:,.0f}/s where {num} end at a time" for num, rate in point.scripts_per_s.items()),
        f"boarding of one waiting request: {point.boarding_us:.1f} µs; "
        f"worst single call: {point.worst.us / 1000:.2f} ms, {point.worst.script}",
        f"as much as goes through: {saturation.admitted_per_wall_s:,.0f} admitted/s, "
        f"{saturation.admitted_per_core_s:,.0f} per second of Redis' core, "
        f"Redis {saturation.busy:.0%} busy and the load {saturation.load_busy:.0%}; "
        f"{1e6 * saturation.redis_cpu_s / max(1, saturation.num_admitted):.1f} µs of Redis each, "
        f"{saturation.script_us / max(1, saturation.num_admitted):.1f} of it scripts, "
        f"{saturation.mail_us / max(1, saturation.num_admitted):.1f} reading mailboxes",
        "of Redis' time there: "
        + ", ".join(f"{name} {share:.0%}" for name, share in saturation.shares.items())
        + f"; bound by {saturation.bound_by}",
        f"at {latency.rate_per_s:,.0f}/s, Redis {latency.busy:.0%} busy, p50/p99 ms: submit "
        f"{_both(latency.submit_ms)}, seat {_both(latency.seat_ms)}, the load itself late {_both(latency.late_ms)}",
    ]
    return "\n".join(lines)


def _both(figures_ms: Sequence[float]) -> str:
    return "/".join(f"{figure:.3f}" for figure in figures_ms)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.ledger.main", description="How far the admission ledger scales.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--queued", type=int, default=10_000, metavar="N", help="requests that wait; default: 10000")
    add("--executors", type=int, default=100, metavar="N", help="executors that report; default: 100")
    add("--seats", type=int, default=32, metavar="N", help="seats of each, 16 to 64; default: 32")
    add("--seconds", type=float, default=3.0, metavar="S", help="about how long each part takes; default: 3")
    add("--seed", type=int, default=1, metavar="N", help="of what is drawn; default: 1")
    add(
        "--matrix",
        type=cells,
        nargs="?",
        const=WHOLE_MATRIX,
        metavar="EXECUTORSxQUEUED,…",
        help="many sizes and their report; default of the sizes: 1, 100 and 1000 by 10, 10000, 100000 and 1000000",
    )
    add("--out", type=Path, default=Path("bench/reports"), metavar="FOLDER", help="default: bench/reports")
    add("--redis-url", metavar="URL", help="a Redis that is there; default: a private one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
