"""The router's HTTP port: metrics in the format that is asked for, brought up to date first, and pages beside them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry, Gauge
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from inflight.common.http.port import HttpPort
from inflight.router.app import http_app
from tests.support.stack.http_pages import page

OPEN_METRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    port = HttpPort(app)
    address = await port.start("127.0.0.1:0")
    try:
        yield address
    finally:
        await port.stop()


async def test_metrics_are_refreshed_before_they_are_shown() -> None:
    registry = CollectorRegistry()
    gauge = Gauge("looked_up", "Looked up when scraped.", registry=registry)

    async def refresh() -> None:
        gauge.inc()

    async with served(http_app(registry, (), refresh)) as address:
        for expected in ("looked_up 1.0", "looked_up 2.0"):
            content_type, text = await page(address)
            assert content_type.startswith("text/plain")
            assert expected in text.splitlines()


async def test_scraper_that_asks_for_open_metrics_gets_it() -> None:
    async with served(http_app(CollectorRegistry(), ())) as address:
        content_type, text = await page(address, headers=OPEN_METRICS)
        assert content_type.startswith("application/openmetrics-text")
        assert text == "# EOF\n"


async def test_pages_that_are_passed_in_stand_beside_the_metrics() -> None:
    async def hello(request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    async with served(http_app(CollectorRegistry(), [Route("/", hello)])) as address:
        assert await page(address, "/") == ("text/plain; charset=utf-8", "hello")
        assert (await page(address))[1] == ""
