"""An executor's rates: means over ten seconds, and zero once it has stalled for that long."""

from __future__ import annotations

import pytest

from inflight.executor.serving.report import WINDOW_S, Rates, RecentRates
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run_steps(rates: RecentRates, clock: Clock, num_steps: int, *, tokens_each: int, interval_s: float) -> None:
    for step in range(1, num_steps + 1):
        clock.now_s += interval_s
        rates.observe(step, step * tokens_each)


def test_rates_are_means_of_the_last_ten_seconds(clock: Clock) -> None:
    rates = RecentRates(clock)
    run_steps(rates, clock, 1000, tokens_each=16, interval_s=0.05)
    assert rates.per_second().steps_per_s == pytest.approx(20, rel=0.02)
    assert rates.per_second().output_tokens_per_s == pytest.approx(320, rel=0.02)


def test_steps_and_tokens_fall_to_zero_together_when_nothing_runs(clock: Clock) -> None:
    # Given an executor that was busy, and has nothing to do now: it makes no step, so nothing is noted
    rates = RecentRates(clock)
    run_steps(rates, clock, 400, tokens_each=16, interval_s=0.05)

    clock.now_s += WINDOW_S / 2
    half = rates.per_second()
    clock.now_s += WINDOW_S / 2
    idle = rates.per_second()

    assert half.output_tokens_per_s == pytest.approx(160, rel=0.05)
    assert half.output_tokens_per_s / half.steps_per_s == pytest.approx(16)
    assert idle == Rates(0.0, 0.0)


def test_executor_that_never_worked_has_no_rates(clock: Clock) -> None:
    rates = RecentRates(clock)
    clock.now_s += 1000
    assert rates.per_second() == Rates(0.0, 0.0)


def test_few_readings_are_kept_however_quick_the_steps_are(clock: Clock) -> None:
    rates = RecentRates(clock)
    run_steps(rates, clock, 50_000, tokens_each=1, interval_s=0.001)
    assert len(rates._readings) <= 2 * WINDOW_S / 0.1
    assert rates.per_second().steps_per_s == pytest.approx(1000, rel=0.02)
