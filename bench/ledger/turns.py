"""The processor time of Redis per call by the scripts of two checkouts, in turns.

    python -m inflight.bench.ledger.turns --redis-server PATH --before TREE

Each side has a server and a process that loads the code of its tree: scripts, routers' store and load. On one
server Lua's collector would look through what both sides keep. The figures are medians over rounds of the time of
Redis' main thread, requests and replies included. The change is the median of the changes of each round, since other
work on the machine changes from round to round. With `--rate` one more row has all of Redis' time for each request that
is admitted at that rate, mailboxes and the routers' periodic calls included.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from inflight.bench.ledger.commands import record_commands
from inflight.bench.ledger.loop import Loop
from inflight.bench.ledger.main import preloaded
from inflight.bench.ledger.measure import MAX_SEATED_AT_ONCE, NUM_CONNECTIONS, REFRESH_S, Frames
from inflight.bench.ledger.scale import PoolScale
from inflight.bench.ledger.server import SCRIPT, Server, Usage, difference
from inflight.bench.ledger.traffic import Traffic
from inflight.local.redis_server import PrivateRedis

TREE = Path(__file__).parents[3]
KINDS = (
    "submit 1",
    "settle 4",
    "submit 16",
    "settle 16",
    "submit 1",
    "settle 1",
    "report 1",
    "report 8",
    "reap 1",
)
NAMES = {
    "submit 1": "submit, queued",
    "submit 16": "16 submits in a call, queued",
    "settle 1": "settle of 1",
    "settle 4": "settle of 4",
    "settle 16": "settle of 16",
    "report 1": "report",
    "report 8": "8 reports in a call",
    "reap 1": "reap with nothing to remove",
    "pace": "a request at the rate of --rate",
}
NUM_CALLS = 256
PACE_S = 1.5
SEED = 1


class Side:
    """One pool and its load, in a process of its own: reads orders from standard input, answers each with a line."""

    def __init__(self, url: str, pool: str, scale: PoolScale) -> None:
        self._scale = scale
        commands = asyncio.run(record_commands(url, pool, scale, SEED))
        self._traffic = Traffic(scale, commands, SEED)
        self._loop = Loop(url, commands.mailboxes, NUM_CONNECTIONS, self._traffic)
        self._refreshed_s = -REFRESH_S

    def obey(self, order: str) -> int:
        """Sends calls of one kind and returns how many, or how many requests were admitted at a rate."""
        traffic, (kind, number) = self._traffic, order.split()
        match kind:
            case "fill":
                self._fill()
                return 0
            case "pace":
                return self._pace(float(number))
            case "refresh" if self._loop.now_s() - self._refreshed_s < REFRESH_S:
                return 0
            case "refresh":
                self._refreshed_s = self._loop.now_s()
                calls = [*traffic.all_reports(), *traffic.all_renewals()]
            case "report":
                calls = list(traffic.all_reports(int(number)))
            case "reap":
                calls = list(traffic.all_reaps())
            case "submit" if number == "1":
                calls = [traffic.submit() for _ in range(self._num_missing)]
            case "submit":
                calls = [traffic.submit_batch(int(number)) for _ in range(self._num_missing // int(number))]
            case "settle":
                possible = range(NUM_CALLS // int(number))
                calls = [traffic.settle(int(number)) for _ in possible if traffic.can_settle(int(number))]
            case _:
                raise ValueError(f"no such order: {order!r}")
        self._loop.pipeline(calls)
        self._loop.read_mail()
        return len(calls)

    def _pace(self, rate_per_s: float) -> int:
        traffic, loop = self._traffic, self._loop
        num_placed, now_s = traffic.num_placed, loop.now_s()
        traffic.start_upkeep(now_s)
        frames = Frames(traffic, rate_per_s, self._scale.queued, now_s, SEED, loop.counts_from_s)
        loop.run(frames.next_call, now_s + PACE_S, frames.due_s)
        loop.read_mail()
        return traffic.num_placed - num_placed

    @property
    def _num_missing(self) -> int:
        """How many requests give the queue its length and those that a round ends."""
        return max(16, min(2 * NUM_CALLS, self._scale.queued + NUM_CALLS - self._traffic.num_waiting))

    def _fill(self) -> None:
        self.obey("refresh 0")
        missing = self._scale.num_seats + self._scale.queued
        while missing > 0:
            self._loop.pipeline([self._traffic.submit() for _ in range(min(missing, MAX_SEATED_AT_ONCE))])
            missing -= MAX_SEATED_AT_ONCE
            self.obey("refresh 0")


@dataclass(slots=True)
class Worker:
    """The process of a side and its server, as the measuring process sees them."""

    server: Server
    process: subprocess.Popen[str]

    def order(self, text: str) -> int:
        """Has the side send calls; returns how many."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit("error: a side has ended; its message is above")
        return int(answer)


