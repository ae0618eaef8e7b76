"""The options of `inflight bench`."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.bench.measures.run import Slo
from inflight.bench.peers.catalogue import VARIANTS, PeerChoice, parse_peer
from inflight.bench.workloads.generate import DEFAULT_SEED, TRACE_SUFFIX, Arrivals
from inflight.bench.workloads.shapes import SHAPES
from inflight.cli.parser import CommandParser

STACK_MODES = ("inflight", "static")
# A stack whose executors have vLLM as their engine.
VLLM_MODE = "inflight-vllm"
ENGINE_MODE = "engine"
MODES = (*STACK_MODES, VLLM_MODE, ENGINE_MODE)
SHARED_CALLS, SINGLE_CALLS = CALLS = ("shared", "single")


@dataclass(frozen=True, slots=True)
class Variant:
    """Flags of our executors under which every mode runs once more, as MODE-NAME."""

    name: str
    flags: tuple[str, ...]

    def mode(self, mode: str) -> str:
        """Returns the name of a mode with these flags."""
        return f"{mode}-{self.name}" if self.name else mode


PLAIN = Variant("", ())


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """A benchmark. `address` None starts local stacks, one for each of the modes that has one."""

    workloads: tuple[str, ...]
    modes: tuple[str, ...]
    peers: tuple[PeerChoice, ...]
    rounds: int
    scale: float
    num_requests: int | None
    seed: int
    arrivals: Arrivals
    concurrencies: tuple[int, ...]
    turns: int | None
    seats: int
    executors: int
    executor_args: tuple[str, ...]
    variants: tuple[Variant, ...]
    stream_intervals: tuple[int, ...]
    calls: tuple[str, ...]
    model: str | None
    address: str | None
    slo: Slo
    price_per_hour: float | None
    out: Path
    name: str
    json_path: Path | None

    @property
    def stack_modes(self) -> tuple[str, ...]:
        """The modes that go through a whole stack."""
        return tuple(mode for mode in self.modes if mode != ENGINE_MODE)

    @property
    def num_targets(self) -> int:
        """How many ways to serve a workload are compared."""
        if self.address is not None:
            return self._num_per_stack
        ours = len(self.stack_modes) * self._num_per_stack + (ENGINE_MODE in self.modes)
        return ours * (1 + len(self.variants)) + len(self.peers)

    @property
    def _num_per_stack(self) -> int:
        return len(self.stream_intervals) * len(self.calls)

    def loads(self) -> list[BenchOptions]:
        """Returns these options once for each concurrency; themselves where there is none."""
        return [
            replace(
                self,
                arrivals=Arrivals(None, concurrency),
                num_requests=self.num_requests if self.turns is None else self.turns * concurrency,
            )
            for concurrency in self.concurrencies
        ] or [self]


def parse_options(argv: Sequence[str]) -> BenchOptions:
    """Reads the command line; exits 2 with the option's name where it is wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    if given.rate is not None and given.concurrencies:
        parser.error("argument --rate: an open and a closed loop exclude each other; leave --concurrency out")
    if given.turns is not None and (not given.concurrencies or given.num_requests is not None):
        parser.error("argument --turns: wants --concurrency, and takes the place of --requests")
    peers = tuple(dict.fromkeys(peer for peers in given.peers for peer in peers))
    if given.address is not None and (peers or given.engine_only or ENGINE_MODE in (given.modes or ())):
        parser.error("argument --address: a router elsewhere cannot be compared with an engine here")
    values = vars(given)
    rate, engine_only = values.pop("rate"), values.pop("engine_only")
    slo = Slo(values.pop("slo_ttft_ms"), values.pop("slo_itl_ms"))
    if given.turns is not None:
        values["num_requests"] = given.turns * max(given.concurrencies)
    return BenchOptions(
        **values
        | {
            "modes": (ENGINE_MODE,) if engine_only else given.modes or STACK_MODES,
            "peers": peers,
            "variants": tuple(given.variants),
            "name": given.name or "-".join(Path(name).stem for name in given.workloads),
        },
        arrivals=Arrivals(rate, None),
        slo=slo,
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight bench",
        description="Compares in-flight with static batching, the engine alone and other engines on this machine, side "
        "by side in one run, or measures a router that runs already. Writes a report as Markdown and JSON.",
        allow_abbrev=False,
    )
    _add_traffic(parser.add_argument_group("requests").add_argument)
    _add_targets(parser.add_argument_group("what is measured").add_argument)
    _add_results(parser.add_argument_group("results").add_argument)
    return parser


