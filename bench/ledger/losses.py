"""The cost of calls that take placements back, which are rare: `python -m inflight.bench.ledger.losses --redis-server
PATH`.

A private Redis has executors whose seats are all taken. Some report that they hold nothing, so that the audit finds all
of their placements lost, and some are silent until their lease has lapsed, so that `reap` removes them. Each call is
made alone. It prints the processor time of Redis' main thread for a call by the number of placements that it takes
back, with the placements of waiting requests that such a report makes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path

from inflight.bench.ledger.commands import Call, record_commands
from inflight.bench.ledger.loop import Loop
from inflight.bench.ledger.measure import AUDIT_S, MAX_SEATED_AT_ONCE, REFRESH_S
from inflight.bench.ledger.scale import PoolScale, executor_id
from inflight.bench.ledger.server import Server
from inflight.bench.ledger.traffic import Traffic
from inflight.bench.ledger.wire import Connection
from inflight.local.redis_server import PrivateRedis
from inflight.router.store.keys import PoolKeys

POOL = "bench-losses"
NUM_LOSING = 16  # executors that report nothing, and as many that are silent
GRACE_S = 2.2  # a placement that is younger is not missed in a report
LEASE_S = 5.3
SEED = 1


class Losses:
    """One pool, and the costs of calls on it: by name, the number of placements taken back and the microseconds."""

    def __init__(self, url: str, scale: PoolScale) -> None:
        self.costs: dict[tuple[str, int], list[float]] = {}
        self._scale = scale
        self._server, self._connection = Server(url), Connection(url)
        commands = asyncio.run(record_commands(url, POOL, scale, SEED))
        self._traffic = Traffic(scale, commands, SEED)
        self._loop = Loop(url, commands.mailboxes, 1, self._traffic)
        self._executors = [executor_id(number) for number in range(scale.executors)]

    def measure(self) -> None:
        """Fills the pool and takes placements back."""
        losing, silent = self._executors[:NUM_LOSING], self._executors[NUM_LOSING : 2 * NUM_LOSING]
        others = self._executors[2 * NUM_LOSING :]
        self._fill()
        self._keep_alive(self._executors, GRACE_S)
        self._keep_alive([*others, *silent], AUDIT_S)
        for executor in losing:
            self._traffic.forget_seats(executor)
            self._cost("report", self._traffic.report([executor]))
        self._keep_alive([*others, *losing], LEASE_S)
        reap = next(self._traffic.all_reaps())
        while self._num_executors > self._scale.executors - NUM_LOSING:
            self._cost("reap", reap)

    def close(self) -> None:
        """Closes the connections."""
        self._loop.close()
        self._connection.close()
        self._server.close()

    @property
    def _num_executors(self) -> int:
        return self._number("HLEN", "executors")

    def _number(self, command: str, key: str) -> int:
        return int(self._connection.ask(command, PoolKeys(POOL).key(key))[1:])

    def _fill(self) -> None:
        self._keep_alive(self._executors, 0.0)
        missing = self._scale.num_seats + self._scale.queued
        while missing > 0:
            self._loop.pipeline([self._traffic.submit() for _ in range(min(missing, MAX_SEATED_AT_ONCE))])
            missing -= MAX_SEATED_AT_ONCE
            self._keep_alive(self._executors, 0.0)

    def _keep_alive(self, executors: Iterable[bytes], seconds: float) -> None:
        """Has these executors report for so long. A pool without calls counts no silence."""
        until_s = self._loop.now_s() + seconds
        while True:
            reports = [self._traffic.report([executor]) for executor in executors]
            self._loop.pipeline([*reports, *self._traffic.all_renewals()])
            self._loop.pipeline([next(self._traffic.all_reaps())])
            if self._loop.now_s() >= until_s:
                return
            self._loop.read_mail_for(min(REFRESH_S, until_s - self._loop.now_s()))

    def _cost(self, name: str, call: Call) -> None:
        placed, asked_s = self._number("ZCARD", "placements"), self._server.cpu_s()
        before_s = self._server.cpu_s()
        self._connection.send(call.encoded)
        self._connection.next_reply()
        cost_s = self._server.cpu_s() - before_s - (before_s - asked_s)
        num_lost = placed - self._number("ZCARD", "placements")
        self.costs.setdefault((name, num_lost), []).append(1e6 * cost_s)


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--redis-server", type=Path, help="a server of version 7 or later; else the one that is found")
    add("--executors", type=int, default=100)
    add("--waiting", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("inflight.router.store").setLevel(logging.ERROR)
    with (
        tempfile.TemporaryDirectory() as folder,
        PrivateRedis.start(Path(folder) / "redis.log", binary=options.redis_server) as redis,
    ):
        losses = Losses(redis.admin_url, PoolScale(options.waiting, options.executors, is_mixed=False))
        losses.measure()
        losses.close()
    print("| call | placements less | calls | median, µs | maximum, µs |\n| --- | --- | --- | --- | --- |")
    for (name, num_lost), us in sorted(losses.costs.items()):
        print(f"| {name} | {num_lost} | {len(us)} | {statistics.median(us):.0f} | {max(us):.0f} |")


if __name__ == "__main__":
    main()
