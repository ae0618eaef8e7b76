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

from inflight.common.errors import Reason
from inflight.v1 import types_pb2

CANCELLED = "cancelled"

CLASS_NAMES: dict[int, str] = {
    types_pb2.PRIORITY_CLASS_INTERACTIVE: "interactive",
    types_pb2.PRIORITY_CLASS_STANDARD: "standard",
    types_pb2.PRIORITY_CLASS_BATCH: "batch",
}


def class_name(priority: int) -> str:
    """Returns the name of a priority class; an unset one is `standard`."""
    return CLASS_NAMES.get(priority, "standard")


def outcome_of(reason: int) -> str:
    """Returns the name of a finish reason: `length`, `stop_token`, `cancelled`, …"""
    return types_pb2.FinishReason.Name(types_pb2.FinishReason.ValueType(reason)).removeprefix("FINISH_REASON_").lower()


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The facts of a request that are known at its arrival. `arrived` is on `time.monotonic`'s clock; `operation` is
    OpenTelemetry's name for it, `chat`, `text_completion` or `embeddings`; `prior_tokens` are output that its client
    brought."""

    model: str = ""
    operation: str = "text_completion"
    priority_class: str = "standard"
    arrived: float = 0.0
    prompt_tokens: int = 0
    prior_tokens: int = 0
    # The client's id of the request and its tenant: for the dashboard's timelines, not for labels of metrics.
    request_id: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PlacedAt:
    """A placement. `wait_s` is how long the request waited for its first placement; None for a later one."""

    executor_id: str
    attempt: int
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended. `outcome` is the finish reason's name or the error's reason; `decode_s` is from its first
    token to its last, None if unknown."""

    outcome: str
    is_error: bool
    duration_s: float
    output_tokens: int
    decode_s: float | None


class RequestRecorder(Protocol):
    """Receives the events of one request. A recorder that inherits from it ignores those that it does not define: an
    explicit `return` makes them not abstract."""

    __slots__ = ()

    def admitted(self) -> None:
        """The ledger has accepted it."""
        return

    def placed(self, placed: PlacedAt) -> None:
        """It was placed on an executor."""
        return

    def boarded(self, cached_tokens: int) -> None:
        """It got its first seat, with so many prompt tokens found in the prefix cache."""
        return

    def boarded_again(self) -> None:
        """It got a seat again, after a preemption or a move."""
        return

    def preempted(self) -> None:
        """It was preempted and waits on its executor for a seat."""
        return

    def first_sent(self, after_s: float) -> None:
        """Its first token was sent, so long after its arrival."""
        return

    def sent(self, num_tokens: int, interval_s: float | None) -> None:
        """So many tokens were sent, so long after the previous ones; None: they were the first to this reader."""
        return

    def moved(self, why: str) -> None:
        """It lost its placement and waits for another."""
        return

    def extended(self) -> None:
        """Its placement has used its reservation; another one follows."""
        return

    def resumed(self) -> None:
        """A client resumed it."""
        return

    def incomplete(self) -> None:
        """A token was missing from what a client was sent. This is a bug of the router."""
        return

    def ended(self, end: RequestEnd) -> None:
        """It ended."""
        return

    def left(self) -> None:
        """It continues without this router."""
        return


class Trace(RequestRecorder, Protocol):
    """A recorder whose spans continue in other processes."""

    @property
    def traceparent(self) -> str:
        """W3C trace context of the current placement."""


class Tracer(Protocol):
    """Makes a trace for every request."""

    def follow(self, facts: RequestFacts) -> Trace:
        """Returns the trace of a valid request that has arrived."""
        ...


class RequestObserver(Protocol):
    """Observes all requests."""

    def follow(self, facts: RequestFacts) -> RequestRecorder:
        """Returns the recorder of a valid request that has arrived."""
        ...

    def refused(self, model: str, priority_class: str, reason: Reason) -> None:
        """A request was refused before it waited; `model` is empty if it named no served model."""


class RequestRecord:
    """One request, reported to its recorders, `trace` among them. A request that was never admitted has no end."""

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
        # Output tokens that were sent to some reader, from offset 0 on.
        self._num_sent = facts.prior_tokens
        self._reader: object = None
        self._last_sent: float | None = None

    @property
    def traceparent(self) -> str:
        """Returns the trace context for its executor; empty if it is not traced."""
        return "" if self._trace is None else self._trace.traceparent

    def admitted(self) -> None:
        """The ledger has accepted it. Safe to repeat."""
        if not self.is_admitted:
            self.is_admitted = True
            for recorder in self._recorders:
                recorder.admitted()

    def adopted(self, has_started: bool) -> None:
        """Another router has admitted and placed it."""
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
        """It has a seat again. Ignored before its first seat."""
        if self._has_boarded:
            for recorder in self._recorders:
                recorder.boarded_again()

    def preempted(self) -> None:
        """It was preempted. Ignored if it had no seat."""
        if self._has_boarded:
            for recorder in self._recorders:
                recorder.preempted()

    def sent(self, reader: object, offset: int, num_tokens: int, *, is_first_known: bool) -> None:
        """Tokens from `offset` on were sent to a reader. Tokens that another reader got before are not counted again.
        `is_first_known`: this router sent the first token of the request."""
        now = time.monotonic()
        interval_s = now - self._last_sent if self._last_sent is not None and reader is self._reader else None
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

    def extended(self) -> None:
        """Its placement has used its reservation; another one follows."""
        for recorder in self._recorders:
            recorder.extended()

    def resumed(self) -> None:
        """A client came back to it."""
        for recorder in self._recorders:
            recorder.resumed()

    def incomplete(self) -> None:
        """A token was missing from what a client was sent."""
        for recorder in self._recorders:
            recorder.incomplete()

    def ended(self, outcome: str, output_tokens: int, decode_s: float | None, *, is_error: bool = False) -> None:
        """It ended. Ignored if it was never admitted, or has ended."""
        if not self.is_admitted or self._is_over:
            return
        self._is_over = True
        duration_s = time.monotonic() - self._facts.arrived
        for recorder in self._recorders:
            recorder.ended(RequestEnd(outcome, is_error, duration_s, output_tokens, decode_s))

    def left(self) -> None:
        """It continues without this router. Ignored if it has ended."""
        if not self._is_over:
            self._is_over = True
            for recorder in self._recorders:
                recorder.left()


class RequestObservers:
    """All observers, and the tracer."""

    def __init__(self, observers: Sequence[RequestObserver] = (), tracer: Tracer | None = None) -> None:
        self._observers = tuple(observers)
        self._tracer = tracer

    def follow(self, facts: RequestFacts) -> RequestRecord:
        """Returns the record of a request that has arrived."""
        trace = None if self._tracer is None else self._tracer.follow(facts)
        return RequestRecord(facts, tuple(observer.follow(facts) for observer in self._observers), trace)

    def refused(self, model: str, priority_class: str, reason: Reason) -> None:
        for observer in self._observers:
            observer.refused(model, priority_class, reason)


NO_OBSERVERS = RequestObservers()
