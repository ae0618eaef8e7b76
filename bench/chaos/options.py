"""The options of `python -m inflight.bench.chaos`."""

from __future__ import annotations

import argparse
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.bench.chaos.load import Manner
from inflight.bench.chaos.schedule import ADAPTER_KINDS, FaultKind
from inflight.bench.fleet.tiny_model import NAMES as TINY


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """A run: how long the faults go on, which there are, and under what load. `overlap` faults may go on at once."""

    seconds: float
    seed: int
    model: str
    routers: int
    executors: int
    seats: int
    clients: int
    adapters: int
    kinds: tuple[FaultKind, ...]
    manners: tuple[Manner, ...]
    overlap: int
    recovery_timeout_s: float
    run_dir: Path
    out: Path
    measured: Path | None
    copies: bool
    executor_args: tuple[str, ...]

    @property
    def adapter_slots(self) -> int:
        """Slots of an executor: fewer than there are adapters, so that some are evicted."""
        return (self.adapters + 1) // 2

    @property
    def is_tiny(self) -> bool:
        """Whether it is the model that is made for this."""
        return self.model in TINY


def parse_options(argv: Sequence[str]) -> ChaosOptions:
    """Reads the command line; exits 2 with the option's name where it is wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.adapters < 0:
        parser.error("--adapters must be at least 0")
    kinds = given.kinds or tuple(kind for kind in FaultKind if given.adapters or kind not in ADAPTER_KINDS)
    if not given.adapters and ADAPTER_KINDS.intersection(kinds):
        parser.error("--faults of adapters need --adapters")
    options = ChaosOptions(**vars(given) | {"kinds": kinds})
    return replace(
        options,
        seed=secrets.randbelow(1_000_000) if given.seed is None else given.seed,
        clients=given.clients or round(1.5 * given.seats * given.executors),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m inflight.bench.chaos",
        description="Kills, stops and cuts off the processes of a real system under load, one at a time, and checks "
        "every stream token by token against the undisturbed one. Exits 1 where a token was lost or came twice, a "
        "block leaked, or a request failed that must not.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add_system_flags(parser, "chaos", seconds=60.0, seats=4)
    add("--seed", type=int, metavar="N", help="the same faults and requests again; default: another one every time")
    add("--clients", type=int, metavar="N", help="requests under way; default: half more than there are seats")
    add("--adapters", type=int, default=0, metavar="N", help="LoRA adapters, in half as many slots; default: none")
    add("--faults", dest="kinds", type=_kinds, metavar="KIND,…", help=_names(FaultKind))
    add("--manners", type=_manners, default=tuple(Manner), metavar="MANNER,…", help=f"of reading: {_names(Manner)}")
    add("--overlap", type=int, default=1, metavar="N", help="faults at a time; nothing is promised for more than 1")
    add(
        "--recovery-timeout",
        dest="recovery_timeout_s",
        type=float,
        default=90.0,
        metavar="S",
        help="until a fault counts as fatal; default: 90",
    )
    add("--measured", type=Path, metavar="FILE", help="a page to put the measured gaps into, such as docs/failures.md")
    add("--copies", action="store_true", help="start processes as copies of one that has loaded its code: back soon")
    add(
        "--executor-args",
        type=_arguments,
        default=(),
        metavar="TEXT",
        help="more options of the executors, such as --speculation=ngram",
    )
    return parser


def add_system_flags(parser: argparse.ArgumentParser, name: str, *, seconds: float, seats: int) -> None:
    """Adds the flags of a system that runs for a time, and of the folders that get what it writes."""
    add, folder = parser.add_argument, Path("run") / name
    add("--seconds", type=float, default=seconds, metavar="S", help="how long; default: %(default)g")
    models = f"{', '.join(TINY)}, or as for `inflight up`; default: SmolLM2-135M-Instruct"
    add("--model", default="", metavar="MODEL", help=models)
    add("--routers", type=int, default=2, metavar="N", help="default: %(default)s")
    add("--executors", type=int, default=2, metavar="N", help="default: %(default)s")
    add("--seats", type=int, default=seats, metavar="N", help="of each executor; default: %(default)s")
    add("--run-dir", type=Path, default=folder, metavar="DIR", help="logs; default: %(default)s")
    add("--out", type=Path, default=folder, metavar="DIR", help="the report; default: %(default)s")


def _names(values: type[FaultKind] | type[Manner]) -> str:
    return f"{', '.join(value.value for value in values)}; default: all"


def _kinds(text: str) -> tuple[FaultKind, ...]:
    return tuple(FaultKind(name) for name in text.split(","))


def _manners(text: str) -> tuple[Manner, ...]:
    return tuple(Manner(name) for name in text.split(","))


def _arguments(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))
