"""Responses that run in the background: one gateway drives each, and any other can take it over.

A driver sends the response's request to a router with the response's id as its idempotency key, and writes what comes
to the log in the store: the chunks of the chat that the response is, with the ids of their tokens and the place after
them. The log says all that another driver needs: it sends the same request with these tokens as output that it has, and
goes on after them. Everything else about a response is a function of its body and its log (`replayed`), so its events
have the same numbers on every gateway.

    a gateway dies            its lease lapses within 3 s; another one, or it again, takes the response
    its router dies           the client library goes on with another router
    its executor dies         the router goes on with another executor
    the store is away         the driver reads the log again and goes on after it; a router keeps the output meanwhile
    the output is lost        the same request again under another key, with the log's tokens and the same seed
    it is cancelled, deleted  the write of its driver is refused, and the driver cancels the request
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message

from inflight import AsyncClient
from inflight.errors import InflightError
from inflight.events import Delta, Event
from inflight.gateway.answers import Chunks, CommentingForm, encoded
from inflight.gateway.choices import Source
from inflight.gateway.conversion import ApiRequest
from inflight.gateway.errors import ApiError
from inflight.gateway.event_ids import AnswerId, Place, event_id, read_event_id
from inflight.gateway.metrics import Metrics
from inflight.gateway.responses.form import ResponseForm
from inflight.gateway.store.leases import Leases
from inflight.gateway.store.news import News
from inflight.gateway.store.store import Record, ResponseStore
from inflight.gateway.streaming import ChoiceSource, EventStream, WriteTimeouts

log = logging.getLogger(__name__)

# For how long a client waits to learn that a router refuses its response. An executor accepts it between two steps.
TAKEN_S = 1.0
# More are a sign that driving this response ends gateways.
MAX_TIMES_TAKEN = 5
# For how long a driver tries again while no router takes the request or the store is away, and how often.
MAX_TRIES = 120
MAX_BACKOFF_S = 5.0
# No client waits for the bytes of the log.
TIMEOUTS = WriteTimeouts(heartbeat_s=3600.0, write_timeout_s=60.0)
# Of a chunk, what is the same in all.
_CONSTANT = frozenset({"id", "object", "created", "model"})

Convert = Callable[[Record], tuple[ApiRequest, ResponseForm]]


@dataclass(slots=True)
class Replayed:
    """A response as far as its log tells it. `run` counts the times that its output was lost."""

    form: ResponseForm
    place: Place = field(default_factory=Place)
    token_ids: list[int] = field(default_factory=list)
    run: int = 0
    has_chunks: bool = False

    def take(self, record: Record, entry: str) -> Iterator[dict[str, Any]]:
        """Adds an entry of the log. Yields the events that it makes, all but the last one."""
        said = json.loads(entry)
        self.run = said.get("run", self.run)
        if "place" in said:
            _, (self.place,) = read_event_id(said["place"])
        self.token_ids += said.get("ids", ())
        answer = _answer(record)
        for short in said.get("chunks", ()):
            self.has_chunks = True
            choices = [{"logprobs": None, "finish_reason": None, **choice} for choice in short["choices"]]
            chunk = {"usage": None, **short, "choices": choices, "id": answer.name, "created": answer.created}
            yield from self.form.events(chunk)
        if (error := said.get("error")) is not None:
            self.form.failed(ApiError(**error))
        if said.get("cancelled"):
            self.form.cancelled()


def first_events(record: Record, form: ResponseForm) -> Iterator[dict[str, Any]]:
    """Yields the events that come before those of the log."""
    return form.queued(record.response_id.partition("_")[2], record.created)


async def replayed(store: ResponseStore, record: Record, form: ResponseForm) -> Replayed:
    """Returns a response as its log tells it. Raises `ApiError`."""
    state, place = Replayed(form), "0"
    for _ in first_events(record, form):
        pass
    while entries := await store.entries(record.response_id, place):
        for _, entry in entries:
            for _ in state.take(record, entry):
                pass
        place = entries[-1][0]
    return state


def _answer(record: Record) -> AnswerId:
    return AnswerId(f"chatcmpl-{record.response_id.partition('_')[2]}", record.created)


class _NotOwnedError(Exception):
    """This driver has lost the response. `is_gone`: it was cancelled or deleted."""

    def __init__(self, *, is_gone: bool) -> None:
        super().__init__(is_gone)
        self.is_gone = is_gone


class _TryAgainError(Exception):
    """The driver must read the log and send the request again; `is_lost`: under another key."""

    def __init__(self, error: ApiError, *, is_lost: bool = False) -> None:
        super().__init__(error)
        self.error = error
        self.is_lost = is_lost


class _LogForm(CommentingForm):
    """Chunks as the log has them, one in a line."""

    def __init__(self, form: ResponseForm) -> None:
        self._form = form
        self.error: ApiError | None = None

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("the log has chunks")

    def event(self, chunk: dict[str, Any], name: str) -> bytes:
        """Returns a chunk without what it has in common with the others."""
        short = {key: value for key, value in chunk.items() if key not in _CONSTANT and value is not None}
        short["choices"] = [
            {key: value for key, value in choice.items() if value is not None} for choice in chunk["choices"]
        ]
        return encoded(short) + b"\n"

    def waiting(self, reason: str) -> bytes:
        """Returns an empty line, so that the place of a waiting request is written."""
        return b"\n"

    def failure(self, error: ApiError) -> bytes:
        """Keeps the error, which ends the stream."""
        self.error = error
        return b""

    def refusal(self, error: ApiError) -> ApiError:
        """Returns the error with the names of the API."""
        return self._form.refusal(error)

    def end(self) -> bytes:
        """Returns nothing."""
        return b""


class _Driver:
    """One try to drive a response on from its log."""

    def __init__(self, store: ResponseStore, record: Record, state: Replayed, on_taken: Callable[[], None]) -> None:
        self._store = store
        self._record = record
        self._state = state
        self._on_taken = on_taken
        self._form = _LogForm(state.form)
        # Ids of tokens that have come, of which the first belong to what is in the log.
        self._token_ids = list(state.token_ids)
        # Without chunks the stream begins with its opening, also if the request has a place already.
        self._place = state.place if state.has_chunks else Place()
        self._written = ""

    async def run(self, api_request: ApiRequest, source: Source) -> None:
        """Drives it to its end. Raises `ApiError` if it is refused before it has a place."""
        (request,) = api_request.requests
        request.idempotency_key = self._record.response_id + (f"~{self._state.run}" if self._state.run else "")
        request.detach = True
        request.want_queue_events = True
        request.output.token_ids = True
        if not request.sampling.HasField("seed"):
            # The same in every run.
            request.sampling.seed = int(self._record.response_id[-12:], 16)
        if self._token_ids:
            request.prior_output.output_ids.extend(self._token_ids)
            request.prior_output.text_bytes = self._place.text_bytes
        chunks = Chunks(api_request, _answer(self._record))
        sources = [ChoiceSource(0, 1, self._with_ids(source.attached(request)))]
        stream = EventStream(chunks, self._form, sources, [self._place], TIMEOUTS, source.metrics)
        await stream({}, _never, self._write)

    async def _with_ids(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    self._token_ids += event.token_ids
                yield event

    async def _write(self, message: Message) -> None:
        """Writes the chunks of a part of the stream, and the place after them."""
        if message["type"] == "http.response.start":
            self._on_taken()
            return
        error, is_over = self._form.error, not message["more_body"]
        if error is not None and (error.status in (429, 503) or error.code in ("output_lost", "taken_over")):
            raise _TryAgainError(error, is_lost=error.code == "output_lost")
        chunks = [json.loads(line) for line in message["body"].splitlines() if line]
        known = len(self._state.token_ids)
        entry: dict[str, Any] = {"chunks": chunks, "ids": self._token_ids[known : self._place.num_tokens]}
        if place := event_id(_answer(self._record), [self._place]):
            entry["place"] = place
        if not (chunks or is_over) and place == self._written:
            return
        self._written = place
        if error is not None:
            entry["error"] = {"status": error.status, "text": error.text}
        await self._append(entry, is_over=is_over)

    async def _append(self, entry: dict[str, Any], *, is_over: bool) -> None:
        text = encoded(entry).decode()
        for _ in self._state.take(self._record, text):
            pass
        # The place is this driver's own, which the stream goes on with.
        self._state.place = self._place
        await write(self._store, self._record, text, self._state.form if is_over else None)


async def write(store: ResponseStore, record: Record, entry: str, ended: ResponseForm | None) -> None:
    """Writes an entry that the form has taken already, and the response if that ends it. Raises `_NotOwnedError` if the
    record's owner may not write."""
    response = "" if ended is None else encoded(ended.response()).decode()
    written = await store.append(record, entry, response)
    if written != "written":
        raise _NotOwnedError(is_gone=written == "gone")


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("a background response has no client that disconnects")


