"""Events of a router's requests, for metrics, traces and the dashboard.

A `RequestObserver` makes a `RequestRecorder` for every request. `RequestRecord` reports each event of a request once to
all its recorders: even if a stream is read again, a token is sent once and a request ends once. Observers are called in
the path of tokens, so they must neither raise nor wait. They get no text and no tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from common.errors import Reason
from inflight.v1 import types_pb2

CANCELLED = "cancelled"

CLASS_NAMES: dict[int, str] = {
    types_pb2.PRIORITY_CLASS_INTERACTIVE: "interactive",
    types_pb2.PRIORITY_CLASS_STANDARD: "standard",
    types_pb2.PRIORITY_CLASS_BATCH: "batch",
}


def class_name(priority: int) -> str:
    """What a priority class is called; one that is not given is `standard`."""
    return CLASS_NAMES.get(priority, "standard")


def outcome_of(reason: int) -> str:
    """What an end is called: `length`, `stop_token`, `cancelled`, …"""
    return types_pb2.FinishReason.Name(types_pb2.FinishReason.ValueType(reason)).removeprefix("FINISH_REASON_").lower()


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known of a request from the beginning. `arrived` is on `time.monotonic`'s clock; `operation` is
    OpenTelemetry's name for it, `chat` or `text_completion`; `prior_tokens` are output that its client brought."""

    model: str = ""
    operation: str = "text_completion"
    priority_class: str = "standard"
    arrived: float = 0.0
    prompt_tokens: int = 0
    prior_tokens: int = 0
    # The client's id of the request and its tenant: for the board's timelines, not for labels of metrics.
    request_id: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PlacedAt:
    """A placement. `wait_s` is how long the request waited for its first one; None: it had one before."""

    executor_id: str
    attempt: int
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended. `outcome` is the finish reason's name or the error's reason; `decode_s` is from its first
    token to its last, None where that is not known."""

    outcome: str
    is_error: bool
    duration_s: float
    output_tokens: int
    decode_s: float | None


class RequestRecorder(Protocol):
    """Told of one request."""

    def admitted(self) -> None:
        """The ledger has it."""

    def placed(self, placed: PlacedAt) -> None:
        """An executor is to run it."""

    def boarded(self, cached_tokens: int) -> None:
        """It got its first seat; the KV of so many of the prompt's tokens was there."""

    def boarded_again(self) -> None:
        """It got a seat again, after it gave one up or moved."""

    def preempted(self) -> None:
        """It gave up its seat and waits on its executor for another."""

    def first_sent(self, after_s: float) -> None:
        """Its first token was sent, so long after its arrival."""

    def sent(self, num_tokens: int, interval_s: float | None) -> None:
        """So many tokens were sent, so long after those before; None: they were the first to this reader."""

    def moved(self, why: str) -> None:
        """It lost its place and waits for another."""

    def resumed(self) -> None:
        """A client came back to it."""

    def ended(self, end: RequestEnd) -> None:
        """It ended."""

    def left(self) -> None:
        """It goes on without this router."""


class Trace(RequestRecorder, Protocol):
    """A recorder whose spans go on elsewhere."""

    @property
    def traceparent(self) -> str:
        """W3C trace context of the current placement."""


class Tracer(Protocol):
    """Follows every request with a trace."""

    def follow(self, facts: RequestFacts) -> Trace:
        """A request has come that is sound; its trace."""
        ...


class RequestObserver(Protocol):
    """Told of all requests."""

    def follow(self, facts: RequestFacts) -> RequestRecorder:
        """A request has come that is sound; its recorder."""
        ...

    def refused(self, model: str, priority_class: str, reason: Reason) -> None:
        """A request was refused before it waited; `model` is empty where it named none that is served."""


