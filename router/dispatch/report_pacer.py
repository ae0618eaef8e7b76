"""The pacing of executors' reports to the ledger.

Pure: the clock's readings are arguments. An executor reports up to 20 times a second to every router. The ledger needs
to know at once what it can promise; otherwise it only needs to know that the executor lives and what it holds. A report
therefore goes at once if it changes what may be promised or if the ledger waits for it, and else half a second after
the one before. Of several that wait only the newest counts. Those that would be due within a tenth of a second go along
in the same call: one report in a call costs Redis several times as much as one of eight.

An executor keeps the phase of its reports: after a report that is late or goes at once, the next one is due when it
would have been otherwise. The first phase follows from the executor's id. Without that all reports that a pause of
Redis or the start of a router holds up would be due together from then on, and other calls would wait behind them twice
a second.

One router relays the reports of an executor: of the live ones the first in the executor's order, which follows from
their ids (rendezvous hashing), so that a router that comes or goes changes only its own share. The next in the order
relays if the ledger has heard nothing of the executor for a second, all others after two seconds; the
ledger says so with every reap. Such a router relays until a dead router is known to be dead. The ledger says so only of
executors that it knows. So each router relays the first report of an executor, and one more after the ledger was lost.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Set
from dataclasses import dataclass, replace

from router.store.types import ExecutorReport

# An executor counts as live for 2 s after a report.
INTERVAL_S = 0.5
# Seconds of silence after which the next router relays. The one after it, and all behind that one, relay after twice as
# long: the executor's lease is 5 s, and several routers may have died one after the other.
SILENCE_S = 1.0
LAST_RANK = 2
# Longer than until all routers know that one is dead: its lease, a reap and a renewal.
STAND_IN_S = 8.0
# A call of the ledger applies so many reports in less than a millisecond.
MAX_PER_CALL = 8
# Reports that go in one call are due together the next time, too, so their interval stays half a second.
EARLY_S = 0.1


@dataclass(slots=True)
class _Pace:
    """One executor: the report that waits and when it came, and what was relayed last."""

    waiting: ExecutorReport | None = None
    waiting_since: float = 0.0
    relayed: ExecutorReport | None = None
    counts_from: float = 0.0
    """The interval until the next report counts from then."""
    is_expected: bool = False
    stands_in_until: float = 0.0
    """This router relays until then although another is first in the order."""
    due: float | None = None
    """The entry in the heap."""

    def due_at(self) -> float:
        """When the waiting report of an executor that this router relays is to go."""
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
        # When reports are due, by executor. An entry counts if it is its executor's `due`.
        self._due: list[tuple[float, str]] = []

    def follow(self, peers: Set[str], now: float) -> None:
        """Takes the other live routers, which share the executors."""
        if peers == self.peers:
            return
        self.peers = peers
        self._peer_keys = tuple(_key(peer) for peer in peers)
        self._ranks.clear()
        for executor_id, pace in self._paces.items():
            self._schedule(executor_id, pace, now)

    def offer(self, report: ExecutorReport, now: float) -> None:
        """Takes a report of an executor."""
        pace = self._paces.get(report.executor_id)
        if pace is None:
            # Before any time of the clock, so that the first report goes at once.
            phase_s = INTERVAL_S * _key(report.executor_id) / (1 << 64)
            pace = self._paces[report.executor_id] = _Pace(counts_from=phase_s - INTERVAL_S)
        pace.waiting, pace.waiting_since = report, now
        self._schedule(report.executor_id, pace, now)

    def expect(self, executor_id: str) -> None:
        """Lets the executor's next report go at once, from any router: the ledger places nothing there before
        it. One that waits here goes, too, if it is for this router to relay."""
        pace = self._paces.get(executor_id)
        if pace is None:
            return
        pace.is_expected = True
        if self.rank(executor_id) == 0:
            self._schedule(executor_id, pace, pace.waiting_since)

    def wants(self, executor_id: str, now: float) -> bool:
        """Returns whether this router could relay the executor's next report. One that is last in the order needs only
        the first, until the ledger hears nothing."""
        pace = self._paces.get(executor_id)
        if pace is None or self._relays(executor_id, pace, now):
            return True
        return self.rank(executor_id) < LAST_RANK

    def report_overdue(self, executor_id: str, silent_s: float, now: float) -> None:
        """Relays for the routers before this one in the executor's order if the ledger has heard nothing of it for too
        long."""
        pace = self._paces.get(executor_id)
        if pace is not None and silent_s >= SILENCE_S * self.rank(executor_id):
            pace.stands_in_until, pace.relayed = now + STAND_IN_S, None
            self._schedule(executor_id, pace, now)

    def start_over(self, now: float) -> None:
        """Relays one report of every executor from this router: the ledger may have lost them."""
        for executor_id, pace in self._paces.items():
            pace.relayed = None
            self._schedule(executor_id, pace, now)

    def fail(self, executor_id: str) -> None:
        """Lets the next report go at once: the last one did not reach the ledger."""
        if executor_id in self._paces:
            self._paces[executor_id].relayed = None

    def forget(self, executor_id: str) -> None:
        """Drops an executor that is gone."""
        self._paces.pop(executor_id, None)

    def take_due(self, now: float, most: int = MAX_PER_CALL) -> list[ExecutorReport]:
        """Returns reports to relay now, which then count as relayed, with their age. None unless one is due."""
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
        """Returns when the next report is to go; None if none waits."""
        while self._due:
            due_at, executor_id = self._due[0]
            pace = self._paces.get(executor_id)
            if pace is not None and pace.due == due_at:
                return due_at
            heapq.heappop(self._due)
        return None

    def rank(self, executor_id: str) -> int:
        """Returns this router's place in the executor's order, 0 for the first, at most `LAST_RANK`."""
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
        """Sets when the waiting report is to go."""
        due: float | None = None
        if pace.waiting is not None and self._relays(executor_id, pace, now):
            due = pace.due_at()
        if due != pace.due:
            pace.due = due
            if due is not None:
                heapq.heappush(self._due, (due, executor_id))


def counts_from(due: float, now: float) -> float:
    """Returns when the interval starts after a report that was due at one time and goes now: of an early one now, so
    that it stays with those in its call, and of a late one when it, or the last one since, should have gone."""
    return now - max(0.0, now - due) % INTERVAL_S


def _promise(report: ExecutorReport) -> tuple[object, ...]:
    """Returns the part of a report that decides what the ledger may promise."""
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
    """Returns a number that is as good as random, the same for the same two on every router."""
    mixed = (executor_key ^ router_key) * _FACTOR & _BITS
    return (mixed ^ mixed >> 32) * _FACTOR & _BITS
