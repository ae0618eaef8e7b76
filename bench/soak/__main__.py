"""`python -m inflight.bench.soak`: the soak test by time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from inflight.bench.fleet.tiny_model import NAMES as TINY
from inflight.bench.soak.soak import SoakOptions, soak
from inflight.bench.targets.command_errors import with_command_errors
from inflight.cli.console import run_in_foreground, run_main


def main(argv: Sequence[str]) -> int:
    """Runs it and returns the exit code: 0 if nothing failed and nothing grows."""
    options = parse_options(argv)
    return run_in_foreground(lambda: with_command_errors(soak(options)))


def parse_options(argv: Sequence[str]) -> SoakOptions:
    """Reads the command line; exits 2 with the option's name where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m inflight.bench.soak",
        description="Keeps a stack at full load with cancellations and vanishing clients, and watches what its "
        "processes hold. Exits 1 where a request failed or something grows.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=3600.0, metavar="S", help="how long; default: 3600")
    add("--seed", type=int, default=0, metavar="N", help="other requests; default: 0")
    add(
        "--model",
        default="",
        metavar="MODEL",
        help=f"{', '.join(TINY)}, or as for `inflight up`; default: SmolLM2-135M-Instruct",
    )
    add("--routers", type=int, default=2, metavar="N", help="default: 2")
    add("--executors", type=int, default=2, metavar="N", help="default: 2")
    add("--seats", type=int, default=8, metavar="N", help="of each executor; default: 8")
    add("--run-dir", type=Path, default=Path("run/soak"), metavar="DIR", help="logs; default: run/soak")
    add("--out", type=Path, default=Path("run/soak"), metavar="DIR", help="the report; default: run/soak")
    given = parser.parse_args(argv)
    return SoakOptions(**vars(given), command=f"make soak SECONDS={given.seconds:g}")


if __name__ == "__main__":
    run_main(main)
