"""What an engine's totals before and after a run say of the run."""

from __future__ import annotations

import pytest

from bench.device_times import DeviceTimes, added_up, device_figures


def test_share_and_exposed_time_are_of_the_run_alone() -> None:
    before, after = DeviceTimes(100, 5.0, 50.0), DeviceTimes(300, 14.0, 60.0)
    figures = device_figures(before, after)
    assert figures["device_busy_fraction"] == pytest.approx(0.9)
    assert figures["exposed_host_ms"] == pytest.approx(5.0)


def test_engine_that_measures_nothing_or_did_nothing_has_no_figures() -> None:
    assert device_figures(DeviceTimes(1), DeviceTimes(5)) == {}
    assert device_figures(DeviceTimes(3, 1.0, 1.0), DeviceTimes(3, 1.0, 1.0)) == {}


def test_totals_of_several_engines_count_only_where_all_measure() -> None:
    assert added_up([DeviceTimes(1, 2.0, 3.0), DeviceTimes(4, 5.0, 6.0)]) == DeviceTimes(5, 7.0, 9.0)
    assert added_up([DeviceTimes(1, 2.0, 3.0), DeviceTimes(4)]) == DeviceTimes(5)
    assert added_up([]) == DeviceTimes()
