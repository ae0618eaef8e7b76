# Generated from aio_stream.py by `make sync-client`. Do not edit.
"""The blocking stream of one request, which `Client.generate` returns.

It owns the calls of the stream. If the connection of a call breaks, another call continues the stream. If the caller
leaves the stream early, the request is also cancelled on the server.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing
from types import TracebackType
from typing import Self, TextIO

from inflight.errors import InflightError
from inflight.events import Completion, Delta, Event, FinishReason, Timing, Transcript, Usage
from inflight.recovery import Again, Recovery
from inflight.sync_connection import CALL_FAILURES, CancelFlag, StreamCalls


class Stream:
    """The stream of one request. Iterating over it yields its deltas. Iterating over `events()` yields all events.

    It can be read once. `request_id` is set from the first event on, `usage` and `timing` at the end.
    """

    def __init__(self, recovery: Recovery, calls: StreamCalls) -> None:
        self._recovery = recovery
        self._calls = calls
        self._call = calls.start(recovery.call(time.monotonic()))
        self._is_over = False
        self._cancelled = CancelFlag()

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def events(self) -> Generator[Event]:
        """Yields every event, in order, and a `Resumed` each time the stream continues after a broken connection.

        Raises:
            InflightError: the request was refused, or failed and could not be continued.
        """
        try:
            while True:
                error: InflightError | None = None
                try:
                    for response in self._call:
                        yield from self._recovery.take(response.event, time.monotonic())
                except CALL_FAILURES as failure:
                    error = self._calls.error_of(failure)
                if not self._goes_on(error):
                    return
        finally:
            self.cancel()

    def _goes_on(self, error: InflightError | None) -> bool:
        """Makes the next call after a call that has ended. Returns False if the stream has ended or was cancelled."""
        if self._cancelled.is_set():
            return False
        try:
            again = self._recovery.broken(error, time.monotonic())
            if isinstance(again, Again):
                self._calls.check_open()
                if self._cancelled.wait(again.delay_s):
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

        This also cancels the request, unless it has `detach` or `resume_ttl_s`. `Client.cancel` ends such a
        request. May be called from another thread.
        """
        with self._cancelled.lock:
            if not (self._is_over or self._cancelled.is_set()):
                self._cancelled.set()
                self._call.cancel()
                self.transcript.mark_cancelled()

    def __repr__(self) -> str:
        choice = self.transcript.choices[0]
        ending = "runs" if choice.finish_reason is None else choice.finish_reason.value
        return f"<Stream {self.request_id or 'not accepted yet'}: {choice.num_tokens} tokens, {ending}>"

    def show(self, out: TextIO | None = None) -> None:
        """Reads to the end and prints the text of the first choice as it arrives, to `out` or standard output."""
        for delta in self:
            if delta.choice == 0:
                print(delta.text, end="", flush=True, file=out)
        print(file=out)

    def text(self) -> str:
        """Reads to the end and returns the text of the first choice."""
        with closing(self.events()) as events:
            for _ in events:
                pass
        return self.transcript.choices[0].text

    def result(self) -> Completion:
        """Reads to the end and returns the whole result."""
        self.text()
        return self.transcript.result()

    @property
    def request_id(self) -> str | None:
        """The request's id."""
        return self.transcript.request_id

    @property
    def resume_token(self) -> str | None:
        """The secret token that `Client.resume` needs."""
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

    def _deltas(self) -> Generator[Delta]:
        with closing(self.events()) as events:
            for event in events:
                if isinstance(event, Delta):
                    yield event
