"""The sizes of the pool that are measured one after the other."""

from __future__ import annotations

import argparse
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product

from bench.ledger.figures import Point
from bench.ledger.scale import PoolScale
from common.machine import num_usable_cores

MATRIX_QUEUED = (10, 10_000, 100_000, 1_000_000)
MATRIX_EXECUTORS = (1, 100, 1_000)
WHOLE_MATRIX = tuple(product(MATRIX_EXECUTORS, MATRIX_QUEUED))
CELL = re.compile(r"([1-9]\d*)x([1-9]\d*)")


def cells(text: str) -> tuple[tuple[int, int], ...]:
    """Executors and queued requests of each cell, from `1x10,100x10000`. For argparse."""
    found = [CELL.fullmatch(cell) for cell in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form EXECUTORSxQUEUED,… such as 1x10,100x10000")
    return tuple((int(cell[1]), int(cell[2])) for cell in found if cell)


def run_matrix(
    chosen: Sequence[tuple[int, int]],
    seats: int,
    measured: Callable[[PoolScale], Point],
    say: Callable[[str], None],
) -> list[Point]:
    """The points in the order of the cells."""
    points = []
    for number, (executors, queued) in enumerate(chosen, 1):
        say(f"size {number} of {len(chosen)}: {executors:,} executors, {queued:,} queued")
        points.append(measured(PoolScale(queued, executors, seats)))
    return points


def circumstances(points: Sequence[Point], seconds: float, seed: int) -> Mapping[str, str]:
    """The machine, Redis and pool of a run, in words."""
    scale = points[0].scale
    return {
        "machine": f"{num_usable_cores()} cores, {platform.machine()}, Python {platform.python_version()}; "
        "the load generator and Redis share it",
        "Redis": f"{points[0].redis_version}, one process, no persistence",
        "pool": f"{scale.routers} routers, {scale.tenants} tenants, 3 classes, {scale.seats} seats an executor",
        "run": f"about {seconds:g} s for each part, seed {seed}",
    }
