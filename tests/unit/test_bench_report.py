"""What a benchmark leaves behind: figures for programs, a page for people, a picture."""

from __future__ import annotations

import json
from pathlib import Path

from bench.measures import Outcome, Run, SeatSample, measure
from bench.report import Report, to_json, to_markdown, write_report
from bench.workloads import build_workload

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def report() -> Report:
    runs = []
    for number in (1, 2):
        for mode, seconds in (("inflight", 2.0), ("static", 6.0)):
            samples = tuple(SeatSample(at / 2, 1, 8, 8 - at, 3, 40, at * 10) for at in range(4))
            outcomes = [Outcome(0.0, 0.25, seconds, 600, (12.5, 20.0))]
            errors = ("UNAVAILABLE: no executor",) if mode == "static" and number == 2 else ()
            runs.append(Run(mode, number, measure(outcomes, samples, 100), samples, errors))
    workload = build_workload("mixed", vocabulary_size=1000, scale=0.1, num_requests=3)
    return Report(workload, {"model": "SmolLM2", "seats": "8"}, tuple(runs))


def test_page_compares_the_modes_and_shows_every_run() -> None:
    page = to_markdown(report(), picture="mixed.png")
    assert "**inflight gives 3.00 times the output tokens/s of static**" in page
    assert "| 1 | inflight | 2.0 | 30.0 | 300.0 | 250 | 250 | 12.5 | 20.0 | 6.00 |" in page
    assert "| 2 | static | 6.0 |" in page
    assert "- model: SmolLM2" in page
    assert "![Seats in use over time](mixed.png)" in page
    assert "- round 2, static: UNAVAILABLE: no executor" in page


def test_json_holds_ratios_runs_and_samples() -> None:
    values = json.loads(json.dumps(to_json(report())))
    assert values["ratios"] == {"inflight": 3.0, "static": 1.0}
    assert [(run["mode"], run["round"]) for run in values["runs"]] == [
        ("inflight", 1),
        ("static", 1),
        ("inflight", 2),
        ("static", 2),
    ]
    assert values["runs"][0]["samples"]["seats_used"] == [8, 7, 6, 5]


def test_report_is_three_files_of_one_name(tmp_path: Path) -> None:
    paths = write_report(report(), tmp_path / "reports", "mixed")
    assert [path.name for path in paths] == ["mixed.json", "mixed.md", "mixed.png"]
    assert json.loads(paths[0].read_text()) == to_json(report())
    assert paths[2].read_bytes().startswith(PNG_SIGNATURE)


def test_run_without_samples_still_makes_a_report(tmp_path: Path) -> None:
    run = Run("static", 1, measure([], [], None), (), ())
    workload = build_workload("short", vocabulary_size=10, num_requests=1)
    paths = write_report(Report(workload, {}, (run,)), tmp_path, "empty")
    assert "| 1 | static | 0.0 | 0.0 | 0.0 | – |" in paths[1].read_text()
