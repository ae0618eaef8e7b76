"""Background writes of usage to the ledger.

The figures are totals since the executor's start, so of each account only the newest counts. While Redis is
unavailable they wait here and at the executors, which repeat today's and yesterday's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from inflight.common.errors import RequestError
from inflight.common.time_of_day import day_text
from inflight.router.dispatch.retry_queue import LEDGER_RETRY_S
from inflight.router.executors.link import ExecutorLink
from inflight.router.ledger.ledger import Ledger
from inflight.router.ledger.types import FIGURES, Account, AccountUsage, ChargeOutcome, ExecutorUsage
from inflight.v1 import executor_pb2, types_pb2

log = logging.getLogger(__name__)


class UsageWriter:
    """The writes for one pool. `on_charged` is called with what the ledger has added to its totals. Over all routers,
    it is called for each nanosecond and token at most once; not if the answer of Redis was lost."""

    def __init__(self, ledger: Ledger, on_charged: Callable[[AccountUsage], None]) -> None:
        self._ledger = ledger
        self._on_charged = on_charged
        # By executor and generation.
        self._waiting: dict[tuple[str, int], dict[Account, AccountUsage]] = {}
        self._wake = asyncio.Event()
        self._has_warned = False
        # Days that this router has booked on.
        self._days: set[int] = set()

    def add(self, usage: ExecutorUsage) -> None:
        """Queues what accounts have used of an executor."""
        waiting = self._waiting.setdefault((usage.executor_id, usage.generation), {})
        waiting.update((one.account, one) for one in usage.totals)
        self._wake.set()

    async def run(self) -> None:
        """Writes until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not await self.charge_now():
                self._wake.set()
                await asyncio.sleep(LEDGER_RETRY_S)

    async def charge_now(self) -> bool:
        """Writes all that has collected. Returns False if the ledger does not answer; the rest then waits."""
        while self._waiting:
            key, totals = self._waiting.popitem()
            usage = ExecutorUsage(*key, tuple(totals.values()))
            try:
                outcome = await self._ledger.charge(usage)
            except RequestError as error:
                log.debug("usage of %s cannot be booked yet: %s", key[0], error)  # the ledger logs its outage
                self._waiting[key] = totals | self._waiting.get(key, {})
                return False
            self._take(outcome, {account.day for account in totals})
        return True

    def _take(self, outcome: ChargeOutcome, days: set[int]) -> None:
        for day in sorted(outcome.first_days & self._days):
            log.error(
                "the ledger has lost the usage of %s: executors that run book theirs again, that of others is missing",
                day_text(day),
            )
        self._days |= days
        if outcome.num_left_out and not self._has_warned:
            self._has_warned = True
            log.error("usage of %d accounts is not booked: the ledger has too many of one day", outcome.num_left_out)
        for added in outcome.added:
            self._on_charged(added)


def executor_usage(link: ExecutorLink, usage: executor_pb2.UsageReport) -> ExecutorUsage:
    """Returns what the ledger is told of a report of usage."""
    description = link.description
    totals = tuple(
        AccountUsage(
            Account(
                one.day,
                one.tenant,
                0 if one.is_system else one.priority or types_pb2.PRIORITY_CLASS_STANDARD,
                one.adapter_name,
                description.executor_class,
                one.is_system,
            ),
            tuple(getattr(one.used, name) for name in FIGURES),
        )
        for one in usage.accounts
    )
    return ExecutorUsage(description.executor_id, description.generation, totals)
