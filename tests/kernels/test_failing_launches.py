"""Steps that fail at any point of their launch, or when they are read, on the runner of the GPU.

A real engine drives a real `GpuRunner`, whose model computes nothing. After each launch the block tables on the device,
those on the host and the sampling parameters are compared with the sequences that have a seat.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.engine.runner import PendingStep
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Batching, SchedulerLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import (
    NO_PROCESSORS,
    FinishReason,
    Processors,
    Sampling,
    Sequence,
    StepPlan,
    Stopping,
)
from tests.support.scheduler.scheduling import make_limits

BLOCK_SIZE = 4
VOCABULARY_SIZE = 8
IN_FLIGHT = make_limits(max_num_sequences=3, num_standby_sequences=5, max_num_tokens=9, context_length=40)
MODES = {
    "chunked": IN_FLIGHT,
    "whole prompts": replace(IN_FLIGHT, enable_chunked_context=False),
    "static": replace(IN_FLIGHT, batching=Batching.STATIC),
}
# Where a step fails. The first fails before the plan was looked at, the last when its tokens are read.
POINTS = ("launch", "pack", "packed", "upload", "copy", "compute", "process", "read")
COMMON_PREFIX = [1, 2, 3, 4] * 5


class Lost(Exception):
    """What a step fails with here."""


class FaultyRunner:
    """A GPU runner without a model, whose next step fails at `point`."""

    def __init__(self, limits: SchedulerLimits) -> None:
        decoder = SimpleNamespace(
            device=torch.device("cpu"),
            dtype=torch.float32,
            hidden_size=1,
            vocabulary_size=VOCABULARY_SIZE,
            group=1,
            ranks=None,
            num_adapter_slots=0,
            recurrent_states=None,
        )
        self.runner = runner = GpuRunner(cast(Any, decoder), (), limits, BLOCK_SIZE)
        self.point: str | None = None
        self.num_launched = 0
        self._fail_before(runner._inputs._packer, "pack", "pack")
        self._fail_before(runner._inputs._columns, "select", "packed")
        self._fail_before(runner._buffers, "upload", "upload")
        self._fail_before(runner._buffers._ring, "copy_to", "copy")
        runner._step.compute = self._compute  # type: ignore[method-assign, assignment]
        runner._processing.draw = lambda *_: None  # type: ignore[method-assign]
        self._fail_before(runner._processing, "draw", "process")

    def launch(self, plan: StepPlan) -> PendingStep:
        self._fail_at("launch")
        step = self.runner.launch(plan)
        self.num_launched += 1
        if self.point == "read":
            self.point = None
            return cast(PendingStep, UnreadableStep(step))
        return step

    def close(self) -> None:
        """See `StepRunner`."""

    def _compute(self, *_: object) -> None:
        self._fail_at("compute")
        self.runner._buffers.sampled_ids.fill_(1)

    def _fail_before(self, owner: Any, method: str, point: str) -> None:
        original: Callable[..., Any] = getattr(owner, method)

        def failing(*arguments: Any) -> Any:
            self._fail_at(point)
            return original(*arguments)

        setattr(owner, method, failing)

    def _fail_at(self, point: str) -> None:
        if self.point == point:
            self.point = None
            raise Lost(point)


class UnreadableStep:
    """A step that was launched and whose tokens cannot be read."""

    def __init__(self, step: PendingStep) -> None:
        self.began_s, self.ended_s = step.began_s, step.ended_s
        self.allows_next = step.allows_next
        self._step = step

    def result(self) -> tuple[int, ...]:
        self._step.result()
        raise Lost("read")


class Ride:
    """An engine on the runner, turn by turn."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.runner = FaultyRunner(limits)
        self.scheduler = Scheduler(limits, BlockPool(60, BLOCK_SIZE))
        self.ends: Counter[str] = Counter()
        self.reasons: dict[str, FinishReason] = {}
        self.deaths: list[BaseException] = []
        self.engine = Engine(self.scheduler, self.runner, self._publish, self.deaths.append)

    def turn(self) -> None:
        """One turn of the loop, after which what the device knows is right."""
        self.engine.step()
        self.scheduler.check()
        self.check_device()

    def check_device(self) -> None:
        """Asserts that the rows of those on a seat are theirs. Who boarded is told to the device with a launch."""
        runner = self.runner.runner
        tables, packer, columns = runner._buffers._tables, runner._inputs._packer, runner._inputs._columns
        for sequence in (*self.scheduler._queues.decodes, *self.scheduler._queues.prefills):
            seat, table = sequence.seat, sequence.block_table
            assert seat is not None
            assert tables[seat, : len(table)].tolist() == table, f"device table of {sequence.request_id}"
            assert packer._tables[seat, : len(table)].tolist() == table, "table of the host"
            assert columns._numbers["seed"][seat] == sequence.sampling.seed, "numbers of another request"
            assert columns._prompt_length[seat] == sequence.num_prompt_tokens
            row = columns._processed.get(seat)
            assert (row is not None) == (sequence.processors != NO_PROCESSORS), "changes of another request"
            assert row is None or row.prompt_and_output.tolist() == sequence.token_ids, "tokens that its changes need"

    def _publish(self, output: EngineOutput) -> None:
        for event in output.finished:
            self.ends[event.sequence.request_id] += 1
            self.reasons[event.sequence.request_id] = event.reason


def make_sequence(chance: random.Random, number: int) -> Sequence:
    prompt = COMMON_PREFIX[: chance.choice((0, 8, 20, 20))] + [chance.randrange(8) for _ in range(chance.randint(1, 7))]
    max_tokens = chance.randint(1, 9)
    return Sequence(
        request_id=f"r{number}",
        attempt=1,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=Sampling(0.0, 0, 1.0, seed=number + 1),
        stopping=Stopping(max_tokens, 0, frozenset()),
        num_reserved_blocks=-(-(len(prompt) + max_tokens) // BLOCK_SIZE),
        cache_salt=b"",
        processors=Processors(presence_penalty=1.0) if number % 3 == 0 else NO_PROCESSORS,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("point", [*POINTS, "any"])
def test_no_failed_step_leaves_stale_tables_or_parameters(mode: str, point: str) -> None:
    chance = random.Random(f"{mode} {point}")
    ride = Ride(MODES[mode])
    offered = 0
    for _ in range(14):
        # Given more sequences than there are seats, which share prefixes
        for _ in range(chance.randint(2, 6)):
            offered += 1
            ride.engine.submit(make_sequence(chance, offered))
        ride.turn()
        # When some steps fail
        while not ride.scheduler.is_idle:
            if chance.random() < 0.25:
                ride.runner.point = chance.choice(POINTS) if point == "any" else point
            ride.turn()
    # Then every sequence ended once, and nothing is left behind
    assert ride.ends == Counter(f"r{number}" for number in range(1, offered + 1))
    assert FinishReason.ERROR in ride.reasons.values()
    assert FinishReason.LENGTH in ride.reasons.values()
    ride.scheduler.check_when_idle()
    assert ride.scheduler.pool.num_used == 0
