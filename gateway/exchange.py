"""One HTTP request from its arrival to its end: its id, errors in OpenAI's form, log line and metrics."""

from __future__ import annotations

import logging
import re
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.gateway.answers import encoded
from inflight.gateway.disconnects import ClientGone
from inflight.gateway.errors import ApiError
from inflight.gateway.messages.form import of_messages
from inflight.gateway.metrics import Metrics

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
# Parameters of the request that had no effect, and where a request's state has them.
UNUSED_HEADER = "x-inflight-unused"
UNUSED = "unused"
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

# nginx's status for a client that closed the connection; only metrics and the log contain it.
CLIENT_CLOSED_REQUEST = 499

# Routes of Anthropic's API, with errors in its form.
OF_MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
UNLOGGED_ROUTES = frozenset({"/", "/version", "/health", "/ready", "/metrics"})
LOGGED_ROUTES = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"),
        *("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
        *("/v1/files", "/v1/batches"),
        *("/tokenize", "/detokenize"),
        *OF_MESSAGES,
    }
)
ROUTES = LOGGED_ROUTES | UNLOGGED_ROUTES
MODEL_ROUTE = "/v1/models/{id}"
RESPONSE_ROUTE = "/v1/responses/{id}"
FILE_ROUTE = "/v1/files/{id}"
BATCH_ROUTE = "/v1/batches/{id}"
ID_ROUTES = (MODEL_ROUTE, RESPONSE_ROUTE, FILE_ROUTE, BATCH_ROUTE)
OTHER_ROUTE = "other"


class Exchange:
    def __init__(self, scope: Scope, send: Send, metrics: Metrics) -> None:
        self._scope = scope
        self._send_on = send
        self._metrics = metrics
        self._began_s = time.monotonic()
        self._route = route_of(scope["path"])
        self._request_id = _request_id(Headers(scope=scope))
        self._status: int | None = None

    async def run(self, app: ASGIApp, receive: Receive) -> None:
        """Runs the application for the request. Only a cancellation escapes."""
        try:
            await app(self._scope, receive, self._send)
        except ApiError as error:
            await self._answer(error, receive)
        except HTTPException as error:
            await self._answer(_no_route(error, self._scope["method"], self._scope["path"]), receive)
        except ClientGone:
            self._status = self._status or CLIENT_CLOSED_REQUEST
        except TimeoutError:
            log.warning("request %s: the client did not read; aborted", self._request_id)
        except Exception:
            log.exception("request %s failed", self._request_id)
            await self._answer(ApiError(500, "the gateway failed", "server_error", code="internal"), receive)
        finally:
            self._end()

    async def _answer(self, error: ApiError, receive: Receive) -> None:
        """Sends an error if nothing has been sent. Otherwise the connection is closed, which the client notices."""
        if self._status is None:
            status, body = of_messages(error) if self._route in OF_MESSAGES else (error.status, error.body())
            answer = Response(encoded(body), status, error.headers(), media_type="application/json")
            await answer(self._scope, receive, self._send)

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_HEADER] = self._request_id
            if self._route in OF_MESSAGES:
                headers["request-id"] = self._request_id  # where Anthropic's clients read it
            if unused := self._scope.get("state", {}).get(UNUSED):
                headers[UNUSED_HEADER] = unused
        await self._send_on(message)

    def _end(self) -> None:
        seconds = time.monotonic() - self._began_s
        status = self._status or CLIENT_CLOSED_REQUEST
        self._metrics.ended(self._route, status, seconds)
        if self._route in LOGGED_ROUTES or self._route in ID_ROUTES:
            log.info("request %s %s %d %.3f s", self._request_id, self._route, status, seconds)


def route_of(path: str) -> str:
    """Returns the route that a path is counted as. Paths that clients can choose freely share one."""
    if path in ROUTES:
        return path
    return next((route for route in ID_ROUTES if path.startswith(route.removesuffix("{id}"))), OTHER_ROUTE)


def _no_route(error: HTTPException, method: str, path: str) -> ApiError:
    """Returns the error for a path or a method that is not served, with what the caller may have meant."""
    if listed := (error.headers or {}).get("Allow", ""):
        allowed = ", ".join(sorted(listed.split(", ")))
        text = f"{path[:200]} is served by {allowed}, not by {method}"
        return ApiError(error.status_code, text, code="unknown_url", allow=allowed)
    text = f"there is no {method} {path[:200]}"
    stripped = path.rstrip("/").removeprefix("/v1")
    meant = next((route for route in (stripped, f"/v1{stripped}") if route in ROUTES and route != path), None)
    if meant is not None:
        text += f"; did you mean {meant}?" + (
            " The base URL of clients ends with /v1" if meant.startswith("/v1") else ""
        )
    return ApiError(error.status_code, text, code="unknown_url")


def _request_id(headers: Headers) -> str:
    """Returns the client's own id, if it is valid in a header and in a log."""
    own = headers.get(REQUEST_ID_HEADER, "")
    return own if _REQUEST_ID.fullmatch(own) else f"req_{secrets.token_hex(16)}"
