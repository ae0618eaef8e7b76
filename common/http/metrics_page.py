"""The page `/metrics` of a process: its registry in the format that the scraper asks for.

Knows no metric. What has to be looked up first, such as what Redis says, `refresh` looks up, once for each scrape.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PATH = "/metrics"
OPENMETRICS = "application/openmetrics-text"

Refresh = Callable[[], Awaitable[None]]


def new_registry() -> CollectorRegistry:
    """An empty registry. Its counters and histograms do not say when they began, for this process from now on: that
    would be a series more for each, and a scraper sees a restart by a counter that falls."""
    disable_created_metrics()
    return CollectorRegistry()


def metrics_route(registry: CollectorRegistry, refresh: Refresh | None = None) -> Route:
    """`GET /metrics`: OpenMetrics where the scraper takes it, else Prometheus' text. With `?name[]=…`, repeated, only
    the samples of these names.

    `refresh` must not raise: a scrape says what is known, whatever is away.
    """

    async def metrics(request: Request) -> Response:
        if refresh is not None:
            await refresh()
        content, content_type = exposition(
            registry, request.headers.get("accept", ""), request.query_params.getlist("name[]")
        )
        # As it is: Starlette would add the character set once more.
        return Response(content, headers={"content-type": content_type})

    return Route(PATH, metrics, methods=["GET"])


def exposition(registry: CollectorRegistry, accept: str, names: list[str]) -> tuple[bytes, str]:
    """The page, and its content type. Every name is one that all scrapers know, so none is escaped; asked for
    underscores, OpenMetrics' encoder would put one for the colon of `vllm:…`."""
    wanted = registry.restricted_registry(names) if names else registry
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        encode, content_type = choose_encoder("")
    if content_type.startswith(OPENMETRICS):
        return openmetrics.generate_latest(wanted, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return encode(wanted), content_type
