"""The page `/metrics`: the format for each scraper."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette
from starlette.testclient import TestClient

from inflight.common.http.metrics_page import Refresh, exposition, metrics_route, new_registry

# What Prometheus 3 and 2 send.
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;q=0.4"
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"


def registry() -> CollectorRegistry:
    found = new_registry()
    Counter("cars_total", "Cars.", ["color"], registry=found).labels("red").inc(3)
    Gauge("speed", "Speed.", registry=found).set(50)
    Counter("vllm:prompt_tokens_total", "Of another project.", ["model_name"], registry=found).labels("m").inc(7)
    return found


def app(found: CollectorRegistry, refresh: Refresh | None = None) -> Starlette:
    return Starlette(routes=[metrics_route(found, refresh)])


@pytest.mark.parametrize("accept", [PROMETHEUS_3, PROMETHEUS_2, "application/openmetrics-text"])
def test_a_scraper_that_takes_openmetrics_gets_it(accept: str) -> None:
    content, content_type = exposition(registry(), accept, [])
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    samples = {sample.name: sample.value for family in parse_openmetrics(content.decode()) for sample in family.samples}
    assert samples["cars_total"] == 3.0
    assert samples["vllm:prompt_tokens_total"] == 7.0


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain", "application/openmetrics-text;version=none"])
def test_everybody_else_gets_text(accept: str) -> None:
    content, content_type = exposition(registry(), accept, [])
    assert content_type.startswith("text/plain; version=0.0.4; charset=utf-8")
    samples = {sample.name: sample.value for family in parse_text(content.decode()) for sample in family.samples}
    assert samples["cars_total"] == 3.0
    assert samples["vllm:prompt_tokens_total"] == 7.0
    assert samples["speed"] == 50.0


def test_a_counter_is_one_series() -> None:
    content, _ = exposition(registry(), "", [])
    assert "_created" not in content.decode()


def test_a_page_of_some_names_has_only_these() -> None:
    with TestClient(app(registry())) as client:
        answer = client.get("/metrics", params={"name[]": ["speed"]})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "speed 50.0" in answer.text
    assert "cars" not in answer.text


def test_what_has_to_be_looked_up_is_looked_up_before_each_page() -> None:
    found = new_registry()
    looks = Counter("looks_total", "Looks.", registry=found)

    async def look() -> None:
        looks.inc()

    with TestClient(app(found, look)) as client:
        assert "looks_total 1.0" in client.get("/metrics").text
        assert "looks_total 2.0" in client.get("/metrics").text
