"""`python -m inflight.bench.scheduling.compare`: the scheduling benchmarks, side by side on equal requests, and their
report."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from inflight.bench.redis.private import private_redis
from inflight.bench.report.page import write_report
from inflight.bench.scheduling.experiments import all_comparisons
from inflight.bench.scheduling.lab import Comparison, Lab
from inflight.bench.scheduling.report import KIND, page, values_of


def main(argv: Sequence[str] | None = None) -> int:
    """Runs everything and writes the report."""
    parser = argparse.ArgumentParser(prog="python -m inflight.bench.scheduling.compare", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--scale", type=float, default=1.0, help="of the time that is simulated (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("bench/reports"), help="folder (default: bench/reports)")
    parser.add_argument("--processes", type=int, default=1, help="comparisons at the same time (default: 1)")
    options = parser.parse_args(argv)
    one = partial(compare, seed=options.seed, scale=options.scale)
    # Time is virtual: that others run beside it changes nothing of a comparison's figures.
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as processes:
        comparisons = list(processes.map(one, range(len(all_comparisons()))))
    for comparison in comparisons:
        for sentence in comparison.found:
            print(f"{comparison.title}: {sentence}")
    circumstances = {
        "command": f"make bench-scheduling ARGS='--seed {options.seed} --scale {options.scale:g}'",
        "devices": "modelled: an 8B model in bfloat16 on an H200 (bench/simulation/device.py); time is virtual",
        "scheduling": "real: the scripts on a real Redis, the executor's loop, scheduler and blocks",
    }
    paths = write_report(options.out, KIND, values_of(comparisons, circumstances), page(comparisons, circumstances))
    print("report: " + ", ".join(str(path) for path in paths))
    return 0


def compare(index: int, seed: int, scale: float) -> Comparison:
    """One of the comparisons, on a Redis of its own."""
    began_s = time.perf_counter()

    def say(name: str) -> None:
        print(f"{time.perf_counter() - began_s:6.1f} s  {name}", flush=True)

    with tempfile.TemporaryDirectory() as folder, private_redis(Path(folder)) as redis:
        return all_comparisons()[index](Lab(redis.admin_url, seed, scale, say))


if __name__ == "__main__":
    sys.exit(main())
