"""Deadlines of sequences in every queue."""

from __future__ import annotations

from inflight.executor.engine.deadlines import MAX_ENDED, DeadlineHeap
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import FinishReason
from tests.support.device.fake_device import FakeDevice
from tests.support.scheduler.scheduling import BLOCK_SIZE, LIMITS, make_sequence


class Turns:
    """An engine that is driven turn by turn, on a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        pool = BlockPool(64, BLOCK_SIZE)
        self.scheduler = Scheduler(LIMITS, pool)
        self.ends: list[tuple[str, FinishReason]] = []
        self.outputs: list[EngineOutput] = []
        self.engine = Engine(
            self.scheduler, FakeDevice(pool), self._publish, lambda error: None, clock=lambda: self.now_s
        )

    def turn(self, now_s: float) -> None:
        """A turn of the loop at this time."""
        self.now_s = now_s
        self.engine.step()

    def _publish(self, output: EngineOutput) -> None:
        self.outputs.append(output)
        self.ends += [(event.sequence.request_id, event.reason) for event in output.finished]


def test_running_and_waiting_sequences_end_at_their_deadline_and_others_go_on() -> None:
    # Given two seats, taken by two with and without a deadline, and one with a deadline in line
    turns = Turns()
    turns.engine.submit(make_sequence("runs", [1], max_tokens=40), 500)
    turns.engine.submit(make_sequence("lasts", [1], max_tokens=40))
    turns.engine.submit(make_sequence("waits", [1], max_tokens=40), 300)
    turns.turn(0.1)
    turns.turn(0.2)
    assert turns.ends == []

    turns.turn(0.3)
    assert turns.ends == [("waits", FinishReason.DEADLINE)]
    for _ in range(3):
        turns.turn(0.5)
    assert turns.ends[1:] == [("runs", FinishReason.DEADLINE)]
    assert [sequence.request_id for sequence in turns.scheduler.held()] == ["lasts"]


def test_sequence_that_is_dead_on_arrival_is_never_computed() -> None:
    turns = Turns()
    turns.engine.submit(make_sequence("late", [1]), 0)
    turns.turn(0.0)

    assert turns.ends == [("late", FinishReason.DEADLINE)]
    assert turns.scheduler.num_computed_tokens == 0


def test_deadline_of_who_has_ended_does_nothing() -> None:
    turns = Turns()
    turns.engine.submit(make_sequence("quick", [1], max_tokens=1), 1000)
    for _ in range(2):
        turns.turn(0.5)
    assert turns.ends == [("quick", FinishReason.LENGTH)]

    turns.engine.submit(make_sequence("quick", [1], attempt=2, max_tokens=9), 1000)
    turns.turn(1.2)
    assert len(turns.ends) == 1


def test_deadline_in_the_far_future_is_no_trouble() -> None:
    turns = Turns()
    turns.engine.submit(make_sequence("patient", [1], max_tokens=1), 2**64 - 1)
    for _ in range(2):
        turns.turn(0.5)

    assert turns.ends == [("patient", FinishReason.LENGTH)]


def test_names_of_who_has_ended_do_not_pile_up() -> None:
    deadlines = DeadlineHeap()
    held = [make_sequence(f"held {i}", [1]) for i in range(3)]
    for i, sequence in enumerate(held):
        sequence.deadline_ms = i
        deadlines.add(sequence, held)
    for i in range(10_000):
        ended = make_sequence(f"ended {i}", [1])
        ended.deadline_ms = 10**9
        deadlines.add(ended, held)

    assert len(deadlines) <= MAX_ENDED + 2 * len(held)
    assert list(deadlines.take_due(10)) == [("held 0", 1), ("held 1", 1), ("held 2", 1)]
