"""A router asks whether the ledger still has what waits: a bounded number at a time, in turns, twice before it acts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from inflight.common.errors import Reason, RequestError
from inflight.router.dispatch.retry_queue import LEDGER_RETRY_S
from inflight.router.dispatch.waiting_audit import CONFIRM_S, MAX_PER_CHECK, WaitingAudit
from inflight.router.ledger.types import Attempt
from inflight.router.stream.request_stream import RequestStream
from tests.support.ledger.scripted_store import new_stream


class Scene:
    """A router with this many requests that wait, and a ledger that has lost some."""

    def __init__(self, num_waiting: int) -> None:
        self.streams = [new_stream(request_id=f"r{number}") for number in range(num_waiting)]
        self.lost: set[str] = set()
        self.calls: list[list[str]] = []
        self.resubmitted: list[str] = []
        self.pauses: list[float] = []
        self.meanwhile: Callable[[], None] = lambda: None
        self.audit = WaitingAudit(self, self._find_forgotten, self._pause)

    def waiting(self) -> list[RequestStream]:
        return list(self.streams)

    def waits(self, stream: RequestStream) -> bool:
        return stream in self.streams

    def resubmit_forgotten(self, stream: RequestStream) -> None:
        self.resubmitted.append(stream.request_id)
        self.lost.discard(stream.request_id)

    async def _find_forgotten(self, waiting: Sequence[Attempt]) -> frozenset[str]:
        self.calls.append([one.request_id for one in waiting])
        return frozenset(self.lost.intersection(self.calls[-1]))

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.meanwhile()


async def test_nothing_is_asked_where_nothing_waits() -> None:
    scene = Scene(0)
    await scene.audit.check_next()
    assert scene.calls == []


async def test_each_check_asks_once_for_a_bounded_number_and_a_round_asks_for_all() -> None:
    scene = Scene(2 * MAX_PER_CHECK + 1)
    for _ in range(3):
        await scene.audit.check_next()
    assert [len(ids) for ids in scene.calls] == [MAX_PER_CHECK, MAX_PER_CHECK, 1]
    assert {one for ids in scene.calls for one in ids} == {stream.request_id for stream in scene.streams}
    await scene.audit.check_next()
    assert len(scene.calls[3]) == MAX_PER_CHECK
    assert scene.resubmitted == []


async def test_forgotten_request_is_submitted_again_after_it_was_asked_for_twice() -> None:
    scene = Scene(3)
    scene.lost = {"r1"}
    await scene.audit.check_next()
    assert [set(ids) for ids in scene.calls] == [{"r0", "r1", "r2"}, {"r1"}]
    assert (scene.pauses, scene.resubmitted) == ([CONFIRM_S], ["r1"])


async def test_request_whose_end_or_placement_was_on_its_way_is_left_alone() -> None:
    scene = Scene(3)
    scene.lost = {"r1", "r2"}
    scene.meanwhile = lambda: scene.streams.remove(scene.streams[1])
    await scene.audit.check_next()
    assert scene.resubmitted == ["r2"]
    scene.lost = {"r0"}
    scene.meanwhile = scene.lost.clear
    await scene.audit.check_next()
    assert scene.resubmitted == ["r2"]


async def test_where_some_were_forgotten_the_rest_of_the_round_is_asked_for_at_once() -> None:
    scene = Scene(4 * MAX_PER_CHECK)
    every_other = {stream.request_id for stream in scene.streams[::2]}
    scene.lost = set(every_other)
    await scene.audit.check_next()
    assert set(scene.resubmitted) == every_other


async def test_after_a_lapse_all_are_asked_for_once_and_only_what_is_missing_is_submitted_again() -> None:
    scene = Scene(2 * MAX_PER_CHECK + 1)
    scene.lost = {"r1", "r300"}
    await scene.audit.check_all()
    assert [len(ids) for ids in scene.calls] == [MAX_PER_CHECK, MAX_PER_CHECK, 1]
    assert (scene.resubmitted, scene.pauses) == (["r1", "r300"], [])


async def test_after_a_lapse_the_ledger_is_asked_until_it_answers() -> None:
    scene = Scene(1)
    scene.lost = {"r0"}
    answers = [RequestError(Reason.STORE_UNAVAILABLE, "away")] * 2
    find_forgotten = scene._find_forgotten

    async def away_at_first(waiting: Sequence[Attempt]) -> frozenset[str]:
        if answers:
            raise answers.pop()
        return await find_forgotten(waiting)

    audit = WaitingAudit(scene, away_at_first, scene._pause)
    running = asyncio.create_task(audit.run_after_lapses())
    audit.lapsed()
    while not scene.resubmitted:
        await asyncio.sleep(0)
    running.cancel()
    assert (scene.resubmitted, scene.pauses) == (["r0"], [LEDGER_RETRY_S] * 2)
