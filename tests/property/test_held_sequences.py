"""The engine's list of held sequences under any order of commands: what was published as accepted and not as ended."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.executor.engine.engine import MAX_COMMANDS, Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.engine.runner import PendingStep
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler, SchedulerLimits
from inflight.executor.scheduler.sequence import FinishReason, Sequence, StepPlan
from tests.property.scheduler_model import limits_strategy, sequence_strategy
from tests.support.device.fake_device import FakeDevice
from tests.support.examples import examples
from tests.support.scheduler.scheduling import BLOCK_SIZE, LIMITS, make_sequence


class Listener:
    """An engine that is turned by hand, and what it has published. Every `failing`-th launch fails."""

    def __init__(self, limits: SchedulerLimits, num_blocks: int, failing: int = 0) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(limits, self.pool)
        self.device = FakeDevice(self.pool)
        self.engine = Engine(self.scheduler, self, self._publish, lambda error: None, clock=lambda: 0.0)
        self.held: dict[Sequence, None] = {}
        self.num_answered = 0
        self._num_launched = 0
        self._failing = failing

    def launch(self, plan: StepPlan) -> PendingStep:
        self._num_launched += 1
        if self._failing and self._num_launched % self._failing == 0:
            self.device.corrupt(plan)
            raise RuntimeError("lost")
        return self.device.launch(plan)

    def close(self) -> None:
        """See `StepRunner`."""

    def _publish(self, output: EngineOutput) -> None:
        self.held.update(dict.fromkeys(output.accepted))
        self.num_answered += len(output.accepted) + len(output.rejected)
        for event in output.finished:
            del self.held[event.sequence]
        if output.status is not None:
            phase = self.scheduler.seating.waiting_phase
            expected = [(s.request_id, s.attempt, s.num_reserved_blocks, phase(s)) for s in self.held]
            held = [(one.request_id, one.attempt, one.reserved_blocks, one.phase) for one in output.status.held]
            assert held == expected


@settings(max_examples=examples(60), deadline=None)
@given(limits=limits_strategy(), failing=st.sampled_from((0, 0, 7)), choice=st.data())
def test_held_sequences_are_those_accepted_and_not_ended_with_their_phase(
    limits: SchedulerLimits, failing: int, choice: st.DataObject
) -> None:
    listener = Listener(limits, 24, failing)
    offered: list[Sequence] = []
    for number in range(choice.draw(st.integers(1, 30))):
        match choice.draw(st.sampled_from(("submit", "submit", "again", "cancel", "prepare", "turn", "turn"))):
            case "submit":
                request = sequence_strategy(BLOCK_SIZE, f"r{number}", 1, limits.is_overcommitted, may_be_unready=True)
                offered.append(choice.draw(request))
                listener.engine.submit(offered[-1])
            case "again" if offered:
                older = choice.draw(st.sampled_from(offered))
                newer = sequence_strategy(BLOCK_SIZE, older.request_id, older.attempt + 1, limits.is_overcommitted)
                offered.append(choice.draw(newer))
                listener.engine.submit(offered[-1])
            case "cancel" if offered:
                sequence = choice.draw(st.sampled_from(offered))
                listener.engine.cancel(sequence.request_id, sequence.attempt, FinishReason.CANCELLED)
            case "prepare":
                _prepare(listener, offered, choice.draw(st.sampled_from(("", "lost"))))
            case "turn" if listener.scheduler.can_run:
                listener.engine.step()
    _prepare(listener, offered, "")
    listener.engine.drain()
    listener.engine.step()
    while not listener.scheduler.is_idle or listener.num_answered < len(offered):
        listener.engine.step()
    assert not listener.held


def _prepare(listener: Listener, offered: list[Sequence], error: str) -> None:
    for sequence in offered:
        if not sequence.is_ready:
            assert sequence.constraint is not None
            sequence.constraint.compiled = None if error else object()
            listener.engine.mark_prepared(sequence, error)


def test_burst_of_commands_is_executed_over_several_turns_while_a_sequence_decodes() -> None:
    # Given a sequence that decodes, and more submits than a turn takes.
    listener = Listener(LIMITS, 32)
    running = make_sequence("running", [1], max_tokens=40)
    listener.engine.submit(running)
    listener.engine.step()
    listener.engine.step()
    for i in range(2 * MAX_COMMANDS + 1):
        listener.engine.submit(make_sequence(f"r{i}", [i]))

    # When the loop turns three times, then each turn answers at most so many, and the sequence gets a token.
    for num_answered in (MAX_COMMANDS, 2 * MAX_COMMANDS, 2 * MAX_COMMANDS + 1):
        num_tokens = running.num_output_tokens
        listener.engine.step()
        assert listener.num_answered == num_answered + 1
        assert running.num_output_tokens == num_tokens + 1
