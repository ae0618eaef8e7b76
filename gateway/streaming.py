"""A streamed answer: the events of all its choices as server-sent events to one client.

Nothing is sent before every choice has been accepted or one was refused, so that a refusal has its HTTP status. After
that an error is an event, and the stream ends without `[DONE]`. While there are no events, comments or pings keep the
connection open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from inflight.errors import InflightError
from inflight.events import Accepted, Delta, Done, Event, Finished, Prompt, Queued, Started, Usage
from inflight.gateway.answers import Chunks, Form, logprobs_of, shown_usage
from inflight.gateway.disconnects import while_connected
from inflight.gateway.errors import ApiError, from_router
from inflight.gateway.event_ids import Place, event_id
from inflight.gateway.logprobs import num_characters, prompt_positions
from inflight.gateway.metrics import Metrics

# Of all choices together. A full queue blocks the readers of its choices, which the router's flow control notices.
MAX_WAITING_EVENTS = 64

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would buffer events
}


@dataclass(frozen=True, slots=True)
class WriteTimeouts:
    """How long a stream may be silent until it gets a comment, and how long a client may leave it unread."""

    heartbeat_s: float
    write_timeout_s: float


@dataclass(frozen=True, slots=True)
class ChoiceSource:
    """The events of one prompt, whose choices are `num_choices` of the answer's from the `first` on."""

    first: int
    num_choices: int
    events: AsyncGenerator[Event, None]

    @property
    def indexes(self) -> range:
        """The answer's indexes of the choices."""
        return range(self.first, self.first + self.num_choices)


@dataclass(frozen=True, slots=True)
class SourceEvent:
    """An event of a prompt, or the error that ended its stream."""

    source: ChoiceSource
    event: Event | InflightError


