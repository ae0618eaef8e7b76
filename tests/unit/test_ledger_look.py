"""The rate of ledger reads for watchers."""

from __future__ import annotations

import asyncio

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.types import ClassQueue, Snapshot
from inflight.router.stats.source import MAX_TENANT_QUEUES, SnapshotCache


class Ledger:
    """Answers when told to."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.now_s = 0.0
        self.answer: asyncio.Future[Snapshot] | None = None
        self.look = SnapshotCache(self.ask, lambda: self.now_s)

    async def ask(self, max_tenant_queues: int) -> Snapshot:
        assert max_tenant_queues == MAX_TENANT_QUEUES
        self.num_asked += 1
        if self.answer is not None:
            return await self.answer
        return snapshot(self.num_asked)


def snapshot(number: int) -> Snapshot:
    return Snapshot((), (ClassQueue(number, 0),))


async def test_one_answer_serves_everybody_until_it_is_old() -> None:
    ledger = Ledger()
    assert await ledger.look.newest(1.0) == snapshot(1)
    ledger.now_s = 0.9
    assert await asyncio.gather(*(ledger.look.newest(1.0) for _ in range(5))) == [snapshot(1)] * 5
    ledger.now_s = 1.0
    assert await asyncio.gather(*(ledger.look.newest(1.0) for _ in range(5))) == [snapshot(2)] * 5
    assert ledger.num_asked == 2


async def test_ledger_is_asked_four_times_a_second_at_most() -> None:
    ledger = Ledger()
    for tick in range(40):
        ledger.now_s = tick / 20
        await ledger.look.newest(0.05)
    assert ledger.num_asked == 8


async def test_a_slow_answer_holds_no_caller_up_and_is_not_asked_for_twice() -> None:
    ledger = Ledger()
    await ledger.look.newest(0.25)
    ledger.now_s, ledger.answer = 1.0, asyncio.get_running_loop().create_future()
    assert await ledger.look.newest(0.0) == snapshot(1)
    ledger.now_s = 2.0
    assert await ledger.look.newest(0.0) == snapshot(1)
    ledger.answer.set_result(snapshot(9))
    assert await ledger.look.newest(5.0) == snapshot(9)
    assert ledger.num_asked == 2


async def test_of_a_ledger_that_is_away_nothing_is_known() -> None:
    ledger = Ledger()
    await ledger.look.newest(1.0)
    ledger.now_s, ledger.answer = 1.0, asyncio.get_running_loop().create_future()
    ledger.answer.set_exception(RequestError(Reason.STORE_UNAVAILABLE, "away"))
    assert await ledger.look.newest(1.0) is None
    ledger.now_s, ledger.answer = 2.0, None
    assert await ledger.look.newest(1.0) == snapshot(3)