def _add_traffic(add: Callable[..., argparse.Action]) -> None:
    add(
        "--workload",
        dest="workloads",
        type=_workloads,
        default=("mixed",),
        metavar="NAME,…",
        help=f"{', '.join(SHAPES)}, a shape (.json) or a trace ({TRACE_SUFFIX}) of yours; default: mixed",
    )
    add("--rounds", type=_positive, default=2, metavar="N", help="times that everything runs; default: 2")
    add("--scale", type=_share, default=1.0, metavar="X", help="factor on prompts and outputs, in (0, 1]; default: 1")
    add(
        "--requests",
        dest="num_requests",
        type=_positive,
        metavar="N",
        help="number of requests; default: the workload's",
    )
    add("--seed", type=int, default=DEFAULT_SEED, metavar="N", help="another seed, other requests of the same shape")
    add("--rate", type=_above_zero, metavar="R", help="open loop: requests arrive as a Poisson process, R per second")
    add(
        "--concurrency",
        dest="concurrencies",
        type=_positives,
        default=(),
        metavar="N,…",
        help="closed loop: N requests under way at any time; each N is measured in turn",
    )
    add("--turns", type=_positive, metavar="N", help="with --concurrency: N times as many requests as are under way")
    add(
        "--stream-interval",
        dest="stream_intervals",
        type=_positives,
        default=(1,),
        metavar="N,…",
        help="through a stack: tokens of an event, as `stream_interval` of a request; each N is measured; default: 1",
    )
    add(
        "--calls",
        type=_names(CALLS),
        default=(SHARED_CALLS,),
        metavar="KIND,…",
        help="through a stack: shared, as the client does by itself, or single, a call for each stream, as with "
        "`share_calls=False`; each is measured; default: shared",
    )


def _add_targets(add: Callable[..., argparse.Action]) -> None:
    add(
        "--modes",
        type=_names(MODES),
        metavar="MODE,…",
        help="inflight and static: through a whole stack; inflight-vllm: through one with vLLM as the engine, which "
        "`make test-vllm` installs; engine: the in-flight engine alone; default: inflight,static",
    )
    add("--engine-only", action="store_true", help="the same as --modes engine")
    add(
        "--peer",
        dest="peers",
        type=_peer,
        action="append",
        default=[],
        metavar="NAME[:VARIANT]",
        help=f"another engine: {_variants()}; `make bench-peers` installs vllm and llama; may be given more than once",
    )
    add("--seats", type=_positive, default=8, metavar="N", help="sequences at once, the same everywhere; default: 8")
    add("--executors", type=_positive, default=1, metavar="N", help="executors of a local stack; default: 1")
    add("--executor-args", type=_flags, default=(), metavar="FLAGS", help="flags for our executors, as one word")
    add(
        "--variant",
        dest="variants",
        type=_variant,
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="runs every mode of inflight once more with these flags for executors, as MODE-NAME; may be repeated",
    )
    add("--model", help="model folder, GGUF file or hub name; default: SmolLM2-135M-Instruct")
    add("--address", metavar="HOST:PORT", help="router to measure instead of starting local stacks")


def _add_results(add: Callable[..., argparse.Action]) -> None:
    add("--slo-ttft-ms", type=_above_zero, metavar="MS", help="goodput: most time to the first token")
    add("--slo-itl-ms", type=_above_zero, metavar="MS", help="goodput: most mean time between a request's tokens")
    add(
        "--price-per-hour",
        type=_above_zero,
        metavar="P",
        help="price of this machine, for the cost of a million tokens",
    )
    add("--out", type=Path, default=Path("bench/reports"), metavar="FOLDER", help="default: bench/reports")
    add("--name", help="name of the report's files; default: the workloads'")
    add("--json", dest="json_path", type=Path, metavar="PATH", help="writes the JSON there too")


def _variants() -> str:
    return ", ".join(f"{name} ({', '.join(variants)})" for name, variants in VARIANTS.items())


def _names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Parses `a,b` into some of the known names."""
    allowed = tuple(known)

    def parse(text: str) -> tuple[str, ...]:
        names = _split(text)
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
        return names

    return parse


def _workloads(text: str) -> tuple[str, ...]:
    """Known names, or files that are there."""
    names = _split(text)
    for name in names:
        if name in SHAPES:
            continue
        if not name.endswith((".json", TRACE_SUFFIX)):
            raise argparse.ArgumentTypeError(
                f"{name!r} is not one of {', '.join(SHAPES)}, nor a file (.json, {TRACE_SUFFIX})"
            )
        if not Path(name).is_file():
            raise argparse.ArgumentTypeError(f"there is no file {name}")
    return names


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _peer(text: str) -> tuple[PeerChoice, ...]:
    try:
        return parse_peer(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _variant(text: str) -> Variant:
    name, _, flags = text.partition("=")
    if not re.fullmatch(r"[a-z0-9]+", name) or not flags.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FLAGS with a name of a-z and 0-9")
    return Variant(name, tuple(shlex.split(flags)))


def _flags(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def _positives(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in _split(text))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _above_zero(text: str) -> float:
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number in (0, 1]")
    return value


def _number(text: str) -> float:
    """0 for what is no number: every option here wants more than that."""
    try:
        return float(text)
    except ValueError:
        return 0.0
