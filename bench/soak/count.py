"""`inflight bench --soak N`: very many short requests through one stack, watching the memory of its processes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress as Bars
from rich.table import Table

from bench.memory import MemoryReading, MemoryTrend, trend
from bench.model import local_model
from bench.options import BenchOptions
from bench.processes import resident_bytes
from bench.progress import REFRESH_PER_S
from bench.stacks import stack_options
from bench.targets.target import TargetError
from bench.workloads.generate import shaped_requests
from bench.workloads.plan import PlannedRequest
from bench.workloads.shapes import Shape
from inflight.aio import Client
from inflight.cli.outcome import EXIT_FAILURE, EXIT_USAGE, CommandError
from inflight.errors import InflightError
from inflight.local.stack import LocalStack

SHAPE = Shape(num_requests=1, prompt_tokens=(8, 48), output_tokens=(2, 16))
# Requests under way for each seat: the queue is never empty, so admission works too.
REQUESTS_PER_SEAT = 2
NUM_READINGS = 200


class Soak:
    """The requests that are left, and what the processes held as they went by."""

    def __init__(self, client: Client, pids: Mapping[str, int], requests: Sequence[PlannedRequest], bars: Bars) -> None:
        self._client = client
        self._pids = pids
        self._left = iter(requests)
        self._every = max(1, len(requests) // NUM_READINGS)
        self._bars = bars
        self._bar = bars.add_task("soak", total=len(requests))
        self.num_done = 0
        self.num_failed = 0
        self.first_error: str | None = None
        self.readings: dict[str, list[MemoryReading]] = {name: [] for name in pids}

    async def run(self, concurrency: int) -> None:
        """Sends everything, so many at a time."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._send_on())
        except* TargetError as ended:
            raise ended.exceptions[0] from None

    async def _send_on(self) -> None:
        for planned in self._left:
            await self._send(planned)
            self.num_done += 1
            self._bars.advance(self._bar)
            if self.num_done % self._every == 0:
                self._read()

    async def _send(self, planned: PlannedRequest) -> None:
        num_tokens = 0
        try:
            async for delta in self._client.generate(
                token_ids=planned.prompt_ids, max_tokens=planned.output_tokens, ignore_eos=True, temperature=0.0
            ):
                num_tokens += delta.num_tokens
            error = None if num_tokens == planned.output_tokens else f"{num_tokens} of {planned.output_tokens} tokens"
        except InflightError as refused:
            error = str(refused)
        if error is not None:
            self.num_failed += 1
            self.first_error = self.first_error or error

    def _read(self) -> None:
        for name, pid in self._pids.items():
            held = resident_bytes(pid)
            if held is None:
                raise TargetError(f"the memory of {name} cannot be read: it ended, or there is no /proc")
            self.readings[name].append(MemoryReading(self.num_done, held))


async def soak(options: BenchOptions, num_requests: int) -> int:
    """Runs a soak and reports how the memory went; 0 where every request went well."""
    if options.address is not None:
        raise CommandError("--soak needs the processes on this machine: leave --address out", EXIT_USAGE)
    console = Console()
    vocabulary_size = local_model(options.model).vocabulary_size
    requests = shaped_requests(SHAPE, "soak", vocabulary_size, num_requests=num_requests, seed=options.seed)
    # A small KV pool, so that the warm-up touches all of it: memory that is first used later would look like growth.
    small = replace(options, workloads=("short",))
    async with LocalStack(stack_options(small, "inflight")) as stack, Client(stack.address) as client:
        pids = {child.name: child.pid for child in [*stack.routers, *stack.executors]}
        with Bars(console=console, refresh_per_second=REFRESH_PER_S, disable=not console.is_terminal) as bars:
            soaked = Soak(client, pids, requests, bars)
            await soaked.run(REQUESTS_PER_SEAT * options.seats * options.executors)
    trends = {name: trend(readings, num_requests) for name, readings in soaked.readings.items()}
    _print(console, trends, soaked, num_requests)
    if options.json_path is not None:
        _write_json(options.json_path, trends, soaked)
    return EXIT_FAILURE if soaked.num_failed else 0


def _print(console: Console, trends: Mapping[str, MemoryTrend | None], soaked: Soak, num_requests: int) -> None:
    table = Table(title=f"{num_requests} short requests, after the warm-up", title_justify="left")
    for title in ("process", "start MiB", "end MiB", "least", "most", "MiB per 1000 requests"):
        table.add_column(title, justify="left" if title == "process" else "right")
    for name, found in trends.items():
        if found is None:
            table.add_row(name, *["–"] * 5)
            continue
        sizes = (found.start_mib, found.end_mib, found.least_mib, found.most_mib)
        table.add_row(name, *(f"{size:.1f}" for size in sizes), f"{found.mib_per_1000_requests:+.3f}")
    console.print(table)
    if soaked.num_failed:
        console.print(f"{soaked.num_failed} requests failed, the first: {soaked.first_error}", markup=False)


def _write_json(path: Path, trends: Mapping[str, MemoryTrend | None], soaked: Soak) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "num_requests": soaked.num_done,
        "num_failed": soaked.num_failed,
        "trends": {name: None if found is None else asdict(found) for name, found in trends.items()},
        "readings": {
            name: [[reading.num_requests, reading.resident_bytes] for reading in readings]
            for name, readings in soaked.readings.items()
        },
    }
    path.write_text(json.dumps(values) + "\n", encoding="utf-8")
