"""The retry queue: few attempts at once however many items wait, and no item is lost."""

from __future__ import annotations

import asyncio

from inflight.router.dispatch.retry_queue import LEDGER_RETRY_S, MAX_CONCURRENT_ATTEMPTS, RetryQueue
from tests.support.ledger.scripted_store import settled


class Work:
    """What is attempted, and how that goes."""

    def __init__(self) -> None:
        self.attempts: list[int] = []
        self.pauses: list[float] = []
        self.succeeds = True
        self.num_under_way = self.most_under_way = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.goes_on = asyncio.Event()
        self.queue: RetryQueue[int] = RetryQueue(
            self._attempt, lambda work: self.tasks.add(asyncio.create_task(work)), self._pause
        )

    async def _attempt(self, item: int) -> bool:
        self.attempts.append(item)
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        await asyncio.sleep(0)
        self.num_under_way -= 1
        return self.succeeds

    async def _pause(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        await self.goes_on.wait()


async def test_thousands_are_attempted_in_order_by_a_few_tasks() -> None:
    work = Work()
    for item in range(5000):
        work.queue.add(item)
    assert len(work.tasks) == MAX_CONCURRENT_ATTEMPTS
    await asyncio.gather(*work.tasks)
    assert work.attempts == list(range(5000))
    assert work.most_under_way == MAX_CONCURRENT_ATTEMPTS
    assert work.pauses == []


async def test_what_fails_is_attempted_again_behind_the_others_after_a_pause() -> None:
    work = Work()
    work.succeeds = False
    for item in range(100):
        work.queue.add(item)
    await settled()
    # While nothing succeeds few attempts are made
    assert work.attempts == list(range(MAX_CONCURRENT_ATTEMPTS))
    assert work.pauses == [LEDGER_RETRY_S] * MAX_CONCURRENT_ATTEMPTS
    work.succeeds = True
    work.goes_on.set()
    await asyncio.gather(*work.tasks)
    assert work.attempts[-100:] == [*range(MAX_CONCURRENT_ATTEMPTS, 100), *range(MAX_CONCURRENT_ATTEMPTS)]


async def test_item_waits_once() -> None:
    work = Work()
    work.queue.add(1)
    work.queue.add(1)
    await asyncio.gather(*work.tasks)
    assert work.attempts == [1]
    # And again later
    work.queue.add(1)
    await settled()
    assert work.attempts == [1, 1]
