"""The axes of charts: positions of values, and the values that are labelled. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

NICE_STEPS = (1, 2, 5)
# From here an axis names powers of ten alone.
MANY_POWERS = 1e4


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` to `high`, even or by powers of ten."""

    low: float
    high: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """0 at the low end, 1 at the high end; what lies outside sits on the edge."""
        held = min(max(value, self.low), self.high)
        if self.is_log:
            return math.log(held / self.low) / math.log(self.high / self.low)
        return (held - self.low) / (self.high - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values between the ends, not more than `most`."""
        values = _log_ticks(self.low, self.high) if self.is_log else _even_ticks(self.low, self.high, most)
        while len(values) > most:
            values = values[::2]
        return values


def log_scale(values: Iterable[float], least: float) -> Scale:
    """Returns an axis by powers of ten around positive values; what is below `least` sits on the edge."""
    positive = [max(value, least) for value in values]
    low, high = (min(positive), max(positive)) if positive else (least, least)
    return Scale(low / 1.1, high * 1.1, is_log=True)


def even_scale(high: float) -> Scale:
    """Returns an axis from 0."""
    return Scale(0.0, high if high > 0 else 1.0)


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    step = _nice_step((high - low) / max(1, most - 1))
    first = math.ceil(low / step)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _nice_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next((nice * power for nice in (*NICE_STEPS, 10) if nice * power >= least), 10 * power)


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = NICE_STEPS if high < MANY_POWERS * low else NICE_STEPS[:1]
    values = [nice * 10.0**power for power in powers for nice in steps]
    return [value for value in values if low <= value <= high]
