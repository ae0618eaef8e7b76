"""The model of the tests in this folder that need no special one."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.tiny_models import save_model, sizes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama model."""
    return save_model(LlamaConfig(**sizes()), tmp_path_factory.mktemp("model") / "tiny")
