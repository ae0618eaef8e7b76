"""The report of interactive requests beside a batch."""

from __future__ import annotations

import argparse

import pytest

from inflight.bench.batches.main import ALONE, BESIDE, Trial, report
from inflight.bench.measures.run import Outcome


def trial(mode: str, *first_token_s: float, num_lines: int = 0, elapsed_s: float = 1.0) -> Trial:
    outcomes = (Outcome(1.0, 1.0 + one, 3.0, 3, (one * 100, one * 200)) for one in first_token_s)
    return Trial(mode, tuple(outcomes), num_lines, elapsed_s)


def test_figures_of_a_mode_are_those_of_the_requests_of_all_rounds() -> None:
    trials = [
        trial(ALONE, 0.1, 0.2),
        trial(BESIDE, 0.3, num_lines=30, elapsed_s=10),
        trial(BESIDE, 0.5, 0.4, num_lines=10, elapsed_s=10),
        trial(ALONE, 0.9),
    ]
    values, page = report(argparse.Namespace(model=None, lines=100, rounds=2, out=None), trials)

    alone, beside = values["modes"]
    assert (alone["mode"], alone["num_requests"], alone["lines_per_s"]) == (ALONE, 3, None)
    assert (beside["mode"], beside["num_requests"], beside["lines_per_s"]) == (BESIDE, 3, 2.0)
    assert [alone["ttft_p50_ms"], beside["ttft_p50_ms"]] == pytest.approx([200, 400])
    assert [alone["inter_token_p99_ms"], beside["inter_token_p99_ms"]] == pytest.approx([180, 100])
    assert [one["mode"] for one in values["trials"]] == [one.mode for one in trials]
    assert f"| {BESIDE} | 400.0 | 500.0 |" in page.markdown()
