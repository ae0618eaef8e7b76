"""Periodic calls of the routers: renewals, reaps and relayed reports, at the rates of the code.

A router makes the next call of a kind only after the reply to the one before, as `RedisLedger` and `LedgerWriter`
do: if Redis cannot keep up, reports arrive late instead of piling up.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from inflight.bench.ledger.commands import Call
from inflight.router.dispatch.report_pacer import EARLY_S, INTERVAL_S, counts_from
from inflight.router.ledger.settings import LedgerSettings

RENEW_S = LedgerSettings().renew_interval_ms / 1000
REAP_S = LedgerSettings().reap_interval_ms / 1000


class Repeated(Protocol):
    """A call that is made again and again."""

    def make(self, now_s: float) -> Call:
        """Returns the next call."""

    def next_due_s(self, now_s: float) -> float:
        """Returns when the call after it is due, at the time of its reply."""


@dataclass(slots=True)
class Periodic:
    """A call that is made again an interval after its reply."""

    encoded: Call
    interval_s: float

    def make(self, now_s: float) -> Call:
        return self.encoded

    def next_due_s(self, now_s: float) -> float:
        return now_s + self.interval_s


class Relay:
    """The reports that one router relays: of each of `executors` the newest, every half second, and in one call those
    that are due soon."""

    def __init__(
        self,
        executors: Sequence[bytes],
        make: Callable[[Sequence[bytes]], Call],
        random_numbers: random.Random,
        began_s: float,
        max_per_call: int,
    ) -> None:
        self._make = make
        self._max_per_call = max_per_call
        self._due = [(began_s + INTERVAL_S * random_numbers.random(), executor) for executor in executors]
        heapq.heapify(self._due)

    def make(self, now_s: float) -> Call:
        relayed: list[bytes] = []
        while not relayed or (len(relayed) < self._max_per_call and self._due[0][0] <= now_s + EARLY_S):
            due_s, executor = self._due[0]
            heapq.heapreplace(self._due, (counts_from(due_s, now_s) + INTERVAL_S, executor))
            relayed.append(executor)
        return self._make(relayed)

    def next_due_s(self, now_s: float) -> float:
        return max(now_s, self._due[0][0])


class Upkeep:
    """All periodic calls, by the time at which each is due."""

    def __init__(self) -> None:
        self._repeated: list[Repeated] = []
        self._due: list[tuple[float, int]] = []

    def start(self, repeated: Sequence[tuple[float, Repeated]]) -> None:
        """Starts calls at the given times, in place of all others."""
        self._repeated = [one for _, one in repeated]
        self._due = [(due_s, number) for number, (due_s, _) in enumerate(repeated)]
        heapq.heapify(self._due)

    @property
    def due_s(self) -> float:
        """When the next call is due."""
        return self._due[0][0] if self._due else float("inf")

    def next_call(self, now_s: float) -> Call:
        """Returns the call that is due first."""
        due_s, number = heapq.heappop(self._due)
        return replace(self._repeated[number].make(now_s), due_s=due_s, upkeep=number)

    def done(self, call: Call, now_s: float) -> None:
        """Takes note of the reply to a call."""
        if call.upkeep is not None and call.upkeep < len(self._repeated):
            heapq.heappush(self._due, (self._repeated[call.upkeep].next_due_s(now_s), call.upkeep))
