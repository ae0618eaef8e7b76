"""The gateway's application: its routes, and the limit of running requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.common.http.connection import OPENED_IN_DRAIN
from inflight.common.http.metrics_page import metrics_route
from inflight.gateway.errors import ApiError
from inflight.gateway.exchange import REQUEST_ID_HEADER, UNUSED_HEADER, Exchange
from inflight.gateway.metrics import Metrics
from inflight.gateway.service import GatewayService
from inflight.gateway.settings import GatewaySettings

# Time for the body of a request that is refused while the gateway drains.
REFUSED_BODY_S = 1.0

# Headers that pages of other origins may read, besides those that browsers always show.
EXPOSED_HEADERS = (REQUEST_ID_HEADER, UNUSED_HEADER, "retry-after", "retry-after-ms", "x-should-retry")

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


class GatewayApp:
    """The ASGI application."""

    def __init__(self, service: GatewayService, settings: GatewaySettings, metrics: Metrics) -> None:
        self._service = service
        self._max_requests = settings.max_requests
        self._metrics = metrics
        self._is_draining = False
        self._num_requests = 0
        self._router = Router(routes=list(self._routes()), redirect_slashes=False)
        # Around everything, so that pages of other origins can read errors, too.
        self._app: ASGIApp = self._serve
        if settings.cors_origins:
            self._app = CORSMiddleware(
                self._app,
                allow_origins=settings.cors_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=EXPOSED_HEADERS,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one HTTP request; other kinds of connection are not supported."""
        if scope["type"] == "http":
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # without it the routes themselves would answer unknown paths and methods
        await Exchange(scope, send, self._metrics).run(self._router, receive)

    def drain(self) -> None:
        """Reports not ready from now on."""
        self._is_draining = True

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Counts a running request of the API. Raises `ApiError` if no more are accepted."""
        if self._num_requests >= self._max_requests:
            raise ApiError(503, "too many requests are under way", "server_error", code="busy", retry_after_s=1.0)
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1

    def _routes(self) -> Iterator[BaseRoute]:
        service = self._service
        yield Route("/v1/chat/completions", _ApiCall(self, service.chat), methods=["POST"])
        yield Route("/v1/completions", _ApiCall(self, service.completion), methods=["POST"])
        yield Route("/v1/responses", _ApiCall(self, service.responses), methods=["POST"])
        if service.stores_responses:
            stored = "/v1/responses/{response_id}"
            yield Route(stored, _ApiCall(self, service.stored_response), methods=["GET", "DELETE"])
            yield Route(f"{stored}/cancel", _ApiCall(self, service.cancel_response), methods=["POST"])
            yield Route(f"{stored}/input_items", _ApiCall(self, service.input_items), methods=["GET"])
        if service.has_files:
            yield Route("/v1/files", _ApiCall(self, service.files), methods=["GET", "POST"])
            yield Route("/v1/files/{file_id}", _ApiCall(self, service.file), methods=["GET", "DELETE"])
            yield Route("/v1/files/{file_id}/content", _ApiCall(self, service.file_content), methods=["GET"])
            yield Route("/v1/batches", _ApiCall(self, service.batches), methods=["GET", "POST"])
            yield Route("/v1/batches/{batch_id}", _ApiCall(self, service.batch), methods=["GET"])
            yield Route("/v1/batches/{batch_id}/cancel", _ApiCall(self, service.cancel_batch), methods=["POST"])
        yield Route("/v1/messages", _ApiCall(self, service.messages), methods=["POST"])
        yield Route("/v1/messages/count_tokens", _ApiCall(self, service.count_tokens), methods=["POST"])
        yield Route("/v1/embeddings", _ApiCall(self, service.embeddings), methods=["POST"])
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):  # of Jina, of Cohere's newest client, of vLLM
            yield Route(path, _ApiCall(self, service.rerank), methods=["POST"])
        for path in ("/v1/score", "/score"):
            yield Route(path, _ApiCall(self, service.score), methods=["POST"])
        yield Route("/v1/models", _ApiCall(self, service.models), methods=["GET"])
        yield Route("/v1/models/{name:path}", _ApiCall(self, service.model), methods=["GET"])
        yield Route("/tokenize", _ApiCall(self, service.tokenize), methods=["POST"])
        yield Route("/detokenize", _ApiCall(self, service.detokenize), methods=["POST"])
        yield Route("/", service.root, methods=["GET"])
        yield Route("/version", service.version, methods=["GET"])
        yield Route("/health", service.health)
        yield Route("/ready", self._ready)
        yield metrics_route(self._metrics.registry)

    async def _ready(self, request: Request) -> Response:
        if self._is_draining:
            return PlainTextResponse("draining\n", status_code=503)
        return await self._service.ready(request)


@dataclass(frozen=True, slots=True)
class _ApiCall:
    """A route of the API. Its requests count as running until the last byte of the answer."""

    app: GatewayApp
    endpoint: Endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("state", {}).get(OPENED_IN_DRAIN):
            await _discard_body(receive)
            raise ApiError(503, "the gateway is draining", "server_error", code="draining", retry_after_s=1.0)
        with self.app.serving():
            answer = await self.endpoint(Request(scope, receive))
            await answer(scope, receive, send)


async def _discard_body(receive: Receive) -> None:
    """Reads a request to its end. A client that still sends when the connection is closed may not see the answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(REFUSED_BODY_S):
            while (await receive()).get("more_body"):
                pass
