"""`python -m bench.soak`: a stack at full load for a chosen time, and whether anything in it grows.

Start → load with readings at even intervals → the load ends → what is left → report. Ctrl-C ends the load and reports
what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench.chaos.health import leak_of
from bench.chaos.tiny_model import NAME as TINY
from bench.chaos.tiny_model import write_tiny_model
from bench.model import local_model
from bench.soak.load import Load
from bench.soak.outcome import Outcome, to_json, to_markdown, trends_of
from bench.soak.readings import REDIS, Readings
from bench.targets.target import TargetError
from bench.workloads.generate import shaped_requests
from bench.workloads.shapes import Shape
from common.model_source import ModelError
from inflight.aio import Client
from inflight.cli.foreground import run_in_foreground
from inflight.cli.outcome import EXIT_FAILURE, EXIT_USAGE, CommandError
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack, StackError
from inflight.local.state import read_state

SHAPE = Shape(num_requests=400, prompt_tokens=(8, 96), output_tokens=(4, 64))
REQUESTS_PER_SEAT = 2
NUM_READINGS = 300
MIN_INTERVAL_S = 0.5
LEFT_TIMEOUT_S = 30.0
SOAK = "soak"


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """A soak by time."""

    seconds: float
    seed: int
    model: str
    routers: int
    executors: int
    seats: int
    run_dir: Path
    out: Path


def main(argv: Sequence[str]) -> int:
    """Runs it and returns the exit code: 0 where nothing failed and nothing grows."""
    options = parse_options(argv)
    return run_in_foreground(lambda: _in_words(options, Console()))


def parse_options(argv: Sequence[str]) -> SoakOptions:
    """Reads the command line; exits 2 with the option's name where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak",
        description="Keeps a stack at full load with cancellations and vanishing clients, and watches what its "
        "processes hold. Exits 1 where a request failed or something grows.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--seconds", type=float, default=3600.0, metavar="S", help="how long; default: 3600")
    add("--seed", type=int, default=0, metavar="N", help="other requests; default: 0")
    add("--model", default="", metavar="MODEL", help=f"{TINY}, or as for `inflight up`; default: SmolLM2-135M-Instruct")
    add("--routers", type=int, default=2, metavar="N", help="default: 2")
    add("--executors", type=int, default=2, metavar="N", help="default: 2")
    add("--seats", type=int, default=8, metavar="N", help="of each executor; default: 8")
    add("--run-dir", type=Path, default=Path("run/soak"), metavar="DIR", help="logs; default: run/soak")
    add("--out", type=Path, default=Path("run/soak"), metavar="DIR", help="the report; default: run/soak")
    return SoakOptions(**vars(parser.parse_args(argv)))


async def _in_words(options: SoakOptions, console: Console) -> int:
    try:
        return await soak(options, console)
    except StackError as error:
        raise CommandError(str(error), EXIT_USAGE if error.is_setting else EXIT_FAILURE) from None
    except ModelError as error:
        raise CommandError(str(error), EXIT_USAGE) from None
    except TargetError as error:
        raise CommandError(str(error)) from None


