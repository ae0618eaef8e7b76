"""A submit that Redis answers too late, while the request is put in line again and served."""

from __future__ import annotations

import asyncio
from typing import Any

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.types import Demand, LeaseLapsed, Placement, Queued
from inflight.v1 import types_pb2
from tests.support.ledger.scripted_store import ScriptedRouter, accepts, new_stream, placement, settled, steps


class SlowFirstAnswer:
    """The first submit is not answered until the test says so, and fails then; the next one is answered at once."""

    def __init__(self, second: Placement | Queued) -> None:
        self.second = second
        self.gives_up = asyncio.Event()
        self.num_submits = 0

    async def submit(self, demand: Demand) -> Any:
        self.num_submits += 1
        if self.num_submits > 1:
            return self.second
        await self.gives_up.wait()
        raise RequestError(Reason.STORE_UNAVAILABLE, "no answer")


async def test_request_that_runs_is_not_told_that_its_first_submit_failed() -> None:
    router, stream = ScriptedRouter("m"), new_stream()
    link, store, answer = router.link("e0", "m"), router.stores["m"], SlowFirstAnswer(placement())
    store.submit = answer.submit  # type: ignore[method-assign]
    async with router.running():
        # Given a submit without an answer, whose request is submitted again since a reply was lost, and runs
        submitting = asyncio.create_task(router.pools.find("m").dispatcher.submit(stream))
        await settled()
        store.tell(LeaseLapsed())
        await settled()
        link.receive(accepts(1))
        link.receive(steps(3, cached=0))
        # When the first submit fails
        answer.gives_up.set()
        # Then its caller hears of the placement, and the client gets its tokens
        assert isinstance(await submitting, Placement)
        assert (await stream.next()).token_ids == [3]
        link.receive(steps(4, offset=1, end=types_pb2.FINISH_REASON_LENGTH))
        news = await stream.next()
        assert (news.token_ids, news.error) == ([4], None)
        assert news.end is not None
        await settled()
        assert [ending.request_id for ending in store.endings] == ["r"]


async def test_client_that_left_before_its_first_submit_failed_leaves_nothing_running() -> None:
    router, stream = ScriptedRouter("m"), new_stream()
    link, store, answer = router.link("e0", "m"), router.stores["m"], SlowFirstAnswer(placement())
    store.submit = answer.submit  # type: ignore[method-assign]
    dispatcher = router.pools.find("m").dispatcher
    async with router.running():
        submitting = asyncio.create_task(dispatcher.submit(stream))
        await settled()
        store.tell(LeaseLapsed())
        await settled()
        link.receive(accepts(1))
        dispatcher.release(stream)
        answer.gives_up.set()
        await submitting
        assert [(one.request_id, one.attempt) for one in link._outbox.cancels] == [("r", 1)]


async def test_request_that_waits_is_not_told_that_its_first_submit_failed() -> None:
    router, stream = ScriptedRouter("m"), new_stream()
    link, store, answer = router.link("e0", "m"), router.stores["m"], SlowFirstAnswer(Queued(4))
    store.submit = answer.submit  # type: ignore[method-assign]
    async with router.running():
        submitting = asyncio.create_task(router.pools.find("m").dispatcher.submit(stream))
        await settled()
        store.tell(LeaseLapsed())
        await settled()
        answer.gives_up.set()
        assert await submitting == Queued(4)
        # When its turn has come, it runs
        store.tell(placement())
        assert [submit.attempt for submit in link._outbox.submits] == [1]
        assert stream.error is None
