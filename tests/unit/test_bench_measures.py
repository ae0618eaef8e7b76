"""The figures of a run, from times at the client, an engine's totals and /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inflight.bench.measures.processes import THIS_BENCH, CoreMeter, cpu_seconds, resident_bytes
from inflight.bench.measures.run import (
    DeviceTimes,
    Measures,
    Outcome,
    Run,
    SeatSample,
    Slo,
    TokenTimes,
    added_up,
    cost_per_million,
    device_figures,
    keeps,
    mean_seats,
    measure,
    percentile,
    ratio,
)


def seats(at_s: float, used: int) -> SeatSample:
    return SeatSample(
        at_s=at_s, num_executors=1, seats_total=8, seats_used=used, num_queued=0, blocks_used=used, num_steps=0
    )


def run_at(mode: str, number: int, output_tokens_per_s: float) -> Run:
    outcome = Outcome(0.0, 0.5, 1.0, int(output_tokens_per_s), ())
    return Run(mode, number, measure([outcome], [], None), (), ())


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0), (0.0, 1.0)])
def test_percentile_is_the_nearest_rank(fraction: float, expected: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], fraction) == expected


def test_percentile_of_nothing_is_unknown() -> None:
    assert percentile([], 0.5) is None


def test_figures_count_from_the_first_send_to_the_last_end() -> None:
    outcomes = [
        Outcome(sent_s=1.0, first_token_s=1.5, ended_s=3.0, output_tokens=30, gaps_ms=(10.0, 20.0)),
        Outcome(sent_s=2.0, first_token_s=4.0, ended_s=6.0, output_tokens=70, gaps_ms=(30.0,)),
    ]
    assert measure(outcomes, [seats(1.0, 4)], num_steps=50) == Measures(
        num_requests=2,
        num_failed=0,
        total_s=5.0,
        requests_per_min=24.0,
        output_tokens=100,
        output_tokens_per_s=20.0,
        ttft_p50_ms=500.0,
        ttft_p99_ms=2000.0,
        inter_token_p50_ms=20.0,
        inter_token_p99_ms=30.0,
        tokens_per_step=2.0,
        mean_seats=4.0,
        tokens_per_s_per_user=50.0,
    )


def test_failed_request_counts_as_failed_and_spoils_no_latency() -> None:
    failed = Outcome(sent_s=0.0, first_token_s=0.1, ended_s=1.0, output_tokens=3, gaps_ms=(9.0,), error="UNAVAILABLE")
    measures = measure([failed], [], None)
    assert (measures.num_requests, measures.num_failed, measures.requests_per_min) == (1, 1, 0.0)
    assert (measures.ttft_p50_ms, measures.inter_token_p50_ms, measures.tokens_per_step) == (None, None, None)


def test_seats_are_averaged_over_time_until_the_end() -> None:
    assert mean_seats([seats(0.0, 8), seats(1.0, 2), seats(9.0, 8)], until_s=3.0) == pytest.approx(4.0)
    assert mean_seats([], until_s=3.0) is None


def test_ratio_is_the_median_of_ratios_within_rounds() -> None:
    runs = [
        run_at("inflight", 1, 300.0),
        run_at("static", 1, 100.0),
        run_at("inflight", 2, 200.0),
        run_at("static", 2, 100.0),
        run_at("inflight", 3, 900.0),  # its partner is missing
    ]
    assert ratio(runs, "inflight", "static") == pytest.approx(2.5)
    assert ratio(runs, "inflight", "absent") is None


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo(ttft_ms=500), True),
        (Slo(ttft_ms=499), False),
        (Slo(inter_token_ms=20), True),
        (Slo(inter_token_ms=19), False),
        (Slo(ttft_ms=500, inter_token_ms=19), False),
        (Slo(), True),
    ],
)
def test_request_keeps_objectives_by_its_first_token_and_the_mean_of_its_gaps(slo: Slo, kept: bool) -> None:
    assert keeps(Outcome(1.0, 1.5, 2.0, 3, (10.0, 30.0)), slo) is kept


def test_request_without_a_token_keeps_nothing() -> None:
    assert not keeps(Outcome(0.0, None, 1.0, 0, ()), Slo(ttft_ms=1e9))


def test_goodput_counts_requests_that_kept_the_objectives_over_the_whole_time() -> None:
    outcomes = [
        Outcome(0.0, 0.1, 60.0, 1, ()),
        Outcome(0.0, 9.0, 60.0, 1, ()),
        Outcome(0.0, 0.1, 60.0, 1, (), "failed"),
    ]
    measures = measure(outcomes, [], None, Slo(ttft_ms=1000))
    assert measures.goodput_requests_per_min == pytest.approx(1.0)
    assert measures.slo_fraction == pytest.approx(1 / 3)
    assert measure(outcomes, [], None).goodput_requests_per_min is None


def test_cost_is_the_price_of_the_time_that_a_million_tokens_take() -> None:
    assert cost_per_million(3.6, 1000.0) == pytest.approx(1.0)
    assert cost_per_million(3.6, 0.0) is None


def test_tokens_that_come_together_count_as_coming_at_equal_distances() -> None:
    times = TokenTimes(1.0)
    for now_s, number in ((1.5, 2), (1.6, 0), (1.9, 4)):
        times.take(now_s, number)
    outcome = times.outcome(2.0)
    assert (outcome.first_token_s, outcome.output_tokens) == (1.5, 6)
    assert outcome.gaps_ms == pytest.approx((0.0, 100.0, 100.0, 100.0, 100.0))


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


def stat_line(pid: int, name: str, session: int, *ticks: int) -> str:
    return f"{pid} ({name}) S 1 {session} {session} 0 -1 4194304 0 0 0 0 {' '.join(map(str, ticks))} 20 0 1 0 5\n"


def write_process(proc: Path, pid: int, text: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(text)


def test_processor_time_is_summed_over_a_session_whatever_commands_are_called(tmp_path: Path) -> None:
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    write_process(tmp_path, 10, stat_line(10, "python", 10, ticks_per_s, 0, 0, 0))
    write_process(tmp_path, 11, stat_line(11, "a) S 1 (b", 10, 0, ticks_per_s, 0, ticks_per_s))
    write_process(tmp_path, 12, stat_line(12, "other", 12, 9 * ticks_per_s, 0, 0, 0))
    (tmp_path / "13").mkdir()  # ended while we looked
    (tmp_path / "self").mkdir()
    assert cpu_seconds({"engine": 10, "gone": 99}, tmp_path) == {"engine": 3.0, "gone": 0.0}


def test_machine_without_proc_knows_nothing(tmp_path: Path) -> None:
    assert cpu_seconds({"engine": 1}, tmp_path / "absent") == {"engine": 0.0}
    assert resident_bytes(1, tmp_path) is None


def test_resident_memory_is_the_second_number_of_statm(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "statm").write_text("900 300 20 1 0 400 0\n")
    assert resident_bytes(7, tmp_path) == 300 * os.sysconf("SC_PAGE_SIZE")


def test_meter_says_nothing_where_no_session_is_known() -> None:
    assert CoreMeter({}).stop() == {}
    assert CoreMeter({"me": os.getsid(0)}).stop().keys() == {"me", THIS_BENCH}
