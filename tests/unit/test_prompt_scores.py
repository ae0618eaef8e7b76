"""Log probabilities of prompts on an executor: every position once, in any chunks, with neighbours and preemption."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from inflight.common.model_source import resolve_model
from inflight.common.protocol import MAX_PROMPT_LOGPROB_ROWS
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import Overcommit, PreemptionCost
from inflight.executor.scheduler.scheduler import Scheduler, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.sequence import Sampling, Sequence, StepPlan, StepResult, Stopping
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE as MODEL_VOCABULARY_SIZE
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.fake_device import VOCABULARY_SIZE, FakeDevice, logprobs_of, token_logprobs
from tests.support.device.torch_threads import torch_threads
from tests.support.scheduler.scheduling import LIMITS, make_sequence, run_overlapped

WIDE = replace(LIMITS, max_num_sequences=6, num_standby_sequences=10, max_num_tokens=256, context_length=256)


class Recorder(FakeDevice):
    """A device that keeps the plans."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self.plans: list[StepPlan] = []

    def run(self, plan: StepPlan) -> tuple[int, ...]:
        self.plans.append(plan)
        return super().run(plan)


def prompt_of(number: int, length: int) -> list[int]:
    return [(number + 3 * i + i * i // 5) % VOCABULARY_SIZE for i in range(length)]


def scored(number: int, length: int, num_top: int | None = 2, **fields: object) -> Sequence:
    sequence = make_sequence(f"r{number}", prompt_of(number, length), **fields)  # type: ignore[arg-type]
    sequence.num_prompt_logprobs = num_top
    return sequence


def run(
    sequences: list[Sequence], limits: SchedulerLimits = WIDE, num_blocks: int = 200, block_size: int = 4
) -> tuple[Scheduler, Recorder]:
    pool = BlockPool(num_blocks, block_size)
    scheduler, device = Scheduler(limits, pool), Recorder(pool)
    for sequence in sequences:
        assert scheduler.offer(sequence) is None
    run_overlapped(scheduler, device)
    scheduler.check_when_idle()
    return scheduler, device


def check(sequence: Sequence) -> None:
    prompt = sequence.token_ids[1 : sequence.num_prompt_tokens]
    if sequence.num_prompt_logprobs is None:
        assert sequence.prompt_logprobs == []
    else:
        assert sequence.prompt_logprobs == [token_logprobs(i, sequence.num_prompt_logprobs) for i in prompt]


@pytest.mark.parametrize("is_chunked", [True, False])
def test_all_sequences_together_score_at_most_64_positions_in_a_step(is_chunked: bool) -> None:
    lengths = (1, 2, 70, 150, 3, 64, 65, 40)
    sequences = [scored(number, length) for number, length in enumerate(lengths)]
    _, device = run(sequences, replace(WIDE, enable_chunked_context=is_chunked), num_blocks=400)
    for sequence in sequences:
        check(sequence)
    num_rows = [sum(one.end - one.start for one in plan.scored) for plan in device.plans]
    assert max(num_rows) == MAX_PROMPT_LOGPROB_ROWS
    assert sum(num_rows) == sum(lengths) - len(lengths)


def test_sequences_that_do_not_score_are_not_held_up() -> None:
    scoring, plain = [scored(0, 200), scored(1, 100)], scored(2, 100, None)
    _, device = run([*scoring, plain])
    first = device.plans[0]
    assert first.sequences == [scoring[0], plain], "the second waits for its turn, and holds no seat"
    assert first.lengths == [MAX_PROMPT_LOGPROB_ROWS, 100]
    for sequence in (*scoring, plain):
        check(sequence)


def test_scored_prompt_is_written_to_the_prefix_cache_and_not_read_from_it() -> None:
    pool = BlockPool(200, 4)
    scheduler, device = Scheduler(WIDE, pool), Recorder(pool)
    sequences = [
        scored(0, 100),
        replace(scored(0, 100), request_id="again"),
        replace(scored(0, 100, None), request_id="plain"),
    ]
    for sequence in sequences:
        assert scheduler.offer(sequence) is None
        run_overlapped(scheduler, device)
        check(sequence)
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 0, 96]


def test_output_of_an_earlier_placement_is_not_scored() -> None:
    sequence = scored(0, 30, prior_output=[1, 2, 3], max_tokens=6)
    run([sequence])
    check(sequence)


@pytest.mark.parametrize("num_host_blocks", [0, 100])
def test_preempted_sequences_keep_what_is_scored(num_host_blocks: int) -> None:
    limits = replace(
        WIDE,
        max_num_tokens=16,
        policy=SchedulerPolicy.MAX_UTILIZATION,
        overcommit=Overcommit(watermark=0.0, margin=0.1, cost=PreemptionCost(1.0, 0.01)),
        num_host_blocks=num_host_blocks,
    )
    sequences = [scored(number, 12 + 9 * number, number % 3 or None, max_tokens=40) for number in range(6)]
    sequences.append(scored(7, 90, 1, max_tokens=5))
    for sequence in sequences:
        sequence.num_reserved_blocks = sequence.num_prompt_tokens // 4 + 1
    scheduler, device = run(sequences, limits, num_blocks=82)
    assert scheduler.num_preemptions > 0
    for sequence in sequences:
        check(sequence)
    positions = [
        (one.sequence.request_id, i) for plan in device.plans for one in plan.scored for i in range(one.start, one.end)
    ]
    assert len(positions) == len(set(positions)), "no position is scored twice"


def test_scores_behind_a_failed_step_are_dropped() -> None:
    """They would stand at the positions that the failed step was to score."""
    pool = BlockPool(200, 4)
    scheduler, device = Scheduler(replace(WIDE, max_num_tokens=8), pool), Recorder(pool)
    sequence = scored(0, 30)
    assert scheduler.offer(sequence) is None
    plans = [scheduler.schedule(), scheduler.schedule()]

    device.corrupt(plans[0])
    scheduler.fail(plans[0], "lost")
    sampled_ids = device.run(plans[1])
    outcome = scheduler.update(StepResult(plans[1], sampled_ids, logprobs_of(plans[1], sampled_ids)))

    assert (sequence.prompt_logprobs, outcome.scored) == ([], ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(LlamaConfig(**sizes(num_hidden_layers=2)), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(params=["reference", "cpu"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[PagedModel]:
    with torch_threads(1):
        model = load_model(
            resolve_model(str(folder)), dtype_name="float32", backend_name=request.param, device_name="cpu"
        )
        model.allocate_kv(60, 16)
        yield model


@pytest.mark.parametrize("max_num_tokens", [7, 24, 128])
def test_values_of_a_model_are_those_of_transformers(model: PagedModel, folder: Path, max_num_tokens: int) -> None:
    """In any chunks, beside others that score, report their output or do neither."""
    limits = replace(LIMITS, max_num_sequences=4, max_num_tokens=max_num_tokens, context_length=128)
    lengths, tops = (40, 2, 77, 21, 1), (5, 0, 20, None, 3)
    sequences = [
        Sequence(
            f"r{number}",
            1,
            [(7 * number + 5 * i + i * i) % MODEL_VOCABULARY_SIZE for i in range(length)],
            length,
            Sampling(0.0 if number % 2 else 0.8, 0, 1.0, number),
            Stopping(6, 0, frozenset()),
            -(-(length + 6) // 16),
            b"salt",
            num_top_logprobs=3 if number == 2 else None,
            num_prompt_logprobs=num_top,
        )
        for number, (length, num_top) in enumerate(zip(lengths, tops, strict=True))
    ]
    runner, scheduler = ModelRunner(model, limits, 16), Scheduler(limits, BlockPool(60, 16))
    for sequence in sequences:
        assert scheduler.offer(sequence) is None
    run_overlapped(scheduler, runner)
    runner.close()
    network = AutoModelForCausalLM.from_pretrained(str(folder))
    for sequence in sequences:
        if sequence.num_prompt_logprobs is None:
            assert sequence.prompt_logprobs == []
            continue
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        with torch.inference_mode():
            expected = network(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert len(sequence.prompt_logprobs) == len(prompt) - 1
        for position, values in enumerate(sequence.prompt_logprobs, start=1):
            row, token_id = expected[position - 1], prompt[position]
            assert values.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert values.rank == 1 + sum(value > values.logprob + 1e-4 for value in row.tolist()) or math.isclose(
                sorted(row.tolist(), reverse=True)[values.rank - 1], values.logprob, abs_tol=1e-4
            )
            top = row.topk(sequence.num_prompt_logprobs).values.tolist()
            assert values.top_logprobs == pytest.approx(top, abs=1e-4)
            if token_id in values.top_ids:
                assert values.logprob in values.top_logprobs, "the same float"
