"""Wait estimates in plain Python, by the formulas of `estimates.lua`. Part of `ledger_model`."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf

from inflight.router.ledger.types import ExecutorReport

MEMORY_MS, FULL_MS, LEAST_MS = 10_000, 5_000, 1_000
MIN_OUTPUTS = 4
MARGIN = 1.2
CORRECTION_STEP = 0.05


@dataclass(slots=True)
class Estimates:
    """What was measured: tokens placed per millisecond while a request waited, how true estimates were, speeds."""

    moving_ms: float = 0.0
    moved_tokens: float = 0.0
    moved_at_ms: int | None = None
    num_estimates: int = 0
    error: float = 0.0
    correction: float = 1.0
    step_ms: float | None = None
    prefill_speed: float | None = None
    output_speed: float | None = None
    standby: float = 0.0
    num_outputs: int = 0

    def reported_speed(self, prompt: int, reserved: int, share: float, num_executors: int) -> float | None:
        """What executors say of requests of so many tokens, of whose reserved output this share is used."""
        if self.output_speed is None or self.num_outputs < MIN_OUTPUTS:
            return None
        busy_ms = max(reserved * share / self.output_speed, prompt / (self.prefill_speed or inf))
        return (prompt + reserved) / busy_ms * num_executors if busy_ms else None

    def speed(self, reported: float | None) -> float | None:
        """How fast the queue moves; None where nothing was measured."""
        missing_ms = FULL_MS - self.moving_ms
        if reported and missing_ms > 0:
            return (self.moved_tokens + reported * missing_ms) / FULL_MS
        return self.moved_tokens / self.moving_ms if self.moving_ms >= LEAST_MS and self.moved_tokens else None

    def prefill_ms(self, tokens: int) -> float:
        """From the seat to the first token; 0 where nothing was measured."""
        return 0.0 if self.prefill_speed is None else tokens / self.prefill_speed + (self.step_ms or 0)

    def observe_speeds(self, report: ExecutorReport, *, is_any_waiting: bool) -> None:
        """Takes in what an executor reports; 0 is not measured."""
        self.step_ms = _smoothed(self.step_ms, report.step_ms, 0.05)
        self.prefill_speed = _smoothed(self.prefill_speed, report.prefill_tokens_per_s / 1000, 0.05)
        if is_any_waiting:
            self.output_speed = _smoothed(self.output_speed, report.output_tokens_per_s / 1000, 0.3)
            self.standby += 0.3 * (report.num_standby - self.standby)

    def observe_placement(self, now_ms: int, tokens: int) -> None:
        """Records that a waiting request was placed."""
        if self.moved_at_ms is not None:
            kept_share = exp((self.moved_at_ms - now_ms) / MEMORY_MS)
            self.moving_ms = kept_share * self.moving_ms + (1 - kept_share) * MEMORY_MS
            self.moved_tokens = kept_share * self.moved_tokens + tokens
        self.moved_at_ms = now_ms

    def observe_wait(self, actual_ms: int, estimate: int, correction: float) -> float:
        """An estimate made with this correction has come true, or not. Returns what it should have been."""
        weight = max(0.01, 1 / (self.num_estimates + 1))
        ratio = max(0.1, min(10, (actual_ms + 50) / (estimate / correction + 50)))
        self.num_estimates += 1
        self.error += weight * (abs(actual_ms - estimate) / max(actual_ms, 100) - self.error)
        self.correction += max(weight, CORRECTION_STEP) * (ratio - self.correction)
        return ratio

    def stop_measuring(self) -> None:
        """Stops measuring how fast the queue moves: it is empty."""
        self.moved_at_ms = None


def _smoothed(old: float | None, new: float, weight: float) -> float | None:
    if new <= 0:
        return old
    return new if old is None else (1 - weight) * old + weight * new
