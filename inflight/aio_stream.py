"""The asynchronous stream of one request, which `AsyncClient.generate` returns.

It owns the calls of the stream. If the connection of a call breaks, another call continues the stream. If the caller
leaves the stream early, the request is also cancelled on the server.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from types import TracebackType
from typing import Self, TextIO

from inflight.aio_connection import CALL_FAILURES, AsyncCancelFlag, AsyncStreamCalls
from inflight.errors import InflightError
from inflight.events import Completion, Delta, Event, FinishReason, Timing, Transcript, Usage
from inflight.recovery import Again, Recovery


class AsyncStream:
    """The stream of one request. Iterating over it yields its deltas. Iterating over `events()` yields all events.

    It can be read once. `request_id` is set from the first event on, `usage` and `timing` at the end.
    """

    def __init__(self, recovery: Recovery, calls: AsyncStreamCalls) -> None:
        self._recovery = recovery
        self._calls = calls
        self._call = calls.start(recovery.call(time.monotonic()))
        self._is_over = False
        self._cancelled = AsyncCancelFlag()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    async def events(self) -> AsyncGenerator[Event]:
        """Yields every event, in order, and a `Resumed` each time the stream continues after a broken connection.

        Raises:
            InflightError: the request was refused, or failed and could not be continued.
        """
        try:
            while True:
                error: InflightError | None = None
                try:
                    async for response in self._call:
                        for event in self._recovery.take(response.event, time.monotonic()):
                            yield event
                except CALL_FAILURES as failure:
                    error = self._calls.error_of(failure)
                if not await self._goes_on(error):
                    return
        finally:
            self.cancel()

    async def _goes_on(self, error: InflightError | None) -> bool:
        """Makes the next call after a call that has ended. Returns False if the stream has ended or was cancelled."""
        if self._cancelled.is_set():
            return False
        try:
            again = self._recovery.broken(error, time.monotonic())
            if isinstance(again, Again):
                self._calls.check_open()
                if await self._cancelled.wait(again.delay_s):
                    return False
                with self._cancelled.lock:
                    if self._cancelled.is_set():
                        return False
                    self._call = self._calls.start(self._recovery.call(time.monotonic()))
                return True
        except InflightError:
            self._is_over = True
            raise
        self._is_over = True
        return False

    def cancel(self) -> None:
        """Cancels the stream if it has not ended. Iterating then ends without an error.

        This also cancels the request, unless it has `detach` or `resume_ttl_s`. `AsyncClient.cancel` ends such a
        request. May be called from another task.
        """
        with self._cancelled.lock:
            if not (self._is_over or self._cancelled.is_set()):
                self._cancelled.set()
                self._call.cancel()
                self.transcript.mark_cancelled()

    def __repr__(self) -> str:
        choice = self.transcript.choices[0]
        ending = "runs" if choice.finish_reason is None else choice.finish_reason.value
        return f"<AsyncStream {self.request_id or 'not accepted yet'}: {choice.num_tokens} tokens, {ending}>"

    async def show(self, out: TextIO | None = None) -> None:
        """Reads to the end and prints the text of the first choice as it arrives, to `out` or standard output."""
        async for delta in self:
            if delta.choice == 0:
                print(delta.text, end="", flush=True, file=out)
        print(file=out)

    async def text(self) -> str:
        """Reads to the end and returns the text of the first choice."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.transcript.choices[0].text

    async def result(self) -> Completion:
        """Reads to the end and returns the whole result."""
        await self.text()
        return self.transcript.result()

    @property
    def request_id(self) -> str | None:
        """The request's id."""
        return self.transcript.request_id

    @property
    def resume_token(self) -> str | None:
        """The secret token that `AsyncClient.resume` needs."""
        return self.transcript.resume_token

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first choice ended."""
        return self.transcript.choices[0].finish_reason

    @property
    def usage(self) -> Usage | None:
        """Token counts."""
        return self.transcript.usage

    @property
    def timing(self) -> Timing | None:
        """Times of the request."""
        return self.transcript.timing

    @property
    def transcript(self) -> Transcript:
        """All events so far, added up."""
        return self._recovery.transcript

    @property
    def num_resumes(self) -> int:
        """How often the stream has continued after a broken connection."""
        return self._recovery.num_resumes

    async def _deltas(self) -> AsyncGenerator[Delta]:
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event