async def soak(options: SoakOptions, console: Console) -> int:
    """One soak; 0 where nothing failed and nothing grows."""
    with tempfile.TemporaryDirectory(prefix="inflight-soak-") as folder:
        model = str(write_tiny_model(Path(folder))) if options.model == TINY else options.model
        async with (
            LocalStack(_stack(options, model)) as stack,
            Client(*stack.router_addresses) as client,
            Readings(_pids(stack), stack.redis_admin_url, client) as readings,
        ):
            outcome = await _soak(options, console, stack, client, readings, model)
    options.out.mkdir(parents=True, exist_ok=True)
    paths = (options.out / "soak.json", options.out / "soak.md")
    paths[0].write_text(to_json(outcome, readings.at_s, readings.series), encoding="utf-8")
    paths[1].write_text(to_markdown(outcome), encoding="utf-8")
    for one in outcome.trends:
        if not one.is_flat:
            console.print(f"grows: {one.process} {one.figure} from {one.early:.1f} to {one.late:.1f}", highlight=False)
    for error in outcome.errors:
        console.print(f"failed: {error}", markup=False, highlight=False, soft_wrap=True)
    console.print("report: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)
    console.print(outcome.last_line, highlight=False, soft_wrap=True)
    return 0 if outcome.is_flat and not outcome.num_failed else EXIT_FAILURE


async def _soak(
    options: SoakOptions, console: Console, stack: LocalStack, client: Client, readings: Readings, model: str
) -> Outcome:
    found = local_model(model)
    requests = shaped_requests(SHAPE, SOAK, found.vocabulary_size, seed=options.seed)
    load = Load(client, stack.router_addresses, requests, options.seed)
    began_s = time.monotonic()
    left: dict[str, int] = {}
    try:
        await _loaded(options, console, load, readings)
        seconds = time.monotonic() - began_s
        leak = await leak_of(client, stack.redis_admin_url, found.name, LEFT_TIMEOUT_S)
        left = {"blocks held": leak.used_blocks, "blocks promised": leak.reserved_blocks, "requests": leak.num_requests}
    except asyncio.CancelledError:
        running = asyncio.current_task()
        assert running is not None
        running.uncancel()  # Ctrl-C: the report is of what there is
        seconds = time.monotonic() - began_s
    trends, too_few = trends_of(readings.series)
    return Outcome(
        circumstances=_circumstances(options, found.name),
        seconds=seconds,
        num_requests=load.num_sent,
        num_cancelled=load.num_cancelled,
        num_vanished=load.num_vanished,
        num_tokens=load.num_tokens,
        num_failed=load.num_failed,
        errors=load.errors,
        left=left,
        trends=trends,
        too_few=too_few,
    )


async def _loaded(options: SoakOptions, console: Console, load: Load, readings: Readings) -> None:
    """Full load and readings, until the time is over and every stream has ended."""
    interval_s = max(MIN_INTERVAL_S, options.seconds / NUM_READINGS)
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(load.run(REQUESTS_PER_SEAT * options.seats * options.executors))
        try:
            while (elapsed_s := time.monotonic() - began_s) < options.seconds:
                await readings.read(elapsed_s)
                _tell(console, elapsed_s, load, readings)
                await asyncio.sleep(min(interval_s, options.seconds))
        finally:
            load.is_stopping = True
        await sending


def _tell(console: Console, elapsed_s: float, load: Load, readings: Readings) -> None:
    """A line now and then."""
    if len(readings.at_s) % 10 != 1:
        return
    held = ", ".join(
        f"{process} {values[-1]:.0f}"
        for (process, figure), values in readings.series.items()
        if figure == "resident MiB"
    )
    console.print(
        f"{elapsed_s:7.0f} s  {load.num_sent} requests, {load.num_failed} failed; MiB: {held}", highlight=False
    )


def _pids(stack: LocalStack) -> dict[str, int]:
    """The processes of a stack, and this one, which holds the client library."""
    state = read_state(stack.options.run_dir)
    assert state is not None
    return {process.name: process.pid for process in state.processes} | {SOAK: os.getpid()}


def _stack(options: SoakOptions, model: str) -> StackOptions:
    # A small KV pool, so that the warm-up touches all of it: memory that is first used later would look like growth.
    longest = SHAPE.prompt_tokens[1] + SHAPE.output_tokens[1] + 16
    return StackOptions(
        executors=options.executors,
        routers=options.routers,
        model=model or None,
        run_dir=options.run_dir,
        executor_args=(
            *("--max-num-sequences", str(options.seats)),
            *("--max-tokens-in-paged-kv-cache", str(options.seats * longest)),
        ),
    )


def _circumstances(options: SoakOptions, model: str) -> dict[str, str]:
    return {
        "command": f"make soak SECONDS={options.seconds:g}",
        "model": model,
        "system": f"{options.routers} routers, {options.executors} executors of {options.seats} seats, one Redis",
        "load": f"{REQUESTS_PER_SEAT * options.seats * options.executors} clients; a fifth cancel, a tenth vanish",
        "processes": f"those of the stack, {REDIS}, and {SOAK}: this one, with the client library",
        "machine": f"{os.cpu_count()} cores",
    }
