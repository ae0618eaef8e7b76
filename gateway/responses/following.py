"""The stream of a background response: the events of its log, from any gateway, while it runs and after its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from starlette.types import Receive, Scope, Send

from inflight.gateway.answers import named_event
from inflight.gateway.disconnects import while_connected
from inflight.gateway.errors import ApiError
from inflight.gateway.metrics import Metrics
from inflight.gateway.responses.background import Replayed, first_events
from inflight.gateway.responses.form import ResponseForm
from inflight.gateway.store.news import News
from inflight.gateway.store.store import Record, ResponseStore
from inflight.gateway.streaming import HEADERS, WriteTimeouts, raw_headers


class Following:
    """The ASGI application that sends the events after number `after`. A disconnect does not affect the response."""

    def __init__(
        self,
        record: Record,
        form: ResponseForm,
        after: int,
        store: ResponseStore,
        news: News,
        timeouts: WriteTimeouts,
        metrics: Metrics,
    ) -> None:
        self._record = record
        self._state = Replayed(form)
        self._after = after
        self._store = store
        self._news = news
        self._timeouts = timeouts
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        await while_connected(receive, self._follow(send))

    async def _follow(self, send: Send) -> None:
        with self._metrics.streaming(), self._news.watching(self._record.response_id) as changed:
            headers = {"type": "http.response.start", "status": 200, "headers": raw_headers(HEADERS)}
            await self._send(send, headers)
            body = self._shown(first_events(self._record, self._state.form))
            place, is_over = "0", False
            while True:
                if body or is_over:
                    await self._send(send, {"type": "http.response.body", "body": body, "more_body": not is_over})
                if is_over:
                    return
                changed.clear()
                # An error closes the connection, and the client can go on after its last event.
                place, body, is_over = await self._read(place)
                if not (body or is_over):
                    body = await self._wait(changed)

    async def _read(self, place: str) -> tuple[str, bytes, bool]:
        """Returns the place up to which the log is read now, the bytes of the events, and whether they are the last."""
        is_running = await self._store.is_running(self._record.response_id)
        if is_running is None:
            raise ApiError(404, "the response was deleted")
        parts = []
        while entries := await self._store.entries(self._record.response_id, place):
            parts += [self._shown(self._state.take(self._record, entry)) for _, entry in entries]
            place = entries[-1][0]
        if not is_running:
            parts.append(self._shown(iter([self._state.form.last()])))
        return place, b"".join(parts), not is_running

    async def _wait(self, changed: asyncio.Event) -> bytes:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timeouts.heartbeat_s):
                await changed.wait()
            return b""
        return self._state.form.waiting("waiting")

    def _shown(self, events: Iterator[dict[str, Any]]) -> bytes:
        return b"".join(named_event(event) for event in events if event["sequence_number"] > self._after)

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        """Sends a message. Raises `TimeoutError` if the client does not read."""
        async with asyncio.timeout(self._timeouts.write_timeout_s):
            await send(message)
