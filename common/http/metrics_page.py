"""The page `/metrics` of a process: its registry in the format that the scraper requests.

It knows no metric. `refresh` fetches values that must be read first, such as those in Redis, once per scrape.
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
    """Makes an empty registry. It turns off the creation times of counters and histograms in this process: each would
    be another series, and a scraper detects a restart by a counter that falls."""
    disable_created_metrics()
    return CollectorRegistry()


def metrics_route(registry: CollectorRegistry, refresh: Refresh | None = None) -> Route:
    """Makes the route `GET /metrics`: OpenMetrics if the scraper accepts it, else Prometheus' text. With `?name[]=…`,
    repeated, it returns only the samples of these names.

    `refresh` must not raise: a scrape returns what is known.
    """

    async def metrics(request: Request) -> Response:
        if refresh is not None:
            await refresh()
        content, content_type = exposition(
            registry, request.headers.get("accept", ""), request.query_params.getlist("name[]")
        )
        # Starlette would add the character set a second time to `media_type`.
        return Response(content, headers={"content-type": content_type})

    return Route(PATH, metrics, methods=["GET"])


def exposition(registry: CollectorRegistry, accept: str, names: list[str]) -> tuple[bytes, str]:
    """Returns the page and its content type. Names are not escaped, since every scraper knows them; with underscores
    requested, OpenMetrics' encoder would replace the colon of `vllm:…`."""
    wanted = registry.restricted_registry(names) if names else registry
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is not a number
        encode, content_type = choose_encoder("")
    if content_type.startswith(OPENMETRICS):
        return openmetrics.generate_latest(wanted, escaping=openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return encode(wanted), content_type