@contextmanager
def _started(server: Server, tree: Path, url: str, options: argparse.Namespace) -> Iterator[Worker]:
    """Starts a side with the code of a tree."""
    flags = ("--executors", options.executors, "--waiting", options.waiting, "--traffic", options.traffic)
    process = subprocess.Popen(
        [sys.executable, __file__, "--side", url, *map(str, flags)],
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Worker(server, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


@dataclass(slots=True)
class Found:
    """What calls of one kind by one side cost, by round."""

    cpu_us: list[float]
    num_commands: list[float]


def measure(workers: dict[str, Worker], num_rounds: int, kinds: Sequence[str]) -> dict[str, dict[str, Found]]:
    """Returns the cost of each kind of call, by side."""
    for worker in workers.values():
        worker.order("fill 0")
    found: dict[str, dict[str, Found]] = {}
    for number in range(num_rounds):
        for kind in kinds:
            for side in workers if number % 2 else reversed(workers):
                server = workers[side].server
                workers[side].order("refresh 0")
                before, usages = server.cpu_s(), server.usages()
                num_calls = workers[side].order(kind)
                cpu_s, used = server.cpu_s() - before, difference(server.usages(), usages)
                name = NAMES[kind if kind in NAMES else kind.split()[0]]
                costs = found.setdefault(name, {}).setdefault(side, Found([], []))
                costs.cpu_us.append(cpu_s / num_calls * 1e6)
                costs.num_commands.append(_num_commands(used) / num_calls)
    return found


def _num_commands(used: dict[str, Usage]) -> int:
    """Returns how many commands the scripts called."""
    return sum(usage.calls for name, usage in used.items() if name not in (SCRIPT, "info", "xread"))


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--redis-server", type=Path, help="a server of version 7 or later; else the one that is found")
    add("--preload", type=Path, metavar="LIB", help="a library that the servers load first: an allocator")
    add("--before", type=Path, metavar="TREE", help="the other checkout")
    add("--executors", type=int, default=20)
    add("--waiting", type=int, default=1000)
    add(
        "--traffic", choices=("mixed", "plain"), default="plain", help="see inflight.bench.ledger.scale; default: plain"
    )
    add("--rounds", type=int, default=20)
    add("--rate", type=float, metavar="R", help="also measure requests that are admitted at so many per second")
    add("--only", default="", metavar="TEXT", help="only calls whose name begins so, such as settle")
    add("--side", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.side or options.before):
        parser.error("--before is required")
    logging.getLogger("inflight.router.ledger").setLevel(logging.ERROR)
    if options.side:
        scale = PoolScale(options.waiting, options.executors, is_mixed=options.traffic == "mixed")
        side = Side(options.side, "bench-turns", scale)
        for line in sys.stdin:
            print(side.obey(line), flush=True)
        return
    workers: dict[str, Worker] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in ("before", "after"):
            with preloaded(options.preload):
                redis = stack.enter_context(PrivateRedis.start(folder / f"{name}.log", binary=options.redis_server))
            server = Server(redis.admin_url)
            stack.callback(server.close)
            tree = options.before if name == "before" else TREE
            workers[name] = stack.enter_context(_started(server, tree, redis.admin_url, options))
        kinds = KINDS if options.rate is None else (*KINDS, f"pace {options.rate}")
        found = measure(workers, options.rounds, [kind for kind in kinds if kind.startswith(options.only)])
    _print(found)


def _print(found: dict[str, dict[str, Found]]) -> None:
    print("| call | before, µs | after, µs | change | commands |\n| --- | --- | --- | --- | --- |")
    for kind, sides in found.items():
        rounds = [sides[name].cpu_us for name in ("before", "after")]
        us = [statistics.median(one) for one in rounds]
        change = statistics.median(after / before for before, after in zip(*rounds, strict=True)) - 1
        commands = [f"{statistics.mean(sides[name].num_commands):.1f}" for name in ("before", "after")]
        print(f"| {kind} | {us[0]:.0f} | {us[1]:.0f} | {change:+.0%} | {' → '.join(commands)} |")


if __name__ == "__main__":
    main()
