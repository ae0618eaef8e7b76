"""The runner: tokens that the host does not know yet, and steps that fail, over a model that is a sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from inflight.executor.attention.gpu_host_tier import Pairs
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import FinishReason, Processors, Sampling, Sequence, StepResult
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling_columns import SamplingBatch
from tests.support.scheduler.scheduling import BLOCK_SIZE, LIMITS, make_scheduler, make_sequence


class AddingModel:
    """Samples the input token of a row plus its position; keeps what it was given."""

    device = torch.device("cpu")
    description = SimpleNamespace(vocabulary_size=100)

    def __init__(self) -> None:
        self.steps: list[tuple[StepBatch, SamplingBatch]] = []
        self.failing: set[int] = set()

    def step(self, batch: StepBatch, sampling: SamplingBatch) -> tuple[Tensor, None]:
        self.steps.append((batch, sampling))
        if len(self.steps) - 1 in self.failing:
            raise RuntimeError("the device is gone")
        return (batch.token_ids + batch.positions)[batch.logit_rows], None


@pytest.fixture
def model() -> AddingModel:
    return AddingModel()


@pytest.fixture
def runner(model: AddingModel) -> Iterator[ModelRunner]:
    runner = ModelRunner(cast("PagedModel", cast("Any", model)), LIMITS, BLOCK_SIZE)
    yield runner
    runner.close()


def run_ahead(scheduler: Scheduler, runner: ModelRunner, num_steps: int) -> None:
    """So many steps, each launched before the one before is read."""
    plan = scheduler.schedule()
    launched = [(plan, runner.launch(plan))]
    for _ in range(num_steps):
        plan = scheduler.schedule()
        if plan.rows:
            launched.append((plan, runner.launch(plan)))
        oldest, step = launched.pop(0)
        scheduler.update(StepResult(oldest, step.result()))
        if not launched:
            return


def sums(prompt: list[int], num_tokens: int) -> list[int]:
    """What the model continues a prompt with."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(token_ids[-1] + len(token_ids) - 1)
    return token_ids


def test_token_in_flight_is_taken_on_the_device(model: AddingModel, runner: ModelRunner) -> None:
    scheduler = make_scheduler()
    first, second = make_sequence("a", [200, 5], max_tokens=9), make_sequence("b", range(300, 312), max_tokens=7)
    scheduler.offer(first)
    scheduler.offer(second)

    run_ahead(scheduler, runner, 40)

    assert first.token_ids == sums([200, 5], 9)
    assert second.token_ids == sums(list(range(300, 312)), 7)
    assert sum(len(batch.carried_rows) for batch, _ in model.steps) == 8 + 6, "every token but the first of each"


def test_seats_are_taken_again_with_tables_and_parameters_of_their_own(model: AddingModel, runner: ModelRunner) -> None:
    scheduler = make_scheduler()
    made: list[Sequence] = []
    for i in range(12):
        sequence = make_sequence(f"r{i}", [150 + i] * (1 + i % 5), max_tokens=1 + i % 3, min_tokens=i % 4)
        sequence.sampling = Sampling(float(i % 2), i, 1.0 - i / 100, 2**64 - 1 - i)
        if i == 5:
            sequence.processors = Processors(allowed_ids=frozenset({7}))
        made.append(sequence)
    for start in range(0, 12, 4):
        for sequence in made[start : start + 4]:
            assert scheduler.offer(sequence) is None
        run_ahead(scheduler, runner, 60)

    for sequence in made:
        num_output = sequence.stopping.max_tokens
        assert sequence.token_ids == sums(sequence.token_ids[: sequence.num_prompt_tokens], num_output)
    rows = [row for _, sampling in model.steps for row in sampling.rows()]
    for sequence in made:
        mine = [row for row in rows if row.sampling == sequence.sampling]
        assert [row.output_index for row in mine] == list(range(sequence.stopping.max_tokens))
        is_early = [index < sequence.stopping.min_tokens for index in range(len(mine))]
        assert [bool(row.banned_ids) for row in mine] == is_early
    for _, sampling in model.steps:
        assert sampling.draws == any(row.sampling.temperature > 0 for row in sampling.rows())
        assert sampling.has_masks == any(row.processed is not None for row in sampling.rows())
    assert {sampling.has_masks for _, sampling in model.steps} == {False, True}


def test_greedy_step_is_known_as_one(model: AddingModel, runner: ModelRunner) -> None:
    scheduler = make_scheduler()
    scheduler.offer(make_sequence("a", [120], max_tokens=1))
    run_ahead(scheduler, runner, 2)
    scheduler.offer(make_sequence("b", [120], max_tokens=2, min_tokens=1))
    run_ahead(scheduler, runner, 3)

    # The one id that would stop it is banned from the first token of "b".
    assert [sampling.is_greedy for _, sampling in model.steps] == [True, False, True]


def test_step_after_a_failed_one_runs_and_carries_nothing(model: AddingModel, runner: ModelRunner) -> None:
    model.failing = {0}
    scheduler = make_scheduler()
    lost, later = make_sequence("a", [1]), make_sequence("b", [170])
    scheduler.offer(lost)
    first = scheduler.schedule()
    failed = runner.launch(first)
    scheduler.offer(later)
    second = scheduler.schedule()
    launched = runner.launch(second)

    with pytest.raises(RuntimeError, match="gone"):
        failed.result()
    outcome = scheduler.fail(first, "gone")
    assert [event.reason for event in outcome.finished] == [FinishReason.ERROR]
    scheduler.update(StepResult(second, launched.result()))
    assert later.token_ids == [170, 170]
    assert failed.began_s <= failed.ended_s <= launched.began_s


def test_copies_to_host_memory_that_fail_are_the_failure_of_their_step_alone(
    model: AddingModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingTier:
        num_swaps = 0

        def swap(self, swaps_out: Pairs, swaps_in: Pairs) -> None:
            self.num_swaps += 1
            if self.num_swaps == 1:
                raise MemoryError

    monkeypatch.setattr(AddingModel, "open_host_tier", lambda self, num_host_blocks: FailingTier(), raising=False)
    limits = replace(LIMITS, num_host_blocks=1)
    runner = ModelRunner(cast("PagedModel", cast("Any", model)), limits, BLOCK_SIZE)
    scheduler = make_scheduler()
    scheduler.offer(make_sequence("a", [1]))
    plan = scheduler.schedule()

    with pytest.raises(MemoryError):
        runner.launch(replace(plan, swaps_out=((1, 0),))).result()
    scheduler.fail(plan, "no memory")
    later = make_sequence("b", [170], max_tokens=3)
    scheduler.offer(later)
    run_ahead(scheduler, runner, 5)

    assert later.token_ids == sums([170], 3)
    runner.close()


def test_batch_for_another_device_takes_only_the_tables_that_it_reads(model: AddingModel, runner: ModelRunner) -> None:
    scheduler = make_scheduler()
    sequence = make_sequence("a", range(150, 157))
    scheduler.offer(sequence)
    run_ahead(scheduler, runner, 1)

    batch = model.steps[0][0].to(torch.device("meta"))

    assert batch.block_tables.shape == (1, 2)
    assert batch.table_rows.shape == (1,)
