"""A router's stream on the executor's side: frames, slots and credits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason, Sampling, Sequence, Stopping, TokenLogprobs
from inflight.executor.serving import router_session as sessions
from inflight.executor.serving.router_session import Session
from inflight.v1 import executor_pb2, types_pb2


def make_sequence(request_id: str) -> Sequence:
    sampling, stopping = Sampling(0.0, 0, 1.0, 0), Stopping(100, 0, frozenset())
    return Sequence(request_id, 1, [1], 1, sampling, stopping, 8, None)


async def take(session: Session) -> executor_pb2.ServeResponse:
    response = await asyncio.wait_for(session.next_response(), 60)
    assert response is not None
    return response


def is_waiting(session: Session) -> bool:
    """Whether nothing can be sent now."""
    coroutine = session.next_response()
    try:
        coroutine.send(None)
    except StopIteration:
        return False
    coroutine.close()
    return True


async def test_tokens_of_a_step_leave_in_one_frame() -> None:
    session = Session("router", 7, 64)
    first, second = make_sequence("a"), make_sequence("b")
    session.accept(first)
    session.accept(second)
    await take(session)
    session.token(first, 0, 11)
    session.token(second, 0, 22)
    session.end_step(3)
    response = await take(session)
    assert response.generation == 7
    assert response.step.step == 3
    assert list(zip(response.step.slots, response.step.offsets, response.step.token_ids, strict=True)) == [
        (0, 0, 11),
        (1, 0, 22),
    ]


async def test_tokens_of_a_stream_interval_wait_for_as_many_after_the_first() -> None:
    session = Session("router", 7, 64)
    sequence = make_sequence("a")
    session.accept(sequence, 4)
    await take(session)
    session.token(sequence, 0, 10)
    assert list((await take(session)).step.token_ids) == [10]
    for offset in range(1, 4):
        session.token(sequence, offset, 10 + offset)
        assert is_waiting(session)
    session.token(sequence, 4, 14)
    response = await take(session)
    assert list(response.step.offsets) == [1, 2, 3, 4]
    assert list(response.step.token_ids) == [11, 12, 13, 14]
    session.token(sequence, 5, 15)
    assert is_waiting(session)


SESSION_EVENTS: dict[str, Callable[[Session, Sequence, Sequence], None]] = {
    "a token of another without an interval": lambda session, _, other: session.token(other, 0, 7),
    "its end": lambda session, one, _: session.finish(FinishEvent(one, FinishReason.LENGTH)),
    "the end of another": lambda session, _, other: session.finish(FinishEvent(other, FinishReason.LENGTH)),
    "a pause": lambda session, one, _: session.preempt(one),
    "a seat": lambda session, _, other: session.start(other),
    "another router": lambda session, one, _: session.detach(one),
    "a report": lambda session, one, other: session.report(executor_pb2.Report(seq=1)),
    "an acceptance": lambda session, one, other: session.accept(make_sequence("c")),
    "the end of the stream": lambda session, one, other: session.close(),
}


@pytest.mark.parametrize("name", SESSION_EVENTS)
async def test_waiting_tokens_leave_with_whatever_else_is_sent(name: str) -> None:
    session = Session("router", 7, 64)
    sequence, other = make_sequence("a"), make_sequence("b")
    session.accept(sequence, 8)
    session.accept(other)
    session.token(sequence, 0, 10)
    await take(session)
    session.token(sequence, 1, 11)
    assert is_waiting(session)
    SESSION_EVENTS[name](session, sequence, other)
    response = await take(session)
    assert (0, 1, 11) in zip(response.step.slots, response.step.offsets, response.step.token_ids, strict=True)


async def test_freed_slot_does_not_keep_its_stream_interval() -> None:
    session = Session("router", 7, 64)
    sequence, other = make_sequence("a"), make_sequence("b")
    session.accept(sequence, 8)
    session.finish(FinishEvent(sequence, FinishReason.LENGTH))
    await take(session)
    session.accept(other)
    assert list((await take(session)).accepted[0].slots) == [0]
    for offset in range(2):
        session.token(other, offset, 20)
        assert list((await take(session)).step.offsets) == [offset]


async def test_attached_stream_keeps_its_interval() -> None:
    session = Session("router", 7, 64)
    sequence = make_sequence("a")
    attached = executor_pb2.SequenceAttached(request_id="a", attempt=1, submit=executor_pb2.Submit(stream_interval=2))
    session.attach(sequence, attached, 0, [10, 11])
    assert list((await take(session)).step.token_ids) == [10, 11]
    session.token(sequence, 2, 12)
    assert is_waiting(session)
    session.token(sequence, 3, 13)
    assert list((await take(session)).step.token_ids) == [12, 13]


async def test_due_tokens_wait_for_the_acknowledgement_and_leave_with_those_behind_them() -> None:
    session = Session("router", 7, 1)
    sequence = make_sequence("a")
    session.accept(sequence, 2)
    session.token(sequence, 0, 10)
    await take(session)
    for offset in range(1, 4):
        session.token(sequence, offset, 10 + offset)
    assert is_waiting(session)
    session.acknowledge(1)
    assert list((await take(session)).step.token_ids) == [11, 12, 13]


async def test_slow_reader_gets_the_held_back_tokens_in_one_frame_and_control_at_once() -> None:
    session = Session("router", 1, 1)
    sequence = make_sequence("a")
    session.accept(sequence)
    session.token(sequence, 0, 10)
    assert (await take(session)).step.frame == 1
    # Given one unacknowledged frame, which is all that is allowed
    for offset in range(1, 5):
        session.token(sequence, offset, 10 + offset)
    assert is_waiting(session)
    session.accept(make_sequence("b"))
    response = await take(session)
    assert response.accepted
    assert not response.HasField("step")
    # When the reader acknowledges
    session.acknowledge(1)
    response = await take(session)
    assert list(response.step.token_ids) == [11, 12, 13, 14]
    assert list(response.step.offsets) == [1, 2, 3, 4]


def attach(session: Session, request_id: str, num_tokens: int) -> None:
    attached = executor_pb2.SequenceAttached(request_id=request_id, attempt=1)
    session.attach(make_sequence(request_id), attached, 0, list(range(num_tokens)))


async def test_router_that_attaches_again_and_again_waits_for_its_tokens_to_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_WAITING_TOKENS", 5)
    session = Session("router", 1, 2)
    attach(session, "a", 5)
    waiting = asyncio.create_task(session.has_room())
    await asyncio.sleep(0)
    assert not waiting.done()

    await take(session)

    await asyncio.wait_for(waiting, 60)


async def test_router_that_attaches_again_and_again_and_acknowledges_nothing_loses_its_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_WAITING_TOKENS", 5)
    session = Session("router", 1, 1)
    attach(session, "a", 3)
    await take(session)
    attach(session, "b", 4)
    await asyncio.wait_for(session.has_room(), 60)
    attach(session, "c", 3)

    with pytest.raises(RequestError, match="1 unacknowledged frames") as refused:
        await asyncio.wait_for(session.has_room(), 60)

    assert refused.value.reason is Reason.STALLED


async def test_slot_is_reused_only_after_the_frame_with_its_end_has_left() -> None:
    session = Session("router", 1, 64)
    first, second, third = make_sequence("a"), make_sequence("b"), make_sequence("c")
    session.accept(first)
    session.finish(FinishEvent(first, FinishReason.LENGTH))
    session.accept(second)
    response = await take(session)
    assert [list(accepted.slots) for accepted in response.accepted] == [[0], [1]]
    assert response.step.finished[0].slot == 0
    session.accept(third)
    assert list((await take(session)).accepted[0].slots) == [0]


async def test_newer_report_replaces_one_not_sent_yet() -> None:
    session = Session("router", 1, 64)
    session.report(executor_pb2.Report(seq=1))
    session.report(executor_pb2.Report(seq=2))
    assert (await take(session)).report.seq == 2
    assert is_waiting(session)


async def test_seat_given_up_is_told_and_one_taken_back_in_the_same_frame_is_not() -> None:
    session = Session("router", 1, 64)
    first, second, third = make_sequence("a"), make_sequence("b"), make_sequence("c")
    for sequence in (first, second, third):
        session.accept(sequence)
        session.preempt(sequence)
    session.start(second)
    session.finish(FinishEvent(third, FinishReason.PREEMPTED))

    step = (await take(session)).step

    assert list(step.paused) == [0]
    assert [started.slot for started in step.started] == [1]
    assert [(end.slot, end.reason) for end in step.finished] == [(2, types_pb2.FINISH_REASON_PREEMPTED)]
    session.start(first)
    assert list((await take(session)).step.paused) == []


async def test_attached_slot_gets_the_tokens_asked_for_and_goes_on_from_there() -> None:
    session = Session("router", 1, 64)
    sequence = make_sequence("a")
    session.attach(sequence, executor_pb2.SequenceAttached(request_id="a", attempt=1), 2, [12, 13])
    session.token(sequence, 4, 14)
    session.finish(FinishEvent(sequence, FinishReason.LENGTH))

    response = await take(session)

    assert list(response.attached[0].slots) == [0]
    assert list(response.step.offsets) == [2, 3, 4]
    assert list(response.step.token_ids) == [12, 13, 14]
    assert response.step.finished[0].slot == 0


async def test_detached_slot_is_free_behind_the_frame_that_says_so() -> None:
    session = Session("router", 1, 64)
    sequence = make_sequence("a")
    session.accept(sequence)
    session.preempt(sequence)
    await take(session)
    session.token(sequence, 0, 10)
    session.detach(sequence)
    session.accept(make_sequence("b"))
    response = await take(session)
    assert list(response.accepted[0].slots) == [1]
    assert list(response.step.token_ids) == [10]
    assert list(response.step.detached) == [0]
    assert not response.step.paused
    session.accept(make_sequence("c"))
    assert list((await take(session)).accepted[0].slots) == [0]


async def test_router_of_the_first_version_hears_nothing_of_attaching() -> None:
    session = Session("router", 1, 64, protocol_version=1)
    sequence = make_sequence("a")
    session.accept(sequence)
    session.detach(sequence)
    step = (await take(session)).step
    assert not step.detached
    assert step.finished[0].reason == types_pb2.FINISH_REASON_CANCELLED


async def test_more_tokens_than_a_message_holds_leave_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.executor.serving.router_session.MAX_FRAME_TOKENS", 4)
    session = Session("router", 1, 64)
    sequence = make_sequence("a")
    session.accept(sequence)
    session.start(sequence)
    for offset in range(10):
        session.token(sequence, offset, offset)
    session.finish(FinishEvent(sequence, FinishReason.LENGTH))
    session.end_step(10)

    steps = [(await take(session)).step for _ in range(3)]

    assert [step.frame for step in steps] == [1, 2, 3]
    assert [step.step for step in steps] == [10, 10, 10]
    assert [len(step.started) for step in steps] == [1, 0, 0]
    assert [list(step.offsets) for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(step.finished) for step in steps] == [0, 0, 1]
    assert is_waiting(session)


async def test_scores_of_prompts_leave_before_the_tokens_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.executor.serving.router_session.MAX_FRAME_PROMPT_LOGPROBS", 128)
    session = Session("router", 1, 64)
    sequence = make_sequence("a")
    sequence.token_ids = [i % 7 for i in range(300)]
    sequence.prompt_logprobs = [TokenLogprobs(-0.5, (3,), (-0.5,), 1)] * 299
    session.accept(sequence)
    session.score(sequence, 0, 299)
    session.token(sequence, 0, 5)
    session.finish(FinishEvent(sequence, FinishReason.LENGTH))

    steps = [(await take(session)).step for _ in range(3)]

    assert [sum(len(one.values) for one in step.prompt_logprobs) for step in steps] == [128, 128, 43]
    assert [one.position for step in steps for one in step.prompt_logprobs] == [1, 65, 129, 193, 257]
    ids = [values.chosen.token_id for step in steps for one in step.prompt_logprobs for values in one.values]
    assert ids == sequence.token_ids[1:]
    assert [list(step.token_ids) for step in steps] == [[], [], [5]]
    assert [len(step.finished) for step in steps] == [0, 0, 1]
    assert is_waiting(session)


async def test_scores_of_prompts_count_among_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_WAITING_TOKENS", 100)
    session = Session("router", 1, 64)
    sequence = make_sequence("a")
    sequence.token_ids, sequence.prompt_logprobs = [1] * 6, [TokenLogprobs(-0.5, (), (), 1)] * 5
    session.accept(sequence)
    session.score(sequence, 0, 5)
    waiting = asyncio.create_task(session.has_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    await take(session)
    await asyncio.wait_for(waiting, 60)


async def test_closed_session_ends_behind_what_is_still_to_be_sent() -> None:
    session = Session("router", 1, 1)
    sequence = make_sequence("a")
    session.accept(sequence)
    session.token(sequence, 0, 10)
    await take(session)
    session.finish(FinishEvent(sequence, FinishReason.PREEMPTED))
    session.close()
    # The end waits for the router's acknowledgement like any frame.
    assert is_waiting(session)
    session.acknowledge(1)
    assert (await take(session)).step.finished
    assert await session.next_response() is None
