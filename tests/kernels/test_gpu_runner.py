"""The GPU runner without a GPU: work that a CUDA graph would replay is computed at once, by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from inflight.common.model_source import resolve_model
from inflight.executor.engine.runner import PendingStep, StepRunner
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.device_step import DeviceStep
from inflight.executor.gpu.runner import MAX_IN_FLIGHT, GpuRunner
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Overcommit, SchedulerPolicy
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import NO_PROCESSORS, Processors, Sampling, Sequence, StepPlan, Stopping
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE
from tests.support.scheduler.scheduling import make_limits, run_overlapped

BLOCK_SIZE = 16
NUM_BLOCKS = 16
LIMITS = make_limits(max_num_sequences=3, num_standby_sequences=4, max_num_tokens=16, context_length=64)


@cache
def loaded(folder: Path, backend_name: str) -> PagedModel:
    """The model, loaded and checked once: its check takes as long as some steps."""
    source = resolve_model(str(folder))
    return load_model(source, dtype_name="float32", backend_name=backend_name, device_name="cpu")


def load(folder: Path, backend_name: str) -> PagedModel:
    """The model with new KV."""
    model = loaded(folder, backend_name)
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return model


def gpu_runner(folder: Path) -> GpuRunner:
    model = load(folder, "triton")
    assert isinstance(model.forward, GpuForward)
    return GpuRunner(model.forward.decoder, model.kv, LIMITS, BLOCK_SIZE)


def sequence(
    number: int, num_prompt_tokens: int, sampling: Sampling, min_tokens: int = 0, num_stops: int = 0
) -> Sequence:
    token_ids = [(7 * number + 5 * i) % VOCABULARY_SIZE for i in range(num_prompt_tokens)]
    stopping = Stopping(max_tokens=5, min_tokens=min_tokens, stop_token_ids=frozenset(range(num_stops)))
    return Sequence(f"request-{number}", 1, token_ids, num_prompt_tokens, sampling, stopping, 3, b"salt")


def requests() -> list[Sequence]:
    """More than there are seats: greedy and random, restricted and not, prompts of a token and of several chunks."""
    return [
        sequence(0, 20, Sampling(0.0, 0, 1.0, 0)),
        sequence(1, 1, Sampling(1.0, 0, 1.0, 2**63 + 5)),
        sequence(2, 14, Sampling(0.8, 5, 0.9, 7)),
        sequence(3, 30, Sampling(0.5, 0, 1.0, 11), min_tokens=3, num_stops=4),
        sequence(4, 3, Sampling(0.0, 0, 1.0, 0), min_tokens=4, num_stops=40),
    ]


def outputs(
    runner: StepRunner, sequences: list[Sequence], scheduler: Scheduler | None = None, num_ahead: int = 1
) -> list[list[int]]:
    """What the sequences yield, each step launched before the one before is read, if that one allows it."""
    scheduler = scheduler or Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    for some in sequences:
        assert scheduler.offer(some) is None
    run_overlapped(scheduler, runner, num_ahead)
    runner.close()
    return [some.token_ids[some.num_prompt_tokens :] for some in sequences]


EVERYTHING = Processors(((3, 2.0), (9, -50.0)), frozenset(range(90)), 1.3, 0.4, 0.2, ((5,), (7, 8)), 3)
CHANGES = {
    0: EVERYTHING,
    2: Processors(repetition_penalty=1.5, no_repeat_ngram_size=1),
    3: Processors(bad_words=tuple((token_id,) for token_id in range(0, VOCABULARY_SIZE, 2))),
    5: Processors(((11, 30.0),), frequency_penalty=2.0, presence_penalty=2.0),
}


def changed_requests() -> list[Sequence]:
    """Requests of which four of seven have their logits changed. One of them continues an earlier output."""
    sequences = requests()
    sequences += [sequence(5, 4, Sampling(0.7, 0, 1.0, 3, 0.05)), sequence(6, 9, Sampling(1.2, 0, 1.0, 4, 0.2))]
    sequences[5].token_ids += [11, 12, 11]
    for number, some in enumerate(sequences):
        some.processors = CHANGES.get(number, NO_PROCESSORS)
        some.stopping = Stopping(8, some.stopping.min_tokens, some.stopping.stop_token_ids)
        some.num_reserved_blocks = -(-(some.num_prompt_tokens + 9) // BLOCK_SIZE)
        some.num_top_logprobs = 2
    return sequences


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Sequence]:
    """The requests as the generic runner completes them, with one step at a time."""
    sequences = changed_requests()
    outputs(ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE), sequences, num_ahead=0)
    return sequences


def assert_same_sequences(ours: list[Sequence], generic: list[Sequence]) -> None:
    """The same tokens and the same log probabilities."""
    assert [some.token_ids for some in ours] == [some.token_ids for some in generic]
    for some, other in zip(ours, generic, strict=True):
        assert sorted(some.logprobs) == sorted(other.logprobs)
        for offset, values in some.logprobs.items():
            assert values.top_ids == other.logprobs[offset].top_ids
            assert values.top_logprobs == pytest.approx(other.logprobs[offset].top_logprobs, abs=1e-4)
            assert values.logprob == pytest.approx(other.logprobs[offset].logprob, abs=1e-4)


def test_changed_rows_beside_others_are_those_of_the_generic_runner(folder: Path, expected: list[Sequence]) -> None:
    ours = changed_requests()
    outputs(gpu_runner(folder), ours)
    assert_same_sequences(ours, expected)
    assert any(len(some.token_ids) > some.num_prompt_tokens + 5 for some in ours if some.processors != NO_PROCESSORS)


def test_log_probabilities_of_a_changed_row_are_the_models_own(folder: Path, expected: list[Sequence]) -> None:
    plain = changed_requests()
    for some in plain:
        some.processors = NO_PROCESSORS
    outputs(gpu_runner(folder), plain)
    for some, other in zip(expected, plain, strict=True):
        ours, others = some.logprobs[min(some.logprobs)], other.logprobs[min(other.logprobs)]
        assert ours.top_logprobs == pytest.approx(others.top_logprobs, abs=1e-4)
        assert ours.top_ids == others.top_ids
    assert not all(some.token_ids == other.token_ids for some, other in zip(expected, plain, strict=True))


def test_changed_rows_go_on_after_a_preemption(folder: Path, expected: list[Sequence]) -> None:
    # Given blocks that do not suffice for those who run
    policy, overcommit = SchedulerPolicy.MAX_UTILIZATION, Overcommit(watermark=0.0, margin=0.0)
    scheduler = Scheduler(replace(LIMITS, policy=policy, overcommit=overcommit), BlockPool(6, BLOCK_SIZE))
    ours = changed_requests()[:4]
    del ours[1]
    for some in ours:
        some.num_reserved_blocks = some.num_prompt_tokens // BLOCK_SIZE + 1

    outputs(gpu_runner(folder), ours, scheduler)

    assert scheduler.num_preemptions > 0
    assert_same_sequences(ours, [expected[0], *expected[2:4]])


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_row_that_excludes_every_token_ends_with_an_error_of_its_own(folder: Path, backend: str) -> None:
    # Given a row whose constraint and bad words leave nothing, one whose min_tokens do, and one beside them
    sequences = [sequence(number, 3, Sampling(0.0, 0, 1.0, 0)) for number in range(3)]
    sequences[0].processors = Processors(allowed_ids=frozenset({5}), bad_words=((5,),))
    sequences[1].stopping = Stopping(5, 2, frozenset(range(VOCABULARY_SIZE)))
    runner = gpu_runner(folder) if backend == "triton" else ModelRunner(load(folder, backend), LIMITS, BLOCK_SIZE)
    scheduler = Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))

    assert [len(output) for output in outputs(runner, sequences, scheduler)] == [0, 0, 5]

    assert scheduler.num_invalid_logits == 0


def test_a_step_is_not_launched_before_the_tokens_that_its_rows_depend_on_are_read(folder: Path) -> None:
    runner, scheduler = gpu_runner(folder), Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    some, plain = changed_requests()[5], changed_requests()[1]
    some.processors = Processors(no_repeat_ngram_size=2)
    assert scheduler.offer(plain) is None
    first_plan = scheduler.schedule()
    first = runner.launch(first_plan)
    assert scheduler.offer(some) is None
    second_plan = scheduler.schedule()

    # Given a step with a row whose mask depends on its tokens, launched before one without is read
    second = runner.launch(second_plan)

    assert (first.allows_next, second.allows_next) == (True, False)
    with pytest.raises(RuntimeError, match="before tokens were read"):
        runner.launch(second_plan)
    first.result()
    second.result()
    assert second.allows_next
    runner.close()


def test_penalties_biases_and_allowed_ids_keep_the_overlap(folder: Path) -> None:
    # Given rows whose newest token is only on the device when they are changed, and ends that the host cannot predict
    changes = (
        Processors(frequency_penalty=0.9),
        Processors(((3, 2.0), (9, 4.0)), presence_penalty=0.5),
        Processors(((11, 30.0),), frozenset(range(60)), 1.4, 2.0, 2.0),
        Processors(repetition_penalty=0.6),
        Processors(((7, 9.0),)),
    )
    runners: list[StepRunner] = [ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE), gpu_runner(folder)]
    found, allowed = [], []
    for num_ahead, runner in enumerate(runners):
        sequences = changed_requests()[:5]
        for some, processors in zip(sequences, changes, strict=True):
            some.processors = processors
        launch = runner.launch

        def watched(plan: StepPlan, launch: Callable[[StepPlan], PendingStep] = launch) -> PendingStep:
            step = launch(plan)
            allowed.append(step.allows_next)
            return step

        runner.launch = watched  # type: ignore[method-assign]
        outputs(runner, sequences, num_ahead=num_ahead)
        found.append(sequences)
    assert_same_sequences(found[1], found[0])
    assert all(allowed)


def test_what_compiles_kernels_at_the_start_changes_no_token(folder: Path) -> None:
    runner = gpu_runner(folder)
    runner.prepare()
    greedy = [requests()[0]]
    assert outputs(runner, greedy) == outputs(
        ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE), [requests()[0]]
    )


def test_steps_after_those_that_cannot_be_launched_are_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a runner whose first steps find no memory, more of them than it has buffers
    runner, scheduler = gpu_runner(folder), Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))

    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("there is no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceStep, "compute", no_memory)
        for attempt in range(1, MAX_IN_FLIGHT + 2):
            sequence = requests()[0]
            sequence.attempt = attempt
            assert scheduler.offer(sequence) is None
            plan = scheduler.schedule()
            with pytest.raises(torch.OutOfMemoryError):
                runner.launch(plan)
            scheduler.fail(plan, "no memory")

    # Then the steps after them are right
    assert outputs(runner, [requests()[1]]) == outputs(
        ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE), [requests()[1]]
    )


def test_log_probabilities_make_no_tensor_of_numbers_and_read_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU either would wait for the steps launched before."""
    # Given rows that report log probabilities and ban more ids than most
    runner, scheduler = gpu_runner(folder), Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    for number in range(2):
        some = sequence(number, 3, Sampling(0.0, 0, 1.0, 0), min_tokens=4, num_stops=40)
        some.num_top_logprobs, some.num_prompt_logprobs = 3, 2
        assert scheduler.offer(some) is None
    plan = scheduler.schedule()

    def waits(*_: object, **__: object) -> None:
        raise AssertionError("the launch would wait for the device")

    def report_without_waiting(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "tensor", waits)
            for name in ("item", "tolist", "__bool__", "__int__", "__float__", "__setitem__"):
                patch.setattr(torch.Tensor, name, waits)
            return report(*arguments)

    report = runner._report
    monkeypatch.setattr(runner, "_report", report_without_waiting)
    pending = runner.launch(plan)

    assert len(pending.result()) == 2
    assert [len(values.top_ids) for values in pending.logprobs().values()] == [3, 3, 2, 2, 2, 2]
    runner.close()