class Background:
    """The background responses that this gateway drives, and its watch for those that none drives."""

    def __init__(
        self, client: AsyncClient, store: ResponseStore, metrics: Metrics, convert: Convert, max_responses: int
    ) -> None:
        self.news = News(store)
        self.leases = Leases(store, lambda response_id, owner: self._run(response_id, owner, _future()), max_responses)
        self._client = client
        self._store = store
        self._metrics = metrics
        self._convert = convert

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Drives responses during the block. Those that have not ended then are given back; their requests continue."""
        reading = asyncio.create_task(self.news.run())
        try:
            async with self.leases.running():
                yield
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def begin(self, record: Record) -> None:
        """Drives a new response. Returns when a router has taken it, or after a second. Raises `ApiError` if a router
        has refused it by then; then it is stored no more."""
        taken = _future()
        self.leases.drive(record.response_id, record.owner, self._run(record.response_id, record.owner, taken))
        await asyncio.wait((taken,), timeout=TAKEN_S)
        if taken.done():
            taken.result()
        else:
            # What refuses it from now on ends it.
            taken.set_result(None)

    async def cancel_request(self, record: Record, place: Place) -> None:
        """Cancels the request at the routers, if it is there."""
        if not place.resume_token:
            return
        try:
            await self._client.cancel(
                place.request_id, resume_token=place.resume_token, metadata=_metadata(record.authorization)
            )
        except InflightError as error:
            log.debug("%s was not cancelled: %s", record.response_id, error)

    async def end_cancelled(self, record: Record) -> None:
        """Ends a response that was cancelled, as its owner."""
        _, form = self._convert(record)
        state = await replayed(self._store, record, form)
        await self.cancel_request(record, state.place)
        entry = encoded({"cancelled": True}).decode()
        for _ in state.take(record, entry):
            pass
        with contextlib.suppress(_NotOwnedError):
            await write(self._store, record, entry, form)

    async def _run(self, response_id: str, owner: str, taken: asyncio.Future[None]) -> None:
        """Drives a response to its end. What goes wrong ends this task only."""
        try:
            await self._try_until_ended(response_id, owner, taken)
        except _NotOwnedError:
            log.debug("response %s has another owner, or was deleted", response_id)
        except ApiError as error:
            log.warning("response %s: %s; another gateway goes on", response_id, error)
            if not taken.done():
                taken.set_exception(error)
        except Exception:
            log.exception("response %s cannot be driven", response_id)
        finally:
            if taken.done():
                taken.exception()  # counts as retrieved, also without a caller that waits
            else:
                taken.set_exception(ApiError(503, "the gateway failed", "server_error", code="unavailable"))
                taken.exception()

    async def _try_until_ended(self, response_id: str, owner: str, taken: asyncio.Future[None]) -> None:
        lost = 0
        for number in range(MAX_TRIES):
            try:
                await self._try(response_id, owner, taken, lost)
                return
            except _TryAgainError as again:
                error, lost = again.error, lost + again.is_lost
            except ApiError as failed:
                if failed.status != 503 or not taken.done():
                    raise
                error = failed
            log.info("response %s: %s; again", response_id, error)
            await asyncio.sleep(min(MAX_BACKOFF_S, max(error.retry_after_s or 0.0, 0.1 * 2 ** min(number, 6))))
        raise ApiError(503, "too many tries", "server_error", code="unavailable")

    async def _try(self, response_id: str, owner: str, taken: asyncio.Future[None], lost: int) -> None:
        (record,) = await self._store.load([response_id])
        if record is None or record.owner != owner:
            raise _NotOwnedError(is_gone=record is None)
        if record.cancelled:
            await self.end_cancelled(record)
            return
        api_request, form = self._convert(record)
        state = await replayed(self._store, record, form)
        if lost > state.run:
            await self._note(record, state, {"run": lost})
        if record.times_taken > MAX_TIMES_TAKEN:
            text = f"{record.times_taken} gateways have ended while they drove it"
            await self._fail(record, state, ApiError(500, text))
            return
        source = Source(self._client, _metadata(record.authorization), self._metrics)
        driver = _Driver(self._store, record, state, lambda: None if taken.done() else taken.set_result(None))
        try:
            await driver.run(api_request, source)
        except _NotOwnedError as gone:
            if gone.is_gone:
                await self.cancel_request(record, state.place)
            raise
        except ApiError as refusal:
            await self._refused(record, state, refusal, taken)

    async def _refused(self, record: Record, state: Replayed, error: ApiError, taken: asyncio.Future[None]) -> None:
        """Ends a response that a router refused, or whose write failed."""
        if not taken.done() and not state.has_chunks and not record.times_taken:
            await self._store.delete(record)
            raise error
        if error.status in (429, 503) or error.code in ("output_lost", "taken_over"):
            raise _TryAgainError(error, is_lost=error.code == "output_lost")
        await self._fail(record, state, error)

    async def _fail(self, record: Record, state: Replayed, error: ApiError) -> None:
        await self._note(record, state, {"error": {"status": error.status, "text": error.text}}, is_over=True)

    async def _note(self, record: Record, state: Replayed, said: dict[str, Any], *, is_over: bool = False) -> None:
        entry = encoded(said).decode()
        for _ in state.take(record, entry):
            pass
        await write(self._store, record, entry, state.form if is_over else None)


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


def _metadata(authorization: str) -> dict[str, str]:
    return {"authorization": authorization} if authorization else {}
