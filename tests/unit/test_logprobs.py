"""Log probabilities: the model's own under any sampling, and only for the rows that report them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from inflight.common.model_source import resolve_model
from inflight.executor.engine.runner import NO_TOKEN
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sampling, Sequence, Stopping
from inflight.executor.step.logprobs import ROWS_AT_ONCE, SUMMED_AT_ONCE, step_logprobs
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, save_model, sizes
from tests.support.device.torch_threads import torch_threads
from tests.support.scheduler.scheduling import LIMITS, run_overlapped

NUM_BLOCKS, BLOCK_SIZE = 40, 16


def test_values_are_those_of_a_log_softmax() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)) * 5
    sampled_ids = torch.tensor([7, 0, 49, 3])

    read = step_logprobs(logits, sampled_ids, [(1, 2), (3, 5)]).read()

    assert sorted(read) == [1, 3]
    for row, num_top in ((1, 2), (3, 5)):
        expected = logits[row].log_softmax(0)
        assert read[row].logprob == pytest.approx(float(expected[sampled_ids[row]]), abs=1e-5)
        assert read[row].top_ids == tuple(expected.topk(num_top).indices.tolist())
        assert read[row].top_logprobs == pytest.approx(expected.topk(num_top).values.tolist(), abs=1e-5)


@pytest.mark.parametrize("vocabulary_size", [50, 4097, 151_937])
def test_row_has_the_same_values_alone_and_beside_rows_that_report_more(vocabulary_size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    # Rounded, so that many are equal
    logits = (torch.randn(7, vocabulary_size, generator=generator) * 8).round() / 4
    chosen_ids = torch.randint(vocabulary_size, (7,), generator=generator)
    with torch_threads(3):
        alone = [step_logprobs(logits[i : i + 1], chosen_ids[i : i + 1], [(0, 3)]).read()[0] for i in range(7)]
        for rows in ([(2, 3), (5, 3)], [(i, 3 if i % 2 else 20) for i in range(7)]):
            read = step_logprobs(logits, chosen_ids, rows).read()
            for i, _ in rows:
                assert (read[i].logprob, read[i].rank) == (alone[i].logprob, alone[i].rank)
                assert read[i].top_ids[:3] == alone[i].top_ids
                assert read[i].top_logprobs[:3] == alone[i].top_logprobs
    order = logits.sort(dim=1, descending=True, stable=True).indices
    assert [row.top_ids for row in alone] == [tuple(ids[:3].tolist()) for ids in order]


def test_any_number_of_rows_takes_the_memory_of_a_few() -> None:
    """A GPU has little memory beside its KV cache."""
    num_rows, vocabulary_size = 3 * ROWS_AT_ONCE + 1, 40
    logits = torch.randn(num_rows, vocabulary_size, generator=torch.Generator().manual_seed(5))
    largest = Largest()
    with largest:
        step = step_logprobs(logits, torch.arange(num_rows) % vocabulary_size, [(row, 2) for row in range(num_rows)])
    assert largest.num_numbers <= ROWS_AT_ONCE * SUMMED_AT_ONCE
    read = step.read()
    assert [read[row].top_ids for row in range(num_rows)] == [tuple(ids) for ids in logits.topk(2).indices.tolist()]


class Largest(TorchDispatchMode):
    """The largest tensor that operations yield while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.num_numbers = max(self.num_numbers, result.numel())
        return result


def test_more_tokens_than_there_are_and_none_at_all() -> None:
    logits = torch.zeros(2, 3)
    read = step_logprobs(logits, torch.tensor([0, 1]), [(0, 20), (1, 0)]).read()
    assert len(read[0].top_ids) == 3
    assert read[1].top_ids == ()


def test_logits_that_are_no_numbers_are_reported_as_impossible() -> None:
    for sampled_id in (2, NO_TOKEN):
        read = step_logprobs(torch.full((1, 4), math.nan), torch.tensor([sampled_id]), [(0, 1)]).read()
        assert read[0].logprob == -math.inf
        assert read[0].top_logprobs == (-math.inf,)


def test_a_logit_that_is_no_number_does_not_change_the_others() -> None:
    logits = torch.tensor([[0.0, math.nan, 0.0]])
    read = step_logprobs(logits, torch.tensor([2]), [(0, 2)]).read()
    assert read[0].logprob == pytest.approx(-math.log(2))
    assert read[0].top_ids == (0, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(LlamaConfig(**sizes(num_hidden_layers=1)), tmp_path_factory.mktemp("model") / "tiny")


def sequences() -> list[Sequence]:
    """Greedy and random ones, of which the first and the last report nothing."""
    samplings = [Sampling(0.0, 0, 1.0, 0), Sampling(0.0, 0, 1.0, 0), Sampling(0.7, 5, 1.0, 7), Sampling(1.0, 0, 1.0, 3)]
    prompts = [[(11 * number + 5 * i) % VOCABULARY_SIZE for i in range(12)] for number in range(4)]
    return [
        Sequence(
            f"r{number}",
            1,
            list(prompt),
            len(prompt),
            sampling,
            Stopping(6, 0, frozenset()),
            2,
            b"salt",
            num_top_logprobs=(None, 4, 2, None)[number],
        )
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]


def run(model: PagedModel, offered: list[Sequence]) -> None:
    """To the end, each step launched before the one before is read."""
    runner, scheduler = ModelRunner(model, LIMITS, BLOCK_SIZE), Scheduler(LIMITS, BlockPool(NUM_BLOCKS, BLOCK_SIZE))
    for sequence in offered:
        assert scheduler.offer(sequence) is None
    run_overlapped(scheduler, runner)
    runner.close()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_values_of_a_model_are_those_of_transformers(folder: Path, backend: str) -> None:
    offered = sequences()
    with torch_threads(1):
        model = load_model(resolve_model(str(folder)), dtype_name="float32", backend_name=backend, device_name="cpu")
        model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        run(model, offered)
        network = AutoModelForCausalLM.from_pretrained(str(folder))
        for sequence in offered:
            if sequence.num_top_logprobs is None:
                assert sequence.logprobs == {}
                continue
            with torch.inference_mode():
                logprobs = network(torch.tensor([sequence.token_ids])).logits[0].log_softmax(-1)
            assert sorted(sequence.logprobs) == list(range(6))
            for offset, values in sequence.logprobs.items():
                position = sequence.num_prompt_tokens + offset
                expected = logprobs[position - 1]
                assert values.logprob == pytest.approx(float(expected[sequence.token_ids[position]]), abs=1e-3)
                top = expected.topk(sequence.num_top_logprobs).values.tolist()
                assert values.top_logprobs == pytest.approx(top, abs=1e-3)


def test_reporting_changes_no_token(folder: Path) -> None:
    with torch_threads(1):
        model = load_model(resolve_model(str(folder)), dtype_name="float32", backend_name="cpu", device_name="cpu")
        model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
        silent, reporting = sequences(), sequences()
        for sequence in silent:
            sequence.num_top_logprobs = None
        run(model, silent)
        run(model, reporting)
    assert [one.token_ids for one in reporting] == [one.token_ids for one in silent]