class RequestRecord:
    """One request, told to its recorders, `trace` among them. What was never admitted has no end."""

    def __init__(
        self, facts: RequestFacts, recorders: Sequence[RequestRecorder] = (), trace: Trace | None = None
    ) -> None:
        self._facts = facts
        self._recorders = recorders if trace is None else (*recorders, trace)
        self._trace = trace
        self.is_admitted = False
        self._has_been_placed = False
        self._has_boarded = False
        self._is_over = False
        # Output tokens that some reader was sent, from offset 0 on.
        self._num_sent = facts.prior_tokens
        self._reader: int | None = None
        self._last_sent = 0.0

    @property
    def traceparent(self) -> str:
        """What its executor is told, so that its spans belong to the trace; empty: it is not traced."""
        return "" if self._trace is None else self._trace.traceparent

    def admitted(self) -> None:
        """The ledger has it. Safe to repeat."""
        if not self.is_admitted:
            self.is_admitted = True
            for recorder in self._recorders:
                recorder.admitted()

    def adopted(self, has_started: bool) -> None:
        """Another router admitted it, and placed it."""
        self.admitted()
        self._has_been_placed = True
        self._has_boarded = self._has_boarded or has_started

    def placed(self, executor_id: str, attempt: int) -> None:
        """An executor is to run it."""
        wait_s = None if self._has_been_placed else time.monotonic() - self._facts.arrived
        self._has_been_placed = True
        for recorder in self._recorders:
            recorder.placed(PlacedAt(executor_id, attempt, wait_s))

    def boarded(self, cached_tokens: int) -> None:
        """It has a seat."""
        if not self._has_boarded:
            self._has_boarded = True
            for recorder in self._recorders:
                recorder.boarded(cached_tokens)

    def boarded_again(self) -> None:
        """It has a seat once more. Nothing before it had its first."""
        if self._has_boarded:
            for recorder in self._recorders:
                recorder.boarded_again()

    def preempted(self) -> None:
        """It gave up its seat. Nothing where it had none."""
        if self._has_boarded:
            for recorder in self._recorders:
                recorder.preempted()

    def sent(self, reader: int, offset: int, num_tokens: int, *, is_first_known: bool) -> None:
        """A reader was sent tokens from `offset` on. What some reader was sent before is not news. `is_first_known`:
        the first token ever was this router's to send."""
        now = time.monotonic()
        interval_s = now - self._last_sent if reader == self._reader else None
        self._reader, self._last_sent = reader, now
        num_new = offset + num_tokens - max(self._num_sent, offset)
        if num_new <= 0:
            return
        is_first = is_first_known and offset <= self._facts.prior_tokens == self._num_sent
        self._num_sent = offset + num_tokens
        for recorder in self._recorders:
            if is_first:
                recorder.first_sent(now - self._facts.arrived)
            recorder.sent(num_new, interval_s)

    def moved(self, why: str) -> None:
        """It lost its place and waits for another."""
        for recorder in self._recorders:
            recorder.moved(why)

    def resumed(self) -> None:
        """A client came back to it."""
        for recorder in self._recorders:
            recorder.resumed()

    def ended(self, outcome: str, output_tokens: int, decode_s: float | None, *, is_error: bool = False) -> None:
        """It ended. Nothing where it was never admitted, or is over."""
        if not self.is_admitted or self._is_over:
            return
        self._is_over = True
        duration_s = time.monotonic() - self._facts.arrived
        for recorder in self._recorders:
            recorder.ended(RequestEnd(outcome, is_error, duration_s, output_tokens, decode_s))

    def left(self) -> None:
        """It goes on without this router. Nothing where it is over."""
        if not self._is_over:
            self._is_over = True
            for recorder in self._recorders:
                recorder.left()


class RequestObservers:
    """All that listen, and who traces."""

    def __init__(self, listeners: Sequence[RequestObserver] = (), tracer: Tracer | None = None) -> None:
        self._listeners = tuple(listeners)
        self._tracer = tracer

    def follow(self, facts: RequestFacts) -> RequestRecord:
        """The record of a request that has come."""
        trace = None if self._tracer is None else self._tracer.follow(facts)
        return RequestRecord(facts, tuple(listener.follow(facts) for listener in self._listeners), trace)

    def refused(self, model: str, priority_class: str, reason: Reason) -> None:
        """See `RequestObserver`."""
        for listener in self._listeners:
            listener.refused(model, priority_class, reason)


NO_OBSERVERS = RequestObservers()
