"""Penalties and bad words through the whole stack give what `transformers` gives, as do the model's own defaults."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from inflight import AsyncClient
from inflight.bench.fleet.tiny_model import write_tiny_model
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.stack.conftest import EXECUTOR_ARGS
from tests.support.device.greedy import Reference, assert_same, generate_alone

NUM_TOKENS = 40
PROMPT = [7, 8, 9, 7, 8]
END = 256
DEFAULTS: dict[str, Any] = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[40], [41, 42]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with defaults of its own."""
    folder = write_tiny_model(tmp_path_factory.mktemp("model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END, **DEFAULTS}))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    options = StackOptions(
        model=str(folder), executor_args=EXECUTOR_ARGS, run_dir=tmp_path_factory.mktemp("stack"), start_timeout_s=120
    )
    async with LocalStack(options) as running:
        yield running.router_addresses[0]


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def generated(model: PreTrainedModel, **options: Any) -> Reference:
    return generate_alone(model, PROMPT, NUM_TOKENS, **options)


async def answer(address: str, **options: Any) -> list[int]:
    options = {"ignore_eos": True, **options}
    async with AsyncClient(address) as client:
        completion = await client.complete(
            token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0, want_token_ids=True, **options
        )
    return list(completion.token_ids)


@pytest.mark.asyncio(loop_scope="module")
async def test_defaults_of_the_model_apply_as_in_transformers(address: str, reference: PreTrainedModel) -> None:
    ids = await answer(address)
    assert_same(ids, generated(reference))
    assert 40 not in ids


OFF = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("asked", "theirs"),
    [
        ({"bad_word_ids": [[END]]}, {"bad_words_ids": [[END]]}),
        ({"bad_word_ids": [[END]], "repetition_penalty": 1.0}, {"bad_words_ids": [[END]], "repetition_penalty": 1.0}),
        (
            {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_word_ids": [[5], [6, 7], [1, 2, 3]]},
            {**OFF, "bad_words_ids": [[5], [6, 7], [1, 2, 3]]},
        ),
        (
            {"repetition_penalty": 0.5, "no_repeat_ngram_size": 2, "bad_word_ids": [[END]]},
            {"repetition_penalty": 0.5, "no_repeat_ngram_size": 2, "bad_words_ids": [[END]]},
        ),
    ],
    ids=["bad words replaced", "no penalty", "bad words only", "encouraged repetition"],
)
async def test_values_of_a_request_replace_the_models(
    address: str, reference: PreTrainedModel, asked: dict[str, Any], theirs: dict[str, Any]
) -> None:
    ids = await answer(address, **asked)
    assert_same(ids, generated(reference, **theirs))


@pytest.mark.asyncio(loop_scope="module")
async def test_end_is_produced_behind_the_minimum_however_likely_it_is(
    address: str, reference: PreTrainedModel
) -> None:
    ids = await answer(address, ignore_eos=False, min_tokens=20, logit_bias={END: 100})
    assert_same(ids, generated(reference, min_new_tokens=20, eos_token_id=END, sequence_bias={(END,): 100.0}))
    assert (len(ids), ids.index(END)) == (21, 20)
