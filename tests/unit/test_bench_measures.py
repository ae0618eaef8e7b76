"""From times at the client to the figures of a run."""

from __future__ import annotations

import pytest

from bench.measures import Measures, Outcome, Run, SeatSample, mean_seats, measure, percentile, ratio


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
