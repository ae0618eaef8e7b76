"""An outage of Redis is a line when it begins, one a minute while it lasts, and one when it is over."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from inflight.common.errors import RequestError
from inflight.router.dispatch.ledger_writer import LedgerWriter
from inflight.router.ledger.calls import QUIET_S, REMINDER_S, Outage
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.types import Ending, ExecutorReport
from tests.support.clock import Clock
from tests.support.ledger.store_pool import SETTINGS


class Followed:
    """An outage, and what it has logged at which second."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.clock = Clock()
        self.outage = Outage("m", logging.getLogger("test"), self.clock)
        self._caplog = caplog

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]


def test_hours_of_failures_are_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(caplog)
    for _ in range(4 * 3600):  # four a second, for an hour
        followed.outage.failed("ConnectionError: refused")
        followed.clock.now_s += 0.25
    assert len(followed.lines) == 3600 / REMINDER_S
    assert followed.lines[:2] == [
        "pool m: the ledger is unavailable: ConnectionError: refused",
        "pool m: the ledger is still unavailable after 60 s, 241 calls have failed: ConnectionError: refused",
    ]


def test_recovery_is_logged_with_how_long_it_took_and_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(caplog)
    followed.outage.answered()
    followed.outage.failed("first")
    followed.clock.now_s += 12
    followed.outage.failed("second")
    followed.clock.now_s += 1
    followed.outage.answered()
    followed.clock.now_s += QUIET_S
    followed.outage.answered()
    followed.outage.answered()
    assert followed.lines == [
        "pool m: the ledger is unavailable: first",
        "pool m: the ledger is available again after 13.0 s, 2 calls have failed",
    ]
    # And the next one is a new one
    followed.outage.failed("third")
    assert followed.lines[2:] == ["pool m: the ledger is unavailable: third"]


def test_successes_among_failures_are_no_recovery(caplog: pytest.LogCaptureFixture) -> None:
    followed = Followed(caplog)
    for _ in range(100):
        followed.outage.failed("ResponseError: OOM")
        followed.clock.now_s += QUIET_S / 4
        followed.outage.answered()
        followed.clock.now_s += QUIET_S / 4
    assert len(followed.lines) == 1 + int(100 * QUIET_S / 2 / REMINDER_S)


class Gone:
    """Redis that cannot be reached."""

    async def execute_command(self, *args: Any, keys: list[str]) -> Any:
        raise RedisConnectionError("Connection refused")


async def test_all_that_a_router_writes_to_the_ledger_fails_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = RedisLedger(Gone(), "m", "a", SETTINGS, lambda event: None)  # type: ignore[arg-type]
    writer = LedgerWriter(store, lambda executor_id, attempt: None)
    writer.settle(Ending("r", 1))
    for _ in range(10):
        assert not await writer.settle_now()
        await writer._relay([ExecutorReport("x", 1, 1, 10, 10, 1, accepting=True)])
    calls = (store.renew(), store.reap(), store.cancel("r"), store.explain("r"), store.clear_suspect("r", 1))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, RequestError) for outcome in outcomes)
    assert [record.getMessage() for record in caplog.records] == [
        "pool m: the ledger is unavailable: ConnectionError: Connection refused"
    ]
