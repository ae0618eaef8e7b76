"""What `inflight bench` can be told on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.workloads import DEFAULT_SEED, SHAPES

MODES = ("inflight", "static")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """A benchmark. `address` None starts local stacks, one for each mode."""

    workloads: tuple[str, ...]
    modes: tuple[str, ...]
    rounds: int
    scale: float
    num_requests: int | None
    seed: int
    seats: int
    executors: int
    model: str | None
    address: str | None
    out: Path
    name: str | None


def parse_options(argv: Sequence[str]) -> BenchOptions:
    """Reads the command line; exits 2 with the option's name where it is wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.name is not None and len(given.workload) > 1:
        parser.error("argument --name: one name cannot stand for several workloads")
    return BenchOptions(
        workloads=given.workload,
        modes=given.modes,
        rounds=given.rounds,
        scale=given.scale,
        num_requests=given.requests,
        seed=given.seed,
        seats=given.seats,
        executors=given.executors,
        model=given.model,
        address=given.address,
        out=given.out,
        name=given.name,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inflight bench",
        description="Compares in-flight with static batching on this machine, side by side in one run, or measures a "
        "router that runs already. Writes a report as Markdown, JSON and PNG.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--workload",
        type=_names(SHAPES),
        default=("mixed",),
        metavar="NAME,…",
        help=f"{_listed(SHAPES)}; default: mixed",
    )
    add(
        "--modes", type=_names(MODES), default=MODES, metavar="MODE,…", help=f"{_listed(MODES)}; default: both, in turn"
    )
    add("--rounds", type=_positive, default=2, metavar="N", help="times that every mode runs; default: 2")
    add("--scale", type=_share, default=1.0, metavar="X", help="factor on prompts and outputs, in (0, 1]; default: 1")
    add("--requests", type=_positive, metavar="N", help="number of requests; default: the workload's")
    add("--seed", type=int, default=DEFAULT_SEED, metavar="N", help="another seed, other requests of the same shape")
    add(
        "--seats",
        type=_positive,
        default=8,
        metavar="N",
        help="seats of an executor, the same in each mode; default: 8",
    )
    add("--executors", type=_positive, default=1, metavar="N", help="executors of a local stack; default: 1")
    add("--model", help="model folder, GGUF file or hub name; default: SmolLM2-135M-Instruct")
    add("--address", metavar="HOST:PORT", help="router to measure instead of starting local stacks")
    add("--out", type=Path, default=Path("bench/reports"), metavar="FOLDER", help="default: bench/reports")
    add("--name", help="name of the report's files; default: the workload's")
    return parser


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Parses `a,b` into some of the known names."""
    allowed = tuple(known)

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
        return names

    return parse


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number in (0, 1]")
    return value
