"""The soak test: a stack at full load for a time, and whether anything in it grows.

Start → load with readings at even intervals → the load ends → what is left → report. Ctrl-C ends the load and reports
the readings so far.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from inflight import AsyncClient
from inflight.bench.fleet.health import leak_of
from inflight.bench.fleet.tiny_model import NAMES as TINY
from inflight.bench.fleet.tiny_model import write_tiny_model
from inflight.bench.report.page import write_report
from inflight.bench.soak.load import SoakLoad
from inflight.bench.soak.readings import REDIS, Readings
from inflight.bench.soak.result import SoakResult, page, trends_of, values_of
from inflight.bench.targets.model import local_model
from inflight.bench.workloads.generate import shaped_requests
from inflight.bench.workloads.shapes import Shape
from inflight.cli.console import EXIT_FAILURE
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.local.state import read_state

SHAPE = Shape(num_requests=400, prompt_tokens=(8, 96), output_tokens=(4, 64))
REQUESTS_PER_SEAT = 2
NUM_READINGS = 300
MIN_INTERVAL_S = 0.5
LEFT_TIMEOUT_S = 30.0
SOAK = "soak"


@dataclass(frozen=True, slots=True)
class SoakOptions:
    """A soak for `seconds`. `command` is for the report."""

    seconds: float
    seed: int
    model: str
    routers: int
    executors: int
    seats: int
    run_dir: Path
    out: Path
    command: str

    @property
    def num_clients(self) -> int:
        return REQUESTS_PER_SEAT * self.seats * self.executors


async def soak(options: SoakOptions) -> int:
    """Runs one soak and returns the exit code: 0 if nothing failed and nothing grows."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="inflight-soak-") as folder:
        model = str(write_tiny_model(Path(folder), name=options.model)) if options.model in TINY else options.model
        async with (
            LocalStack(_stack(options, model)) as stack,
            AsyncClient(*stack.router_addresses) as client,
            Readings(_pids(stack), stack.redis_admin_url, client) as readings,
        ):
            outcome = await _soak(options, console, stack, client, readings, model)
    paths = write_report(options.out, SOAK, values_of(outcome, readings.at_s, readings.series), page(outcome))
    for one in outcome.trends:
        if not one.is_flat:
            console.print(f"grows: {one.process} {one.figure} from {one.early:.1f} to {one.late:.1f}", highlight=False)
    for error in outcome.errors:
        console.print(f"failed: {error}", markup=False, highlight=False, soft_wrap=True)
    console.print("report: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)
    console.print(outcome.last_line, highlight=False, soft_wrap=True)
    return EXIT_FAILURE if outcome.num_failed or outcome.is_flat is False else 0


async def _soak(
    options: SoakOptions, console: Console, stack: LocalStack, client: AsyncClient, readings: Readings, model: str
) -> SoakResult:
    found = local_model(model)
    requests = shaped_requests(SHAPE, SOAK, found.vocabulary_size, seed=options.seed)
    load = SoakLoad(client, stack.router_addresses, requests, options.seed)
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
        running.uncancel()  # Ctrl-C: the report is of the readings so far
        seconds = time.monotonic() - began_s
    trends, too_few = trends_of(readings.series)
    return SoakResult(
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


async def _loaded(options: SoakOptions, console: Console, load: SoakLoad, readings: Readings) -> None:
    """Full load and readings, until the time is over and every stream has ended."""
    interval_s = max(MIN_INTERVAL_S, options.seconds / NUM_READINGS)
    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(load.run(options.num_clients))
        try:
            while not sending.done() and (elapsed_s := time.monotonic() - began_s) < options.seconds:
                await readings.read(elapsed_s)
                _show_progress(console, elapsed_s, load, readings)
                await asyncio.wait([sending], timeout=min(interval_s, options.seconds))
        finally:
            load.is_stopping = True
        await sending


def _show_progress(console: Console, elapsed_s: float, load: SoakLoad, readings: Readings) -> None:
    """Prints a line at every tenth reading."""
    if len(readings.at_s) % 10 != 1:
        return
    held = ", ".join(
        f"{process} {values[-1]:.0f}"
        for (process, figure), values in readings.series.items()
        if figure == "resident MiB"
    )
    line = f"{elapsed_s:7.0f} s  {load.num_sent} requests, {load.num_failed} failed; MiB: {held}"
    console.print(line, highlight=False, soft_wrap=True)


def _pids(stack: LocalStack) -> dict[str, int]:
    """Returns the processes of a stack, and this one, which holds the client library."""
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
        "command": options.command,
        "model": model,
        "system": f"{options.routers} routers, {options.executors} executors of {options.seats} seats, one Redis",
        "load": f"{options.num_clients} clients; a fifth cancel, a tenth vanish, a tenth send a request twice",
        "processes": f"those of the stack, {REDIS}, and {SOAK}: this one, with the client library",
        "machine": f"{os.cpu_count()} cores",
    }
