"""Predictions after every token of a prompt: equal by the native forward pass and by transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

from inflight.bench.engine.teacher_forcing import MAX_TOKENS_OF_STEP, paged_predictions, transformers_predictions
from inflight.common.model_source import ModelSource, resolve_model
from inflight.executor.model.loader import load_model
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.torch_threads import torch_threads

PROMPTS = [[5, 9, 3, 40, 41, 42, 43, 7], [1, 2], [90, 80, *range(60)], [3] * 17]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelSource]:
    with torch_threads(1):
        folder: Path = save_model(LlamaConfig(**sizes()), tmp_path_factory.mktemp("model"))
        yield resolve_model(str(folder))


@pytest.mark.parametrize("chunk_tokens", [1, 5, MAX_TOKENS_OF_STEP], ids=["one by one", "chunks", "whole"])
def test_paged_forward_predicts_what_transformers_does(source: ModelSource, chunk_tokens: int) -> None:
    expected = transformers_predictions(source, PROMPTS)
    model = load_model(source, dtype_name="float32", device_name="cpu")

    found = paged_predictions(model, PROMPTS, chunk_tokens)

    assert len(found.top_ids) == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert found.top_ids == expected.top_ids
    assert found.top_gaps == pytest.approx(expected.top_gaps, abs=1e-4)
    assert found.log_probabilities == pytest.approx(expected.log_probabilities, abs=1e-4)
