"""Steps and output tokens per second over the last ten seconds. An engine that stands still comes down to zero."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 10.0
# Readings are kept this far apart: so much the window may be off.
GAP_S = 0.1


@dataclass(frozen=True, slots=True)
class Rates:
    """Means over the window."""

    steps_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    num_steps: int
    num_output_tokens: int


class RecentRates:
    """Takes in counters that only grow; knows how much they grew within the window."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The first is the newest from before the window.
        self._readings: deque[_Reading] = deque((_Reading(clock(), 0, 0),))

    def note(self, num_steps: int, num_output_tokens: int) -> None:
        """Takes in the counters as they are now."""
        now_s = self._clock()
        readings = self._readings
        if len(readings) > 1 and now_s - readings[-2].at_s < GAP_S:
            readings.pop()
        readings.append(_Reading(now_s, num_steps, num_output_tokens))
        self._forget(now_s)

    def per_second(self) -> Rates:
        """The rates of now."""
        self._forget(self._clock())
        first, last = self._readings[0], self._readings[-1]
        return Rates(
            (last.num_steps - first.num_steps) / WINDOW_S,
            (last.num_output_tokens - first.num_output_tokens) / WINDOW_S,
        )

    def _forget(self, now_s: float) -> None:
        while len(self._readings) > 1 and self._readings[1].at_s <= now_s - WINDOW_S:
            self._readings.popleft()
