"""The reserve quantile, which follows the cost of overcommitting."""

from __future__ import annotations

import pytest

from inflight.executor.scheduler.max_utilization import MIN_QUANTILE, ReserveController, ReserveRules

RULES = ReserveRules(window_tokens=1000, hold_tokens=2000, max_hold_tokens=8000)


class Tokens:
    """Feeds a controller windows with a share of recomputed tokens."""

    def __init__(self) -> None:
        self.controller = ReserveController(RULES)
        self._computed = self._recomputed = 0

    def window(self, share: float, count: int = 1) -> float:
        """The quantile after so many windows."""
        for _ in range(count):
            self._computed += 1000
            self._recomputed += int(1000 * share)
            self.controller.observe(self._computed, self._recomputed)
        return self.controller.quantile


def test_quantile_starts_high_and_sinks_slowly_to_a_floor_while_nothing_is_lost() -> None:
    tokens = Tokens()

    assert tokens.controller.quantile == 0.9
    assert tokens.window(0.0) == pytest.approx(0.89)
    assert tokens.window(0.0, 100) == MIN_QUANTILE


def test_quantile_stays_near_the_target_and_rises_above_it() -> None:
    tokens = Tokens()

    assert tokens.window(0.015) == 0.9
    assert tokens.window(0.05) == pytest.approx(0.95)
    assert tokens.window(0.05) == pytest.approx(0.975)


def test_nothing_is_decided_within_a_window() -> None:
    controller = ReserveController(RULES)

    controller.observe(999, 500)

    assert controller.quantile == 0.9


def test_when_it_hurts_everything_is_reserved_for_a_while_and_twice_as_long_the_next_time() -> None:
    tokens = Tokens()

    assert tokens.window(0.2) == 1.0
    assert tokens.window(0.2) == 1.0, "what is lost now was promised before"
    assert tokens.window(0.0) == pytest.approx(0.95)
    assert tokens.window(0.2) == 1.0
    assert tokens.window(0.0, 3) == 1.0
    assert tokens.window(0.0) == pytest.approx(0.975)


def test_hold_is_bounded_and_forgotten_in_good_times() -> None:
    tokens = Tokens()
    for _ in range(5):
        tokens.window(0.2)
        while tokens.controller.is_holding:
            tokens.window(0.0)
    tokens.window(0.2)
    assert tokens.window(0.0, 7) == 1.0
    assert tokens.window(0.0) < 1.0

    tokens.window(0.0, 10)
    tokens.window(0.2)
    assert tokens.window(0.0, 2) < 1.0
