"""Beam search in the client: the same beams and scores as `generate(num_beams=…)` of transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from inflight.beams.search import Beam, BeamParams, BeamSearch, EarlyStopping
from inflight.events import Logprob
from tests.support.checkpoints.tiny_models import VOCABULARY_SIZE, sizes
from tests.support.device.torch_threads import torch_threads

PROMPT = [5, 17, 9, 60]


@pytest.fixture(scope="module")
def network() -> Iterator[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network: Any = AutoModelForCausalLM.from_config(LlamaConfig(**sizes(num_hidden_layers=1)))
    with torch_threads(1):
        yield network.eval()


def search(network: Any, params: BeamParams) -> tuple[Beam, ...]:
    """Searches with the log probabilities of a model."""
    beams = BeamSearch(params)
    while beams.running:
        ids = torch.tensor([[*PROMPT, *output_ids] for output_ids in beams.running])
        with torch.inference_mode():
            values, tokens = network(ids).logits[:, -1].log_softmax(-1).topk(beams.num_candidates)
        beams.step(
            [[Logprob(int(t), float(v)) for t, v in zip(*row, strict=True)] for row in zip(tokens, values, strict=True)]
        )
    return beams.finished


def reference(network: Any, params: BeamParams) -> list[tuple[list[int], float]]:
    """The outputs of transformers without padding, with their scores."""
    with torch.inference_mode():
        result = network.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
            do_sample=False,
            num_beams=params.beams,
            num_return_sequences=params.beams,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=sorted(params.end_token_ids),
            pad_token_id=VOCABULARY_SIZE - 1,
            output_scores=True,
            return_dict_in_generate=True,
        )
    outputs = []
    for row, score in zip(result.sequences[:, len(PROMPT) :].tolist(), result.sequences_scores.tolist(), strict=True):
        ends = [i + 1 for i, token_id in enumerate(row) if token_id in params.end_token_ids]
        outputs.append((row[: ends[0] if ends else params.max_tokens], score))
    return outputs


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 2.0])
@pytest.mark.parametrize(
    ("beams", "max_tokens", "end_ids"),
    [(2, 10, (7,)), (10, 6, (7,)), (3, 8, (7, 30)), (5, 1, (2,))],
)
def test_beams_are_those_of_transformers(
    network: Any, beams: int, max_tokens: int, end_ids: tuple[int, ...], length_penalty: float, early_stopping: Any
) -> None:
    # End tokens that are likely, so that beams end at different lengths.
    likely = torch.tensor(end_ids)
    with torch.no_grad():
        before = network.lm_head.weight[likely].clone()
        network.lm_head.weight[likely] *= 2
    try:
        params = BeamParams(beams, max_tokens, length_penalty, early_stopping, frozenset(end_ids))
        found, expected = search(network, params), reference(network, params)
    finally:
        with torch.no_grad():
            network.lm_head.weight[likely] = before
    assert [list(beam.token_ids) for beam in found] == [ids for ids, _ in expected]
    assert [beam.score for beam in found] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_impossible_tokens_continue_no_beam() -> None:
    search = BeamSearch(BeamParams(2, 2, 1.0, False, frozenset()))
    search.step([[Logprob(1, -0.5), Logprob(2, -math.inf)]])
    assert search.running == ((1,),)
    search.step([[Logprob(3, -0.5), Logprob(4, -1.0)]])
    assert [beam.token_ids for beam in search.finished] == [(1, 3), (1, 4)]
    assert search.finished[0] == Beam((1, 3), -1.0, -0.5)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"beams": 0}, "beams: is 0; must be 1 to 10 with 1 end tokens"),
        ({"beams": 11}, "beams: is 11; must be 1 to 10 with 1 end tokens"),
        ({"beams": 7, "end_token_ids": frozenset({1, 2})}, "beams: is 7; must be 1 to 6 with 2 end tokens"),
        ({"max_tokens": 0}, "max_tokens: is 0"),
        ({"length_penalty": math.nan}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
    ],
)
def test_parameters_are_checked(wrong: dict[str, Any], text: str) -> None:
    early_stopping: EarlyStopping = False
    good: dict[str, Any] = {
        "beams": 2,
        "max_tokens": 4,
        "length_penalty": 1.0,
        "early_stopping": early_stopping,
        "end_token_ids": frozenset({1}),
    }
    with pytest.raises(ValueError, match=text):
        BeamParams(**{**good, **wrong})
