"""W3C Trace Context in gRPC metadata and in placements. Needs only OpenTelemetry's API."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


def context_in(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
    """Returns the context in a call's metadata; an empty one if there is none."""
    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    return _PROPAGATOR.extract(carrier, context=Context())


def trace_metadata(context: Context | None = None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata with which a call's spans belong to the current span, or to that of `context`; empty without
    a span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return tuple(carrier.items())


def traceparent_of(span: Span) -> str:
    """Returns the context of a span as one line; empty if the span has none."""
    return dict(trace_metadata(set_span_in_context(span, Context()))).get("traceparent", "")


def parent_context(traceparent: str) -> Context:
    """Returns the context that a line contains."""
    carrier: Mapping[str, str] = {"traceparent": traceparent}
    return _PROPAGATOR.extract(carrier, context=Context())


def unix_ns(monotonic_s: float) -> int:
    """Converts a time of `time.monotonic` to the time format of spans."""
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)
