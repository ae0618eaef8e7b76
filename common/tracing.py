"""Traces: where the spans of a process go, and how their context travels in gRPC metadata (W3C Trace Context).

Without a collector nothing is recorded and nothing but OpenTelemetry's API is needed. With one, spans are sent by a
thread in batches: nobody waits for it, and what it cannot send in time is dropped. Which traces are recorded is decided
where they begin; for those that begin here OTEL_TRACES_SAMPLER says so. No prompt, output or credential is put into a
span.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.settings import SettingError

FLUSH_TIMEOUT_S = 3.0

_PROPAGATOR = TraceContextTextMapPropagator()


class Tracing:
    """The spans of one process. `is_on`: they go somewhere."""

    def __init__(self, tracer: Tracer | None = None, close: Callable[[], object] = lambda: None) -> None:
        self.is_on = tracer is not None
        self.tracer: Tracer = tracer or NoOpTracer()
        self._close = close

    async def aclose(self) -> None:
        """Sends what has collected, as far as that can be done soon."""
        await asyncio.to_thread(self._close)


NO_TRACING = Tracing()


def open_tracing(process: str, instance: str, endpoint: str) -> Tracing:
    """Traces of a process go to the collector at `endpoint`; empty: nowhere. Raises `SettingError`."""
    if not endpoint:
        return NO_TRACING
    where = "--otlp-endpoint (INFLIGHT_OTLP_ENDPOINT)"
    if urlsplit(endpoint).scheme not in ("http", "https") or not urlsplit(endpoint).hostname:
        raise SettingError(f"{where}: {endpoint!r} is not http://host:port or https://host:port")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingError(f"{where}: needs OpenTelemetry's SDK: pip install 'inflight[otel]' ({error})") from error
    resource = Resource.create({"service.name": f"inflight-{process}", "service.instance.id": instance})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http:"), timeout=FLUSH_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider.get_tracer("inflight"), provider.shutdown)


def context_in(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
    """The context that a call brings; an empty one where it brings none."""
    carrier = {key: value for key, value in metadata if isinstance(value, str)}
    return _PROPAGATOR.extract(carrier, context=Context())


def metadata_of(context: Context | None = None) -> tuple[tuple[str, str], ...]:
    """What goes with a call so that its spans belong to the current one, or to that of `context`; empty: there is
    none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return tuple(carrier.items())


def traceparent_of(span: Span) -> str:
    """The context of a span in one line; empty where it is none."""
    return dict(metadata_of(set_span_in_context(span, Context()))).get("traceparent", "")


def context_of(traceparent: str) -> Context:
    """The context that a line names."""
    carrier: Mapping[str, str] = {"traceparent": traceparent}
    return _PROPAGATOR.extract(carrier, context=Context())


def unix_ns(monotonic_s: float) -> int:
    """A moment of `time.monotonic`'s clock as spans name moments."""
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)
