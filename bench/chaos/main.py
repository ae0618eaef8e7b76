"""`python -m bench.chaos`: a system, its load, its faults, and its result.

Start → reference → load with faults → wait until the load has ended → look for leaks → report. Ctrl-C ends the faults
and the load where they are and reports what there is.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rich.console import Console

from bench.chaos.gaps import Window
from bench.chaos.inject import inject
from bench.chaos.load import Load, Sent
from bench.chaos.options import ChaosOptions, parse_options
from bench.chaos.reference import Reference, load_or_make
from bench.chaos.report import fill, page, values_of
from bench.chaos.requests import sample_requests
from bench.chaos.schedule import Fault, faults
from bench.chaos.setting import Setting, setting_of
from bench.chaos.tally import Tally, tally
from bench.fleet.fleet import Fleet, running_fleet
from bench.fleet.fork_server import ForkServer
from bench.fleet.health import Leak, Observer
from bench.report.page import write_report
from bench.targets.command_errors import with_command_errors
from inflight import AsyncClient
from inflight.cli.console import EXIT_FAILURE, run_in_foreground

LEAK_TIMEOUT_S = 30.0


@dataclass(slots=True)
class ChaosRun:
    """A run under way, and what has come of it so far."""

    options: ChaosOptions
    setting: Setting
    console: Console
    windows: list[Window] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """A line with the time since the load began."""
        self.console.print(
            f"{time.monotonic() - self.began_s:7.1f} s  {text}", markup=False, highlight=False, soft_wrap=True
        )


def main(argv: Sequence[str]) -> int:
    """Runs it and returns the exit code."""
    options = parse_options(argv)
    console = Console()
    console.print(f"seed {options.seed}", highlight=False)
    return run_in_foreground(lambda: with_command_errors(chaos(options, console)))


async def chaos(options: ChaosOptions, console: Console) -> int:
    """One run; 0 if every promise was kept."""
    with setting_of(options) as setting:
        run = ChaosRun(options, setting, console)
        result = await _run(run)
    paths = write_report(options.out, "chaos", values_of(result, run.windows, run.began_s), page(result))
    if options.measured is not None:
        fill(options.measured, result)
    for failure in result.failures:
        console.print(f"failed: {failure}", markup=False, highlight=False, soft_wrap=True)
    console.print("report: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)
    console.print(result.last_line, markup=False, highlight=False, soft_wrap=True)
    return 0 if result.is_right else EXIT_FAILURE


async def _run(run: ChaosRun) -> Tally:
    options = run.options
    run.say(f"starting {options.routers} routers and {options.executors} executors with {run.setting.pool}")
    async with (
        _fork_server(options) as fork_server,
        running_fleet(run.setting.stack, fork_server) as fleet,
        AsyncClient(*fleet.addresses) as client,
        Observer(fleet, run.setting.pool) as observer,
    ):
        await observer.wait_until_whole(options.recovery_timeout_s)
        reference = await _reference(run, client)
        load = Load(client, reference.expected, options.seed, options.manners, lambda sent: _tell(run, sent))
        run.began_s = time.monotonic()
        leak: Leak | None = None
        try:
            await _disturbed(run, fleet, observer, load)
            leak = await observer.leak(LEAK_TIMEOUT_S)
        except asyncio.CancelledError:
            running = asyncio.current_task()
            assert running is not None
            running.uncancel()  # Ctrl-C: the report is of what there is
        facts = _circumstances(run, reference)
        return tally(facts, load.sent, run.windows, fleet.exits, leak, was_interrupted=leak is None)


@asynccontextmanager
async def _fork_server(options: ChaosOptions) -> AsyncIterator[ForkServer | None]:
    """What processes are copies of, where they are to be."""
    if not options.copies:
        yield None
        return
    options.run_dir.mkdir(parents=True, exist_ok=True)
    async with ForkServer(options.run_dir / "fork-server.log") as fork_server:
        yield fork_server


async def _reference(run: ChaosRun, client: AsyncClient) -> Reference:
    wanted = list(sample_requests(run.setting.num_samples, run.setting.lengths, run.setting.vocabulary_size))
    run.say(f"what {len(wanted)} requests bring undisturbed")
    reference = await load_or_make(client, wanted, run.setting.system)
    left_out = f", {reference.num_left_out} left out for a tie" if reference.num_left_out else ""
    run.say(f"{len(reference.expected)} requests to choose from{left_out}")
    return reference


async def _disturbed(run: ChaosRun, fleet: Fleet, observer: Observer, load: Load) -> None:
    """The load with faults, until the time is over and every stream has ended."""
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(load.run(run.options.clients))
        try:
            await _disturb(run, fleet, observer, load)
        finally:
            load.stop()
        run.say(f"no more faults; {len(load.under_way)} streams to go")
        await sending


async def _disturb(run: ChaosRun, fleet: Fleet, observer: Observer, load: Load) -> None:
    options = run.options
    ends_s = time.monotonic() + options.seconds
    schedule = faults(options.seed, options.kinds, options.routers, options.executors)

    async def disturb() -> None:
        for fault in schedule:
            left_s = ends_s - time.monotonic()
            if left_s <= fault.calm_s:
                await asyncio.sleep(max(0.0, left_s))
                return
            await asyncio.sleep(fault.calm_s)
            await _one_fault(run, fleet, observer, load, fault)

    async with asyncio.TaskGroup() as group:
        for _ in range(options.overlap):
            group.create_task(disturb())


async def _one_fault(run: ChaosRun, fleet: Fleet, observer: Observer, load: Load, fault: Fault) -> None:
    """Makes it happen and waits until the system is whole again."""
    began_s = time.monotonic()
    run.say(f"{fault.number:3d}. {fault.kind.value}: {fault.target}, {len(load.under_way)} streams under way")
    window = Window(fault, began_s, began_s, None)
    run.windows.append(window)
    at = len(run.windows) - 1
    await inject(fleet, fault)
    over_s = time.monotonic()
    try:
        await observer.wait_until_whole(run.options.recovery_timeout_s)
    except TimeoutError:
        run.say(f"{fault.number:3d}. not whole after {run.options.recovery_timeout_s:g} s")
        run.windows[at] = Window(fault, began_s, over_s, None)
        return
    run.windows[at] = Window(fault, began_s, over_s, time.monotonic())
    num_failed = sum(sent.failed for sent in load.sent)
    failed = f", {num_failed} failed" if num_failed else ""
    run.say(
        f"{fault.number:3d}. whole after {time.monotonic() - began_s:.1f} s; {len(load.sent)} streams ended{failed}"
    )


def _tell(run: ChaosRun, sent: Sent) -> None:
    if sent.failed:
        observed = sent.observed
        why = observed.error or sent.verdict.problem or "its stream did not end"
        run.say(f"     request {sent.number} ({observed.sample.name}, {sent.manner.value}) failed: {why}")


def _circumstances(run: ChaosRun, reference: Reference) -> dict[str, str]:
    options = run.options
    return {
        "command": f"make chaos SECONDS={options.seconds:g} SEED={options.seed}"
        + (f' ARGS="--model {options.model}"' if options.model else ""),
        "model": run.setting.system,
        "system": f"{options.routers} routers, {options.executors} executors of {options.seats} seats, one Redis",
        "load": f"{options.clients} clients, each with one request after the other out of {len(reference.expected)}",
        "faults": ", ".join(kind.value for kind in options.kinds),
        "at a time": str(options.overlap),
        "machine": f"{os.cpu_count()} cores",
    }
