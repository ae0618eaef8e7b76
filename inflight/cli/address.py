"""The addresses of the routers that a command uses, and the flags for them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from inflight.local.state import DEFAULT_RUN_DIR, StackState, read_state

ADDRESS_VARIABLE = "INFLIGHT_ADDRESS"
RUN_DIR_VARIABLE = "INFLIGHT_RUN_DIR"
DEFAULT_ADDRESS = "localhost:50051"


def add_address_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--address` and `--run-dir`."""
    parser.add_argument(
        "--address",
        metavar="HOST:PORT[,…]",
        help=f"address of a router, or several that share the calls [{ADDRESS_VARIABLE}]; default: the routers of the "
        f"local stack in the run directory, else {DEFAULT_ADDRESS}",
    )
    add_run_dir_flag(parser)


def add_run_dir_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--run-dir`."""
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        help=f"directory of the local stack's state.json and logs [{RUN_DIR_VARIABLE}]; default: {DEFAULT_RUN_DIR}",
    )


def resolve_addresses(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The routers to use: the flag, else the environment, else the running local stack, else the default."""
    given = options.address or environment.get(ADDRESS_VARIABLE)
    if given:
        return tuple(str(given).split(","))
    state = stack_in_use(options, environment)
    if state is None:
        return (DEFAULT_ADDRESS,)
    others = (process.address for process in state.processes if process.role == "router")
    return tuple(dict.fromkeys((state.address, *others)))


def stack_in_use(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> StackState | None:
    """The local stack, if its routers are to be used."""
    if options.address or environment.get(ADDRESS_VARIABLE):
        return None
    return read_state(resolve_run_dir(options, environment))


def resolve_run_dir(options: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Path:
    """The run directory: the flag, else the environment, else the default."""
    return Path(options.run_dir or environment.get(RUN_DIR_VARIABLE) or DEFAULT_RUN_DIR)
