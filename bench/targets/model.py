"""The model of a local benchmark: a Hugging Face folder with weights, which most engines read, and its GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from inflight.common.model_source import ModelError, ModelSource, resolve_model


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. `gguf_file` is None where it is a folder with weights."""

    name: str
    folder: Path
    gguf_file: Path | None
    vocabulary_size: int


def local_model(model: str | None) -> LocalModel:
    """Finds the model, importing it first where it is a GGUF file.

    Raises:
        ModelError: it is not there or not whole.
    """
    source = resolve_model(model or "")
    folder = source.folder if source.gguf_file is None else _imported(source)
    return LocalModel(source.name, folder, source.gguf_file, _vocabulary_size(folder))


def _imported(source: ModelSource) -> Path:
    # Imported here: it takes torch, which this process needs for nothing else.
    from inflight.executor.checkpoint.gguf import import_gguf

    return import_gguf(source)


def _vocabulary_size(folder: Path) -> int:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model folder {folder} has no readable config.json: {error}") from None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise ModelError(f"{folder}/config.json has no vocab_size")
    return size
