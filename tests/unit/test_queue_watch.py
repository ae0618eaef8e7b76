"""Queue updates: requests that asked for them get their new places, and no others are looked up."""

from __future__ import annotations

import asyncio

from inflight.common.errors import Reason, RequestError
from inflight.router.dispatch.queue_updates import QueueWatch
from inflight.router.ledger.types import Explanation, LedgerState, Queued
from inflight.router.stream.request_stream import RequestStream
from tests.support.ledger.scripted_store import new_stream, place, placement


class Ledger:
    """Answers with `explanation`; counts reads, also those under way at once."""

    def __init__(self) -> None:
        self.explanation: Explanation | RequestError | None = waiting(5, None)
        self.num_reads = self.most_at_once = 0
        self._num_under_way = 0

    async def explain(self, request_id: str) -> Explanation | None:
        self.num_reads += 1
        self._num_under_way += 1
        self.most_at_once = max(self.most_at_once, self._num_under_way)
        await asyncio.sleep(0)
        self._num_under_way -= 1
        if isinstance(self.explanation, RequestError):
            raise self.explanation
        return self.explanation


def waiting(position: int, wait_ms: int | None) -> Explanation:
    return Explanation(LedgerState.WAITING, position=position, estimated_wait_ms=wait_ms)


async def told(stream: RequestStream) -> Queued | None:
    """What it was told since the last look."""
    stream.board(0)  # so that there is news in any case
    return (await stream.next()).queued


async def test_change_of_position_or_estimate_is_told_and_sameness_is_not() -> None:
    ledger, stream = Ledger(), new_stream()
    watch = QueueWatch(ledger.explain, 1.0)
    watch.watch(stream, Queued(5, None))
    await watch.look()
    assert await told(stream) is None
    for explanation in (waiting(4, None), waiting(4, 200)):
        ledger.explanation = explanation
        await watch.look()
        assert await told(stream) == Queued(explanation.position, explanation.estimated_wait_ms)
        await watch.look()
        assert await told(stream) is None


async def test_ledger_is_read_for_one_request_at_a_time() -> None:
    ledger = Ledger()
    watch = QueueWatch(ledger.explain, 1.0)
    for _ in range(5):
        watch.watch(new_stream(), Queued(0))
    await watch.look()
    assert (ledger.num_reads, ledger.most_at_once) == (5, 1)


async def test_placed_and_released_requests_are_not_looked_at() -> None:
    ledger, placed, released = Ledger(), new_stream(), new_stream()
    watch = QueueWatch(ledger.explain, 1.0)
    watch.watch(placed, Queued(0))
    watch.watch(released, Queued(0))
    place(placed, placement())
    watch.unwatch(released)
    watch.unwatch(released)
    await watch.look()
    assert ledger.num_reads == 0


async def test_request_that_the_ledger_does_not_have_in_line_is_told_nothing() -> None:
    ledger, stream = Ledger(), new_stream()
    watch = QueueWatch(ledger.explain, 1.0)
    watch.watch(stream, Queued(5))
    for answer in (None, Explanation(LedgerState.LOST), RequestError(Reason.STORE_UNAVAILABLE, "away")):
        ledger.explanation = answer
        await watch.look()
        assert await told(stream) is None


async def test_nothing_is_read_without_a_watcher() -> None:
    ledger = Ledger()
    watch = QueueWatch(ledger.explain, 0.0)
    running = asyncio.create_task(watch.run())
    for _ in range(20):
        await asyncio.sleep(0)
    assert ledger.num_reads == 0
    stream = new_stream()
    watch.watch(stream, Queued(9))
    assert (await asyncio.wait_for(stream.next(), 60)).queued == Queued(5, None)
    running.cancel()
