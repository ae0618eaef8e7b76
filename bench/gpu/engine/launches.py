"""Launches of a step as plain values."""

from __future__ import annotations

from dataclasses import dataclass

# Matrix products, by the type of what they multiply.
PRODUCT = "product"
FP8_PRODUCT = "product in FP8"


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its programs, the bytes that it loads and stores, and the operations of a matrix product."""

    kernel: str
    num_programs: int
    bytes_loaded: int
    bytes_stored: int
    operations: int
