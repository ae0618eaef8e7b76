"""The bound on freeing blocks: two steps of the engine after a sequence is ended, in every queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Overcommit, SchedulerLimits
from inflight.executor.scheduler.scheduler import Scheduler, SchedulerPolicy
from inflight.executor.scheduler.sequence import FinishReason, Sequence
from inflight.executor.serving.placements import PlacementTable, RetentionPolicy
from inflight.executor.serving.router_session import Session
from inflight.v1 import executor_pb2
from tests.support.device.fake_device import FakeDevice
from tests.support.scheduler.scheduling import BLOCK_SIZE, LIMITS, make_sequence

MAX_STEPS = 2
"""As docs/design/time-bounds.md has it."""
OVERCOMMITTED = replace(
    LIMITS, policy=SchedulerPolicy.MAX_UTILIZATION, num_host_blocks=8, overcommit=Overcommit(watermark=0.0, margin=0.1)
)


class Turns:
    """An executor that is driven turn by turn, and that one router is linked with."""

    def __init__(self, limits: SchedulerLimits, num_blocks: int, *, overlap: bool) -> None:
        self.now_s = 0.0
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(limits, self.pool)
        self.ends: list[tuple[str, FinishReason]] = []
        device = FakeDevice(self.pool)
        self.engine = Engine(
            self.scheduler, device, self._publish, lambda error: None, overlap=overlap, clock=lambda: self.now_s
        )
        retention = RetentionPolicy(orphan_grace_s=0)
        self.placements = PlacementTable(retention, self.engine.cancel, lambda: self.now_s)
        self.router = Session("router", 1, 64)

    def submit(self, sequence: Sequence, session: Session | None = None) -> Sequence:
        """A placement, by the router unless by another."""
        submit = executor_pb2.Submit(request_id=sequence.request_id, attempt=sequence.attempt)
        assert self.placements.offer(sequence, submit, session or self.router)
        self.engine.submit(sequence)
        return sequence

    def run(self, is_enough: Callable[[], bool]) -> None:
        """Turns until then."""
        for _ in range(100):
            if is_enough():
                return
            self.engine.step()
        raise AssertionError("it never comes to that")

    def steps_until_free(self, sequence: Sequence) -> int:
        """Steps until the sequence has ended and holds nothing."""
        before = self.engine.num_steps
        for _ in range(20):
            self.engine.step()
            self.scheduler.check()
            ended = sequence.request_id in [request_id for request_id, _ in self.ends]
            if ended and not sequence.block_table and sequence.host_copy is None:
                return self.engine.num_steps - before
        raise AssertionError(f"{sequence.request_id} still holds {sequence.block_table}")

    def _publish(self, output: EngineOutput) -> None:
        self.placements.publish(output)
        self.ends += [(event.sequence.request_id, event.reason) for event in output.finished]


def waits(turns: Turns) -> Sequence:
    """Stands by, two others have the seats."""
    for name in ("a", "b"):
        turns.submit(make_sequence(name, [1], max_tokens=40), Session("other", 1, 64))
    sequence = turns.submit(make_sequence("r", [1], max_tokens=40))
    turns.run(lambda: turns.engine.num_steps >= 2)
    assert turns.scheduler.num_waiting == 1
    return sequence


def is_prefilled(turns: Turns) -> Sequence:
    """Its prompt takes many steps, and the first are behind it."""
    sequence = turns.submit(make_sequence("r", range(50), max_tokens=10))
    turns.run(lambda: turns.engine.num_steps >= 2)
    assert 0 < sequence.num_computed < 50
    return sequence


def decodes(turns: Turns) -> Sequence:
    """Has brought tokens, beside another."""
    turns.submit(make_sequence("a", [1], max_tokens=40), Session("other", 1, 64))
    sequence = turns.submit(make_sequence("r", [1, 2], max_tokens=40))
    turns.run(lambda: sequence.num_output_tokens >= 3)
    return sequence


def is_in_its_last_step(turns: Turns) -> Sequence:
    """With overlap its last token is on its way and its seat another's."""
    sequence = turns.submit(make_sequence("r", [1, 2], max_tokens=4))
    turns.submit(make_sequence("a", [1], max_tokens=40), Session("other", 1, 64))
    turns.run(lambda: sequence.num_tokens >= 6)
    return sequence


