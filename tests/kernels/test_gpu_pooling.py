"""Embeddings on a GPU, under Triton's interpreter, are those of sentence-transformers, alone and beside others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inflight.common.model_source import resolve_model
from inflight.executor.forward.gpu import GpuForward
from inflight.executor.gpu.runner import GpuRunner
from inflight.executor.model.loader import load_model
from tests.kernels.test_gpu_graphs import Captured
from tests.support.checkpoints.pooling_models import Oracle, write_embedding_model
from tests.unit.test_pooling import BLOCK_SIZE, LIMITS, NUM_BLOCKS, PROMPTS, TOKENS, generating, pooled, run

# Prompts in one chunk and in several.
NAMES = ("one", "block", "other")


@pytest.mark.parametrize(("mode", "has_graphs"), [("lasttoken", False), ("mean", False), ("mean", True)])
def test_embeddings_are_those_of_sentence_transformers(
    mode: str, has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a model whose steps of up to 16 tokens may be replayed
    monkeypatch.setattr("inflight.executor.gpu.runner.warm_up_lengths", lambda *_: [])
    folder = write_embedding_model(tmp_path / mode, mode)
    model = load_model(resolve_model(str(folder)), dtype_name="float32", backend_name="triton", device_name="cpu")
    assert isinstance(model.forward, GpuForward)
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    limits = replace(LIMITS, max_num_sequences=4, max_num_tokens=32)
    captured = Captured({})
    options: dict[str, Any] = (
        {"capture_graphs": captured, "max_graph_tokens": 16} if has_graphs else {"uses_graphs": False}
    )
    runner = GpuRunner(model.forward.decoder, model.kv, limits, BLOCK_SIZE, **options)
    if has_graphs:
        runner.prepare()
        captured.replays.clear()
    # When prompts are embedded beside one that generates
    crowd = [generating("beside", TOKENS[300:307], 6), *(pooled(model, name, PROMPTS[name]) for name in NAMES)]
    results = run(model, [crowd], limits, runner)
    # Then they are those of the oracle
    assert any(not bucket.is_decodes for bucket in captured.replays) == has_graphs
    oracle = Oracle(folder)
    for name in NAMES:
        assert (results[name] - oracle.embedding(PROMPTS[name], mode)).abs().max() <= 1e-5
