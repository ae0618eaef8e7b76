"""The sizes of a decoder layer's projections, and of the numbers in them."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_NUMBER = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Lengths of the rows between the projections of a layer: `attention` of all heads, `kv` of all KV heads."""

    hidden: int
    attention: int
    kv: int
    inner: int
