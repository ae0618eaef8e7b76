"""Embeddings and scores of executors are those of sentence-transformers, however their prompts are computed."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import Lfm2Config

from inflight.common.kv_size import num_slots
from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.engine.runner import StepRunner
from inflight.executor.forward.native import NativeForward
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.pooling.pooled import PooledOutput, Pooling, PoolingKind
from inflight.executor.recurrent.mixer import StateSizes
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import SchedulerLimits, StateLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import FinishReason, Sampling, Sequence, StepPlan, StepResult, Stopping
from tests.support.checkpoints.pooling_models import (
    Oracle,
    write_classifier,
    write_embedding_model,
    write_modules,
    write_qwen3,
)
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.scheduler.scheduling import make_limits

# The first test of a build may wait for the compiler.
pytestmark = pytest.mark.timeout(600)

BLOCK_SIZE, NUM_BLOCKS = 16, 120
LIMITS = make_limits(max_num_sequences=4, num_standby_sequences=16, max_num_tokens=48, context_length=512)
GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, 250, (400,), generator=GENERATOR).tolist()
RECURRENT = Lfm2Config(
    **sizes(num_hidden_layers=3),
    layer_types=["conv", "full_attention", "conv"],
    block_auto_adjust_ff_dim=False,
)
PROMPTS = {
    "one": TOKENS[:1],
    "block": TOKENS[:16],
    "chunks": TOKENS[:131],
    "shares": [*TOKENS[:96], *TOKENS[200:217]],
    "other": TOKENS[150:190],
}


@dataclass(frozen=True, slots=True)
class Case:
    """A served model, how it pools, and the same by transformers."""

    model: PagedModel
    mode: str
    is_native: bool
    oracle: Oracle


@pytest.fixture(
    scope="module", params=["lasttoken-native", "mean-native", "lasttoken-transformers", "mean-transformers"]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    mode, _, forward = request.param.partition("-")
    folder = write_embedding_model(tmp_path_factory.mktemp("models") / mode, mode)
    with torch_threads(1):
        is_native = forward == "native"
        model = loaded(folder, forward_name="auto" if is_native else forward)
        assert isinstance(model.forward, NativeForward) == is_native
        yield Case(model, mode, is_native, Oracle(folder))


def loaded(folder: Path, **options: Any) -> PagedModel:
    model = load_model(resolve_model(str(folder)), dtype_name="float32", device_name="cpu", **options)
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return model


def pooled(model: PagedModel, name: str, prompt: list[int], dimensions: int = 0) -> Sequence:
    """A sequence that ends with its prompt, with the blocks of its prompt alone."""
    assert model.pooling is not None
    made = generating(name, prompt, 0)
    made.pooled = PooledOutput(model.pooling, dimensions)
    return made


def generating(name: str, prompt: list[int], num_tokens: int) -> Sequence:
    num_blocks, stopping = -(-(len(prompt) + num_tokens) // BLOCK_SIZE), Stopping(num_tokens, 0, frozenset())
    return Sequence(name, 1, list(prompt), len(prompt), Sampling(0.0, 0, 1.0, 0), stopping, num_blocks, b"")


def run(
    model: PagedModel, crowds: list[list[Sequence]], limits: SchedulerLimits = LIMITS, runner: StepRunner | None = None
) -> dict[str, Tensor]:
    """Runs crowds one after the other, a step ahead, and returns the results. Nothing is left behind."""
    scheduler = Scheduler(limits, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    runner = runner or ModelRunner(model, limits, BLOCK_SIZE)
    launched: deque[tuple[StepPlan, Any]] = deque()
    results: dict[str, Tensor] = {}
    for crowd in crowds:
        for sequence in crowd:
            assert scheduler.offer(sequence) is None
        while launched or not scheduler.is_idle:
            plan = scheduler.schedule()
            scheduler.check()
            if plan.rows:
                launched.append((plan, runner.launch(plan)))
            while len(launched) > int(bool(plan.rows)):
                done, pending = launched.popleft()
                ids, logprobs = pending.result(), pending.logprobs()
                for event in scheduler.update(StepResult(done, ids, logprobs, pending.pooled())).finished:
                    assert event.reason is FinishReason.LENGTH, event.error
                    results[event.sequence.request_id] = torch.tensor(event.pooled)
    runner.close()
    scheduler.check_when_idle()
    return results


def test_embeddings_are_those_of_sentence_transformers(case: Case) -> None:
    for name, prompt in PROMPTS.items():
        (result,) = run(case.model, [[pooled(case.model, name, prompt)]]).values()
        expected = case.oracle.embedding(prompt, case.mode)

        assert cosine_similarity(result, expected, 0) >= 0.9999
        assert (result - expected).abs().max() <= 1e-5
        assert abs(result.norm() - 1) <= 1e-6


def test_fewer_dimensions_are_the_first_ones_and_normalized_again(case: Case) -> None:
    prompt = PROMPTS["other"]
    (result,) = run(case.model, [[pooled(case.model, "few", prompt, 20)]]).values()

    assert result.shape == (20,)
    assert (result - case.oracle.embedding(prompt, case.mode, 20)).abs().max() <= 1e-5


def test_embeddings_do_not_depend_on_what_else_is_computed(case: Case) -> None:
    # Given what each is alone, in one step
    whole = replace(LIMITS, max_num_tokens=512, enable_prefix_cache=False)
    alone = {
        name: run(case.model, [[pooled(case.model, name, prompt)]], whole)[name] for name, prompt in PROMPTS.items()
    }

    # When all run in chunks beside sequences that generate, and then again behind cached prefixes
    crowds = [
        [
            generating(f"g{turn}", TOKENS[300 + turn : 320], 30),
            *(pooled(case.model, f"{name}{turn}", prompt) for name, prompt in PROMPTS.items()),
        ]
        for turn in (0, 1)
    ]
    results = run(case.model, crowds)
    # The sums of a mean are in another order.
    most = {(True, "lasttoken"): 0.0, (True, "mean"): 1e-7, (False, "lasttoken"): 1e-5, (False, "mean"): 1e-5}

    # Then each is the same, with the native forward pass to the last bit of each row
    for name, expected in alone.items():
        for turn in (0, 1):
            distance = (results[f"{name}{turn}"] - expected).abs().max()
            assert distance <= (most[case.is_native, case.mode]), (name, turn)


@pytest.mark.parametrize(("kind", "needed"), [(PoolingKind.MEAN, (40, 60)), (PoolingKind.LAST, (60, 60))], ids=str)
def test_rows_that_were_added_before_a_preemption_are_not_added_again(
    kind: PoolingKind, needed: tuple[int, int]
) -> None:
    output = PooledOutput(Pooling(kind, 2))
    _, output.num_planned = output.rows_of_chunk(0, 40, 100) if kind is PoolingKind.MEAN else (0, 0)

    # It begins again at the first token.
    assert output.rows_of_chunk(0, 60, 100) == needed
    assert output.rows_of_chunk(60, 100, 100) == ((60, 100) if kind is PoolingKind.MEAN else (99, 100))


def test_prefix_cache_is_read_only_where_no_row_is_missed(case: Case) -> None:
    first, second = (pooled(case.model, name, PROMPTS["chunks"]) for name in ("first", "second"))
    run(case.model, [[first], [second]])

    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (128 if case.mode == "lasttoken" else 0)


def test_generated_tokens_are_the_same_beside_embeddings(case: Case) -> None:
    alone, beside = (generating(name, PROMPTS["other"], 12) for name in ("alone", "beside"))
    run(case.model, [[alone]])
    run(case.model, [[beside, *(pooled(case.model, name, prompt) for name, prompt in PROMPTS.items())]])

    assert beside.token_ids == alone.token_ids


def test_a_cancelled_embedding_frees_its_blocks(case: Case) -> None:
    scheduler, pool = Scheduler(LIMITS, pool := BlockPool(NUM_BLOCKS, BLOCK_SIZE)), pool
    assert scheduler.offer(pooled(case.model, "gone", PROMPTS["chunks"])) is None
    plan = scheduler.schedule()
    assert pool.num_used
    assert scheduler.cancel("gone", 1, FinishReason.CANCELLED) is None

    zeros = tuple(array("d", [0.0] * 64) for _ in plan.pooled)
    (event,) = scheduler.update(StepResult(plan, (), pooled=zeros)).finished

    assert (event.reason, len(event.pooled), pool.num_used) == (FinishReason.CANCELLED, 0, 0)
    scheduler.check_when_idle()


def test_hidden_states_that_are_not_finite_end_their_sequence_alone(case: Case) -> None:
    scheduler = Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    for name in ("broken", "whole"):
        assert scheduler.offer(pooled(case.model, name, PROMPTS["block"])) is None
    plan = scheduler.schedule()
    values = {"broken": torch.nan, "whole": 1.0}
    sums = tuple(array("d", [values[one.sequence.request_id]] * 64) for one in plan.pooled)

    ends = {event.sequence.request_id: event for event in scheduler.update(StepResult(plan, (), pooled=sums)).finished}

    assert ends["broken"].reason is FinishReason.ERROR
    assert "not finite" in ends["broken"].error
    assert ends["whole"].reason is FinishReason.LENGTH
    assert len(ends["whole"].pooled) == 64


@pytest.mark.parametrize("forward_name", ["auto", "transformers"])
def test_yes_no_scores_are_those_of_transformers(tmp_path: Path, forward_name: str) -> None:
    vocabulary = write_qwen3(tmp_path / "reranker")
    model, oracle = (
        loaded(tmp_path / "reranker", pooling_name="yes_no", forward_name=forward_name),
        Oracle(tmp_path / "reranker"),
    )
    results = run(model, [[pooled(model, name, prompt) for name, prompt in PROMPTS.items()]])

    assert model.pooling is not None
    assert not model.pooling.is_only
    for name, prompt in PROMPTS.items():
        expected = oracle.yes_no(prompt, vocabulary["yes"], vocabulary["no"])
        assert results[name].item() == pytest.approx(expected, abs=1e-5)
    assert len({round(result.item(), 3) for result in results.values()}) > 1


def test_scores_by_the_files_of_sentence_transformers_and_of_classifiers(tmp_path: Path) -> None:
    vocabulary, listed = write_qwen3(tmp_path / "listed"), tmp_path / "listed"
    write_modules(listed, [("", "Transformer"), ("1_LogitScore", "LogitScore")])
    ids = f'{{"true_token_id": {vocabulary["yes"]}, "false_token_id": {vocabulary["no"]}}}'
    (listed / "1_LogitScore" / "config.json").write_text(ids)
    classifier = write_classifier(tmp_path / "classifier")
    weight = load_file(classifier / "model.safetensors")["score.weight"]
    prompt = PROMPTS["other"]

    for folder, expected in (
        (listed, Oracle(listed).yes_no(prompt, vocabulary["yes"], vocabulary["no"])),
        (classifier, Oracle(classifier).classified(prompt, weight)),
    ):
        model = loaded(folder)
        (result,) = run(model, [[pooled(model, "one", prompt)]]).values()
        assert model.pooling is not None
        assert model.pooling.is_only
        assert result.item() == pytest.approx(expected, abs=1e-5)


def test_models_whose_pooling_cannot_be_applied_are_refused_by_name(tmp_path: Path) -> None:
    dense = write_embedding_model(tmp_path / "dense")
    write_modules(dense, [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")])
    refused = {
        write_embedding_model(tmp_path / "cls", "cls"): "pooling_mode_cls_token",
        dense: "Dense",
        write_classifier(tmp_path / "three", 3): r"\[3, 64\]",
    }
    for folder, reason in refused.items():
        with pytest.raises(ModelError, match=reason):
            loaded(folder)


def test_a_generative_model_pools_only_if_a_setting_says_how(tmp_path: Path) -> None:
    folder = tmp_path / "generative"
    write_qwen3(folder)

    assert loaded(folder).pooling is None
    model = loaded(folder, pooling_name="mean")
    (result,) = run(model, [[pooled(model, "one", PROMPTS["other"])]]).values()
    assert (result - Oracle(folder).embedding(PROMPTS["other"], "mean")).abs().max() <= 1e-5


@pytest.mark.parametrize("mode", ["last", "mean"])
def test_embeddings_of_a_model_with_recurrent_layers(tmp_path: Path, mode: str) -> None:
    folder = save_model(RECURRENT, tmp_path / "model", has_random_vectors=True)
    model = loaded(folder, pooling_name=mode)
    states, slots = model.forward.states, num_slots(LIMITS.max_num_sequences)
    assert states is not None
    states.reserve(StateSizes(slots, 0, 0))
    limits = replace(LIMITS, enable_prefix_cache=False, states=StateLimits(slots, 0, max(16, states.grid_tokens)))
    prompts = {name: [token_id % 96 for token_id in prompt] for name, prompt in PROMPTS.items()}

    results = run(model, [[pooled(model, name, prompt) for name, prompt in prompts.items()]], limits)

    oracle = Oracle(folder)
    for name, prompt in prompts.items():
        expected = oracle.embedding(prompt, "lasttoken" if mode == "last" else mode)
        assert (results[name] - expected).abs().max() <= 1e-5
