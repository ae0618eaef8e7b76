"""Files of a Hugging Face model folder: their completeness, and the defaults of generation.

This module does not need torch, so an incomplete download is detected before anything is loaded.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.common.model_source import ModelError, read_json
from inflight.common.parameters import LARGEST_INTEGERS, SAMPLING_NUMBERS, Parameter
from inflight.common.protocol import MAX_BAD_WORD_IDS, MAX_BAD_WORD_SEQUENCES

log = logging.getLogger(__name__)

# Far above any real header (Llama-405B: 130 kB); a larger number means that these bytes are not a length.
MAX_HEADER_BYTES = 100_000_000


# sentence-transformers' list of what is computed behind the network.
MODULES_FILE = "modules.json"
# The layer that a checkpoint for sequence classification has in place of an output layer.
CLASSIFIER_WEIGHTS = ("score.weight", "score.bias")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Tokens that end an output, and content of `generation_config.json`: `sampling` has the numbers that it sets."""

    eos_token_ids: tuple[int, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


# Fields that change the output of transformers and are not implemented, with the values that change nothing.
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "num_beams": (1,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
}


def check_weights(folder: Path) -> None:
    """Raises `ModelError` if safetensors files are missing, empty or truncated."""
    names = weight_files(folder)
    if not names:
        raise ModelError(f"model folder {folder} has no weights (*.safetensors)")
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"model folder {folder} is not complete: {name} is missing")
        _check_safetensors(folder / name)


def num_weights(folder: Path) -> int:
    """Returns the numbers in the weight files of a folder, by their headers."""
    headers = [_header(folder / name)[0] for name in weight_files(folder)]
    return sum(math.prod(tensor["shape"]) for header in headers for tensor in header.values())


def weight_files(folder: Path) -> list[str]:
    """Returns the names of the safetensors files of a model folder. Files beside model.safetensors are those of an
    adapter, or the same weights in another form."""
    if (folder / "model.safetensors").is_file():
        return ["model.safetensors"]
    index = read_json(folder / "model.safetensors.index.json")
    return sorted(set(index.get("weight_map", {}).values())) or sorted(
        path.name for path in folder.glob("*.safetensors")
    )


def is_classifier(folder: Path) -> bool:
    """Returns whether a model folder is a checkpoint for sequence classification."""
    names = read_json(folder / "config.json").get("architectures") or [""]
    return str(names[0]).endswith("ForSequenceClassification")


def may_lack_head(folder: Path) -> bool:
    """Returns whether the model may have no output layer, because it does not generate."""
    return is_classifier(folder) or (folder / MODULES_FILE).is_file()


def read_generation_defaults(folder: Path, eos_token_ids: tuple[int, ...]) -> GenerationDefaults:
    """Reads the sampling of a model folder. Raises `ModelError` for a value out of range."""
    generation = read_json(folder / "generation_config.json")
    for name, neutral in _WITHOUT_EFFECT.items():
        if generation.get(name) not in (None, *neutral):
            log.warning("generation_config.json: %s has no effect: it is not implemented", name)
    return GenerationDefaults(
        eos_token_ids=eos_token_ids,
        bad_word_ids=_bad_word_ids(generation.get("bad_words_ids"), eos_token_ids),
        sampling={
            one.name: _number(one, generation[one.name])
            for one in SAMPLING_NUMBERS
            if one.in_generation_config and generation.get(one.name) is not None
        },
    )


def _number(parameter: Parameter, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    largest = LARGEST_INTEGERS.get(parameter.kind)
    is_right = is_number and parameter.allows(value) and (largest is None or (value == int(value) and value <= largest))
    if not is_right:
        raise ModelError(f"generation_config.json: {parameter.name} is {value!r}; must be {parameter.rule}")
    return float(value) if largest is None else int(value)


def _bad_word_ids(sequences: Any, eos_token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the sequences without those that are an end-of-sequence id, which transformers leaves out, too."""
    try:
        found = tuple(tuple(int(token_id) for token_id in one) for one in sequences or ())
    except (TypeError, ValueError):
        raise ModelError("generation_config.json: bad_words_ids must be a list of lists of token ids") from None
    kept = tuple(one for one in found if one and not (len(one) == 1 and one[0] in eos_token_ids))
    num_ids = sum(map(len, kept))
    if len(kept) > MAX_BAD_WORD_SEQUENCES or num_ids > MAX_BAD_WORD_IDS:
        raise ModelError(
            f"generation_config.json: bad_words_ids has {len(kept)} sequences of {num_ids} ids; at most "
            f"{MAX_BAD_WORD_SEQUENCES} sequences of {MAX_BAD_WORD_IDS} ids are allowed"
        )
    return kept


def _check_safetensors(path: Path) -> None:
    """Checks that a file has all tensors of its header, one after the other."""
    header, num_header_bytes = _header(path)
    try:
        ends = [tensor["data_offsets"][1] for tensor in header.values()]
    except (KeyError, TypeError) as error:
        raise ModelError(f"weight file {path} has a damaged header") from error
    num_bytes, expected = path.stat().st_size, num_header_bytes + max(ends, default=0)
    if num_bytes < expected:
        raise ModelError(f"weight file {path} is truncated: {num_bytes} bytes of {expected}")


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the tensors of a safetensors file, and where they begin. The file has the length of its header (8 bytes,
    little endian), the header (JSON), and tensors."""
    if path.stat().st_size == 0:
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
        tensors = {name: tensor for name, tensor in json.loads(raw_header).items() if name != "__metadata__"}
    except (ValueError, AttributeError) as error:
        raise ModelError(f"weight file {path} has a damaged header") from error
    return tensors, 8 + num_header_bytes
