"""The pacing of executors' reports to the ledger.

Pure: times are arguments. An executor sends up to 20 reports a second to every router. The ledger must learn at once if
the resources that it may reserve change. Otherwise it only needs to know that the executor is alive and which sequences
it holds. A report is therefore sent at once if it changes those resources or if the ledger waits for it. Any other
report is sent half a second after the previous one. Of several waiting reports of an executor only the newest counts.
Reports that would be due within a tenth of a second are sent in the same call, because a call with one report costs
Redis several times as much per report as a call with eight.

An executor keeps the phase of its reports. After a report that is sent late or at once, the next one is due when it
would have been due otherwise. The first phase is derived from the executor's id. Without phases, all reports that a
pause of Redis or the start of a router delays would be due together from then on, and other calls would wait behind
them twice a second.

One router relays the reports of an executor: the first live router in the executor's order. The order is derived from
the ids by rendezvous hashing, so that a router that joins or leaves changes only its own share. If the ledger has had
no report of the executor for one second, the second router in the order also relays; after two seconds all others do.
The ledger reports such executors with every reap. A router that stands in relays until all routers know that a dead
router is dead. The ledger reports only executors that it knows. So each router relays the first report of an executor,
and one more after the ledger may have been lost.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Set
from dataclasses import dataclass, replace

from inflight.router.ledger.types import ExecutorReport

# An executor counts as live for 2 s after a report.
INTERVAL_S = 0.5
# Seconds without a report after which the router of rank 1 relays. All routers of higher rank relay after twice as
# long, because the executor's lease is 5 s and several routers may have died one after the other.
SILENCE_S = 1.0
LAST_RANK = 2
# Longer than it takes until all routers know that a router is dead: its lease, a reap and a renewal.
STAND_IN_S = 8.0
# One call of report.lua applies this many reports in less than a millisecond.
MAX_PER_CALL = 8
# A report may be sent this much early, with others. Reports of one call are due together the next time, too, so their
# interval stays half a second.
EARLY_S = 0.1


@dataclass(slots=True)
class _Pace:
    """One executor: its waiting report, when that arrived, and the report that was relayed last."""

    waiting: ExecutorReport | None = None
    waiting_since: float = 0.0
    relayed: ExecutorReport | None = None
    counts_from: float = 0.0
    """The time at which the interval until the next report starts."""
    is_expected: bool = False
    stands_in_until: float = 0.0
    """Until this time this router relays although another router is first in the order."""
    due: float | None = None
    """The time of the executor's valid entry in the heap."""

    def due_at(self) -> float:
        """Returns when to send the waiting report, if this router relays for the executor."""
        assert self.waiting is not None
        if self.relayed is None or self.is_expected or _promise(self.waiting) != _promise(self.relayed):
            return self.counts_from
        return self.counts_from + INTERVAL_S


