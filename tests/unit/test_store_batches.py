"""Calls that are made together: what waits for its turn goes out in one call, and each gets its own outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.calls import MAX_CALLS, MAX_ITEMS, Batches
from inflight.router.ledger.connection import NotSent, unavailable
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    CancelOutcome,
    Demand,
    Duplicate,
    HandBackRefusal,
    LedgerCall,
    LedgerState,
    Placement,
    Queued,
    Refused,
    TenantLimits,
)
from tests.support.ledger.store_pool import StorePool


@dataclass
class Calls:
    """Calls that end when the test says so."""

    made: list[list[int]] = field(default_factory=list)
    ends: list[asyncio.Future[None]] = field(default_factory=list)
    has_turn: bool = True

    def __post_init__(self) -> None:
        self.batches = Batches(self._call, self._turn, asyncio.create_task)

    async def _call(self, items: Sequence[int]) -> list[int]:
        self.made.append(list(items))
        self.ends.append(asyncio.get_running_loop().create_future())
        await self.ends[-1]
        return [-item for item in items]

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if not self.has_turn:
            raise unavailable(LedgerSettings(), "silent", NotSent)
        yield

    def ask(self, count: int) -> list[asyncio.Task[int]]:
        return [asyncio.create_task(self.batches.add(item)) for item in range(count)]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_first_goes_at_once_and_what_comes_meanwhile_goes_together() -> None:
    calls = Calls()
    first = calls.ask(1)
    await settled()
    assert calls.made == [[0]]
    rest = calls.ask(40)
    await settled()
    assert len(calls.made) == MAX_CALLS
    for number in range(2, 5):
        calls.ends[number - 2].set_result(None)
        await settled()
    assert [len(items) for items in calls.made] == [1, MAX_ITEMS, MAX_ITEMS, 40 - 2 * MAX_ITEMS]
    for end in calls.ends:
        if not end.done():
            end.set_result(None)
    assert await asyncio.gather(*first, *rest) == [0, *(-item for item in range(40))]


async def test_failed_call_fails_its_items_and_no_others() -> None:
    calls = Calls()
    first = calls.ask(1)
    await settled()
    second = calls.ask(3)
    await settled()
    calls.ends[0].set_exception(RequestError(Reason.STORE_UNAVAILABLE, "lost"))
    calls.ends[1].set_result(None)
    outcomes = await asyncio.gather(*first, *second, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [RequestError, int, int, int]


async def test_what_waits_is_refused_without_a_turn_and_later_items_are_not() -> None:
    calls = Calls(has_turn=False)
    refused = await asyncio.gather(*calls.ask(5), return_exceptions=True)
    assert [type(outcome) for outcome in refused] == [NotSent] * 5
    calls.has_turn = True
    later = calls.ask(1)
    await settled()
    calls.ends[0].set_result(None)
    assert await asyncio.gather(*later) == [0]


async def test_item_whose_caller_is_gone_delays_no_other() -> None:
    calls = Calls()
    gone, stays = calls.ask(2)
    await settled()
    gone.cancel()
    for end in calls.ends:
        end.set_result(None)
    assert await stays == -1


@pytest.fixture
def counted(store_pool: StorePool) -> list[LedgerCall]:
    """The calls of router a."""
    made: list[LedgerCall] = []
    store_pool.router("a").store._on_call = made.append
    return made


async def test_each_of_several_submits_gets_its_own_outcome(store_pool: StorePool, counted: list[LedgerCall]) -> None:
    a = store_pool.router("a").store
    await a.report(store_pool.next_report(blocks=10, sequences=2))
    await a.submit(Demand("known", 2, 1))
    counted.clear()
    demands = [
        Demand("placed", 2, 1),
        Demand("waits", 2, 1),
        Demand("too large", 2, 11),
        Demand("full", 2, 1, tenant="t", limits=TenantLimits(max_queue_requests=0)),
        Demand("known", 1, 1),
        Demand("waits, too", 2, 1),
    ]
    outcomes = await asyncio.gather(*(a.submit(demand) for demand in demands))
    assert [call.script for call in counted] == ["submit"]
    placed, waits, too_large, full, known, waits_too = outcomes
    assert isinstance(placed, Placement)
    assert isinstance(waits, Queued)
    assert too_large == Refused(Reason.NEVER_FITS, "")
    assert full == Refused(Reason.QUEUE_FULL, "tenant max_queue_requests", None)
    assert known == Duplicate(LedgerState.PLACED)
    assert waits_too == Queued(waits.position + 1)


async def test_several_cancels_and_hand_backs_go_in_one_call(store_pool: StorePool, counted: list[LedgerCall]) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=100, sequences=20))
    placed = [await a.place(f"p{number}") for number in range(8)]
    await a.store.report(store_pool.next_report(blocks=100, sequences=8))
    for number in range(8):
        await a.queue(Demand(f"w{number}", 2, 1))
    counted.clear()
    cancelled = await asyncio.gather(*(a.store.cancel(f"w{number}") for number in range(8)), a.store.cancel("none"))
    assert cancelled == [*(CancelOutcome(LedgerState.WAITING, None, "a") for _ in range(8)), CancelOutcome(None)]
    back = await asyncio.gather(
        *(a.store.hand_back(one.request_id, one.attempt, 3, preempted=True) for one in placed),
        a.store.hand_back("none", 1, 3),
    )
    assert back == [*(replace(one, attempt=2) for one in placed), HandBackRefusal.UNKNOWN]
    assert [call.script for call in counted] == ["cancel", "hand_back"]


async def test_request_placed_by_a_later_one_of_the_same_call_is_told_as_placed(store_pool: StorePool) -> None:
    """A request that frees the line lets another go: both are in one call."""
    a = store_pool.router("a").store
    await a.report(store_pool.next_report(blocks=10, sequences=8))
    outcomes = await asyncio.gather(*(a.submit(Demand(f"r{number}", 2, 1)) for number in range(12)))
    assert sum(isinstance(outcome, Placement) for outcome in outcomes) == 8
    snapshot = await a.snapshot()
    assert snapshot.executors[0].reserved_sequences == 8
    assert sum(snapshot.num_waiting) == 4


async def test_only_requests_that_need_a_mailbox_are_asked_for_again(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await b.store.report(store_pool.next_report(blocks=10, sequences=1))
    await b.place("running")
    await b.queue(Demand("of b", 2, 1))  # whose mailbox a does not know
    await a.queue(Demand("of a", 2, 1))
    sent: list[int] = []
    call = a.store._call

    async def counting(operation: object, name: str, args: Sequence[object]) -> object:
        sent.append((len(args) - 1) // 2)
        return await call(operation, name, args)  # type: ignore[arg-type]

    a.store._call = counting  # type: ignore[method-assign, assignment]
    outcomes = await asyncio.gather(*(a.store.cancel(one) for one in ("none", "of a", "of b")))
    assert [outcome.state for outcome in outcomes] == [None, LedgerState.WAITING, LedgerState.WAITING]
    assert sent == [3, 1]