class EventStream:
    """The ASGI application that answers one request with a stream.

    `places` are the client's positions: at the beginning, or after the last event that it has received. `keep` is
    called before the end of a complete stream is sent.
    """

    def __init__(
        self,
        chunks: Chunks,
        form: Form,
        sources: Sequence[ChoiceSource],
        places: list[Place],
        timeouts: WriteTimeouts,
        metrics: Metrics,
        keep: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._keep = keep
        self._chunks = chunks
        self._form = form
        self._sources = sources
        self._places = places
        self._timeouts = timeouts
        self._metrics = metrics
        self._news: asyncio.Queue[SourceEvent] = asyncio.Queue(MAX_WAITING_EVENTS)
        self._usages: dict[int, Usage] = {}
        self._prompt_tokens = [0] * len(places)
        # All its prompts are of one kind.
        self._has_parts = False
        self._has_opened = [bool(place.resume_token) for place in places]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer. Raises `ApiError` if the request is refused before anything was sent."""
        await while_connected(receive, self._answer(send))

    async def _answer(self, send: Send) -> None:
        readers = [asyncio.create_task(self._read(source)) for source in self._sources]
        try:
            first = await self._until_all_are_taken()
            with self._metrics.streaming():
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": raw_headers(HEADERS)})
                await self._relay(send, first)
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, source: ChoiceSource) -> None:
        try:
            async with aclosing(source.events) as events:
                async for event in events:
                    await self._news.put(SourceEvent(source, event))
        except InflightError as error:
            await self._news.put(SourceEvent(source, error))

    async def _until_all_are_taken(self) -> list[SourceEvent]:
        """Returns the first events, at least one of each prompt."""
        first: list[SourceEvent] = []
        silent = {source.first for source in self._sources}
        while silent:
            news = await self._news.get()
            if isinstance(news.event, InflightError):
                raise self._error(news.event)
            silent.discard(news.source.first)
            first.append(news)
        return first

    async def _relay(self, send: Send, news: list[SourceEvent]) -> None:
        while True:
            try:
                body = b"".join(part for one in news for part in self._told(one))
                is_over = len(self._usages) == len(self._sources)
                if is_over:
                    body += await self._ending()
            except ApiError as error:
                body, is_over = self._form.failure(error), True
            if body or is_over:
                await self._send(send, {"type": "http.response.body", "body": body, "more_body": not is_over})
            if is_over:
                return
            news = await self._next_news(send)

    async def _next_news(self, send: Send) -> list[SourceEvent]:
        """Returns all events that have arrived, at least one; sends comments while there is none."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._timeouts.heartbeat_s):
                    news = [await self._news.get()]
                break
            await self._send(
                send, {"type": "http.response.body", "body": self._form.waiting("waiting"), "more_body": True}
            )
        while not self._news.empty():
            news.append(self._news.get_nowait())
        return news

    def _told(self, news: SourceEvent) -> Iterator[bytes]:
        """Yields what the client receives for an event. Raises `ApiError` if that ends the stream."""
        source = news.source
        match news.event:
            case InflightError() as error:
                raise self._error(error)
            case Queued() as queued:
                self._name(source, queued)
                yield self._form.waiting(f"queued, {queued.position} ahead")
            case Accepted() as accepted:
                self._name(source, accepted)
                self._has_parts = accepted.has_parts
                for index in source.indexes:
                    self._prompt_tokens[index] = accepted.prompt_tokens
                    yield from self._opening(index, accepted)
            case Started() as started:
                yield self._form.started(self._prompt_tokens[source.first], started.cached_tokens)
            case Prompt() as prompt if self._chunks.api_request.echoes:
                for index in source.indexes:
                    yield from self._prompt(index, prompt)
            case Delta() as delta:
                yield from self._text(source.first + delta.choice, delta)
            case Finished() as finished if not self._places[source.first + finished.choice].has_finished:
                yield self._finished(source.first + finished.choice, finished)
            case Done() as done:
                self._usages[source.first] = shown_usage(self._chunks.api_request, done.usage)

    def _prompt(self, index: int, prompt: Prompt) -> Iterator[bytes]:
        place = self._places[index]
        positions = prompt_positions(prompt)[max(0, place.num_prompt_tokens - prompt.offset) :]
        if logprobs := logprobs_of(self._chunks.api_request, positions, place.num_characters):
            place.num_prompt_tokens += len(positions)
            place.num_characters += num_characters(positions)
            yield self._event(self._chunks.text(index, "", logprobs))

    def _text(self, index: int, delta: Delta) -> Iterator[bytes]:
        place = self._places[index]
        if self._chunks.api_request.drops_output and (delta.num_tokens or place.num_tokens):
            place.num_tokens = delta.offset + delta.num_tokens
            return
        logprobs = logprobs_of(self._chunks.api_request, delta.logprobs, place.num_characters)
        place.num_tokens = delta.offset + delta.num_tokens
        place.num_characters += num_characters(delta.logprobs)
        place.text_bytes += len(delta.text.encode())
        # Tokens without text have log probabilities, too.
        if self._has_parts:
            if delta.parts or logprobs:
                yield self._event(self._chunks.parts(index, delta.parts, logprobs))
        elif delta.text or logprobs:
            yield self._event(self._chunks.text(index, delta.text, logprobs))

    def _name(self, source: ChoiceSource, event: Accepted | Queued) -> None:
        if event.request_id and event.resume_token:
            for index in source.indexes:
                self._places[index].request_id = event.request_id
                self._places[index].resume_token = event.resume_token

    def _opening(self, index: int, accepted: Accepted) -> Iterator[bytes]:
        if not self._has_opened[index]:
            self._has_opened[index] = True
            if (opening := self._chunks.opening(index, accepted)) is not None:
                yield self._event(opening)

    def _finished(self, index: int, finished: Finished) -> bytes:
        chunk = self._chunks.finished(index, finished)
        self._places[index].has_finished = True
        return self._event(chunk)

    async def _ending(self) -> bytes:
        usages = [self._usages[source.first] for source in self._sources]
        counted = self._event(self._chunks.usage(usages)) if self._chunks.api_request.include_usage else b""
        if self._keep is not None:
            await self._keep()
        return counted + self._form.end()

    def _event(self, chunk: dict[str, Any]) -> bytes:
        output_tokens = sum(place.num_tokens for place in self._places)
        told = self._chunks.with_running_usage(chunk, self._prompt_tokens, output_tokens)
        return self._form.event(told, event_id(self._chunks.answer, self._places))

    def _error(self, error: InflightError) -> ApiError:
        api_request = self._chunks.api_request
        return self._form.refusal(
            from_router(error, api_request.prompt_param, api_request.renamed, api_request.num_joined)
        )

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        """Sends a message. Raises `TimeoutError` if the client does not read."""
        async with asyncio.timeout(self._timeouts.write_timeout_s):
            await send(message)


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Returns headers as ASGI has them."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
