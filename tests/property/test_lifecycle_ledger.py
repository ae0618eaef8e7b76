"""The ledger of the exploration of life cycles decides as the oracle of the scripts does.

The oracle has times, tenants and blocks, so a copy of it costs too much for an exploration of every order. The ledger
of `tests.support.lifecycle.world` has only what the life cycles depend on. The same calls to both have the same
outcomes and tell the routers the same.
"""

from __future__ import annotations

import random
import re

import pytest

from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    Attempt,
    Demand,
    Ending,
    ExecutorReport,
    HeldSequence,
    LedgerState,
    Placement,
    Queued,
)
from inflight.router.lifecycle.events import RequeueReason
from tests.property import ledger_model
from tests.support.lifecycle.world import EXECUTOR, MAX_ATTEMPTS, Entry, Ledger

ROUTERS = ("r0", "r1")
REQUESTS = ("a", "b", "c")  # `b` has no key: only its owner can repeat it
CALLS = ("submit", "submit", "submit", "adopt", "settle", "settle", "cancel", "hand back", "report", "lose")
WHYS = {RequeueReason.LOST: "lost", RequeueReason.REJECTED: "rejected", RequeueReason.PREEMPTED: "preempted"}
SETTINGS = LedgerSettings(remember_ended_ms=10**9)
REPORTED_MS = 700  # later than the longest delay of a report: it says that the executor lives
LOST_MS = 2100  # later than the grace in which an executor need not know a placement


class Both:
    """The ledger of the exploration and the oracle, and calls to both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.small = Ledger(living=frozenset(ROUTERS))
        self.oracle = ledger_model.Ledger(SETTINGS)
        self.num_reports = 0
        self.report(REPORTED_MS)

    def report(self, later_ms: int, *lost: str) -> None:
        """The executor holds what is placed, except what is lost."""
        self.oracle.pool.now_ms += later_ms
        self.num_reports += 1
        for router_id in ROUTERS:
            self.oracle.register(router_id)
        held = tuple(
            HeldSequence(name, entry.attempt, 1)
            for name, entry in self.small.entries.items()
            if entry.state is LedgerState.PLACED and name not in lost and entry.generation == self.small.generation
        )
        one = ExecutorReport(EXECUTOR, self.small.generation, self.num_reports, 100, 100, 1, accepting=True, held=held)
        self.oracle.report(ROUTERS[0], one)
        for name in lost:
            self.small.lose(name)
        self.small.is_suspended = False
        self.small.board()

    def step(self) -> tuple[object, object]:
        """Makes a call; returns the outcomes."""
        rng, small, oracle = self.rng, self.small, self.oracle
        small.now += 1
        oracle.pool.now_ms += 1
        name, caller, other = rng.choice(REQUESTS), rng.choice(ROUTERS), rng.random() < 0.3
        entry = small.entries.get(name)
        if entry is not None and not other:
            caller = entry.owner
        attempt = entry.attempt if entry else rng.randrange(3)
        match rng.choice(CALLS):
            case "submit":
                digest, is_served = name != "b", rng.random() < 0.3
                demand = Demand(
                    name, 2, 1, last_attempt=attempt, block_size=1, digest="d" * digest, is_served=is_served
                )
                return small.submit(name, caller, digest, is_served, attempt), oracle.submit(caller, demand)
            case "adopt":
                return small.adopt(name, caller), oracle.adopt(caller, name)
            case "settle":
                ending = Ending(name, attempt, cancelled=rng.random() < 0.3)
                small.settle(ending, caller)
                oracle.settle(caller, [ending])
            case "cancel":
                is_own = rng.random() < 0.5
                return small.cancel(name, caller, is_own), oracle.cancel(caller, name, is_own)
            case "hand back" if entry is not None and entry.attempt:
                return self._hand_back(name, entry, caller)
            case "lose" if entry is not None and entry.state is LedgerState.PLACED:
                if rng.random() < 0.5:
                    self.small.generation += 1
                self.report(LOST_MS, name)
            case "report":
                self.report(REPORTED_MS)
        return None, None

    def _hand_back(self, name: str, entry: Entry, caller: str) -> tuple[object, object]:
        rng = self.rng
        placement = Placement(name, entry.attempt - (rng.random() < 0.1), EXECUTOR, entry.generation)
        why = rng.choice(tuple(WHYS))
        if entry.failures and entry.generation == self.small.generation:
            why = RequeueReason.PREEMPTED  # whether an executor that is gone has died is known only to the oracle
        progressed = rng.random() < 0.3
        one = Attempt(name, placement.attempt)
        theirs = self.oracle.hand_back(caller, one, MAX_ATTEMPTS, WHYS[why], 0, progressed)
        return self.small.hand_back(placement, why, progressed, caller), theirs


def comparable(outcome: object) -> str:
    """Returns what a life cycle depends on: of a place in the queue only that it is one, of a placement no blocks."""
    return "queued" if isinstance(outcome, Queued) else re.sub(r", blocks=\d+, suspect=\w+", "", str(outcome))


@pytest.mark.parametrize("seed", range(20))
def test_ledger_of_the_exploration_decides_as_the_oracle(seed: int) -> None:
    both = Both(seed)
    for number in range(200):
        ours, theirs = both.step()
        assert comparable(ours) == comparable(theirs), f"call {number}"
        for router_id in ROUTERS:
            told = [comparable(event) for _, event in both.small.mail.get(router_id, ())]
            assert told == [comparable(event) for event in both.oracle.pool.told.get(router_id, ())], f"call {number}"
        both.small.mail.clear()
        both.oracle.pool.told.clear()
