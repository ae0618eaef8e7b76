"""Trace spans of a request on this router: the call, what it waits for, and its placements.

    inflight.generate
      inflight.tokenize
      inflight.ledger submit      (Redis)
      inflight.queue              until it is placed
      inflight.placement          one for each; the executor's spans are its children

Other calls of the ledger within a traced call have a span, too; periodic ones have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from opentelemetry import context as current
from opentelemetry import trace
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Status, StatusCode, Tracer

from inflight.common.errors import Reason, RequestError
from inflight.common.telemetry.trace_context import context_in, traceparent_of, unix_ns
from inflight.router.ledger.types import LedgerCall
from inflight.router.telemetry.events import PlacedAt, RequestEnd, RequestFacts, RequestRecorder
from inflight.router.telemetry.metrics import PROVIDER


@contextmanager
def call_span(tracer: Tracer, name: str, metadata: Iterable[tuple[str, str | bytes]]) -> Iterator[Span]:
    """Spans a client's call, within the trace of the client. Records an error's reason, not its text."""
    with tracer.start_as_current_span(
        name, context_in(metadata), SpanKind.SERVER, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except RequestError as error:
            _fail(span, error.reason.value)
            raise


def trace_ledger_calls(tracer: Tracer, call: LedgerCall) -> None:
    """Records a finished call of the ledger. Ignored if it belongs to no traced request."""
    if not trace.get_current_span().is_recording():
        return
    span = tracer.start_span(
        f"inflight.ledger {call.script}",
        kind=SpanKind.CLIENT,
        attributes={
            "db.system.name": "redis",
            "db.operation.name": "FCALL",
            "db.stored_procedure.name": call.script,
        },
        start_time=unix_ns(call.ended - call.seconds),
    )
    if not call.succeeded:
        _fail(span, Reason.STORE_UNAVAILABLE.value)
    span.end(unix_ns(call.ended))


class RequestTracer:
    """Implements `inflight.router.telemetry.events.RequestObserver`, with traces of requests whose call is traced."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def follow(self, facts: RequestFacts) -> RequestTrace:
        """Must run within the request's own call, whose context the spans take."""
        return RequestTrace(self._tracer, facts)

    def refused(self, model: str, priority_class: str, reason: Reason) -> None:
        """The call's own span says so."""


class RequestTrace(RequestRecorder):
    """Spans of one request."""

    def __init__(self, tracer: Tracer, facts: RequestFacts) -> None:
        self._context = current.get_current()
        self._call = trace.get_current_span()
        # A request adopted from another router arrives outside any call, and starts no trace of its own.
        self._tracer = tracer if self._call.get_span_context().is_valid else NoOpTracer()
        self._queue: Span | None = None
        self._placement: Span | None = None
        self._call.set_attributes(
            {
                "gen_ai.operation.name": facts.operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": facts.model,
                "gen_ai.usage.input_tokens": facts.prompt_tokens,
                "inflight.priority_class": facts.priority_class,
            }
        )

    @property
    def traceparent(self) -> str:
        """The context of its placement, for the executor."""
        return "" if self._placement is None else traceparent_of(self._placement)

    def admitted(self) -> None:
        self._queue = self._tracer.start_span("inflight.queue", self._context)

    def placed(self, placed: PlacedAt) -> None:
        self._end_all()
        self._placement = self._tracer.start_span(
            "inflight.placement",
            self._context,
            SpanKind.CLIENT,
            {"inflight.executor_id": placed.executor_id, "inflight.attempt": placed.attempt},
        )

    def boarded(self, cached_tokens: int) -> None:
        if self._placement is not None:
            self._placement.add_event("boarded", {"inflight.cached_tokens": cached_tokens})

    def boarded_again(self) -> None:
        if self._placement is not None:
            self._placement.add_event("boarded again")

    def preempted(self) -> None:
        if self._placement is not None:
            self._placement.add_event("preempted")

    def first_sent(self, after_s: float) -> None:
        if self._placement is not None:
            self._placement.add_event("first token sent")

    def moved(self, why: str) -> None:
        if self._placement is not None:
            self._placement.set_attribute("inflight.moved", why)
        self._end_all()
        self.admitted()

    def extended(self) -> None:
        self.moved("extended")

    def ended(self, end: RequestEnd) -> None:
        if self._placement is not None and end.is_error:
            _fail(self._placement, end.outcome)
        self._end_all()
        if self._call.is_recording():  # else its client is gone
            self._call.set_attribute("gen_ai.usage.output_tokens", end.output_tokens)
            self._call.set_attribute("gen_ai.response.finish_reasons", [end.outcome])

    def left(self) -> None:
        self._end_all()

    def _end_all(self) -> None:
        for span in (self._queue, self._placement):
            if span is not None:
                span.end()
        self._queue = self._placement = None


def _fail(span: Span, error_type: str) -> None:
    span.set_attribute("error.type", error_type)
    span.set_status(Status(StatusCode.ERROR))
