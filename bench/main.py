"""`inflight bench`: starts what is to be compared, runs it in turn, writes the report.

All stacks are up during the whole run; only one works at a time, and an idle one uses no processor time. Each mode runs
once per round, on the same requests, so that whatever disturbs the machine disturbs both.
"""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib import metadata
from pathlib import Path

from bench.load import run_workload
from bench.measures import Run, ratio
from bench.options import BenchOptions, parse_options
from bench.report import BASELINE_MODE, Report, write_report
from bench.stacks import planned_workload, stack_options
from bench.workloads import Workload, build_workload
from client.aio import Client
from client.catalogue import Model
from client.cli.foreground import run_in_foreground
from client.cli.outcome import EXIT_FAILURE, EXIT_USAGE, CommandError, in_words
from client.errors import InflightError
from client.stack.local import LocalStack, StackError
from common.machine import num_usable_cores

# The first steps of a process allocate, compile and fill caches; these requests take that on themselves.
WARM_UP_VARIANT = -1
WARM_UP_SCALE = 0.25


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark and returns the exit code: 0 where every request went well."""
    options = parse_options(argv)
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("the report's picture needs matplotlib: pip install 'inflight[bench]'")
    return run_in_foreground(lambda: _bench(options))


async def _bench(options: BenchOptions) -> int:
    try:
        async with _clients(options) as clients:
            reports = [await _compare(clients, options, name) for name in options.workloads]
    except StackError as error:
        raise CommandError(str(error), EXIT_USAGE if error.is_setting else EXIT_FAILURE) from None
    except InflightError as error:
        raise CommandError(in_words(error, options.address or "the stack")) from None
    for name, report in zip(options.workloads, reports, strict=True):
        _print_summary(report, write_report(report, options.out, options.name or name))
    return EXIT_FAILURE if any(run.measures.num_failed for report in reports for run in report.runs) else 0


@asynccontextmanager
async def _clients(options: BenchOptions) -> AsyncIterator[Mapping[str, Client]]:
    """A client for each mode, with a local stack behind it unless an address is given."""
    async with AsyncExitStack() as opened:
        if options.address is not None:
            client = await opened.enter_async_context(Client(options.address))
            executors = (await client.capacity()).executors
            yield {"+".join(sorted({executor.batching for executor in executors})) or "no executor": client}
            return
        clients = {}
        for mode in options.modes:
            print(f"starting the {mode} stack", flush=True)
            stack = await opened.enter_async_context(LocalStack(stack_options(options, mode)))
            clients[mode] = await opened.enter_async_context(Client(stack.address))
        yield clients


async def _compare(clients: Mapping[str, Client], options: BenchOptions, name: str) -> Report:
    """Runs every mode once per round, in turn."""
    model = await _only_model(next(iter(clients.values())))
    for mode, client in clients.items():
        await _warm_up(client, mode, model, options)
    runs = []
    for number in range(1, options.rounds + 1):
        workload = planned_workload(options, name, model.vocabulary_size, variant=number)
        for mode, client in clients.items():
            run = await run_workload(client, workload, mode=mode, round_number=number)
            runs.append(run)
            _print_run(workload, run, options.rounds)
    return Report(workload, _circumstances(model, options), tuple(runs))


async def _only_model(client: Client) -> Model:
    models = await client.list_models()
    if len(models) != 1:
        raise CommandError(f"a benchmark needs a router with one model, not {len(models)}")
    return models[0]


async def _warm_up(client: Client, mode: str, model: Model, options: BenchOptions) -> None:
    workload = build_workload(
        "short",
        vocabulary_size=model.vocabulary_size,
        scale=WARM_UP_SCALE,
        num_requests=options.seats * options.executors,
        variant=WARM_UP_VARIANT,
    )
    await run_workload(client, workload, mode=mode, round_number=0)


def _circumstances(model: Model, options: BenchOptions) -> dict[str, str]:
    shape = f"scale {options.scale:g}, seed {options.seed}, rounds: {options.rounds}"
    if options.address is not None:
        return {"model": model.name, "router": options.address, "workload": shape}
    return {
        "model": model.name,
        "machine": f"{num_usable_cores()} cores, {platform.machine()}, Python {platform.python_version()}",
        "inflight": metadata.version("inflight"),
        "torch": metadata.version("torch"),
        "stack": f"for each mode 1 router, executors: {options.executors}, seats of each: {options.seats}",
        "workload": shape,
    }


def _print_run(workload: Workload, run: Run, rounds: int) -> None:
    measures = run.measures
    seats = "" if measures.mean_seats is None else f", {measures.mean_seats:.1f} seats in use"
    print(
        f"{workload.name} round {run.round}/{rounds} {run.mode}: {measures.num_requests} requests in "
        f"{measures.total_s:.1f} s, {measures.output_tokens_per_s:.1f} output tokens/s{seats}"
        + (f", {measures.num_failed} failed: {run.errors[0]}" if measures.num_failed else ""),
        flush=True,
    )


def _print_summary(report: Report, paths: Sequence[Path]) -> None:
    for mode in report.modes:
        against = ratio(report.runs, mode, BASELINE_MODE)
        if mode != BASELINE_MODE and against is not None:
            print(f"{report.workload.name}: {mode} gives {against:.2f} times the output tokens/s of {BASELINE_MODE}")
    print("report: " + ", ".join(str(path) for path in paths), flush=True)
