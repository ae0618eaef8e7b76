"""`inflight bench`: starts what is to be compared, runs it in turn, writes the report.

Everything is up during the whole run; only one target works at a time, and an idle one uses no processor time. Each
runs once per round, on the same requests, so that whatever disturbs the machine disturbs all of them.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

from rich.console import Console

from bench.measures import Run
from bench.options import BenchOptions, parse_options
from bench.progress import Progress
from bench.report.report import Report, Section
from bench.report.terminal import print_report
from bench.report.write import write_report
from bench.soak.count import soak
from bench.stacks import planned_workload
from bench.start import Field, circumstances, start_field
from bench.targets.target import Target, TargetError
from bench.workloads.generate import build_workload
from bench.workloads.plan import Workload, WorkloadError
from common.model_source import ModelError
from inflight.cli.foreground import run_in_foreground
from inflight.cli.outcome import EXIT_FAILURE, EXIT_USAGE, CommandError, in_words
from inflight.errors import InflightError
from inflight.local.stack import StackError

# The first steps of a process allocate, compile and fill caches; these requests take that on themselves.
WARM_UP_VARIANT = -1
WARM_UP_SCALE = 0.25


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark and returns the exit code: 0 where every request went well."""
    options = parse_options(argv)
    if options.num_soak_requests is not None:
        return run_in_foreground(lambda: _in_words(options, soak(options, options.num_soak_requests or 0)))
    return run_in_foreground(lambda: _in_words(options, _bench(options)))


async def _in_words(options: BenchOptions, command: Coroutine[Any, Any, int]) -> int:
    """Runs a command; what goes wrong outside of it becomes a line for the user."""
    try:
        return await command
    except StackError as error:
        raise CommandError(str(error), EXIT_USAGE if error.is_setting else EXIT_FAILURE) from None
    except (ModelError, WorkloadError) as error:
        raise CommandError(str(error), EXIT_USAGE) from None
    except TargetError as error:
        raise CommandError(str(error)) from None
    except InflightError as error:
        raise CommandError(in_words(error, options.address or "the stack")) from None


async def _bench(options: BenchOptions) -> int:
    console = Console()
    for name in options.workloads:
        planned_workload(options, name, vocabulary_size=1)  # a file that is wrong is found before anything starts
    num_targets = len(options.modes) + len(options.peers) if options.address is None else 1
    async with AsyncExitStack() as opened:
        progress = opened.enter_context(Progress(console, num_targets * options.rounds * len(options.workloads)))
        started = await start_field(options, opened, progress)
        sections = [await compare(started, options, name, progress) for name in options.workloads]
        report = Report(circumstances(options, started), tuple(sections), options.price_per_hour, options.slo)
    print_report(report, console)
    paths = write_report(report, options.out, options.name, options.json_path)
    console.print("report: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)
    return EXIT_FAILURE if any(run.measures.num_failed for section in sections for run in section.runs) else 0


async def compare(started: Field, options: BenchOptions, name: str, progress: Progress) -> Section:
    """Runs everything once per round. Each round begins with another one, so that nobody is always the first."""
    runs: list[Run] = []
    warm_up = _warm_up(started, options)
    for target in list(started.targets):
        progress.begin(warm_up, f"{target.mode}, warming up")
        await _run(started, target, warm_up, 0, progress)
    for number in range(1, options.rounds + 1):
        workload = planned_workload(options, name, started.vocabulary_size, variant=number)
        first = (number - 1) % max(1, len(started.targets))
        for target in [*started.targets[first:], *started.targets[:first]]:
            progress.begin(workload, target.mode)
            run = await _run(started, target, workload, number, progress)
            if run is not None:
                runs.append(run)
                progress.end(workload, run)
    ordered = sorted(runs, key=lambda run: (run.round, started.place(run.mode)))
    return Section(planned_workload(options, name, started.vocabulary_size), tuple(ordered))


async def _run(started: Field, target: Target, workload: Workload, number: int, progress: Progress) -> Run | None:
    """One run; a peer that breaks is left out from then on, one of ours ends the benchmark."""
    try:
        return await target.run(workload, number, progress.advance)
    except TargetError as error:
        if target.mode not in started.peer_modes:
            raise
        started.leave_out(target, str(error))
        progress.say(f"without {error}")
        return None


def _warm_up(started: Field, options: BenchOptions) -> Workload:
    return build_workload(
        "short",
        vocabulary_size=started.vocabulary_size,
        scale=WARM_UP_SCALE,
        num_requests=options.seats * options.executors,
        variant=WARM_UP_VARIANT,
    )
