"""CPU time per token in client, router and executor loop: `python -m inflight.bench.token_path [--tree ../old --tree
.:8]`.

Real processes: a client with 32 streams, a router, an executor and Redis. The executor computes a model of a few
thousand weights and waits before each step, so that tokens come at a set rate. Only the time in which all streams run
is counted, so requests cost nothing here. Time is CPU time of threads, which other work on the machine changes little.

With several trees (of git worktrees) each has its own processes, all are up at once, and they take turns in each round:
the ratio of two trees then holds also on a busy machine. A number after a tree is the `stream_interval` of its
requests, and `shared` behind that lets streams share calls: `--tree .:1 --tree .:1:shared`. The executor's
engine thread and the threads of its model are not part of the sum.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from inflight.bench.fleet.redis_process import RedisProcess
from inflight.bench.fleet.tiny_model import write_tiny_model
from inflight.bench.measures.processes import PROC
from inflight.bench.report.table import Table
from inflight.local.options import STOP_GRACE_S, StackOptions, executor_command, router_command
from inflight.local.ports import free_ports
from inflight.local.process import ChildProcess
from inflight.local.ready import wait_until_serving
from inflight.local.stack import EXECUTOR_SERVICE, REDIS_URL_VARIABLE, ROUTER_SERVICE

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
CLIENT = Path(__file__).with_name("client.py")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SHARED = "shared"
# Parts whose sum is the cost of the path.
PATH = ("router", "client", "executor loop")


@dataclass(frozen=True, slots=True)
class Load:
    """What a round runs."""

    streams: int
    tokens: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class Tree:
    """A source tree, the `stream_interval` of its requests, and whether streams share calls."""

    path: Path
    interval: int = 1
    is_shared: bool = False

    def __str__(self) -> str:
        if self.is_shared:
            return f"{self.path}:{self.interval}:{SHARED}"
        return str(self.path) if self.interval == 1 else f"{self.path}:{self.interval}"


def tree_of(text: str) -> Tree:
    """Returns the tree of `PATH`, `PATH:INTERVAL` or `PATH:INTERVAL:shared`. For argparse."""
    path, interval, how = (*text.split(":"), "", "")[:3]
    if how not in ("", SHARED) or text.count(":") > 2:
        raise ValueError(text)
    return Tree(Path(path), int(interval or 1), how == SHARED)


@dataclass(frozen=True, slots=True)
class Stack:
    """The running processes of one tree."""

    tree: Tree
    address: str
    processes: Mapping[str, ChildProcess]


Figures = dict[str, float]


def thread_seconds(pid: int, proc: Path = PROC) -> dict[str, float]:
    """CPU seconds of a process's threads: `loop` is the main thread, `grpc` those of gRPC's core, `other` the rest."""
    spent = {"loop": 0.0, "grpc": 0.0, "other": 0.0}
    for task in (proc / str(pid) / "task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        fields = rest.split()
        is_grpc = "event_engine" in name or name.startswith(("grpc", "timer"))
        part = "loop" if task.name == str(pid) else "grpc" if is_grpc else "other"
        spent[part] += (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return spent


def stack_seconds(stack: Stack) -> Figures:
    """CPU seconds of the parts of a stack."""
    executor = thread_seconds(stack.processes["executor"].pid)
    return {
        "router": sum(thread_seconds(stack.processes["router"].pid).values()),
        "executor loop": executor["loop"] + executor["grpc"],
        "executor engine": executor["other"],
        "redis": sum(thread_seconds(stack.processes["redis"].pid).values()),
    }


@asynccontextmanager
async def running_stack(tree: Tree, folder: Path, load: Load) -> AsyncIterator[Stack]:
    """Runs the processes of a tree."""
    redis_port, executor_port, router_port = free_ports(HOST, 3)
    redis = RedisProcess(folder / "redis", redis_port)
    executor_address, router_address = f"{HOST}:{executor_port}", f"{HOST}:{router_port}"
    options = StackOptions(
        model=str(write_tiny_model(folder)),
        run_dir=folder,
        program=(sys.executable, "-P", "-m", "inflight.bench.fleet.paced", str(load.step_ms)),
        executor_args=("--dtype", "float32", "--max-num-sequences", str(load.streams), "--num-threads", "1"),
    )
    environment = environment_of(tree.path)
    processes: dict[str, ChildProcess] = {}
    try:
        processes["redis"] = await redis.start()
        for name, command, address, more in (
            ("executor", executor_command(options, "e0", executor_address), executor_address, {}),
            (
                "router",
                router_command(options, "r0", router_address, (executor_address,)),
                router_address,
                {REDIS_URL_VARIABLE: redis.url()},
            ),
        ):
            log_file = folder / f"{name}.log"
            processes[name] = await ChildProcess.start(name, name, address, command, log_file, environment | more)
        await wait_until_serving(executor_address, EXECUTOR_SERVICE, START_TIMEOUT_S)
        await wait_until_serving(router_address, ROUTER_SERVICE, START_TIMEOUT_S)
        yield Stack(tree, router_address, processes)
    finally:
        for process in reversed(processes.values()):
            await process.stop(STOP_GRACE_S)


def environment_of(tree: Path) -> dict[str, str]:
    """Returns variables with which Python imports the modules of a tree."""
    return {"PYTHONPATH": str(tree.resolve()), "PYTHONSAFEPATH": "1"}


async def measure_round(stack: Stack, load: Load) -> Figures:
    """Runs the streams once and returns microseconds of CPU per token by part, and the events per token."""
    words = [stack.address, str(load.streams), str(load.tokens), str(stack.tree.interval)]
    words += [SHARED] if stack.tree.is_shared else []
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, str(CLIENT), *words),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment_of(stack.tree.path)},
    )
    assert client.stdout is not None
    try:
        marks: list[tuple[dict[str, float], Figures]] = []
        while line := await client.stdout.readline():
            marks.append((json.loads(line), stack_seconds(stack)))
        if await client.wait():
            raise SystemExit("the client failed")
    finally:
        with contextlib.suppress(ProcessLookupError):
            client.kill()
    (first, before), (last, after) = marks
    num_tokens = last["tokens"] - first["tokens"]
    figures = {name: (after[name] - before[name]) / num_tokens * 1e6 for name in after}
    figures["client"] = (last["cpu_s"] - first["cpu_s"]) / num_tokens * 1e6
    figures["sum"] = sum(figures[part] for part in PATH)
    figures["events per token"] = (last["events"] - first["events"]) / num_tokens
    return figures


async def measure(trees: Sequence[Tree], load: Load, rounds: int) -> list[list[Figures]]:
    """Returns the figures of every round, by tree."""
    results: list[list[Figures]] = [[] for _ in trees]
    with tempfile.TemporaryDirectory(prefix="inflight-token-path-") as folder:
        async with AsyncExitStack() as opened:
            folders = [tempfile.TemporaryDirectory(dir=folder) for _ in trees]
            stacks = [
                await opened.enter_async_context(running_stack(tree, Path(opened.enter_context(own)), load))
                for tree, own in zip(trees, folders, strict=True)
            ]
            # The first round of each tree fills caches and is not counted.
            for number in range(rounds + 1):
                for stack, result in zip(stacks, results, strict=True):
                    figures = await measure_round(stack, load)
                    if number:
                        result.append(figures)
    return results


def table_of(trees: Sequence[Tree], results: Sequence[Sequence[Figures]]) -> Table:
    """Returns the medians by part, and of each further tree its ratio to the first."""
    rows = []
    for name in (*PATH, "sum", "redis", "executor engine", "events per token"):
        medians = [statistics.median(figures[name] for figures in result) for result in results]
        format_of = "{:.2f}" if name == "events per token" else "{:.0f}"
        ratios = [f"{median / medians[0]:.2f}" if medians[0] else "" for median in medians[1:]]
        rows.append([name, *(format_of.format(median) for median in medians), *ratios])
    names = [str(tree) for tree in trees]
    return Table(["µs of CPU per token", *names, *(f"{name} / first" for name in names[1:])], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a row for each part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tree",
        type=tree_of,
        action="append",
        metavar="PATH[:N[:shared]]",
        help="a source tree; repeat to compare (default: .)",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=250, help="of each stream, at most 900")
    parser.add_argument("--step-ms", type=float, default=30.0)
    options = parser.parse_args(argv)
    trees = options.tree or [Tree(Path(__file__).parents[3])]
    load = Load(options.streams, options.tokens, options.step_ms)
    results = asyncio.run(measure(trees, load, options.rounds))
    print(table_of(trees, results).text())


if __name__ == "__main__":
    main()
