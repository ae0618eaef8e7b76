"""`python -m inflight.bench.chaos`: a system, its load, its faults, and its result.

Start → reference → load with faults → wait until the load has ended → look for leaks → report. Ctrl-C ends the faults
and the load where they are and reports what there is.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

from rich.console import Console

from inflight import AsyncClient
from inflight.bench.chaos.adapters import NUM_VERSIONS, ServedAdapters, version_name
from inflight.bench.chaos.disturbance import ChaosRun, System, disturb, running_system
from inflight.bench.chaos.gaps import Window
from inflight.bench.chaos.load import AdapterSamples, Load, Sent, Versions
from inflight.bench.chaos.options import ChaosOptions, parse_options
from inflight.bench.chaos.reference import Reference, load_or_make
from inflight.bench.chaos.report import fill, page, values_of
from inflight.bench.chaos.requests import SampleRequest, sample_requests
from inflight.bench.chaos.schedule import FaultKind
from inflight.bench.chaos.setting import NUM_ADAPTER_SAMPLES, setting_of
from inflight.bench.chaos.tally import Tally, tally
from inflight.bench.fleet.health import Leak
from inflight.bench.fleet.usage import UNREPORTED_S, BusyWatch, Costs
from inflight.bench.report.page import write_report
from inflight.bench.targets.command_errors import with_command_errors
from inflight.cli.console import EXIT_FAILURE, run_in_foreground

LEAK_TIMEOUT_S = 90.0
# Executors send all of their totals once a minute.
USAGE_TIMEOUT_S = 90.0


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
    for failure in (*result.failures, *result.cost_problems):
        console.print(f"failed: {failure}", markup=False, highlight=False, soft_wrap=True)
    console.print("report: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)
    console.print(result.last_line, markup=False, highlight=False, soft_wrap=True)
    return 0 if result.is_right else EXIT_FAILURE


async def _run(run: ChaosRun) -> Tally:
    options = run.options
    async with running_system(run) as system:
        reference = await _reference(run, system.client)
        adapted = None
        if system.adapters is not None:
            adapted = await _adapter_samples(run, system.client, system.adapters)
            await system.adapters.begin()
        load = Load(
            *(system.client, reference.expected, options.seed, options.manners, lambda sent: _tell(run, sent), adapted)
        )
        run.began_s = time.monotonic()
        leak: Leak | None = None
        costs: Costs | None = None
        watch = BusyWatch(system.fleet)
        watching = asyncio.create_task(watch.run())
        try:
            await _disturbed(run, system, load)
            leak = await system.observer.leak(LEAK_TIMEOUT_S)
            costs = await watch.costs(system.client, run.setting.pool, _lost_s(run.windows), USAGE_TIMEOUT_S)
        except asyncio.CancelledError:
            running = asyncio.current_task()
            assert running is not None
            running.uncancel()  # Ctrl-C: the report is of what there is
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        facts = _circumstances(run, reference)
        return tally(facts, load.sent, run.windows, system.fleet.exits, leak, costs, was_interrupted=costs is None)


async def _reference(run: ChaosRun, client: AsyncClient) -> Reference:
    wanted = list(sample_requests(run.setting.num_samples, run.setting.lengths, run.setting.vocabulary_size))
    run.say(f"what {len(wanted)} requests bring undisturbed")
    reference = await load_or_make(client, wanted, run.setting.system)
    left_out = f", {reference.num_left_out} left out for a tie" if reference.num_left_out else ""
    run.say(f"{len(reference.expected)} requests to choose from{left_out}")
    return reference


async def _adapter_samples(run: ChaosRun, client: AsyncClient, adapters: ServedAdapters) -> AdapterSamples:
    """What requests with adapters bring with each version: generated with every version, served under a name of its
    own."""
    setting, names = run.setting, adapters.files.names

    def samples(name: str) -> list[SampleRequest]:
        model = f"{setting.pool}:{name}"
        lengths = setting.adapter_lengths
        return list(sample_requests(NUM_ADAPTER_SAMPLES, lengths, setting.vocabulary_size, model))

    of_versions = {
        (name, version): samples(version_name(name, version)) for name in names for version in range(NUM_VERSIONS)
    }
    wanted = [sample for found in of_versions.values() for sample in found]
    run.say(f"what {len(wanted)} requests with adapters bring undisturbed")
    hashes = ", ".join(f"{name} {content}" for name, content in sorted(adapters.hashes.items()))
    known = (await load_or_make(client, wanted, f"{setting.system} with {hashes}")).expected
    expected: dict[SampleRequest, Versions] = {}
    for name in names:
        for index, sample in enumerate(samples(name)):
            found = [known.get(of_versions[name, version][index]) for version in range(NUM_VERSIONS)]
            versions = {version: one for version, one in enumerate(found) if one is not None}
            # A request with a tie is left out, and one that does not tell the versions apart.
            if len({one.token_ids for one in versions.values()}) == NUM_VERSIONS:
                expected[sample] = versions
    run.say(f"{len(expected)} requests with adapters to choose from")
    return AdapterSamples(expected, adapters.history)


async def _disturbed(run: ChaosRun, system: System, load: Load) -> None:
    """The load with faults, until the time is over and every stream has ended."""
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(load.run(run.options.clients))
        try:
            await disturb(run, system, load)
        finally:
            load.stop()
        run.say(f"no more faults; {load.num_under_way} streams to go")
        await sending


def _lost_s(windows: Sequence[Window]) -> float | None:
    """Returns until when executors may have ended whose usage Redis has lost: until the others have reported again."""
    kinds = (FaultKind.REDIS_EMPTY, FaultKind.STORE_STALE)
    found = (window.whole_s or window.over_s for window in windows if window.fault.kind in kinds)
    return max((over_s + UNREPORTED_S for over_s in found), default=None)


def _tell(run: ChaosRun, sent: Sent) -> None:
    if sent.failed:
        observed = sent.observed
        why = observed.error or sent.verdict.problem or "its stream did not end"
        run.say(f"     request {sent.number} ({observed.sample.name}, {sent.manner.value}) failed: {why}")


def _circumstances(run: ChaosRun, reference: Reference) -> dict[str, str]:
    options = run.options
    arguments = " ".join(
        [f"--model {options.model}"] * bool(options.model) + [f"--adapters {options.adapters}"] * bool(options.adapters)
    )
    return {
        "command": f"make chaos SECONDS={options.seconds:g} SEED={options.seed}"
        + (f' ARGS="{arguments}"' if arguments else ""),
        "executor options": " ".join(options.executor_args) or "none",
        "model": run.setting.system,
        "system": f"{options.routers} routers, {options.executors} executors of {options.seats} seats, one Redis",
        "load": f"{options.clients} clients, each with one request after the other out of {len(reference.expected)}",
        "adapters": f"{options.adapters} in {options.adapter_slots} slots" if options.adapters else "none",
        "faults": ", ".join(kind.value for kind in options.kinds),
        "at a time": str(options.overlap),
        "machine": f"{os.cpu_count()} cores",
    }
