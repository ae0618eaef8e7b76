"""Launches of a step as plain values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel with its programs, the bytes that it loads and stores, and the operations of a matrix product."""

    kernel: str
    num_programs: int
    bytes_loaded: int
    bytes_stored: int
    operations: int
