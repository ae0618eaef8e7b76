"""The placement table: routers that leave, sequences that are handed back, and late answers of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from inflight.executor.engine.output import EngineOutput, ReportedSequence
from inflight.executor.scheduler.admission import Refusal
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason, NewTokens, Sequence
from inflight.executor.serving.placements import PlacementTable, RetentionPolicy
from inflight.executor.serving.router_session import Session
from inflight.v1 import executor_pb2, types_pb2
from tests.support.scheduler.scheduling import make_sequence


@dataclass(slots=True)
class World:
    """A placement table with a clock that stands still, and the commands that it gave to the engine."""

    now_s: float = 0.0
    cancels: list[tuple[str, int, FinishReason]] = field(default_factory=list)
    placements: PlacementTable = field(init=False)

    def __post_init__(self) -> None:
        retention = RetentionPolicy(orphan_grace_s=15, retain_ended_s=60)
        self.placements = PlacementTable(retention, lambda *cancel: self.cancels.append(cancel), lambda: self.now_s)

    def offer(self, session: Session, request_id: str, attempt: int = 1) -> Sequence:
        """A placement that the engine has not answered."""
        sequence = make_sequence(request_id, [1, 2])
        sequence.attempt = attempt
        submit = executor_pb2.Submit(request_id=request_id, attempt=attempt, prompt_ids=[1, 2])
        assert self.placements.offer(sequence, submit, session)
        return sequence

    def accept(self, sequence: Sequence) -> None:
        """The engine takes it."""
        self.placements.publish(EngineOutput(0, accepted=[sequence]))

    def place(self, session: Session, request_id: str, attempt: int = 1) -> Sequence:
        """A placement that the engine has taken and seated."""
        sequence = self.offer(session, request_id, attempt)
        self.accept(sequence)
        self.placements.publish(EngineOutput(0, boarded=(sequence,)))
        return sequence

    def step(self, *sequences: Sequence) -> None:
        """Each yields a token."""
        tokens = NewTokens()
        for sequence in sequences:
            tokens.sequences.append(sequence)
            tokens.offsets.append(sequence.num_output_tokens)
            tokens.token_ids.append(7)
            sequence.token_ids.append(7)
        self.placements.publish(EngineOutput(1, tokens=tokens))

    def end(self, sequence: Sequence, reason: FinishReason = FinishReason.LENGTH) -> None:
        """The engine ends it."""
        self.placements.publish(EngineOutput(2, finished=[FinishEvent(sequence, reason)]))


@pytest.fixture
def world() -> World:
    return World()


def router() -> Session:
    return Session("router", 1, 64)


def take(session: Session) -> executor_pb2.ServeResponse:
    """What the session has to say."""
    return session.take() or executor_pb2.ServeResponse()


def test_orphans_collect_nothing_and_are_cancelled_each_at_its_time(world: World) -> None:
    first, second = router(), router()
    a, b = world.place(first, "a"), world.place(second, "b")
    take(first), take(second)
    world.placements.leave(first)
    world.now_s = 10
    world.placements.leave(second)
    world.step(a, b)
    assert take(first) == take(second) == executor_pb2.ServeResponse()
    assert world.placements.num_orphans == 2

    assert world.placements.expire() == 15
    world.now_s = 15
    assert world.placements.expire() == 25
    assert world.cancels == [("a", 1, FinishReason.CANCELLED)]
    world.now_s = 25
    assert world.placements.expire() is None
    assert world.cancels[1:] == [("b", 1, FinishReason.CANCELLED)]


def test_orphan_that_is_read_again_is_none(world: World) -> None:
    sequence = world.place(router_left := router(), "a")
    world.step(sequence)
    world.placements.leave(router_left)
    reader = router()
    world.placements.attach(executor_pb2.Attach(request_id="a", attempt=1, offset=0), reader)
    world.now_s = 100
    world.placements.expire()
    world.step(sequence)
    assert not world.cancels
    assert list(take(reader).step.offsets) == [0, 1]


def test_paused_sequence_is_paused_for_who_attaches(world: World) -> None:
    sequence = world.place(router(), "a")
    world.placements.publish(EngineOutput(1, preempted=(sequence,)))
    reader = router()
    world.placements.attach(executor_pb2.Attach(request_id="a", attempt=1, offset=0), reader)
    response = take(reader)
    assert response.attached[0].started
    assert list(response.step.paused) == list(response.attached[0].slots)


def test_refusal_reaches_also_who_wanted_to_attach(world: World) -> None:
    first, second, gone = router(), router(), router()
    sequence = world.offer(first, "a")
    for session in (second, gone):
        world.placements.attach(executor_pb2.Attach(request_id="a", attempt=1, offset=0), session)
    world.placements.leave(gone)
    world.placements.publish(EngineOutput(0, rejected=[(sequence, Refusal.NO_CAPACITY)]))
    assert [one.reason for one in take(first).rejected] == [executor_pb2.REJECT_REASON_NO_CAPACITY]
    assert [one.reason for one in take(second).rejected] == [executor_pb2.REJECT_REASON_NOT_HELD]
    assert take(gone) == executor_pb2.ServeResponse()
    assert world.placements.num_held == 0


def test_who_asked_last_reads_and_each_attach_is_answered(world: World) -> None:
    first, second = router(), router()
    sequence = world.offer(router(), "a")
    attach = executor_pb2.Attach(request_id="a", attempt=1)
    for session in (first, second, first):
        world.placements.attach(attach, session)

    world.accept(sequence)

    first_response, second_response = take(first), take(second)
    assert (len(first_response.attached), len(first_response.step.detached)) == (2, 1)
    assert len(second_response.attached) == len(second_response.step.detached) == 1
    world.step(sequence)
    assert list(take(first).step.token_ids) == [7]


def test_router_that_leaves_before_the_engine_answers_leaves_an_orphan(world: World) -> None:
    first, second = router(), router()
    sequence = world.offer(first, "a")
    world.placements.attach(executor_pb2.Attach(request_id="a", attempt=1, offset=0), second)
    world.placements.leave(first)
    world.accept(sequence)
    assert world.placements.num_orphans == 0
    assert take(second).attached
    assert take(first) == executor_pb2.ServeResponse()


def test_what_is_handed_back_has_ended_and_later_output_is_dropped(world: World) -> None:
    # Given one that runs, one that waits, one without a reader and one without an answer
    reader, gone = router(), router()
    running, orphan = world.place(reader, "running"), world.place(gone, "orphan")
    waiting = world.offer(reader, "waiting")
    world.accept(waiting)
    offered = world.offer(reader, "offered")
    world.placements.leave(gone)
    world.step(running, orphan)
    take(reader)

    # When all are handed back
    assert world.placements.hand_back("the engine made no step") == 4

    # Then their routers hear so at once, and why of those that may be to blame
    response = take(reader)
    ends = [(end.slot, end.reason, end.error) for end in response.step.finished]
    preempted = types_pb2.FINISH_REASON_PREEMPTED
    assert ends == [(0, preempted, "the engine made no step"), (1, preempted, "")]
    assert [(one.request_id, one.reason) for one in response.rejected] == [
        ("offered", executor_pb2.REJECT_REASON_DRAINING)
    ]
    assert world.placements.num_held == 0
    assert {cancel[0] for cancel in world.cancels} == {"running", "waiting", "orphan", "offered"}

    # And the engine, once it moves again, has no listener, and keeps its work until it reports the end
    held = [ReportedSequence(s.request_id, s.attempt, s.num_reserved_blocks) for s in (running, waiting, orphan)]
    assert world.placements.reported(held) == []
    assert world.placements.num_times_idle == 0
    world.step(running, orphan)
    world.accept(offered)
    for sequence in (running, waiting, orphan, offered):
        world.end(sequence, FinishReason.PREEMPTED)
    assert take(reader) == executor_pb2.ServeResponse()
    assert world.placements.num_times_idle == 1
    assert not world.placements.has_work

    # While who comes for the orphan gets what it had
    other = router()
    world.placements.attach(executor_pb2.Attach(request_id="orphan", attempt=1, offset=0), other)
    response = take(other)
    assert list(response.step.token_ids) == [7]
    assert response.step.finished[0].reason == preempted


def test_next_attempt_of_what_was_handed_back_is_another_placement(world: World) -> None:
    reader = router()
    before = world.place(reader, "a")
    world.placements.hand_back()
    after = world.place(reader, "a", attempt=2)
    world.end(before, FinishReason.PREEMPTED)
    take(reader)
    world.step(after)
    assert list(take(reader).step.token_ids) == [7]
    assert world.placements.num_held == 1


def test_superseded_attempt_is_not_remembered(world: World) -> None:
    first, second = router(), router()
    older = world.place(first, "a")
    world.placements.leave(first)
    newer = world.place(second, "a", attempt=2)
    world.end(older, FinishReason.CANCELLED)
    assert len(world.placements.ended) == 0
    world.end(newer)
    assert len(world.placements.ended) == 1
    late = router()
    world.placements.attach(executor_pb2.Attach(request_id="a", attempt=1, offset=0), late)
    assert take(late).rejected[0].reason == executor_pb2.REJECT_REASON_NOT_HELD


def test_newer_attempt_makes_void_what_was_remembered(world: World) -> None:
    reader = router()
    world.end(world.place(reader, "a"))
    world.place(reader, "a", attempt=2)
    assert len(world.placements.ended) == 0


def test_report_counts_what_the_engine_has_not_answered(world: World) -> None:
    reader = router()
    world.place(reader, "a")
    world.offer(reader, "b")
    held = [ReportedSequence("a", 1, 8)]
    assert [(one.request_id, one.attempt) for one in world.placements.reported(held)] == [("a", 1), ("b", 1)]


def test_idleness_is_counted(world: World) -> None:
    reader = router()
    a, b = world.place(reader, "a"), world.place(reader, "b")
    world.end(a)
    assert world.placements.num_times_idle == 0
    world.end(b)
    assert world.placements.num_times_idle == 1
    assert not world.placements.has_work


def test_orphan_goes_on_up_to_the_last_moment_of_its_grace(world: World) -> None:
    world.place(left := router(), "a")
    world.now_s = 100.0
    world.placements.leave(left)
    world.now_s = 114.999
    assert world.placements.expire() == 115
    assert not world.cancels
    world.now_s = 115.0
    world.placements.expire()
    assert world.cancels == [("a", 1, FinishReason.CANCELLED)]


def test_ended_sequence_is_kept_for_its_minute_and_no_longer(world: World) -> None:
    world.end(world.place(router(), "a"))
    world.now_s = 59.999
    assert world.placements.expire() == 60
    world.placements.attach(executor_pb2.Attach(request_id="a", attempt=1), in_time := router())
    assert take(in_time).attached
    world.now_s = 60.0
    assert world.placements.expire() is None
    world.placements.attach(executor_pb2.Attach(request_id="a", attempt=1), late := router())
    assert [one.reason for one in take(late).rejected] == [executor_pb2.REJECT_REASON_NOT_HELD]
