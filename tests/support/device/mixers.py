"""Sizes of what a recurrent layer reads, by its shape."""

from __future__ import annotations

from inflight.common.model_files.recurrent import MixerShape


def vector_sizes(shape: MixerShape) -> dict[str, int]:
    """Returns the numbers of the `vectors` of `MixerWeights`, by name."""
    if not shape.num_heads:
        return {"bias": shape.channels}
    of_heads = {"rates": shape.num_heads, "gate_bias": shape.num_heads}
    if shape.corrects:
        return of_heads | {"norm": shape.value_dim}
    return {"bias": shape.channels} | of_heads | {"norm": shape.depth, "skips": shape.num_heads, "limits": 2}


def num_columns(shape: MixerShape) -> int:
    """Returns the numbers of a position that the first projection yields."""
    if not shape.num_heads:
        return 3 * shape.channels
    return shape.channels + shape.depth + (2 if shape.corrects else 1) * shape.num_heads
