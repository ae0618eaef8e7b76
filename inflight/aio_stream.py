"""The asynchronous answer to one request: what `Client.generate` returns.

Owns the calls of one stream, one after the other where its connection breaks. Left early, it is cancelled on the
server too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self, TextIO

import grpc
import grpc.aio

from common.cancellation import task_is_cancelled
from inflight.errors import InflightError, client_closed, from_rpc_error
from inflight.events import Completion, Delta, Event, FinishReason, Timing, Transcript, Usage
from inflight.recovery import Again, Call, Recovery


class Stream:
    """The answer to one request: iterate over it for its deltas, or over `events()` for everything.

    It is read once. `request_id` is known from the first event on, `usage` and `timing` when it has ended.
    """

    def __init__(self, recovery: Recovery, start: Callable[[Call], Any]) -> None:
        self._recovery = recovery
        self._start = start
        self._call = start(recovery.call(time.monotonic()))
        self._is_over = False
        self._left = asyncio.Event()

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event, in order, and `Resumed` wherever the connection broke and the stream went on.

        Raises:
            InflightError: the request was refused, or broke off and could not be continued.
        """
        try:
            while True:
                error: InflightError | None = None
                try:
                    async for response in self._call:
                        for event in self._recovery.take(response.event, time.monotonic()):
                            yield event
                except grpc.aio.AioRpcError as broken:
                    error = from_rpc_error(broken)
                except asyncio.CancelledError:
                    if task_is_cancelled():
                        raise
                    if not self._left.is_set():
                        self._is_over = True
                        raise client_closed() from None
                if not await self._goes_on(error):
                    return
        finally:
            self.cancel()

    async def _goes_on(self, error: InflightError | None) -> bool:
        """Makes the next call after one that is over; False where there is none to make."""
        if self._left.is_set():
            return False
        try:
            again = self._recovery.broken(error, time.monotonic())
            if isinstance(again, Again):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._left.wait(), again.delay_s)
                if self._left.is_set():
                    return False
                self._call = self._start(self._recovery.call(time.monotonic()))
                return True
        except InflightError:
            self._is_over = True
            raise
        self._is_over = True
        return False

    def cancel(self) -> None:
        """Ends the request, if it still runs; iterating ends without an error.

        One that asked for `detach` or `resume_ttl_s` is only left: `Client.cancel` ends it.
        """
        if not (self._is_over or self._left.is_set()):
            self._left.set()
            self._call.cancel()
            self.transcript.mark_cancelled()

    def __repr__(self) -> str:
        choice = self.transcript.choices[0]
        ending = "runs" if choice.finish_reason is None else choice.finish_reason.value
        return f"<Stream {self.request_id or 'not accepted yet'}: {choice.num_tokens} tokens, {ending}>"

    async def show(self, out: TextIO | None = None) -> None:
        """Reads to the end and prints the text of the first choice as it comes, here or to `out`."""
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
        """With the request's id, what `Client.resume` needs; a secret."""
        return self.transcript.resume_token

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first choice ended."""
        return self.transcript.choices[0].finish_reason

    @property
    def usage(self) -> Usage | None:
        """Tokens counted."""
        return self.transcript.usage

    @property
    def timing(self) -> Timing | None:
        """Where the time went."""
        return self.transcript.timing

    @property
    def transcript(self) -> Transcript:
        """All that the stream has brought so far."""
        return self._recovery.transcript

    @property
    def num_resumes(self) -> int:
        """How often the connection broke and the stream went on."""
        return self._recovery.num_resumes

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event
