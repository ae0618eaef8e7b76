"""`inflight status`: the executors and queues, once or repeatedly."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from inflight.catalogue import Capacity, ExecutorCapacity, VariantCapacity
from inflight.cli.console import EXIT_USAGE, CommandError, open_console
from inflight.cli.flags import add_connection_flags, connected
from inflight.cli.parser import CommandParser
from inflight.sync import Client

HEADINGS = (
    *("seats", "standby", "KV blocks", "reserved", "cached", "tokens/s", "step ms"),
    *("reserves", "preempted", "bound by"),
)


def main(argv: Sequence[str]) -> int:
    """Runs the command."""
    flags = _parser().parse_args(argv)
    if flags.watch is not None and not 0.1 <= flags.watch <= 3600:
        raise CommandError(f"--watch: {flags.watch} is not between 0.1 and 3600 seconds", EXIT_USAGE)
    with connected(flags) as client:
        capacity = client.capacity(model=flags.model or "")
        if flags.json:
            print(json.dumps(asdict(capacity)))
        elif flags.watch is None:
            open_console().print(capacity_view(capacity))
        else:
            _watch(client, capacity, flags.model or "", flags.watch)
    return 0


def capacity_view(capacity: Capacity) -> Group:
    """Returns a table per model with a row per executor, and a line with the queues."""
    models = sorted({executor.model for executor in capacity.executors})
    tables: list[Table | Text] = [
        _table(model, [e for e in capacity.executors if e.model == model]) for model in models
    ]
    waiting = ", ".join(f"{queue.num_requests} {queue.priority} for {queue.model}" for queue in capacity.queues)
    tables = tables or [Text("no executor")]
    tables += [
        Text(f"not used: {one.executor_id} of {one.model} at {one.address}: {one.reason}", style="red")
        for one in capacity.unused
    ]
    if capacity.variants:
        tables.append(_variants_table(capacity.variants))
    return Group(*tables, Text(f"waiting: {waiting}" if waiting else "no requests waiting"))


def _table(model: str, executors: Sequence[ExecutorCapacity]) -> Table:
    table = Table(title=model, title_justify="left", title_style="bold", box=None, header_style="dim")
    table.add_column("executor", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for executor in executors:
        table.add_row(*_row(executor), style="" if executor.accepting else "dim")
    return table


def _row(executor: ExecutorCapacity) -> tuple[str, ...]:
    static = ", static" if executor.batching == "static" else ""
    draining = "" if executor.accepting else ", not accepting"
    return (
        f"{executor.executor_id}{static}{draining}",
        f"{executor.seats_used}/{executor.seats_total}",
        str(executor.num_waiting),
        f"{executor.blocks_used}/{executor.blocks_total}",
        str(executor.blocks_reserved),
        str(executor.blocks_cached),
        f"{executor.output_tokens_per_s:.0f}",
        "-" if executor.stands_still else f"{executor.step_ms:.1f}",
        _reserves(executor),
        str(executor.num_preemptions),
        "" if executor.constraint == "unspecified" else executor.constraint.replace("_", " "),
    )


def _reserves(executor: ExecutorCapacity) -> str:
    """Returns the part of a request's possible output for which blocks are reserved."""
    if executor.scheduler_policy != "max_utilization":
        return "all"
    return "likely" if executor.reserve_quantile is None else f"p{executor.reserve_quantile * 100:.3g}"


def _variants_table(variants: Sequence[VariantCapacity]) -> Table:
    table = Table(title="variants", title_justify="left", title_style="bold", box=None, header_style="dim")
    table.add_column("name", no_wrap=True)
    table.add_column("model", no_wrap=True)
    for heading in ("share", "requests", "refused", "TTFT p50 ms", "p99", "between tokens p50 ms", "p99"):
        table.add_column(heading, justify="right")
    for one in variants:
        times = (one.ttft_p50_ms, one.ttft_p99_ms, one.inter_token_p50_ms, one.inter_token_p99_ms)
        table.add_row(
            one.model,
            one.variant,
            f"{one.share:.0%}",
            str(one.num_requests),
            str(one.num_refused),
            *("-" if time_ms is None else f"{time_ms:.1f}" for time_ms in times),
        )
    return table


def _watch(client: Client, capacity: Capacity, model: str, interval_s: float) -> None:
    """Shows the capacity every `interval_s` seconds until Ctrl-C."""
    with Live(capacity_view(capacity), console=open_console(), auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)  # the API has no watch: the interval is the user's
            live.update(capacity_view(client.capacity(model=model)), refresh=True)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="inflight status", description="Shows seats, KV blocks and speed of every executor, and the queues."
    )
    parser.add_argument("--model", metavar="NAME", help="only this model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--watch", type=float, nargs="?", const=1.0, metavar="SECONDS", help="repeat every so many seconds (default: 1)"
    )
    add_connection_flags(parser)
    return parser
