"""Files of a Hugging Face model folder: their completeness, and the defaults of generation.

This module does not need torch, so an incomplete download is detected before anything is loaded.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.model_source import ModelError, read_json

# Far above any real header (Llama-405B: 130 kB); a larger number means that these bytes are not a length.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Content of `generation_config.json`; None for fields that it lacks."""

    eos_token_ids: tuple[int, ...]
    temperature: float | None
    top_k: int | None
    top_p: float | None


def check_weights(folder: Path) -> None:
    """Raises `ModelError` if safetensors files are missing, empty or truncated."""
    index = read_json(folder / "model.safetensors.index.json")
    names = sorted(set(index.get("weight_map", {}).values())) or [path.name for path in folder.glob("*.safetensors")]
    if not names:
        raise ModelError(f"model folder {folder} has no weights (*.safetensors)")
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"model folder {folder} is not complete: {name} is missing")
        _check_safetensors(folder / name)


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """Reads the end-of-sequence ids and sampling of a model folder. The ids may be in config.json instead."""
    generation = read_json(folder / "generation_config.json")
    config = read_json(folder / "config.json")
    eos = generation.get("eos_token_id", config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id")))
    return GenerationDefaults(
        eos_token_ids=_as_ids(eos),
        temperature=generation.get("temperature"),
        top_k=generation.get("top_k"),
        top_p=generation.get("top_p"),
    )


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)


def _check_safetensors(path: Path) -> None:
    """Checks the format: length of the header (8 bytes, little endian), header (JSON), tensors one after the other."""
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise ModelError(f"weight file {path} is empty")
    with path.open("rb") as file:
        prefix = file.read(8)
        num_header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= num_header_bytes <= MAX_HEADER_BYTES:
            raise ModelError(f"weight file {path} is not a safetensors file")
        raw_header = file.read(num_header_bytes)
    if len(raw_header) < num_header_bytes:
        raise ModelError(f"weight file {path} is truncated inside its header")
    try:
        header = json.loads(raw_header)
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"weight file {path} has a damaged header") from error
    expected = 8 + num_header_bytes + max(ends, default=0)
    if num_bytes < expected:
        raise ModelError(f"weight file {path} is truncated: {num_bytes} bytes of {expected}")
