"""The writer of reports: tables, pages, charts and their axes, and the pages of the committed reports."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.bench.build_reports import PAGES, REPORTS
from inflight.bench.comparison.pages import page, sentences, terminal_lines, values_of
from inflight.bench.comparison.report import Report, read_report, section_of, stack_cost
from inflight.bench.measures.run import Run, Slo, measure
from inflight.bench.report.page import Page, Part, dump, write_report
from inflight.bench.report.scale import Scale, even_scale, log_scale
from inflight.bench.report.table import Table
from tests.support.bench.runs import WORKLOAD, finished_run, report, section

VOID = frozenset({"meta", "br"})
EVIL = "<script>alert('1')</script> | &"


class Reader(HTMLParser):
    """Checks that every element is closed where it should be and that coordinates are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            assert name not in ("points", "d", "style") or not re.search(r"nan|inf\b|None", value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def read(html: str) -> str:
    """Checks a page and returns the text that a person would read."""
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert not reader.open
    assert not re.search(r"https?://|src=|@import|url\(|<script", html), "a page is complete in itself"
    return unescape(re.sub(r"<[^>]*>", " ", html))


def test_table_is_the_same_in_every_form_and_escapes_its_cells() -> None:
    table = Table(["name", "number"], [["one", "1.5"], ["<two>\n|", "**10**"]])
    assert table.markdown().splitlines()[2:] == ["| one | 1.5 |", "| &lt;two> \\| | **10** |"]
    assert "<td>&lt;two&gt;\n|</td><td>10</td>" in table.html()
    assert Table(["name", "number"], [["one", "1.5"]]).text().splitlines() == ["name  number", "one      1.5"]


def test_page_escapes_what_comes_from_outside() -> None:
    part = Part(EVIL, EVIL, [EVIL], Table([EVIL], [[EVIL]]), problems=[EVIL])
    evil = Page("title", {EVIL: EVIL}, [part], EVIL, last_lines=[EVIL])
    assert read(evil.html()).count(EVIL) == 10


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    )
)
def test_json_means_the_same_however_its_lines_are_broken(values: object) -> None:
    assert json.loads(dump(values)) == values


