"""The processor time of Redis per call, by EVALSHA and by FCALL, in lock step on one server.

    python -m bench.ledger.functions --redis-server PATH

Two pools, one for each way, get the same calls by turns: submits that find the seats taken, and settles of 4 and of 16
whose seats waiting requests take. The figures are medians over rounds of the time of Redis' main thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from bench.redis.pipelined import RedisWire
from bench.redis.wire import command
from inflight.local.redis_server import PrivateRedis
from router.store.codec import parse_outcomes, parse_reply, parse_submit, report_args, settle_args, submit_args
from router.store.keys import PoolKeys
from router.store.lua import Argument, Script, load_scripts
from router.store.settings import StoreSettings
from router.store.types import Attempt, Demand, ExecutorReport, HeldSequence, Placement

SETTINGS = StoreSettings(max_queue_requests=1_000_000)
ROUTER = "router"
WAYS = ("EVALSHA", "FCALL")
NUM_SEATS = 32
NUM_CALLS = 256
NUM_TENANTS = 20


class Pool:
    """One pool: what runs, and how its scripts are called."""

    def __init__(self, wire: RedisWire, way: str, num_executors: int) -> None:
        self._wire = wire
        self._way = way
        self._num_executors = num_executors
        self._keys = PoolKeys(way).for_script(())
        self._scripts = load_scripts()
        self._placed: deque[Placement] = deque()
        self._num_submitted = self._seq = 0

    def report(self) -> None:
        """Has every executor report what it holds. Without reports executors get no work 2 s later."""
        self._seq += 1
        held: dict[str, list[HeldSequence]] = {f"x{number}": [] for number in range(self._num_executors)}
        for one in self._placed:
            held[one.executor_id].append(HeldSequence(one.request_id, one.attempt, one.blocks))
        reports = (
            ExecutorReport(name, 1, self._seq, 10_000, 10_000, NUM_SEATS, accepting=True, held=tuple(sequences))
            for name, sequences in held.items()
        )
        self._call("report", [report_args(one, SETTINGS) for one in reports])

    def submit(self, count: int) -> None:
        """Submits requests of 128 tokens of prompt and 128 of output."""
        calls = []
        for _ in range(count):
            self._num_submitted += 1
            number = self._num_submitted
            demand = Demand(
                f"request-{number:030}", 1 + number % 3, 16, tenant=f"tenant-{number % NUM_TENANTS}",
                prompt_tokens=128, max_tokens=128, prefix_hashes=(f"{number:016x}", f"{number + 1:016x}"),
            )  # fmt: skip
            calls.append(["", *submit_args(demand, SETTINGS)])
        self._call("submit", calls)

    def settle(self, ends: int) -> None:
        """Ends so many requests a call, as many in all as `NUM_CALLS`."""
        calls = []
        for _ in range(NUM_CALLS // ends):
            ended = [self._placed.popleft() for _ in range(ends)]
            calls.append(settle_args([Attempt(one.request_id, one.attempt) for one in ended]))
        self._call("settle", calls)

    def _call(self, name: str, calls: list[list[Argument]]) -> None:
        beginning = _beginning(self._scripts[name], self._way)
        for args in calls:
            self._wire.send(command(*beginning, len(self._keys), *self._keys, ROUTER, *args))
        self._wire.flush()
        for args in calls:
            reply = parse_reply(self._wire.read())
            self._placed += (one for one in reply.events if isinstance(one, Placement))
            if reply.status == "SUBMITTED":
                (outcome,) = (parse_submit(str(args[1]), one) for one in parse_outcomes(reply))
                self._placed += [outcome] if isinstance(outcome, Placement) else []


def _beginning(script: Script, way: str) -> tuple[str, str]:
    return (way, script.function if way == "FCALL" else script.sha)


def _cpu_s(wire: RedisWire) -> float:
    """Returns the processor time of Redis' main thread."""
    lines = str(wire.call(command("INFO", "cpu"))).splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return float(fields["used_cpu_user_main_thread"]) + float(fields["used_cpu_sys_main_thread"])


def measure(wire: RedisWire, num_executors: int, num_waiting: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """Returns the microseconds of each kind of call, by way."""
    for script in load_scripts().values():
        wire.call(command("SCRIPT", "LOAD", script.source))
    wire.call(command("FUNCTION", "LOAD", script.library.source))
    pools = {way: Pool(wire, way, num_executors) for way in WAYS}
    for pool in pools.values():
        pool.report()
        pool.submit(num_executors * NUM_SEATS)
        pool.submit(num_waiting)
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(num_rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            pool = pools[way]
            pool.report()
            kinds: list[tuple[str, int, Any]] = [
                ("submit, queued", NUM_CALLS, lambda pool=pool: pool.submit(NUM_CALLS)),
                ("settle of 4", NUM_CALLS // 4, lambda pool=pool: pool.settle(4)),
                ("submit, queued", NUM_CALLS, lambda pool=pool: pool.submit(NUM_CALLS)),
                ("settle of 16", NUM_CALLS // 16, lambda pool=pool: pool.settle(16)),
                ("report", num_executors, pool.report),
            ]
            for kind, count, call in kinds:
                before = _cpu_s(wire)
                call()
                us = (_cpu_s(wire) - before) / count * 1e6
                found.setdefault(kind, {}).setdefault(way, []).append(us)
    return {kind: {way: statistics.median(us) for way, us in ways.items()} for kind, ways in found.items()}


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--redis-server", type=Path, help="a server of version 7 or later; else the one that is found")
    parser.add_argument("--executors", type=int, default=20)
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "redis.log"
        with PrivateRedis.start(log, binary=options.redis_server) as server:
            wire = RedisWire.connect(server.admin_url, lambda push: None)
            found = measure(wire, options.executors, options.waiting, options.rounds)
            wire.close()
    print("| call | EVALSHA, µs | FCALL, µs | change |\n| --- | --- | --- | --- |")
    for kind, us in found.items():
        print(f"| {kind} | {us['EVALSHA']:.0f} | {us['FCALL']:.0f} | {us['FCALL'] / us['EVALSHA'] - 1:+.0%} |")


if __name__ == "__main__":
    main()
