"""The writer of reports: tables and pages."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.bench.comparison.pages import page, sentences, terminal_lines, values_of
from inflight.bench.comparison.report import Report, section_of, stack_cost
from inflight.bench.measures.run import Run, Slo, measure
from inflight.bench.report.page import Page, Part, dump, write_report
from inflight.bench.report.table import Table
from tests.support.bench.runs import WORKLOAD, finished_run, report, section


def test_table_is_the_same_in_every_form_and_escapes_its_cells() -> None:
    table = Table(["name", "number"], [["one", "1.5"], ["<two>\n|", "**10**"]])
    assert table.markdown().splitlines()[2:] == ["| one | 1.5 |", "| &lt;two> \\| | **10** |"]
    assert Table(["name", "number"], [["one", "1.5"]]).text().splitlines() == ["name  number", "one      1.5"]


def test_page_breaks_no_table_by_what_comes_from_outside() -> None:
    evil = "<script>alert('1')</script> | &"
    text = Page("title", {"from": evil}, [Part("part", problems=[evil])]).markdown()
    assert text.count("&lt;script>alert('1')&lt;/script> \\| &") == 2


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    )
)
def test_json_means_the_same_however_its_lines_are_broken(values: object) -> None:
    assert json.loads(dump(values)) == values


def test_report_is_two_files_of_one_name(tmp_path: Path) -> None:
    values = values_of(report("inflight"))
    paths = write_report(tmp_path / "reports", "mixed", values, page(report("inflight")))
    assert [path.name for path in paths] == ["mixed.json", "mixed.md"]
    assert json.loads(paths[0].read_text())["workloads"][0]["summary"]["inflight"]["total s"]["median"] == 2.1


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
