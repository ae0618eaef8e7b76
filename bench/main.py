"""`inflight bench`: compares targets side by side and writes the report.

Everything is up during the whole run. Only one target works at a time, and an idle one uses no processor time. Each
runs once per round, on the same requests, so that a disturbance of the machine affects all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from inflight.bench.comparison.options import BenchOptions, parse_options
from inflight.bench.comparison.pages import page, terminal_lines, values_of
from inflight.bench.comparison.progress import Progress
from inflight.bench.comparison.report import Report, Section, section_of
from inflight.bench.comparison.stacks import planned_workload
from inflight.bench.comparison.start import Field, circumstances, start_field
from inflight.bench.measures.run import Run
from inflight.bench.report.page import write_report
from inflight.bench.targets.command_errors import with_command_errors
from inflight.bench.targets.target import Target, TargetError
from inflight.bench.workloads.generate import build_workload
from inflight.bench.workloads.plan import Workload
from inflight.cli.console import EXIT_FAILURE, run_in_foreground

# The first steps of a process allocate, compile and fill caches. These requests bear that cost.
WARM_UP_VARIANT = -1
WARM_UP_SCALE = 0.25
# Far more than are asked for.
ROUNDS_OF_A_LOAD = 1000


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark and returns the exit code: 0 if every request went well."""
    options = parse_options(argv)
    return run_in_foreground(lambda: with_command_errors(_compare(options), options.address))


async def _compare(options: BenchOptions) -> int:
    console = Console()
    for name in options.workloads:
        planned_workload(options, name, vocabulary_size=1)  # a file that is wrong is found before anything starts
    loads = options.loads()
    num_runs = options.num_targets * options.rounds * len(options.workloads) * len(loads)
    async with AsyncExitStack() as opened:
        progress = opened.enter_context(Progress(console, num_runs))
        started = await start_field(options, opened, progress)
        await warm_up(started, options, progress)
        sections = [await compare(started, load, name, progress) for name in options.workloads for load in loads]
        report = Report(circumstances(options, started), tuple(sections), options.price_per_hour, options.slo)
    for line in terminal_lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    paths = write_report(options.out, options.name, values_of(report), page(report))
    _copy_json(paths[0], options.json_path)
    console.print("report: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)
    return EXIT_FAILURE if any(run.measures.num_failed for section in sections for run in section.runs) else 0


async def compare(started: Field, options: BenchOptions, name: str, progress: Progress) -> Section:
    """Runs everything once per round. Each round begins with another target, so that none is always the first."""
    runs: list[Run] = []
    # Other token ids for each load, too: none finds the KV of another in a prefix cache.
    first_variant = ROUNDS_OF_A_LOAD * (options.arrivals.concurrency or 0)
    for number in range(1, options.rounds + 1):
        workload = planned_workload(options, name, started.vocabulary_size, variant=first_variant + number)
        first = (number - 1) % max(1, len(started.targets))
        for target in [*started.targets[first:], *started.targets[:first]]:
            progress.begin(workload, target.mode)
            run = await _run(started, target, workload, number, progress)
            if run is not None:
                runs.append(run)
                progress.end(workload, run)
    ordered = sorted(runs, key=lambda run: (run.round, started.place(run.mode)))
    return section_of(planned_workload(options, name, started.vocabulary_size), ordered)


async def _run(started: Field, target: Target, workload: Workload, number: int, progress: Progress) -> Run | None:
    """One run. A peer that breaks is left out from then on; any other target that breaks ends the benchmark."""
    try:
        return await target.run(workload, number, progress.advance)
    except TargetError as error:
        if target.mode not in started.peer_modes:
            raise
        started.leave_out(target, str(error))
        progress.say(f"without {error}")
        return None


async def warm_up(started: Field, options: BenchOptions, progress: Progress) -> None:
    """Lets every target fill its seats once with requests that are not measured."""
    workload = build_workload(
        "short",
        vocabulary_size=started.vocabulary_size,
        scale=WARM_UP_SCALE,
        num_requests=options.seats * options.executors,
        variant=WARM_UP_VARIANT,
    )
    for target in list(started.targets):
        progress.begin(workload, f"{target.mode}, warming up")
        await _run(started, target, workload, 0, progress)


def _copy_json(report: Path, path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(report.read_bytes())
