"""Context length of a model by its configuration, as vLLM derives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Names of the length in the configurations of different models.
NAMES = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")


def context_length_of(config: Mapping[str, Any]) -> int | None:
    """Returns the tokens that a model can read and write together; None if its configuration does not say.

    Linear scaling of the rotary embedding multiplies the length, and YaRN the original one. Gemma 3's length contains
    its factor already.
    """
    length = next((int(config[name]) for name in NAMES if config.get(name)), None)
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if length is None or not isinstance(rope, Mapping) or str(config.get("model_type")).startswith("gemma3"):
        return length
    rope = rope.get("full_attention") or rope
    kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor")
    if kind not in ("linear", "yarn") or not isinstance(factor, int | float):
        return length
    original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
    return int((original or length) * factor)
