"""Where the routers are, for every command that talks to them, and the flags that say so."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from inflight.local.options import DEFAULT_RUN_DIR
from inflight.local.state import StackState, read_state

ADDRESS_VARIABLE = "INFLIGHT_ADDRESS"
RUN_DIR_VARIABLE = "INFLIGHT_RUN_DIR"
DEFAULT_ADDRESS = "localhost:50051"


def add_address_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--address` and `--run-dir`."""
    parser.add_argument(
        "--address",
        metavar="HOST:PORT[,…]",
        help=f"router to ask, or several that share the calls [{ADDRESS_VARIABLE}]; default: those of the run folder's "
        f"local stack, else {DEFAULT_ADDRESS}",
    )
    add_run_dir_flag(parser)


def add_run_dir_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--run-dir`."""
    parser.add_argument(
        "--run-dir",
        metavar="FOLDER",
        help=f"folder with state.json and the logs of the local stack [{RUN_DIR_VARIABLE}]; default: {DEFAULT_RUN_DIR}",
    )


def resolve_addresses(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The routers to ask: flag, environment, running local stack, default; the first of these that is there."""
    given = options.address or environment.get(ADDRESS_VARIABLE)
    if given:
        return tuple(str(given).split(","))
    state = stack_in_use(options, environment)
    if state is None:
        return (DEFAULT_ADDRESS,)
    others = (process.address for process in state.processes if process.role == "router")
    return tuple(dict.fromkeys((state.address, *others)))


def stack_in_use(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> StackState | None:
    """The local stack, where its router is the one to ask."""
    if options.address or environment.get(ADDRESS_VARIABLE):
        return None
    return read_state(resolve_run_dir(options, environment))


def resolve_run_dir(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Path:
    """The run folder: flag, environment, default."""
    return Path(options.run_dir or environment.get(RUN_DIR_VARIABLE) or DEFAULT_RUN_DIR)
