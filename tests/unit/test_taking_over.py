"""Takeover of requests between routers: attaching, being taken over, suspects, gaps, and what is left alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.executors.link import ExecutorLink
from inflight.router.ledger.mailbox import OwnershipFilter
from inflight.router.ledger.types import (
    Adopted,
    Demand,
    Duplicate,
    Ending,
    HandBackRefusal,
    LedgerEvent,
    LedgerState,
    Lost,
    Placement,
    Queued,
    TakenOver,
)
from inflight.router.lifecycle.events import End
from inflight.router.stream.relay import Relay
from inflight.router.stream.request_stream import Reader, RequestStream
from inflight.v1 import executor_pb2, resume_pb2, types_pb2
from tests.support.ledger.scripted_store import (
    ScriptedLedger,
    ScriptedRouter,
    accepts,
    new_delivery,
    new_stream,
    placement,
    settled,
    steps,
)

LENGTH = types_pb2.FINISH_REASON_LENGTH
CANCELLED = types_pb2.FINISH_REASON_CANCELLED


class Scene:
    """One router with one executor, and request `r`."""

    def __init__(self) -> None:
        self.router = ScriptedRouter("m")
        self.link: ExecutorLink = self.router.link("e0", "m")
        self.store: ScriptedLedger = self.router.stores["m"]
        self.dispatcher: Dispatcher = self.router.pools.find("m").dispatcher
        self.stream: RequestStream = new_stream(delivery=new_delivery())

    async def run_here(self, *token_ids: int, suspect: bool = False) -> None:
        """The request runs on the executor, in slot 0."""
        self.store.answers.append(Placement("r", 1, "e0", 1, suspect=suspect))
        await self.dispatcher.submit(self.stream)
        self.link.receive(accepts(1))
        self.link.receive(steps(*token_ids, cached=0))

    def is_taken_over(self) -> bool:
        """Whether the reader is told so."""
        return self.stream.error is not None and self.stream.error.reason is Reason.TAKEN_OVER


@pytest.fixture
def scene() -> Scene:
    return Scene()


def attached(slot: int = 3, *, attempt: int = 1, started: bool = True) -> executor_pb2.ServeResponse:
    """The executor lets the router read request `r`."""
    response = executor_pb2.ServeResponse()
    response.attached.add(request_id="r", attempt=attempt, slots=[slot], started=started, cached_tokens=4)
    return response


def not_held(attempt: int = 1) -> executor_pb2.ServeResponse:
    """The executor knows nothing of request `r`."""
    response = executor_pb2.ServeResponse()
    response.rejected.add(request_id="r", attempt=attempt, reason=executor_pb2.REJECT_REASON_NOT_HELD)
    return response


def detached(slot: int = 0) -> executor_pb2.ServeResponse:
    """Another router reads what is in the slot."""
    return executor_pb2.ServeResponse(step=executor_pb2.StepFrame(frame=1, detached=[slot]))


@pytest.mark.parametrize("by_ledger", [True, False])
async def test_request_that_is_taken_over_is_neither_settled_nor_cancelled(scene: Scene, by_ledger: bool) -> None:
    async with scene.router.running():
        await scene.run_here(1, 2)
        if by_ledger:
            scene.store.tell(TakenOver("r"))
        else:  # the ledger is asked whether it is so
            scene.store.answers.append(Duplicate(LedgerState.PLACED))
            scene.link.receive(detached())
            await settled()
        assert scene.is_taken_over()
        scene.dispatcher.leave(scene.stream, None)
        # What still comes of it is not for this router
        scene.store.tell(TakenOver("r"))
        if by_ledger:
            scene.link.receive(steps(3, offset=2, end=LENGTH))
        await settled()
        assert scene.dispatcher.streams == ()
        assert (scene.store.endings, scene.store.hand_backs) == ([], [])
        assert not scene.link._outbox.cancels
        assert scene.stream.output_ids == [1, 2]
        assert await scene.dispatcher.find("r") is None


@pytest.mark.parametrize("by_ledger", [True, False])
async def test_router_that_is_displaced_by_a_late_attach_attaches_again(scene: Scene, by_ledger: bool) -> None:
    """Another router had the request before this one. Its attach, or the event of its takeover, comes only now."""
    async with scene.router.running():
        await scene.run_here(1, 2)
        scene.store.answers.append(Adopted(placement(), ended=False))
        if by_ledger:
            scene.store.tell(TakenOver("r", is_certain=False))
        else:
            scene.link.receive(detached())
        await settled()
        assert scene.store.demands[-1].is_served
        assert [attach.offset for attach in scene.link._outbox.attaches] == [0]
        scene.link.receive(attached())
        scene.link.receive(steps(1, 2, 3, slot=3, end=LENGTH))
        await settled()
        assert scene.stream.output_ids == [1, 2, 3]
        assert scene.stream.end is not None
        assert scene.store.endings == [Ending("r", 1, computed_tokens=6, output_tokens=3, by_itself=True)]


async def test_takeover_in_the_millisecond_of_an_adoption_is_not_certain() -> None:
    events: list[LedgerEvent] = []
    ownership = OwnershipFilter(events.append)
    ownership.take("r", 1000)
    for at_ms in (999, 1000, 1001):
        ownership.receive(TakenOver("r", at_ms))
    assert [(event.at_ms, event.is_certain) for event in events if isinstance(event, TakenOver)] == [
        (1000, False),
        (1001, True),
    ]


async def test_reply_that_was_overtaken_by_a_later_one_does_not_revive_a_takeover_in_between() -> None:
    events: list[LedgerEvent] = []
    ownership = OwnershipFilter(events.append)
    ownership.take("r", 1000)
    ownership.take("r", 990)
    ownership.receive(TakenOver("r", 995))
    assert events == []


async def test_slot_of_a_request_that_was_taken_over_is_used_again(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here(1)
        scene.store.tell(TakenOver("r"))
        scene.link.receive(detached())
        scene.stream = new_stream()
        await scene.run_here(4, 5)
        assert scene.stream.output_ids == [4, 5]


async def test_lost_placement_of_a_request_that_was_taken_over_meanwhile_ends_its_stream(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here(1)
        scene.store.answers.extend([HandBackRefusal.STALE, Duplicate(LedgerState.PLACED)])
        scene.store.tell(Lost("r", 1, "e0", 1))
        await settled()
        assert scene.store.demands[-1].is_served
        assert scene.is_taken_over()
        assert scene.store.endings == []


# --- attaching


async def resumed(scene: Scene, *answers: executor_pb2.ServeResponse, ended: bool = False) -> RequestStream:
    scene.store.answers.append(Adopted(placement(), ended=ended))
    task = asyncio.create_task(scene.dispatcher.resume("r", lambda attached: scene.stream))
    await settled()
    (attach,) = scene.link._outbox.attaches
    assert (attach.request_id, attach.attempt, attach.offset) == ("r", 1, 0)
    for answer in answers:
        scene.link.receive(answer)
    return await task


async def test_adopted_request_goes_on_as_any_other(scene: Scene) -> None:
    async with scene.router.running():
        stream = await resumed(scene, attached(), steps(1, 2, slot=3))
        reader = Reader(1)
        stream.attend(reader)
        news = await stream.next(reader)
        assert (news.accepted, news.boarded, news.token_ids) == (True, True, [1, 2])
        scene.link.receive(steps(3, offset=2, slot=3, end=LENGTH))
        await settled()
        assert scene.store.endings == [Ending("r", 1, computed_tokens=6, output_tokens=3, by_itself=True)]
        assert await scene.dispatcher.find("r") is stream


async def test_adopted_request_whose_executor_is_lost_then_goes_on_elsewhere(scene: Scene) -> None:
    async with scene.router.running():
        stream = await resumed(scene, attached(), steps(1, 2, slot=3))
        second = scene.router.link("e1", "m")
        scene.store.answers.append(placement(2, "e1"))
        scene.link._break()
        await settled()
        assert [hand_back[2]["progressed"] for hand_back in scene.store.hand_backs] == [True]
        (submit,) = second._outbox.submits
        assert (submit.attempt, list(submit.prior_output_ids)) == (2, [1, 2])
        assert stream.num_migrations == 1


async def test_ended_request_is_replayed_with_its_end_and_not_settled(scene: Scene) -> None:
    async with scene.router.running():
        stream = await resumed(scene, attached(), steps(1, slot=3, end=CANCELLED), ended=True)
        reader = Reader(1)
        stream.attend(reader)
        news = await stream.next(reader)
        assert news.end is not None
        assert news.end.reason == CANCELLED
        await settled()
        assert (scene.store.endings, scene.store.hand_backs) == ([], [])


async def test_request_that_no_executor_holds_is_lost_and_its_place_free(scene: Scene) -> None:
    async with scene.router.running():
        with pytest.raises(RequestError) as caught:
            await resumed(scene, not_held())
        await settled()
        assert caught.value.reason is Reason.OUTPUT_LOST
        assert scene.store.endings == [Ending("r", 1, cancelled=True)]


@pytest.mark.parametrize("answer", [None, LedgerState.WAITING, LedgerState.LOST, LedgerState.ENDED])
async def test_request_without_a_placement_is_lost(scene: Scene, answer: LedgerState | None) -> None:
    async with scene.router.running():
        scene.store.answers.append(answer or Queued(0))
        with pytest.raises(RequestError) as caught:
            await scene.dispatcher.resume("r", lambda attached: scene.stream)
        assert caught.value.reason is Reason.OUTPUT_LOST


async def test_adoption_waits_for_the_link_to_the_executor(scene: Scene) -> None:
    async with scene.router.running():
        scene.store.answers.append(Adopted(placement(executor_id="e9"), ended=False))
        task = asyncio.create_task(scene.dispatcher.resume("r", lambda attached: scene.stream))
        await settled()
        late = scene.router.link("e9", "m")
        await settled()
        late.receive(attached())
        assert await task is scene.stream


async def test_link_that_breaks_before_it_answers_leaves_nothing_to_read(scene: Scene) -> None:
    async with scene.router.running():
        scene.store.answers.append(Adopted(placement(), ended=False))
        task = asyncio.create_task(scene.dispatcher.resume("r", lambda attached: scene.stream))
        await settled()
        scene.link._break()
        with pytest.raises(RequestError) as caught:
            await task
        assert caught.value.reason is Reason.OUTPUT_LOST


async def test_two_who_resume_at_once_get_one_stream(scene: Scene) -> None:
    async with scene.router.running():
        scene.store.answers.append(Adopted(placement(), ended=False))
        tasks = [asyncio.create_task(scene.dispatcher.resume("r", lambda attached: scene.stream)) for _ in range(2)]
        await settled()
        scene.link.receive(attached())
        assert await asyncio.gather(*tasks) == [scene.stream, scene.stream]


async def test_repeat_whose_first_was_never_sent_is_sent_under_the_same_attempt(scene: Scene) -> None:
    async with scene.router.running():
        scene.store.answers.append(Adopted(placement(), ended=False))
        task = asyncio.create_task(scene.dispatcher.submit(scene.stream))
        await settled()
        scene.link.receive(not_held())
        await task
        assert [submit.attempt for submit in scene.link._outbox.submits] == [1]


async def test_repeat_whose_output_no_process_holds_is_lost(scene: Scene) -> None:
    async with scene.router.running():
        scene.store.answers.append(Adopted(placement(), ended=True))
        task = asyncio.create_task(scene.dispatcher.submit(scene.stream))
        await settled()
        scene.link.receive(not_held())
        with pytest.raises(RequestError) as caught:
            await task
        assert caught.value.reason is Reason.OUTPUT_LOST
        assert scene.dispatcher.streams == ()


async def test_executor_of_the_older_protocol_holds_nothing_to_attach_to(scene: Scene) -> None:
    scene.link.description.protocol_version = 1
    async with scene.router.running():
        scene.store.answers.append(Adopted(placement(), ended=False))
        with pytest.raises(RequestError) as caught:
            await scene.dispatcher.resume("r", lambda attached: scene.stream)
        assert caught.value.reason is Reason.OUTPUT_LOST
        assert not scene.link._outbox.attaches


# --- suspects and gaps


async def test_suspect_is_cleared_by_its_first_token_once(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here(suspect=True)
        await settled()
        assert scene.store.cleared_suspects == []
        scene.link.receive(steps(1, 2))
        scene.link.receive(steps(3, offset=2))
        await settled()
        assert scene.store.cleared_suspects == [("r", 1)]


async def test_loss_before_a_token_of_the_placement_is_no_progress(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here(1)
        scene.store.answers.append(placement(2))
        scene.store.tell(Lost("r", 1, "e0", 1))
        await settled()
        scene.store.tell(Lost("r", 2, "e0", 1))
        await settled()
        assert [hand_back[2]["progressed"] for hand_back in scene.store.hand_backs] == [True, False]


async def test_request_that_killed_its_executors_ends_internal(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here()
        scene.store.answers.append(HandBackRefusal.EXHAUSTED)
        scene.store.tell(Lost("r", 1, "e0", 1))
        await settled()
        await scene.stream.next()
        assert scene.stream.error is not None
        assert scene.stream.error.reason is Reason.ATTEMPTS_EXHAUSTED
        assert "executors died under the request" in str(scene.stream.error)


async def test_missing_token_is_asked_for_on_the_same_link(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here(1)
        scene.link.receive(steps(4, offset=3))
        scene.link.receive(steps(5, offset=4))
        (attach,) = scene.link._outbox.attaches
        assert (attach.request_id, attach.attempt, attach.offset) == ("r", 1, 1)
        # What was under way in the old slot does no harm
        scene.link.receive(attached(slot=3))
        scene.link.receive(steps(6, offset=5))
        scene.link.receive(detached(0))
        scene.link.receive(steps(2, 3, 4, 5, 6, offset=1, slot=3))
        scene.link.receive(steps(7, offset=6, slot=3, end=LENGTH))
        await settled()
        assert scene.stream.output_ids == [1, 2, 3, 4, 5, 6, 7]
        assert scene.store.hand_backs == []
        assert len(scene.link._outbox.attaches) == 1


@pytest.mark.parametrize("answer", [not_held, attached])
async def test_token_that_stays_missing_sends_the_request_elsewhere(
    scene: Scene, answer: Callable[[], executor_pb2.ServeResponse]
) -> None:
    async with scene.router.running():
        await scene.run_here(1)
        scene.link.receive(steps(4, offset=3))
        scene.link.receive(answer())
        if answer is attached:
            scene.link.receive(steps(4, offset=3, slot=3))
        await settled()
        assert scene.store.hand_backs == [
            ("r", 1, {"rejected": False, "preempted": False, "output_tokens": 1, "progressed": True})
        ]
        assert [cancel.attempt for cancel in scene.link._outbox.cancels] == [1]


async def test_placement_that_is_lost_behind_its_last_token_has_ended(scene: Scene) -> None:
    submit = executor_pb2.Submit(request_id="r", prompt_ids=[1] * 10)
    submit.stopping.max_tokens = 2
    scene.stream = RequestStream(Demand("r", 2, 9), submit, 0.0, delivery=new_delivery())
    async with scene.router.running():
        await scene.run_here(1, 2)
        scene.link._break()
        await settled()
        assert scene.stream.end == End(LENGTH, None)
        assert scene.store.hand_backs == []
        assert [(ending.request_id, ending.attempt) for ending in scene.store.endings] == [("r", 1)]


# --- without an executor


async def test_only_requests_without_a_deadline_are_given_up_when_no_executor_comes_back() -> None:
    router = ScriptedRouter("m", no_executor_grace_s=0.0)
    link, store = router.link("e0", "m"), router.stores["m"]
    dispatcher = router.pools.find("m").dispatcher
    async with router.running():
        patient, other = new_stream(deadline=time.monotonic() + 100), new_stream(request_id="s")
        store.answers.extend([placement(), placement(request_id="s")])
        for stream in (patient, other):
            await dispatcher.submit(stream)
        link._break()
        async with asyncio.timeout(60):
            while not other.has_ended:
                await asyncio.sleep(0)
        assert other.error is not None
        assert other.error.reason is Reason.NO_EXECUTOR
        assert not patient.has_ended
        await settled()
        assert [stream.request_id for stream in dispatcher.streams] == ["r"]


# --- what comes out of order, and what is missing


async def test_take_over_that_is_told_before_the_answer_leaves_the_placement_to_the_other(scene: Scene) -> None:
    async with scene.router.running():
        asked = asyncio.create_task(scene.dispatcher.submit(scene.stream))
        scene.store.before_answer = lambda: scene.store.tell(TakenOver("r"))
        scene.store.answers.append(placement())
        with pytest.raises(RequestError) as refused:
            await asked
        assert refused.value.reason is Reason.TAKEN_OVER
        await settled()
        assert scene.store.endings == []
        assert not scene.link._outbox.submits


async def test_end_behind_a_missing_token_waits_for_it(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here()
        scene.link.receive(steps(3, offset=2, end=LENGTH))
        assert not scene.stream.has_ended
        (attach,) = scene.link._outbox.attaches
        assert attach.offset == 0
        scene.link.receive(attached())
        scene.link.receive(steps(1, 2, 3, slot=3, end=LENGTH))
        assert (scene.stream.output_ids, scene.stream.has_ended) == ([1, 2, 3], True)


@pytest.mark.parametrize("num_answered", [1, 2])
async def test_length_that_is_not_reached_is_no_end(scene: Scene, num_answered: int) -> None:
    scene.stream = new_stream(delivery=new_delivery(), max_tokens=3)
    async with scene.router.running():
        await scene.run_here()
        scene.link.receive(steps(1, end=LENGTH))
        assert not scene.stream.has_ended
        scene.link.receive(attached())
        if num_answered == 1:
            scene.link.receive(steps(2, 3, offset=1, slot=3, end=LENGTH))
            assert (scene.stream.output_ids, scene.stream.has_ended) == ([1, 2, 3], True)
        else:
            scene.link.receive(steps(slot=3, end=LENGTH))
            await settled()
            assert [attempt for _, attempt, _ in scene.store.hand_backs] == [1]


async def test_request_that_lacks_only_the_word_of_its_end_has_ended(scene: Scene) -> None:
    scene.stream = new_stream(delivery=new_delivery(), max_tokens=2)
    async with scene.router.running():
        await scene.run_here(1, 2)
        scene.link._break()
        await settled()
        assert scene.stream.end is not None
        assert scene.stream.end.reason == LENGTH
        assert scene.store.hand_backs == []
        assert [one.request_id for one in scene.store.endings] == ["r"]


async def test_key_is_held_against_what_the_executor_was_told(scene: Scene) -> None:
    scene.stream = new_stream(delivery=new_delivery(digest=b"as asked"))
    async with scene.router.running():
        scene.store.answers.append(Adopted(placement(), ended=False))
        asked = asyncio.create_task(scene.dispatcher.submit(scene.stream))
        await settled()
        answer = attached()
        told = resume_pb2.RouterContext(tenant="default", request_id="r", digest=b"another")
        answer.attached[0].submit.MergeFrom(
            executor_pb2.Submit(request_id="r", router_context=told.SerializeToString())
        )
        scene.link.receive(answer)
        with pytest.raises(RequestError) as refused:
            await asked
        assert refused.value.reason is Reason.IDEMPOTENCY_MISMATCH
        scene.link.receive(steps(1, slot=3, end=LENGTH))
        await settled()
        assert not scene.link._outbox.cancels
        assert scene.store.endings == []


async def test_stop_text_that_does_not_come_is_no_end(scene: Scene) -> None:
    """The router that found it has told the executor, which has less of the output than that router had."""
    async with scene.router.running():
        await scene.run_here(1)
        scene.link.receive(steps(end=types_pb2.FINISH_REASON_STOP_STRING))
        with pytest.raises(RequestError) as refused:
            await Relay(scene.stream, None).run()
        assert refused.value.reason is Reason.OUTPUT_LOST


async def test_output_of_what_came_to_its_stop_while_it_was_attached_to_is_kept(scene: Scene) -> None:
    async with scene.router.running():
        await scene.run_here(1, 2)
        scene.stream.stop()
        scene.stream.attach(has_started=True, num_cached_tokens=0)
        assert scene.stream.tokens(0, [1])
        assert scene.stream.output_ids == [1, 2]