class ReportPacer:
    """The reports of one pool's executors."""

    def __init__(self, router_id: str = "") -> None:
        self.router_id = router_id
        self.peers: Set[str] = frozenset()
        self._own_key = _key(router_id)
        self._peer_keys: tuple[int, ...] = ()
        self._ranks: dict[str, int] = {}
        self._paces: dict[str, _Pace] = {}
        # A heap of the times at which reports are due. An entry is valid if it equals its executor's `due`.
        self._due: list[tuple[float, str]] = []

    def follow(self, peers: Set[str], now: float) -> None:
        """Sets the other live routers, among which the executors are divided."""
        if peers == self.peers:
            return
        self.peers = peers
        self._peer_keys = tuple(_key(peer) for peer in peers)
        self._ranks.clear()
        for executor_id, pace in self._paces.items():
            self._schedule(executor_id, pace, now)

    def offer(self, report: ExecutorReport, now: float) -> None:
        """Queues a report of an executor."""
        pace = self._paces.get(report.executor_id)
        if pace is None:
            # At or before any time of the clock, so that the first report is sent at once.
            phase_s = INTERVAL_S * _key(report.executor_id) / (1 << 64)
            pace = self._paces[report.executor_id] = _Pace(counts_from=phase_s - INTERVAL_S)
        pace.waiting, pace.waiting_since = report, now
        self._schedule(report.executor_id, pace, now)

    def expect(self, executor_id: str) -> None:
        """Lets this router send the executor's next report at once, whatever its rank. The ledger places nothing on the
        executor before that report. A report that already waits is sent at once if this router is first in the
        order."""
        pace = self._paces.get(executor_id)
        if pace is None:
            return
        pace.is_expected = True
        if self.rank(executor_id) == 0:
            self._schedule(executor_id, pace, pace.waiting_since)

    def wants(self, executor_id: str, now: float) -> bool:
        """Returns whether this router may have to relay the executor's next report. A router of the last rank needs
        only the first report, unless the ledger gets none."""
        pace = self._paces.get(executor_id)
        if pace is None or self._relays(executor_id, pace, now):
            return True
        return self.rank(executor_id) < LAST_RANK

    def report_overdue(self, executor_id: str, silent_s: float, now: float) -> None:
        """Lets this router stand in for the routers before it in the executor's order, if the ledger has had no report
        of the executor for too long."""
        pace = self._paces.get(executor_id)
        if pace is not None and silent_s >= SILENCE_S * self.rank(executor_id):
            pace.stands_in_until, pace.relayed = now + STAND_IN_S, None
            self._schedule(executor_id, pace, now)

    def start_over(self, now: float) -> None:
        """Lets this router relay one report of every executor, because the ledger may have lost them."""
        for executor_id, pace in self._paces.items():
            pace.relayed = None
            self._schedule(executor_id, pace, now)

    def fail(self, executor_id: str) -> None:
        """Lets the next report be sent at once, because the last one may not have reached the ledger."""
        if executor_id in self._paces:
            self._paces[executor_id].relayed = None

    def forget(self, executor_id: str) -> None:
        """Drops the state of an executor that is no longer linked."""
        self._paces.pop(executor_id, None)

    def take_due(self, now: float, most: int = MAX_PER_CALL) -> list[ExecutorReport]:
        """Returns at most `most` reports to relay now, with their age. They then count as relayed. The list is empty
        unless at least one report is due."""
        due: list[ExecutorReport] = []
        until = now
        while len(due) < most and (due_at := self.next_due()) is not None and due_at <= until:
            _, executor_id = heapq.heappop(self._due)
            pace = self._paces[executor_id]
            assert pace.waiting is not None
            due.append(replace(pace.waiting, age_ms=int(1000 * (now - pace.waiting_since))))
            pace.relayed, pace.counts_from = pace.waiting, counts_from(due_at, now)
            pace.waiting, pace.is_expected, pace.due = None, False, None
            until = now + EARLY_S
        return due

    def next_due(self) -> float | None:
        """Returns when the next report is due; None if no report is to be sent."""
        while self._due:
            due_at, executor_id = self._due[0]
            pace = self._paces.get(executor_id)
            if pace is not None and pace.due == due_at:
                return due_at
            heapq.heappop(self._due)
        return None

    def rank(self, executor_id: str) -> int:
        """Returns this router's rank in the executor's order: 0 for the first, at most `LAST_RANK`."""
        rank = self._ranks.get(executor_id)
        if rank is None:
            executor_key = _key(executor_id)
            own = _score(executor_key, self._own_key)
            before = sum(_score(executor_key, peer_key) > own for peer_key in self._peer_keys)
            rank = self._ranks[executor_id] = min(LAST_RANK, before)
        return rank

    def _relays(self, executor_id: str, pace: _Pace, now: float) -> bool:
        return pace.relayed is None or pace.is_expected or now < pace.stands_in_until or self.rank(executor_id) == 0

    def _schedule(self, executor_id: str, pace: _Pace, now: float) -> None:
        """Sets when the waiting report is due."""
        due: float | None = None
        if pace.waiting is not None and self._relays(executor_id, pace, now):
            due = pace.due_at()
        if due != pace.due:
            pace.due = due
            if due is not None:
                heapq.heappush(self._due, (due, executor_id))


def counts_from(due: float, now: float) -> float:
    """Returns the start of the next interval, after a report that was due at `due` and is sent at `now`.

    After an early report the interval starts now, so that the report stays with the others of its call. After a late
    report it starts at the latest time, up to now, at which a report would have been due.
    """
    return now - max(0.0, now - due) % INTERVAL_S


def _promise(report: ExecutorReport) -> tuple[object, ...]:
    """Returns the part of a report that decides what the ledger may reserve. Saved blocks change with every sequence
    that comes or goes, and what the ledger knows of them may be old."""
    return (
        report.generation,
        report.budget_blocks,
        report.total_blocks,
        report.budget_sequences,
        report.accepting,
        report.reserve_quantile,
    )


_BITS = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def _score(executor_key: int, router_key: int) -> int:
    """Returns a pseudorandom 64-bit number that depends only on the two keys, so that all routers compute the same."""
    mixed = (executor_key ^ router_key) * _FACTOR & _BITS
    return (mixed ^ mixed >> 32) * _FACTOR & _BITS