def is_swapped(turns: Turns) -> Sequence:
    """Gave up its seat because blocks ran out; its KV is in host memory."""
    other = turns.submit(make_sequence("a", [1, 2], max_tokens=30, salt=None), Session("other", 1, 64))
    sequence = turns.submit(make_sequence("r", [3, 4], max_tokens=30, salt=None))
    other.num_reserved_blocks = sequence.num_reserved_blocks = 1
    turns.run(lambda: turns.scheduler.num_preempted > 0)
    return next(one for one in (sequence, other) if one.host_copy is not None)


PLACES = [waits, is_prefilled, decodes, is_in_its_last_step]


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in-turn"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.PREEMPTED])
def test_blocks_of_a_cancelled_sequence_are_free_within_two_steps(
    place: Callable[[Turns], Sequence], overlap: bool, reason: FinishReason
) -> None:
    turns = Turns(LIMITS, 64, overlap=overlap)
    sequence = place(turns)
    turns.engine.cancel("r", 1, reason)
    assert turns.steps_until_free(sequence) <= MAX_STEPS


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in-turn"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_blocks_of_a_router_that_disconnects_are_free_within_two_steps(
    place: Callable[[Turns], Sequence], overlap: bool
) -> None:
    turns = Turns(LIMITS, 64, overlap=overlap)
    sequence = place(turns)
    assert turns.placements.leave(turns.router) == (not turns.ends)
    assert turns.steps_until_free(sequence) <= MAX_STEPS


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in-turn"])
def test_host_and_device_blocks_of_a_preempted_sequence_are_free_within_two_steps(overlap: bool) -> None:
    turns = Turns(OVERCOMMITTED, 8, overlap=overlap)
    sequence = is_swapped(turns)
    turns.engine.cancel(sequence.request_id, 1)
    assert turns.steps_until_free(sequence) <= MAX_STEPS
    assert turns.scheduler.num_used_host_blocks == 0


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in-turn"])
def test_blocks_of_a_sequence_that_ends_by_itself_are_free_within_two_steps(overlap: bool) -> None:
    turns = Turns(LIMITS, 64, overlap=overlap)
    sequence = turns.submit(make_sequence("r", [1, 2], max_tokens=4))
    turns.submit(make_sequence("a", [1], max_tokens=40))
    turns.run(lambda: bool(turns.ends))
    before = turns.engine.num_steps
    turns.run(lambda: not sequence.block_table)
    assert turns.engine.num_steps - before <= MAX_STEPS


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "in-turn"])
def test_sequence_ends_within_two_steps_of_its_deadline_and_not_before(overlap: bool) -> None:
    turns = Turns(LIMITS, 64, overlap=overlap)
    running, waiting = make_sequence("runs", [1], max_tokens=50), make_sequence("waits", [1], max_tokens=50)
    for sequence, time_left_ms in ((running, 1000), (make_sequence("a", [1], max_tokens=50), None), (waiting, 1000)):
        turns.placements.offer(sequence, executor_pb2.Submit(request_id=sequence.request_id, attempt=1), turns.router)
        turns.engine.submit(sequence, time_left_ms)
    turns.run(lambda: running.num_output_tokens >= 3)
    turns.now_s = 0.999
    for _ in range(3):
        turns.engine.step()
    assert turns.ends == []
    turns.now_s = 1.0
    assert turns.steps_until_free(running) <= MAX_STEPS
    assert sorted(turns.ends) == [("runs", FinishReason.DEADLINE), ("waits", FinishReason.DEADLINE)]