def test_tokens_are_those_of_the_generic_runner(folder: Path) -> None:
    generic, ours = requests(), requests()
    for some in (*generic[1:4], *ours[1:4]):
        some.num_top_logprobs = 3
    expected = outputs(ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE), generic)
    assert outputs(gpu_runner(folder), ours) == expected
    assert all(expected)
    for one, other in zip(generic, ours, strict=True):
        assert sorted(one.logprobs) == (list(range(one.num_output_tokens)) if one.num_top_logprobs else [])
        for offset, values in one.logprobs.items():
            assert other.logprobs[offset].top_ids == values.top_ids
            assert other.logprobs[offset].top_logprobs == pytest.approx(values.top_logprobs, abs=1e-4)
            assert other.logprobs[offset].logprob == pytest.approx(values.logprob, abs=1e-4)


@pytest.mark.parametrize(
    "numbers", [(0, 1, 2, 3, 4), (4,)], ids=["a batch", "a step that needs the logits of all rows"]
)
def test_scores_of_prompts_are_those_of_the_generic_runner(folder: Path, numbers: tuple[int, ...]) -> None:
    generic, ours = ([requests()[number] for number in numbers] for _ in range(2))
    for some in (*generic, *ours):
        some.num_prompt_logprobs = None if some.request_id == "request-2" else 3
    expected = outputs(ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE), generic)
    assert outputs(gpu_runner(folder), ours) == expected
    for one, other in zip(generic, ours, strict=True):
        assert len(one.prompt_logprobs) == (0 if one.num_prompt_logprobs is None else one.num_prompt_tokens - 1)
        for values, others in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert (others.top_ids, others.rank) == (values.top_ids, values.rank)
            assert others.logprob == pytest.approx(values.logprob, abs=1e-4)
