"""What a router shows on its HTTP port: its metrics, and the pages that are passed in."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from common.metrics_page import Refresh, metrics_route


def http_app(
    registry: CollectorRegistry, extra_routes: Sequence[BaseRoute], refresh: Refresh | None = None
) -> Starlette:
    """`/metrics` with what `registry` holds, and `extra_routes`. `refresh` brings it up to date before every look."""
    return Starlette(routes=[metrics_route(registry, refresh), *extra_routes])
