"""A clock that stands still until a test moves it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """The time in seconds, for code that takes a function as its clock."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s
