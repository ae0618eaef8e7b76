"""Context length by the configuration of a model, and the setting that shortens it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import LlamaConfig

from inflight.common.model_files.context_length import context_length_of
from inflight.common.model_source import ModelError, resolve_model
from inflight.executor.model.loader import load_model
from inflight.executor.model.model import PagedModel
from inflight.tools.sizing.model_shape import read_model_shape
from tests.support.checkpoints.quantized_checkpoints import save_gguf
from tests.support.checkpoints.tiny_models import save_model, sizes

KINDS: Any = gguf.GGMLQuantizationType
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


def load(folder: Path, **options: Any) -> PagedModel:
    options = {"dtype_name": "float32", "backend_name": "reference", "device_name": "cpu"} | options
    return load_model(resolve_model(str(folder)), **options)


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"n_positions": 100}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4.0}}, 400),
        ({"max_position_embeddings": 100, "rope_parameters": {"rope_type": "linear", "factor": 2.5}}, 250),
        # Qwen 2.5 and Qwen 3 as their cards describe it: the length in the file is not that of the scaled model.
        (
            {"max_position_embeddings": 40960, "rope_scaling": YARN | {"original_max_position_embeddings": 32768}},
            131072,
        ),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 400),
        # Those whose length in the file is that of the scaled model.
        ({"max_position_embeddings": 256, "rope_scaling": YARN}, 256),
        ({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "longrope", "factor": 8.0}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "su", "factor": 8.0}}, 100),
        ({"model_type": "gemma3_text", "max_position_embeddings": 100, "rope_scaling": LINEAR}, 100),
        ({"max_position_embeddings": 100, "rope_parameters": {"full_attention": YARN, "sliding_attention": {}}}, 256),
        ({}, None),
    ],
)
def test_scaling_lengthens_the_context(fields: dict[str, Any], length: int | None) -> None:
    assert context_length_of(fields) == length


@pytest.mark.parametrize(("rope", "length"), [(YARN, 256), (LINEAR, 160)], ids=["yarn", "linear"])
def test_executor_and_sizes_have_the_scaled_length(rope: dict[str, Any], length: int, tmp_path: Path) -> None:
    config = LlamaConfig(**sizes(max_position_embeddings=80, rope_parameters=rope))
    folder = save_model(config, tmp_path / "tiny")
    assert load(folder).description.context_length == length
    assert load(folder, max_sequence_length=length).description.context_length == length
    assert read_model_shape(str(folder)).context_length == length
    # And with the fields as older programs wrote them
    fields = json.loads((folder / "config.json").read_text())
    fields["rope_scaling"] = {"type" if name == "rope_type" else name: value for name, value in rope.items()}
    del fields["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(fields))
    assert load(folder).description.context_length == length
    assert read_model_shape(str(folder)).context_length == length


def test_sizes_of_a_gguf_file_have_the_scaled_length(tmp_path: Path) -> None:
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    path = save_gguf(tmp_path / "tiny.gguf", "llama", [KINDS["Q8_0"]], keys=keys)
    assert read_model_shape(str(path)).context_length == 512


def test_longer_sequences_than_the_context_are_refused_and_not_cut(tmp_path: Path) -> None:
    folder = save_model(LlamaConfig(**sizes()), tmp_path / "tiny")
    with pytest.raises(ModelError, match=r"^max_sequence_length=257 is above 256, the context length"):
        load(folder, max_sequence_length=257)
