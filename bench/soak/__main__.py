"""`python -m inflight.bench.soak`: the soak test by time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from inflight.bench.chaos.options import add_system_flags
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
    add_system_flags(parser, "soak", seconds=3600.0, seats=8)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other requests; default: 0")
    given = parser.parse_args(argv)
    return SoakOptions(**vars(given), command=f"make soak SECONDS={given.seconds:g}")


if __name__ == "__main__":
    run_main(main)
