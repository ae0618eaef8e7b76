"""The choice of a model for a name that stands for several.

Pure. The choice depends only on the key and the weights, so every router makes the same choice and a session stays with
its model. The method is weighted rendezvous hashing: each model draws a number for the key, and the best one wins. An
added model takes its share evenly from the others; no other key changes its model.
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
    """Returns the variant that serves the key."""
    return min(variants, key=lambda variant: _draw(variant.model, key) / variant.weight)


def share_of(variant: Variant, variants: Sequence[Variant]) -> float:
    """Returns the part of all keys that a variant serves, 0 to 1."""
    return variant.weight / sum(one.weight for one in variants)


def _draw(model: str, key: str) -> float:
    """Returns an exponentially distributed number. The least of several, each divided by its weight, wins in proportion
    to the weights."""
    digest = hashlib.blake2b(f"{model}\0{key}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest) + 1) / 2**64)
