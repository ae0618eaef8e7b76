"""Recent latencies of a model: windows, percentiles, and what counts."""

from __future__ import annotations

import pytest

from inflight.common.errors import Reason
from inflight.router.telemetry.events import RequestEnd, RequestFacts
from inflight.router.telemetry.latencies import Latencies, RollingCount, RollingTimes
from tests.support.clock import Clock


def test_a_count_forgets_what_is_older_than_its_window() -> None:
    count = RollingCount(10)
    for second in (0, 5, 5, 9):
        count.add(second, 2)
    assert count.total(9) == 8
    assert count.total(10) == 6
    assert count.total(15) == 2
    assert count.total(100) == 0


def test_percentiles_are_within_one_percent_and_of_the_last_minute() -> None:
    times = RollingTimes()
    assert times.percentiles(0, (0.5,)) is None
    for ms in range(1, 1001):
        times.add(ms / 100, float(ms))
    median, high, least = times.percentiles(10, (0.5, 0.99, 0.0001)) or []
    assert median == pytest.approx(500, rel=0.011)
    assert high == pytest.approx(990, rel=0.011)
    assert least == pytest.approx(1, rel=0.011)
    # What came in the first six seconds is forgotten.
    assert (times.percentiles(65, (0.0001,)) or [0])[0] == pytest.approx(600, rel=0.011)
    assert times.percentiles(200, (0.5,)) is None


def test_times_of_nothing_are_told_too() -> None:
    times = RollingTimes()
    times.add(0, 0.0)
    assert (times.percentiles(0, (0.5,)) or [1])[0] < 0.02


def test_what_a_models_requests_tell_is_what_it_says() -> None:
    clock = Clock()
    latencies = Latencies(["m", "other"], clock)
    assert not latencies.by_model["m"].to_proto("m").HasField("ttft_p50_ms")

    recorder = latencies.follow(RequestFacts(model="m"))
    recorder.first_sent(0.2)
    recorder.sent(1, None)
    recorder.sent(4, 0.1)
    recorder.ended(RequestEnd("length", False, 1.0, 5, 0.8))
    latencies.refused("m", "standard", Reason.QUEUE_FULL)
    latencies.refused("", "standard", Reason.UNKNOWN_MODEL)

    latency = latencies.by_model["m"].to_proto("m")
    assert (latency.model, latency.num_ended, latency.num_refused) == ("m", 1, 1)
    assert latency.output_tokens_per_s == pytest.approx(0.5)
    assert latency.ttft_p50_ms == latency.ttft_p99_ms == pytest.approx(200, rel=0.011)
    assert latency.inter_token_p50_ms == pytest.approx(25, rel=0.011)
    clock.now_s += 61
    latency = latencies.by_model["m"].to_proto("m")
    assert (latency.num_ended, latency.num_refused, latency.output_tokens_per_s) == (0, 0, 0)
    assert not latency.HasField("ttft_p50_ms")
    assert latencies.by_model["other"].to_proto("other").num_ended == 0
