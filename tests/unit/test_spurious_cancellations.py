"""Spurious cancellations: a former placement or a former client must not end a request as cancelled."""

from __future__ import annotations

import asyncio

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.dispatch import dispatcher as dispatch
from inflight.router.ledger.types import Adopted, CancelOutcome, Ending, Lost, Queued
from inflight.v1 import types_pb2
from tests.support.ledger.scripted_store import new_delivery, new_stream, placement, settled, steps
from tests.unit.test_taking_over import Scene, attached

CANCELLED = types_pb2.FINISH_REASON_CANCELLED
AWAY = RequestError(Reason.STORE_UNAVAILABLE, "Redis is away")


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_end_of_a_placement_that_goes_back_to_the_ledger_is_not_settled(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here(1, 2, 3)
        scene.store.answers.append(AWAY)  # so the placement is still this request's there
        scene.store.tell(Lost("r", 1, "e0", 1))
        scene.link.receive(steps(end=CANCELLED))
        await settled()
        assert len(scene.store.hand_backs) == 1
        assert scene.store.endings == []


async def test_lost_placement_of_a_request_whose_client_is_gone_was_cancelled(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here(1)
        scene.dispatcher.release(scene.stream)
        scene.store.tell(Lost("r", 1, "e0", 1))
        await settled()
        assert scene.store.endings == [Ending("r", 1, cancelled=True)]


async def test_repeat_of_what_only_its_executor_takes_for_cancelled_is_lost(scene: Scene) -> None:
    async with scene.router.running():
        scene.store.answers.append(Adopted(placement(), ended=True))
        repeating = asyncio.create_task(scene.dispatcher.submit(scene.stream))
        await settled()
        scene.link.receive(attached())
        await repeating
        scene.link.receive(steps(1, 2, 3, slot=3, end=CANCELLED))
        await settled()
        assert scene.stream.end is None
        assert scene.stream.error is not None
        assert scene.stream.error.reason is Reason.OUTPUT_LOST
        assert (scene.store.endings, scene.store.hand_backs) == ([], [])


async def test_late_withdrawal_leaves_a_repeat_its_place(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here(1)
        # Given a request on its way back to the ledger, whose client goes while that is away
        answer = asyncio.Event()

        async def hand_back(*args: object, **how: object) -> Queued:
            await answer.wait()
            return Queued(0)

        cancelled: list[str] = []

        async def cancel(request_id: str) -> CancelOutcome:
            cancelled.append(request_id)
            if len(cancelled) == 1:
                raise AWAY
            return CancelOutcome(None)

        scene.store.hand_back, scene.store.cancel = hand_back, cancel  # type: ignore[method-assign]
        scene.store.tell(Lost("r", 1, "e0", 1))
        await settled()
        scene.dispatcher.release(scene.stream)
        await settled()
        # When a repeat waits here under its id by the time that it is back in line
        repeat = new_stream(delivery=new_delivery())
        assert isinstance(await scene.dispatcher.submit(repeat), Queued)
        answer.set()
        await settled()
        assert cancelled == ["r"]
        assert scene.dispatcher.stream_of("r") is repeat


async def test_client_that_comes_back_does_not_read_what_is_being_cancelled(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here(1)
        scene.dispatcher.release(scene.stream)
        coming = asyncio.create_task(scene.dispatcher.find("r"))
        await settled()
        assert not coming.done()
        scene.link.receive(steps(end=CANCELLED))
        # The ledger knows whether it goes on somewhere else
        assert await coming is None


@pytest.mark.parametrize("repeats", [True, False])
async def test_client_is_told_to_come_again_while_a_cancel_takes_long(
    scene: Scene, repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "CANCEL_WAIT_S", 0.0)
    scene.stream = new_stream(delivery=new_delivery(digest=b"d"))
    async with scene.router.running():
        await scene.run_here(1)
        scene.dispatcher.release(scene.stream)
        repeat = new_stream(delivery=new_delivery(digest=b"d"))
        with pytest.raises(RequestError) as caught:
            await (scene.dispatcher.find_repeated(repeat) if repeats else scene.dispatcher.find("r"))
        assert caught.value.retry_after_ms is not None


async def test_client_is_told_that_another_caller_cancelled_its_request(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here(1)
        scene.stream.life.is_cancelled = True
        scene.link.receive(steps(end=CANCELLED))
        await settled()
        assert await scene.dispatcher.find("r") is scene.stream
