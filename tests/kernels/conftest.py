"""What the tests of this folder share: an interpreter that repeats little, one thread, few splits, and tiny models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

from inflight.executor.kernels import tiling
from tests.kernels.interpreter import quick_interpreter
from tests.support.checkpoints.tiny_models import save_model, sizes
from tests.support.device.torch_threads import torch_threads


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with quick_interpreter():
        yield


@pytest.fixture(scope="module", autouse=True)
def few_splits() -> Iterator[None]:
    """Two programs share the keys of a decode. A GPU has 32, of which the short contexts here leave 31 without a key,
    and the interpreter takes as long for those. A module that compares attention itself overrides this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiling, "MAX_SPLITS", 2)
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama model with one layer."""
    return save_model(LlamaConfig(**sizes(num_hidden_layers=1)), tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def two_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one with two layers."""
    return save_model(LlamaConfig(**sizes()), tmp_path_factory.mktemp("model") / "tiny")