@pytest.mark.parametrize("path", sorted(REPORTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_report_is_what_its_json_says(path: Path) -> None:
    values = json.loads(path.read_text(encoding="utf-8"))
    page = PAGES[values["report"]](values)
    assert path.with_suffix(".md").read_text(encoding="utf-8") == page.markdown(), "run make reports"
    text = read(page.html())
    assert all(part.title in text for part in page.parts)


def test_report_is_three_files_of_one_name(tmp_path: Path) -> None:
    values = values_of(report("inflight"))
    paths = write_report(tmp_path / "reports", "mixed", values, page(report("inflight")))
    assert [path.name for path in paths] == ["mixed.json", "mixed.md", "mixed.html"]
    assert page(read_report(json.loads(paths[0].read_text()))) == page(report("inflight"))


def test_subject_is_compared_with_every_other_mode() -> None:
    said = sentences(section("inflight", "static", "vllm"))
    assert said == [
        "**inflight gives 3.00 times the output tokens/s of static** (median over the rounds).",
        "**inflight gives 2.00 times the output tokens/s of vllm** (median over the rounds).",
    ]


def test_variants_are_compared_with_peers_and_with_the_engine_of_their_flags() -> None:
    assert sentences(section("engine", "engine-int8", "vllm"))[-1] == (
        "**engine-int8 gives 5.00 times the output tokens/s of vllm**."
    )
    kept = sentences(section("inflight", "inflight-interval-8", "inflight-int8", "engine", "engine-int8"))
    assert [sentence.partition(" of")[0] for sentence in kept] == [
        "**The whole stack keeps 80.0 %",
        "**inflight-interval-8 keeps 94.1 %",
        "**inflight-int8 keeps 80.0 %",
    ]
    assert "of engine-int8's tokens/s" in kept[2]


def test_several_concurrencies_make_a_pareto_curve() -> None:
    sections = tuple(replace(section("engine", "vllm"), concurrency=number) for number in (1, 4))
    curve = page(Report({}, sections))
    assert [part.title for part in curve.parts] == [
        "mixed: tokens/s per device against tokens/s per user",
        "mixed, 1 under way",
        "mixed, 4 under way",
    ]
    text = curve.markdown()
    assert "| under way | engine, per device | engine, per user | vllm, per device | vllm, per user |" in text
    assert "| 4 | 358.0 | 61.5 | 143.2 | 61.5 |" in text
    assert "**engine gives 2.50 to 2.50 times the output tokens/s of vllm** at the same concurrency." in text
    assert "Pareto curve" in read(curve.html())


def test_stack_is_compared_with_its_engine_as_a_cost() -> None:
    cost = stack_cost(section("inflight", "engine"))
    assert cost is not None
    assert cost.speed_ratio == pytest.approx(0.8)
    assert cost.added_ttft_ms == pytest.approx(10.0)
    assert cost.added_inter_token_ms == pytest.approx(0.0)
    assert sentences(section("inflight", "engine")) == [
        "**The whole stack keeps 80.0 % of the engine's tokens/s**; its TTFT (p50) differs by +10.0 ms."
    ]
    assert stack_cost(section("inflight", "static")) is None


def test_comparison_shows_medians_with_ranges_and_every_run() -> None:
    text = page(report("inflight", "static")).markdown()
    assert "| mode | total s | requests/min | output tokens/s |" in text
    assert "| inflight | 2.1 (2.0–2.2) | 28.6 (27.3–30.0) | 286.4 (272.7–300.0) |" in text
    assert "| 2 | static | 6.6 | 9.1 | 90.9 |" in text
    assert "cost of a million tokens" in text
    assert "goodput" not in text, "no figure is shown that was not asked for"
    charts = read(page(report("inflight", "static", "engine", "vllm")).html())
    assert all(title in charts for title in ("Throughput", "Between tokens", "Seats in use over time", "Cores busy"))


def test_goodput_is_shown_where_objectives_are_set() -> None:
    slo = Slo(ttft_ms=300, inter_token_ms=20)
    runs = [finished_run("inflight", 1, "UNAVAILABLE: a | b", slo=slo)]
    text = page(Report({}, (section_of(WORKLOAD, runs),), slo=slo)).markdown()
    assert "goodput requests/min | within objectives %" in text
    assert "- objective, first token: within 300 ms" in text
    assert "- round 1, inflight: UNAVAILABLE: a \\| b" in text


def test_terminal_shows_a_row_for_each_mode_and_what_follows() -> None:
    text = "\n".join(terminal_lines(report("inflight", "static")))
    assert re.search(r"^inflight +286.4 \(272.7–300.0\)", text, re.MULTILINE)
    assert "inflight gives 3.00 times the output tokens/s of static" in text


def test_run_without_samples_or_tokens_still_makes_a_report() -> None:
    empty = Report({}, (section_of(WORKLOAD, [Run("static", 1, measure([], [], None), (), ())]),))
    assert "| static | 0.0 | 0.0 | 0.0 |" in page(empty).markdown()
    read(page(empty).html())


def test_axis_names_round_values_and_powers_of_ten() -> None:
    assert even_scale(93.0).ticks() == [0, 20, 40, 60, 80]
    assert even_scale(0.0).ticks(3)[0] == 0
    scale = Scale(1.0, 100.0, is_log=True)
    assert (scale.at(1.0), scale.at(10.0), scale.at(100.0)) == pytest.approx((0.0, 0.5, 1.0))
    assert scale.ticks(8) == pytest.approx([1, 2, 5, 10, 20, 50, 100])
    assert (even_scale(10.0).at(-5.0), even_scale(10.0).at(50.0)) == (0.0, 1.0)


@given(st.lists(st.floats(0.0, 1e9), min_size=1), st.booleans())
def test_every_value_and_tick_lies_on_the_axis(values: list[float], is_log: bool) -> None:
    scale = log_scale(values, 0.1) if is_log else even_scale(max(values))
    assert all(0.0 <= scale.at(value) <= 1.0 for value in values)
    ticks = scale.ticks()
    assert len(ticks) <= 6
    assert all(scale.low * 0.999 <= tick <= scale.high * 1.001 for tick in ticks)
