"""Reports of usage to routers: what accounts have used, as messages.

Every report goes to one router, each time to the next one, and it puts the figures into the ledger. They are totals, so
nothing is acknowledged: accounts that have changed are sent for a minute, and once a minute all of today and yesterday
are. What one router does not deliver, the next one does. Event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from inflight.executor.engine.accounting import NUM_DAYS, Account, AccountTotal
from inflight.executor.scheduler.sequence import Resources
from inflight.executor.serving.submission import PRIORITIES
from inflight.v1 import executor_pb2, types_pb2

INTERVAL_S = 1.0
# How long a change is sent again, and how often everything is.
REPEAT_S = 60.0

PRIORITY_PROTO = {priority: types_pb2.PriorityClass.Name(wire) for wire, priority in PRIORITIES.items()}


class UsageReader(Protocol):
    """A router's session."""

    @property
    def router_id(self) -> str:
        """The router's id."""

    def charge(self, usage: executor_pb2.UsageReport) -> None:
        """Sends what accounts have used."""


class UsageReporter:
    """The newest totals of the executor's accounts. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # With the time of the last change.
        self._totals: dict[Account, tuple[Resources, float]] = {}
        self._all_sent_s = clock()
        self._turn = 0

    def take(self, totals: Iterable[AccountTotal]) -> None:
        """Takes the totals that have changed."""
        now_s = self._clock()
        for account, used in totals:
            if account not in self._totals:
                self._forget_before(account.day - NUM_DAYS + 1)
            self._totals[account] = (used, now_s)

    def _forget_before(self, day: int) -> None:
        for account in [account for account in self._totals if account.day < day]:
            del self._totals[account]

    async def run(self, readers: Callable[[], Collection[UsageReader]]) -> None:
        """Sends reports until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.send(readers())

    def send(self, readers: Collection[UsageReader]) -> None:
        """Sends what is due to the next of the routers."""
        if not readers:
            return
        now_s = self._clock()
        since_s = now_s - REPEAT_S
        if self._all_sent_s <= since_s:
            self._all_sent_s, since_s = now_s, float("-inf")
        report = self._report(since_s)
        if report.accounts:
            self._turn += 1
            in_order = sorted(readers, key=lambda reader: reader.router_id)
            in_order[self._turn % len(in_order)].charge(report)

    def send_all(self, readers: Collection[UsageReader]) -> None:
        """Sends everything to every router, before the executor stops."""
        report = self._report(float("-inf"))
        for reader in readers if report.accounts else ():
            reader.charge(report)

    def _report(self, since_s: float) -> executor_pb2.UsageReport:
        changed = ((account, used) for account, (used, at_s) in self._totals.items() if at_s > since_s)
        return executor_pb2.UsageReport(accounts=[_account_proto(account, used) for account, used in changed])


def used_proto(used: Resources) -> types_pb2.ResourceUsage:
    """Returns the message. Times are rounded down; of a total, that loses nothing for good."""
    return types_pb2.ResourceUsage(
        busy_ns=used.busy_ns,
        seat_us=used.seat_ns // 1000,
        block_ms=used.block_ns // 1_000_000,
        computed_prompt_tokens=used.computed_prompt_tokens,
        cached_prompt_tokens=used.cached_prompt_tokens,
        output_tokens=used.output_tokens,
        wasted_draft_tokens=used.wasted_draft_tokens,
        recomputed_tokens=used.recomputed_tokens,
    )


def _account_proto(account: Account, used: Resources) -> executor_pb2.AccountUsage:
    return executor_pb2.AccountUsage(
        day=account.day,
        tenant=account.tenant,
        priority=None if account.is_system else PRIORITY_PROTO[account.priority],
        adapter_name=account.adapter_name,
        is_system=account.is_system,
        used=used_proto(used),
    )
