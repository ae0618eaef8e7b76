"""A router's link to an executor: how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inflight.router.executors import link as links
from inflight.router.executors.frame_checks import check_frame
from inflight.router.executors.link import Answer, ExecutorLink, OnAnswer
from inflight.router.ledger.types import Lost
from inflight.router.request.executor_context import FrameError
from inflight.router.stream.request_stream import RequestStream, unread_stream
from inflight.v1 import executor_pb2
from tests.support.ledger.scripted_store import ScriptedRouter, accepts, new_stream, place, placement, settled, steps


class StillCall:
    """A stream that takes everything and says nothing."""

    async def write(self, request: executor_pb2.ServeRequest) -> None:
        await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        """Nothing to end."""

    def __aiter__(self) -> StillCall:
        return self

    async def __anext__(self) -> executor_pb2.ServeResponse:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("it has spoken")


class StillExecutor:
    """Describes itself and is silent from then on."""

    async def Describe(self, request: executor_pb2.DescribeRequest, timeout: float) -> executor_pb2.DescribeResponse:
        return executor_pb2.DescribeResponse(
            executor_id="e",
            generation=1,
            protocol_version=2,
            block_size=16,
            total_blocks=8,
            max_num_sequences=2,
            context_length=64,
            vocabulary_size=100,
        )

    def Serve(self) -> StillCall:
        return StillCall()


class OverSilence:
    """A silence that has just come to its end."""

    is_over = True

    def __init__(self, max_silent_s: int) -> None:
        self.max_silent_s = max_silent_s

    async def watch(self, end: Any) -> None:
        """It ends nothing here."""


async def test_link_that_is_stopped_while_its_executor_is_silent_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LivenessTimer", OverSilence)
    observer: Any = None
    stub: Any = StillExecutor()
    serving = asyncio.create_task(ExecutorLink("e:1", "router", observer)._serve(stub))
    for _ in range(5):
        await asyncio.sleep(0)

    serving.cancel()

    await asyncio.wait((serving,), timeout=60)
    assert serving.cancelled()


async def test_token_of_a_void_placement_is_dropped() -> None:
    router, stream = ScriptedRouter("m"), new_stream()
    first, second = router.link("e0", "m"), router.link("e1", "m")
    store = router.stores["m"]
    async with router.running():
        store.answers.append(placement())
        await router.pools.find("m").dispatcher.submit(stream)
        first.receive(accepts(1))
        first.receive(steps(3, 4, cached=0))
        # When the ledger has placed it on another executor, and the first one does not know that yet
        store.answers.append(placement(2, "e1"))
        store.tell(Lost("r", 1, "e0", 1))
        await settled()
        second.receive(accepts(2))
        first.receive(steps(0, offset=2))
        second.receive(steps(1, offset=2, cached=0))
        # Then only what the second one says counts
        assert stream.output_ids == [3, 4, 1]


async def test_each_attach_of_a_placement_is_answered_in_order() -> None:
    """A router that loses a request and gets it back attaches again before the first answer."""
    link = ScriptedRouter("m").link("e0", "m")
    answers: list[str] = []

    def on_answer(name: str) -> OnAnswer:
        def take(answer: Answer) -> RequestStream:
            answers.append(name)
            return unread_stream("r")

        return take

    for name in ("first", "second"):
        link.attach("r", 1, 0, on_answer(name))
    both = executor_pb2.ServeResponse(generation=link.description.generation)
    for slot in (3, 4):
        both.attached.add(request_id="r", attempt=1, slots=[slot])
    both.step.detached.append(3)
    check_frame(both, link.description, link._offered, link._seated.keys(), link._attaching)
    link.receive(both)
    assert answers == ["first", "second"]
    assert list(link._seated) == [4]
    with pytest.raises(FrameError, match="not offered"):
        check_frame(both, link.description, link._offered, link._seated.keys(), link._attaching)


async def test_executor_that_refuses_the_second_offer_of_a_placement_accepts_the_first() -> None:
    router = ScriptedRouter("m")
    link = router.link("e0", "m")
    streams = [new_stream(), new_stream()]
    async with router.running():
        for stream in streams:
            link.submit(stream, place(stream, placement()))
        refused = executor_pb2.ServeResponse()
        refused.rejected.add(request_id="r", attempt=1, reason=executor_pb2.REJECT_REASON_STALE_ATTEMPT)
        link.receive(refused)
        accepted = accepts(1)
        accepted.generation = link.description.generation
        check_frame(accepted, link.description, link._offered, link._seated.keys(), link._attaching)
        link.receive(accepted)
    assert [stream.has_been_accepted for stream in streams] == [True, False]
