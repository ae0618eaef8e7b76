"""The dashboard, the alerts and the documentation against what running processes export."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dashboards.conftest import ELSEWHERE, Watched
from tests.dashboards.queries import DOCS, FOLDER, Query, alerts, asked_by, documented, panels, queries

# What scrapers add, and what belongs to histograms.
ADDED_LABELS = frozenset({"namespace", "instance", "le", "job"})
# Prometheus makes it for every target.
ADDED_METRICS = frozenset({"up"})


def base_of(metric: str, known: frozenset[str]) -> str:
    """`a_seconds` for its buckets, count and sum."""
    return metric if metric in known else re.sub(r"_(bucket|count|sum)$", "", metric)


@pytest.mark.parametrize("query", queries(), ids=lambda query: query.where)
def test_query_parses_and_reads_what_is_documented(query: Query) -> None:
    promised = documented()
    for asked in asked_by(query):
        metric = base_of(asked.metric, frozenset(promised))
        assert metric in promised or metric in ADDED_METRICS, f"{query.where}: {asked.metric}"


@pytest.mark.asyncio(loop_scope="session")
async def test_every_metric_and_label_of_a_query_is_exported(watched: Watched) -> None:
    scraped, promised = await watched.scraped(), documented()
    known = frozenset(scraped.labels)
    missing = [
        f"{query.where}: {asked.metric} {sorted(asked.labels)}"
        for query in queries()
        for asked in asked_by(query)
        for metric in (base_of(asked.metric, known),)
        # A metric of something that has not happened has no labels yet; the documentation has them.
        if metric not in ADDED_METRICS and not metric.startswith(ELSEWHERE)
        if metric not in known or not asked.labels <= (scraped.labels[metric] or promised[metric]) | ADDED_LABELS
    ]
    assert not missing


@pytest.mark.asyncio(loop_scope="session")
async def test_documentation_and_export_agree_both_ways(watched: Watched) -> None:
    scraped, promised = await watched.scraped(), documented()
    assert set(scraped.labels) == {name for name in promised if not name.startswith(ELSEWHERE)}
    differ = {name: labels for name, labels in scraped.labels.items() if labels and labels != promised[name]}
    assert not differ


@pytest.mark.asyncio(loop_scope="session")
async def test_bounds_that_alerts_count_by_are_buckets(watched: Watched) -> None:
    scraped = await watched.scraped()
    bounds = {
        (metric, bound) for rule in alerts() for metric, bound in re.findall(r'(\w+)_bucket\{le="(.*?)"', rule["expr"])
    }
    assert bounds
    assert not {(metric, bound) for metric, bound in bounds if bound not in scraped.buckets[metric]}


def test_every_alert_has_a_runbook_that_is_there() -> None:
    headings = re.findall(r"^#+ (.+)$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    for rule in alerts():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "https://inflight.example.org/docs/metrics.html"
        assert anchor in anchors
        assert anchor == rule["alert"].lower()
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_panels_lie_beside_each_other_and_read_from_the_chosen_source() -> None:
    places = [panel["gridPos"] for panel in panels()]
    cells = [(x, y) for p in places for x in range(p["x"], p["x"] + p["w"]) for y in range(p["y"], p["y"] + p["h"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    dashboard = json.loads((FOLDER / "inflight.json").read_text(encoding="utf-8"))
    assert [one["name"] for one in dashboard["templating"]["list"]] == ["datasource", "namespace", "model"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in panels():
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def promtool(*arguments: str, cwd: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed")
    return subprocess.run([program, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def test_prometheus_takes_the_alerts() -> None:
    checked = promtool("check", "rules", "alerts.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_fire_when_they_should_and_only_then() -> None:
    tested = promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yaml")))
    assert tested.returncode == 0, tested.stdout + tested.stderr
