"""Wait estimates in plain Python, by the formulas of `estimates.lua`. Part of `ledger_model`."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

WINDOW_MS = 1000
MARGIN = 1.2


@dataclass(slots=True)
class Estimates:
    """What was measured: tokens placed per millisecond while a request waited, how true estimates were, speeds."""

    speed: float | None = None
    window_since: int | None = None
    window_tokens: int = 0
    num_estimates: int = 0
    error: float = 0.0
    correction: float = 1.0
    step_ms: float | None = None
    prefill_speed: float | None = None

    def wait_ms(self, num_ahead: int, num_waiting: int, tokens_waiting: int) -> int | None:
        """Until so many were placed; None where nothing was measured."""
        if self.speed is None or num_waiting == 0:
            return None
        return ceil((num_ahead + 1) * tokens_waiting / num_waiting / self.speed * self.correction)

    def prefill_ms(self, tokens: int) -> float:
        """From the seat to the first token; 0 where nothing was measured."""
        return 0.0 if self.prefill_speed is None else tokens / self.prefill_speed + (self.step_ms or 0)

    def observe_speeds(self, step_ms: float, tokens_per_s: float) -> None:
        """Takes in what an executor reports; 0 is not measured."""
        self.step_ms = _smoothed(self.step_ms, step_ms, 0.05)
        self.prefill_speed = _smoothed(self.prefill_speed, tokens_per_s / 1000, 0.05)

    def observe_placement(self, now_ms: int, tokens: int) -> None:
        """Records that a waiting request was placed."""
        if self.window_since is None:
            self.window_since = now_ms
        self.window_tokens += tokens
        window_ms = now_ms - self.window_since
        if window_ms >= WINDOW_MS:
            self.speed = _smoothed(self.speed, self.window_tokens / window_ms, 0.3)
            self.window_since, self.window_tokens = now_ms, 0

    def observe_wait(self, actual_ms: int, estimate: int, correction: float) -> None:
        """An estimate made with this correction has come true, or not."""
        weight = max(0.01, 1 / (self.num_estimates + 1))
        ratio = max(0.1, min(10, (actual_ms + 50) / (estimate / correction + 50)))
        self.num_estimates += 1
        self.error += weight * (abs(actual_ms - estimate) / max(actual_ms, 100) - self.error)
        self.correction += max(weight, 0.05) * (ratio - self.correction)

    def end_window(self) -> None:
        """Stops measuring how fast the queue moves: it is empty."""
        self.window_since, self.window_tokens = None, 0


def _smoothed(old: float | None, new: float, weight: float) -> float | None:
    if new <= 0:
        return old
    return new if old is None else (1 - weight) * old + weight * new
