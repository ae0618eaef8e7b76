"""The dashboard over HTTP: the page at `/`, its static files, the stream of statistics, the timeline of a request, and
today's usage.

The stream is one message a line. Its caller is authenticated as that of a call, with the header `authorization: Bearer
…`, and checked again while it runs: it ends within seconds after its key was withdrawn.
The page itself holds no secret and is open.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from inflight.common.errors import Reason, RequestError
from inflight.router.auth.caller import Authenticator, Caller, Metadata
from inflight.router.dashboard.feed import Feed, Feeds
from inflight.router.dashboard.watching import Seen, Watching, joined
from inflight.v1 import inference_pb2

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
STATUSES = {Reason.UNAUTHENTICATED: 401, Reason.NOT_ALLOWED: 403, Reason.UNKNOWN_TENANT: 403}
# What a caller may see of the usage.
UsageReader = Callable[[Caller, inference_pb2.GetUsageRequest], Awaitable[inference_pb2.GetUsageResponse]]
# Timeout of the first message; a busy router answers later.
FIRST_LINE_TIMEOUT_S = 10.0
# Interval of checking a running stream's credential.
RECHECK_S = 5.0


def dashboard_routes(
    feeds: Feeds, authenticator: Authenticator, watching: Watching | None = None, usage: UsageReader | None = None
) -> list[BaseRoute]:
    """Returns the routes: the page, its files under `/board/`, `/board/stats`, `/board/request` and `/board/usage`."""
    watching = watching or Watching()

    async def stats(request: Request) -> ASGIApp:
        return await _stats(request, feeds, authenticator, watching)

    async def timeline(request: Request) -> Response:
        return _timeline(request, authenticator, watching)

    async def used(request: Request) -> Response:
        return await _usage(request, authenticator, usage)

    return [
        Route("/board/stats", stats, methods=["GET"]),
        Route("/board/request", timeline, methods=["GET"]),
        Route("/board/usage", used, methods=["GET"]),
        *(_asset(path.name, path.read_bytes()) for path in _static_files()),
    ]


def _static_files() -> list[Traversable]:
    folder = resources.files("inflight.router.dashboard") / "static"
    return [path for path in folder.iterdir() if PurePosixPath(path.name).suffix in CONTENT_TYPES]


def _asset(name: str, content: bytes) -> Route:
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    kind = CONTENT_TYPES[PurePosixPath(name).suffix]
    headers = {**HEADERS, "etag": etag, "cache-control": "no-cache"}

    async def asset(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    return Route("/" if name == "index.html" else f"/board/{name}", asset, methods=["GET"])


def _is_foreign(request: Request) -> bool:
    return request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none")


def _timeline(request: Request, authenticator: Authenticator, watching: Watching) -> Response:
    """Returns the timeline of the request `model`, `tenant`, `id`, if the caller may see it."""
    if _is_foreign(request):
        return _refused(403, "requests from pages of other sites are refused")
    try:
        caller = authenticator.identify(tuple(request.headers.items()))
    except RequestError as error:
        return _refusal(error)
    named = [request.query_params.get(name, "") for name in ("model", "tenant", "id")]
    found = watching.timeline(named[0], named[1], named[2], caller)
    if found is None:
        return _refused(404, "this router has no timeline of this request")
    return JSONResponse(found, headers={**HEADERS, "cache-control": "no-store"})


async def _usage(request: Request, authenticator: Authenticator, usage: UsageReader | None) -> Response:
    """Returns today's usage that the caller may see, as `GetUsage` does."""
    if _is_foreign(request):
        return _refused(403, "requests from pages of other sites are refused")
    found = inference_pb2.GetUsageResponse()
    try:
        caller = authenticator.identify(tuple(request.headers.items()))
        if usage is not None:
            found = await usage(caller, inference_pb2.GetUsageRequest())
    except RequestError as error:
        return _refusal(error)
    return JSONResponse(MessageToDict(found), headers={**HEADERS, "cache-control": "no-store"})


async def _stats(request: Request, feeds: Feeds, authenticator: Authenticator, watching: Watching) -> ASGIApp:
    # A page of another site could not read the stream, but it could use up the watcher slots.
    if _is_foreign(request):
        return _refused(403, "requests from pages of other sites are refused")
    if len(request.headers.getlist("authorization")) > 1:
        return _refused(400, "more than one Authorization header")
    metadata = tuple(request.headers.items())
    try:
        caller = authenticator.identify(metadata)
    except RequestError as error:
        return _refusal(error)
    feed = feeds.join(caller)
    if feed is None:
        return _refused(503, "too many viewers, or the router is stopping", retry_after_s=10)
    return _Watch(feeds, feed, watching, caller, lambda: _lets_in(authenticator, metadata, caller))


class _Watch:
    """The response to one watcher, which has joined the feed and always leaves it at the end."""

    def __init__(
        self, feeds: Feeds, feed: Feed, watching: Watching, caller: Caller, is_let_in: Callable[[], bool]
    ) -> None:
        self._feeds = feeds
        self._feed = feed
        self._watching = watching
        self._seen: Seen | None = None
        self._caller = caller
        self._is_let_in = is_let_in

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._response()
            await response(scope, receive, send)
        finally:
            self._feeds.leave(self._caller, self._feed)

    async def _response(self) -> Response:
        """Sends the stream, or an error."""
        try:
            async with asyncio.timeout(FIRST_LINE_TIMEOUT_S):
                first = await self._feed.after(0)
        except TimeoutError:
            return _refused(503, "the router has no statistics yet", retry_after_s=2)
        if first is not None:
            headers = {**HEADERS, "cache-control": "no-store", "x-accel-buffering": "no"}
            return StreamingResponse(self._lines(*first), media_type="application/x-ndjson", headers=headers)
        if self._feed.error is not None:
            return _refusal(self._feed.error)
        return _refused(503, "the statistics ended", retry_after_s=2)

    async def _lines(self, number: int, line: bytes) -> AsyncIterator[bytes]:
        yield await self._with_news(line)
        checked_s = time.monotonic()
        while (newer := await self._feed.after(number)) is not None:
            if time.monotonic() - checked_s >= RECHECK_S:
                if not self._is_let_in():
                    return
                checked_s = time.monotonic()
            number, line = newer
            yield await self._with_news(line)

    async def _with_news(self, line: bytes) -> bytes:
        """Returns the line with everything that is new for this watcher."""
        self._seen, news = self._watching.since(self._seen, self._caller)
        # A whole history has some hundred kilobytes: encoded in a thread, since the event loop forwards tokens.
        return joined(line, await asyncio.to_thread(news.text) if news.samples else news.text())


def _lets_in(authenticator: Authenticator, metadata: Metadata, caller: Caller) -> bool:
    """Whether the credential still identifies that caller."""
    try:
        return authenticator.identify(metadata) == caller
    except RequestError:
        return False


def _refusal(error: RequestError) -> Response:
    return _refused(STATUSES.get(error.reason, 503), error.description)


def _refused(status: int, why: str, retry_after_s: int | None = None) -> Response:
    headers = {**HEADERS, "cache-control": "no-store"}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    return JSONResponse({"error": why}, status, headers)
