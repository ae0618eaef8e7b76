"""The warning of a collapse of reuse, and what reports say of recurrent state."""

from __future__ import annotations

import pytest

from inflight.executor.scheduler.states import StateCounts
from inflight.executor.serving.report import states_proto
from inflight.executor.serving.state_reuse import StateReuse

COUNTS = StateCounts(9, 2, 40, 30, 50, 5, 7, 1000, 640, (b"12345678",))


class Watch:
    """A watch with a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.reuse = StateReuse(lambda: self.now_s)
        self.counts = COUNTS
        self.reuse.observe(COUNTS)

    def observe(self, kv_tokens: int, usable_tokens: int, after_s: float) -> None:
        self.now_s += after_s
        counts = self.counts
        self.counts = counts._replace(
            kv_tokens=counts.kv_tokens + kv_tokens, usable_tokens=counts.usable_tokens + usable_tokens, dropped=70
        )
        self.reuse.observe(self.counts)


def test_collapse_of_reuse_is_logged_once_in_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    watch.observe(12_000, 1000, after_s=61)
    assert "of 12000 prompt tokens with KV in the cache only 1000 could be used" in caplog.text
    assert "there are 40 checkpoints, and 63 were dropped" in caplog.text
    watch.observe(12_000, 1000, after_s=30)
    assert len(caplog.records) == 1
    watch.observe(12_000, 1000, after_s=31)
    assert len(caplog.records) == 2


def test_usual_reuse_little_traffic_and_short_times_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    watch.observe(12_000, 11_000, after_s=61)
    watch.observe(9_000, 0, after_s=61)
    watch.observe(9_000, 18_000, after_s=61)
    watch.observe(50_000, 0, after_s=59)
    assert not caplog.records


def test_reports_have_the_counts() -> None:
    states = states_proto(COUNTS)
    assert [value for _, value in states.ListFields()] == list(COUNTS[:-1])
