"""How a trace's context travels: W3C Trace Context in gRPC metadata and in placements. Needs the API alone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from opentelemetry.context import Context
from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PROPAGATOR = TraceContextTextMapPropagator()


def context_in(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
    """The context that a call brings; an empty one where it brings none."""
    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    return _PROPAGATOR.extract(carrier, context=Context())


def trace_metadata(context: Context | None = None) -> tuple[tuple[str, str], ...]:
    """What goes with a call so that its spans belong to the current one, or to that of `context`; empty: there is
    none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return tuple(carrier.items())


def traceparent_of(span: Span) -> str:
    """The context of a span in one line; empty where it is none."""
    return dict(trace_metadata(set_span_in_context(span, Context()))).get("traceparent", "")


def parent_context(traceparent: str) -> Context:
    """The context that a line names."""
    carrier: Mapping[str, str] = {"traceparent": traceparent}
    return _PROPAGATOR.extract(carrier, context=Context())


def unix_ns(monotonic_s: float) -> int:
    """A moment of `time.monotonic`'s clock as spans name moments."""
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)
