"""One name for several models: which of them serves whom.

Pure. The choice depends on nothing but the key and the weights, so every router chooses the same, and a session stays
with its model. Weighted rendezvous hashing: each model draws a number for the key and the best one has it; a model that
is added takes its share evenly from the others, and nobody else moves.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variant:
    """A model that a name may stand for. `weight` is relative to those of the others."""

    model: str
    weight: float


def choose_variant(variants: Sequence[Variant], key: str) -> Variant:
    """The variant that serves the key."""
    return min(variants, key=lambda variant: _draw(variant.model, key) / variant.weight)


def share_of(variant: Variant, variants: Sequence[Variant]) -> float:
    """The part of all keys that a variant serves, 0 to 1."""
    return variant.weight / sum(one.weight for one in variants)


def _draw(model: str, key: str) -> float:
    """An exponentially distributed number: the least of several, each divided by its weight, is won in proportion."""
    digest = hashlib.blake2b(f"{model}\0{key}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest) + 1) / 2**64)
