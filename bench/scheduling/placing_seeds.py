"""`python -m inflight.bench.scheduling.placing_seeds`: placement over several seeds.

One run's TTFT p90 depends on the order in which a few chats arrive, so one seed says little. Each seed is another
trace, the same for all ways, and the ratio to the oracle is taken within a seed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from inflight.bench.redis.private import private_redis
from inflight.bench.report.table import UNKNOWN, Table
from inflight.bench.scheduling.figures import Figures
from inflight.bench.scheduling.lab import Lab
from inflight.bench.scheduling.placing import BUSIEST, CACHED, P90, TRACES, WAYS
from inflight.bench.scheduling.placing import run_way as run_in

RunKey = tuple[int, str, str, str]
HEADER = (
    "trace, load", "placement", "TTFT p50, ms", "p90", "p90 by seed", "p90 / oracle's", "by seed", "cached",
    "busiest / mean",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything and prints a table."""
    options = _parser().parse_args(argv)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    ways = options.ways.split(",") if options.ways else [way.name for way in WAYS]
    loads = [(options.trace, load) for load in options.loads.split(",")]
    keys = [(seed, trace, load, way) for seed in seeds for trace, load in loads for way in ways]
    figures: dict[RunKey, Figures] = {}
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as processes:
        for key, found in zip(keys, processes.map(partial(run, scale=options.scale), keys), strict=True):
            figures[key] = found
            print(*key, " ".join(f"{found.extra[name]:.2f}" for name in (P90, CACHED, BUSIEST)), flush=True)
    rows = [_row(figures, seeds, trace, load, way) for trace, load in loads for way in ways]
    print(Table(HEADER, rows).markdown())
    return 0


def run(key: RunKey, scale: float) -> Figures:
    """One run, on a Redis of its own."""
    seed, trace, load, name = key
    way = next(way for way in WAYS if way.name == name)
    with tempfile.TemporaryDirectory() as folder, private_redis(Path(folder)) as redis:
        return run_in(Lab(redis.admin_url, seed, scale), TRACES[trace], load, way)


def _row(figures: dict[RunKey, Figures], seeds: Sequence[int], trace: str, load: str, way: str) -> list[str]:
    runs = [figures[seed, trace, load, way] for seed in seeds]
    p90s = [one.extra[P90] for one in runs]
    oracles = [figures.get((seed, trace, load, "oracle")) for seed in seeds]
    ratios = [p90 / one.extra[P90] for p90, one in zip(p90s, oracles, strict=True) if one is not None]
    return [
        f"{trace}, {load}",
        way,
        f"{statistics.median(one.ttft_p50_ms or 0.0 for one in runs):,.0f}",
        f"{statistics.median(p90s):,.0f}",
        ", ".join(f"{p90:,.0f}" for p90 in p90s),
        f"{statistics.median(ratios):.2f}" if ratios else UNKNOWN,
        ", ".join(f"{ratio:.2f}" for ratio in ratios),
        f"{statistics.mean(one.extra[CACHED] for one in runs):.0f} %",
        f"{max(one.extra[BUSIEST] for one in runs):.2f}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inflight.bench.scheduling.placing_seeds", description=__doc__)
    parser.add_argument("--trace", choices=sorted(TRACES), default="agents", help="(default: agents)")
    parser.add_argument("--loads", default="80 %", help="with commas between: 80 %%, saturated (default: 80 %%)")
    parser.add_argument("--seeds", default="0,1,2", help="(default: 0,1,2)")
    parser.add_argument("--ways", default="", help="names of placements, with commas between (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time that is simulated (default: 1)")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time (default: 1)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
