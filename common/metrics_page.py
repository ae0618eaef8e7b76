"""The page that Prometheus reads: what a registry holds, in the format that the reader asks for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Refresh = Callable[[], Awaitable[None]]


def metrics_route(registry: CollectorRegistry, refresh: Refresh | None = None) -> Route:
    """`/metrics`. `refresh` is awaited first: it looks up what is not counted where it happens."""

    async def page(request: Request) -> Response:
        if refresh is not None:
            await refresh()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"Content-Type": content_type})

    return Route("/metrics", page, methods=["GET"])
