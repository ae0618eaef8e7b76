"""The GPU's runner swaps blocks in the order of its steps; without a GPU, by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

from common.model_source import resolve_model
from executor.gpu.runner import GpuRunner
from executor.model.model import PagedModel
from executor.model.runner import ModelRunner
from tests.evicted_prefixes import conversations
from tests.swapping import BLOCK_SIZE, LIMITS, NUM_BLOCKS, greedy_tokens
from tests.tiny_models import save_model, sizes
from tests.torch_threads import torch_threads


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(LlamaConfig(**sizes(num_hidden_layers=1)), tmp_path_factory.mktemp("model") / "tiny")


def load(folder: Path, backend_name: str) -> PagedModel:
    source = resolve_model(str(folder))
    model = PagedModel.load(source, dtype_name="float32", backend_name=backend_name, device_name="cpu")
    model.allocate_kv(NUM_BLOCKS, BLOCK_SIZE)
    return model


def test_sequence_goes_on_after_its_blocks_were_away(folder: Path) -> None:
    reference = ModelRunner(load(folder, "reference"), LIMITS, BLOCK_SIZE)
    undisturbed = greedy_tokens(reference, swap_after=None, num_ahead=0)
    model = load(folder, "triton")
    assert model.gpu_decoder is not None
    for num_ahead in (0, 1):
        runner = GpuRunner(model.gpu_decoder, model.kv, LIMITS, BLOCK_SIZE)
        assert greedy_tokens(runner, swap_after=6, num_ahead=num_ahead) == undisturbed


def test_prefix_that_was_evicted_comes_back_as_it_was(folder: Path) -> None:
    reference, model = load(folder, "reference"), load(folder, "triton")
    decoder = model.gpu_decoder
    assert decoder is not None
    computed, _ = conversations(lambda limits: ModelRunner(reference, limits, BLOCK_SIZE), num_host_blocks=0)
    copied, counts = conversations(lambda limits: GpuRunner(decoder, model.kv, limits, BLOCK_SIZE), num_host_blocks=12)

    assert copied == computed
    assert counts.restored_blocks >= 6
