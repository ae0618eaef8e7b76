"""Axes of charts: where a value lies, and which values they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.report.scale import Scale, even_scale, log_scale


def test_even_axis_names_round_values_from_zero() -> None:
    assert even_scale(93.0).ticks() == [0, 20, 40, 60, 80]
    assert even_scale(0.0).ticks(3)[0] == 0


def test_axis_by_powers_of_ten_puts_equal_factors_at_equal_distances() -> None:
    scale = Scale(1.0, 100.0, is_log=True)
    assert (scale.at(1.0), scale.at(10.0), scale.at(100.0)) == pytest.approx((0.0, 0.5, 1.0))
    assert scale.ticks(8) == pytest.approx([1, 2, 5, 10, 20, 50, 100])


def test_what_lies_outside_sits_on_the_edge() -> None:
    assert (even_scale(10.0).at(-5.0), even_scale(10.0).at(50.0)) == (0.0, 1.0)


@given(st.lists(st.floats(0.0, 1e9), min_size=1), st.booleans())
def test_every_value_and_tick_lies_on_the_axis(values: list[float], is_log: bool) -> None:
    scale = log_scale(values, 0.1) if is_log else even_scale(max(values))
    assert all(0.0 <= scale.at(value) <= 1.0 for value in values)
    ticks = scale.ticks()
    assert len(ticks) <= 6
    assert all(scale.low * 0.999 <= tick <= scale.high * 1.001 for tick in ticks)
