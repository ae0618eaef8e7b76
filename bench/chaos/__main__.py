"""`python -m inflight.bench.chaos`."""

from __future__ import annotations

from inflight.bench.chaos.main import main
from inflight.cli.console import run_main

if __name__ == "__main__":
    run_main(main)
