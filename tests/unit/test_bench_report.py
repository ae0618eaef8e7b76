"""What a benchmark leaves behind: figures for programs, a page for people, one with charts."""

from __future__ import annotations

import io
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from bench.measures import Run, Slo, measure
from bench.report.as_json import dump, to_json
from bench.report.markdown import sentences, to_markdown
from bench.report.page import to_html
from bench.report.report import Report, Section, stack_cost
from bench.report.terminal import print_report
from bench.report.write import write_report
from bench.workloads.generate import build_workload
from tests.bench_runs import finished_run, report, section

WORKLOAD = build_workload("mixed", vocabulary_size=1000, scale=0.1, num_requests=3)
VOID = frozenset({"meta", "br"})


class Reader(HTMLParser):
    """Checks that every element is closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def text_of(page: str) -> str:
    """What a person would read."""
    return unescape(re.sub(r"<[^>]*>", " ", page))


def test_subject_is_compared_with_every_other_mode() -> None:
    said = sentences(section("inflight", "static", "vllm"))
    assert said == [
        "**inflight gives 3.00 times the output tokens/s of static** (median over the rounds).",
        "**inflight gives 2.00 times the output tokens/s of vllm** (median over the rounds).",
    ]


def test_stack_is_compared_with_its_engine_as_a_cost() -> None:
    cost = stack_cost(section("inflight", "engine"))
    assert cost is not None
    assert cost.speed_ratio == pytest.approx(0.8)
    assert cost.added_ttft_ms == pytest.approx(10.0)
    assert cost.added_inter_token_ms == pytest.approx(0.0)
    assert sentences(section("inflight", "engine")) == [
        "**The whole stack keeps 80.0 % of the engine's tokens/s**; its TTFT (p50) differs by +10.0 ms."
    ]


def test_stack_without_its_engine_has_no_cost() -> None:
    assert stack_cost(section("inflight", "static")) is None


def test_markdown_shows_medians_with_ranges_and_every_run() -> None:
    page = to_markdown(report("inflight", "static"), page="mixed.html")
    assert "| mode | total s | requests/min | output tokens/s |" in page
    assert "| inflight | 2.1 (2.0–2.2) | 28.6 (27.3–30.0) | 286.4 (272.7–300.0) |" in page
    assert "| 2 | static | 6.6 | 9.1 | 90.9 |" in page
    assert "- model: SmolLM2" in page
    assert "[mixed.html](mixed.html)" in page
    assert "cost of a million tokens" in page
    assert "goodput" not in page, "nothing is said of what was not asked"


def test_goodput_is_shown_where_objectives_are_set() -> None:
    slo = Slo(ttft_ms=300, inter_token_ms=20)
    page = to_markdown(
        Report({}, (Section(WORKLOAD, (finished_run("inflight", 1, slo=slo),)),), slo=slo), page="x.html"
    )
    assert "goodput requests/min | within objectives %" in page
    assert "- objective: first token within 300 ms" in page


def test_errors_of_runs_are_listed_and_break_no_table() -> None:
    run = finished_run("static", 2, "UNAVAILABLE: a | b\n<c>")
    page = to_markdown(Report({}, (Section(WORKLOAD, (run,)),)), page="x.html")
    assert "- round 2, static: UNAVAILABLE: a \\| b &lt;c>" in page


def test_json_holds_summary_ratios_runs_and_samples() -> None:
    values = json.loads(dump(to_json(report("inflight", "static"))))
    (workload,) = values["workloads"]
    assert (workload["compared"], workload["ratios"]) == ("inflight", {"static": pytest.approx(3.0)})
    assert [(run["mode"], run["round"]) for run in workload["runs"]] == [
        ("inflight", 1),
        ("static", 1),
        ("inflight", 2),
        ("static", 2),
    ]
    assert workload["runs"][0]["samples"]["seats_used"] == [8, 7, 6, 5]
    assert workload["runs"][0]["distributions"]["ttft_ms"][50] == 260.0
    assert workload["summary"]["inflight"]["total s"] == {
        "median": pytest.approx(2.1),
        "least": 2.0,
        "most": pytest.approx(2.2),
    }


def test_page_is_complete_in_itself_and_well_formed() -> None:
    page = to_html(report("inflight", "static", "engine", "vllm"))
    read(page)
    assert not re.search(r"https?://|src=|@import|url\(", page)
    text = text_of(page)
    for words in (
        "Throughput",
        "Time to first token",
        "Between tokens",
        "Seats in use over time",
        "Cost",
        "Cores busy",
    ):
        assert words in text
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_page_escapes_what_comes_from_outside() -> None:
    evil = '<script>alert("1")</script>'
    run = finished_run("static", 1, f"INTERNAL {evil}")
    page = to_html(Report({"model": evil, evil: "&"}, (Section(WORKLOAD, (run,)),)))
    assert "<script" not in page
    assert text_of(page).count(evil) == 3


def test_charts_hold_no_number_that_is_none() -> None:
    page = to_html(report("inflight", "static"))
    for name, value in read(page).attributes:
        if name in ("points", "d", "style"):
            assert not re.search(r"nan|inf\b|None", value)


def test_terminal_shows_a_row_for_each_mode_and_what_follows() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    print_report(report("inflight", "static"), console)
    text = console.export_text()
    assert "286.4 (272.7–300.0)" in text
    assert "inflight gives 3.00 times the output tokens/s of static" in text


def test_report_is_three_files_of_one_name_and_json_where_it_is_wanted(tmp_path: Path) -> None:
    paths = write_report(report("inflight"), tmp_path / "reports", "mixed", tmp_path / "elsewhere" / "result.json")
    assert [path.name for path in paths] == ["mixed.json", "mixed.md", "mixed.html", "result.json"]
    assert paths[0].read_text() == paths[3].read_text() == dump(to_json(report("inflight")))


def test_run_without_samples_or_tokens_still_makes_a_report(tmp_path: Path) -> None:
    run = Run("static", 1, measure([], [], None), (), ())
    paths = write_report(Report({}, (Section(WORKLOAD, (run,)),)), tmp_path, "empty")
    assert "| static | 0.0 | 0.0 | 0.0 |" in paths[1].read_text()
    read(paths[2].read_text())
