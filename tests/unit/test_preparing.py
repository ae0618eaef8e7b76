"""Sequences whose grammar is still being compiled: accepted, without a seat, and holding up no other."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Batching
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.seat_view import SequencePhase
from inflight.executor.scheduler.sequence import Constraint, FinishEvent, FinishReason, Sequence
from tests.support.device.fake_device import FakeDevice, solo_output
from tests.support.scheduler.scheduling import BLOCK_SIZE, LIMITS, make_scheduler, make_sequence, retire, step

TIMEOUT_S = 60


def make_unready(request_id: str, prompt: list[int], max_tokens: int = 4) -> Sequence:
    sequence = make_sequence(request_id, prompt, max_tokens=max_tokens)
    sequence.constraint = Constraint("{}", b"hash", frozenset())
    return sequence


def compile_for(sequence: Sequence) -> Sequence:
    """The fake device ignores grammars."""
    assert sequence.constraint is not None
    sequence.constraint.compiled = object()
    return sequence


def test_others_board_past_a_sequence_that_is_not_ready() -> None:
    scheduler = make_scheduler()
    first, second, third = make_unready("a", [1]), make_sequence("b", [2]), make_sequence("c", [3])
    for sequence in (first, second, third):
        assert scheduler.offer(sequence) is None

    plan = scheduler.schedule()
    assert plan.sequences == [second, third]
    assert first.seat is None
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    snapshots = {one.request_id: one for one in scheduler.seating.snapshot()}
    assert (snapshots["a"].phase, snapshots["a"].seat) == (SequencePhase.PREPARING, None)
    retire(scheduler, plan)


def test_sequence_boards_at_its_place_in_the_line_once_it_is_ready() -> None:
    scheduler = make_scheduler()
    running = [make_sequence(f"r{i}", [1], max_tokens=2) for i in range(2)]
    early, late = make_unready("early", [1]), make_sequence("late", [2])
    for sequence in (*running, early, late):
        assert scheduler.offer(sequence) is None
    step(scheduler)
    assert scheduler.mark_prepared(compile_for(early)) is None

    finished = step(scheduler).finished
    assert len(finished) == 2
    assert scheduler.schedule().boarded == (early, late)


def test_only_unready_sequences_make_no_plan_and_nothing_to_do() -> None:
    scheduler = make_scheduler(replace(LIMITS, batching=Batching.STATIC))
    sequence = make_unready("a", [1])
    scheduler.offer(sequence)
    assert not scheduler.schedule().sequences
    assert (scheduler.can_run, scheduler.is_idle) == (False, False)
    assert list(scheduler.held()) == [sequence]
    scheduler.mark_prepared(compile_for(sequence))
    assert scheduler.can_run
    assert scheduler.schedule().boarded == (sequence,)


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.PREEMPTED])
def test_end_while_the_grammar_is_compiled_frees_the_reservation(reason: FinishReason) -> None:
    scheduler = make_scheduler(num_blocks=2)
    sequence = make_unready("a", [1])
    assert scheduler.offer(sequence) is None
    assert scheduler.offer(make_sequence("b", [1])) is not None, "its blocks are reserved"

    assert scheduler.cancel("a", 1, reason) == FinishEvent(sequence, reason)
    assert scheduler.is_idle
    assert scheduler.mark_prepared(compile_for(sequence)) is None
    assert scheduler.mark_prepared(sequence, "too late") is None
    assert scheduler.is_idle
    assert scheduler.offer(make_sequence("c", [1])) is None


def test_grammar_that_fails_ends_its_sequence_only() -> None:
    scheduler = make_scheduler()
    broken, other = make_unready("a", [1]), make_unready("b", [2])
    scheduler.offer(broken)
    scheduler.offer(other)
    assert scheduler.mark_prepared(broken, "no") == FinishEvent(broken, FinishReason.ERROR, error="no")
    assert list(scheduler.held()) == [other]


def test_newer_attempt_replaces_one_that_is_not_ready() -> None:
    scheduler = make_scheduler()
    older, newer = make_unready("a", [1]), make_sequence("a", [1], attempt=2)
    scheduler.offer(older)
    assert scheduler.offer(newer) is None
    assert [event.sequence for event in scheduler.take_finished()] == [older]
    assert scheduler.mark_prepared(compile_for(older)) is None
    assert scheduler.schedule().boarded == (newer,)


@dataclass(slots=True)
class Loop:
    engine: Engine
    scheduler: Scheduler
    outputs: queue.SimpleQueue[EngineOutput]
    deaths: list[BaseException] = field(default_factory=list)

    def ends(self, num: int) -> dict[str, tuple[list[int], FinishReason]]:
        """Output and reason of so many ends."""
        ends: dict[str, tuple[list[int], FinishReason]] = {}
        while len(ends) < num:
            for event in self.outputs.get(timeout=TIMEOUT_S).finished:
                token_ids = event.sequence.token_ids[event.sequence.num_prompt_tokens :]
                ends[event.sequence.request_id] = token_ids, event.reason
        return ends

    def until_accepted(self, request_id: str) -> None:
        """Waits for the acceptance."""
        while request_id not in [one.request_id for one in self.outputs.get(timeout=TIMEOUT_S).accepted]:
            pass


@pytest.fixture(params=[True, False], ids=["overlap", "in-turn"])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = Scheduler(LIMITS, pool)
    outputs: queue.SimpleQueue[EngineOutput] = queue.SimpleQueue()
    deaths: list[BaseException] = []
    engine = Engine(scheduler, FakeDevice(pool), outputs.put, deaths.append, overlap=request.param)
    engine.start()
    yield Loop(engine, scheduler, outputs, deaths)
    assert engine.stop(TIMEOUT_S)
    assert deaths == []


def test_idle_engine_wakes_for_a_compiled_grammar(loop: Loop) -> None:
    sequence = make_unready("a", [1, 2], max_tokens=5)
    expected = solo_output(make_sequence("a", [1, 2], max_tokens=5), LIMITS.context_length)
    loop.engine.submit(sequence)
    loop.until_accepted("a")
    assert loop.engine.num_steps == 0

    loop.engine.mark_prepared(compile_for(sequence))
    assert loop.ends(1) == {"a": expected}


def test_waiting_engine_makes_no_turns(loop: Loop) -> None:
    loop.engine.submit(make_unready("a", [1]))
    loop.until_accepted("a")
    loop.engine.submit(make_sequence("b", [1], max_tokens=3))
    loop.ends(1)
    num_steps = loop.engine.num_steps
    # The answers to two commands, one after the other, with nothing in between.
    for _ in range(2):
        loop.engine.list_sequences()
        output = loop.outputs.get(timeout=TIMEOUT_S)
        assert [one.request_id for one in output.sequences or ()] == ["a"]
        assert output.status is None
    assert loop.engine.num_steps == num_steps
    assert loop.outputs.empty()


def test_deadline_and_cancel_end_a_sequence_that_only_waits(loop: Loop) -> None:
    loop.engine.submit(make_unready("late", [1]), time_left_ms=20)
    loop.engine.submit(make_unready("cancelled", [1]))
    loop.engine.cancel("cancelled", 1)
    assert loop.ends(2) == {"late": ([], FinishReason.DEADLINE), "cancelled": ([], FinishReason.CANCELLED)}


def test_failed_grammar_ends_with_an_error(loop: Loop) -> None:
    sequence = make_unready("a", [1])
    loop.engine.submit(sequence)
    loop.engine.mark_prepared(sequence, "no such rule")
    assert loop.ends(1) == {"a": ([], FinishReason.ERROR)}
