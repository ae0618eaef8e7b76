"""Traces: the export of a process's spans.

Without a collector nothing is recorded, and only OpenTelemetry's API is needed. With one, a thread sends the spans in
batches: no request waits for it, and spans that cannot be sent in time are dropped. Which traces are recorded is
decided where they begin; for those that begin here by OTEL_TRACES_SAMPLER. Spans contain no prompt, output or
credential.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

from opentelemetry.trace import NoOpTracer, Tracer

from inflight.common.settings import SettingError

FLUSH_TIMEOUT_S = 3.0


class Tracing:
    """The spans of one process. `is_on`: they are exported."""

    def __init__(self, tracer: Tracer | None = None, close: Callable[[], object] = lambda: None) -> None:
        self.is_on = tracer is not None
        self.tracer: Tracer = tracer or NoOpTracer()
        self._close = close

    async def aclose(self) -> None:
        """Sends the collected spans, as far as possible within the timeout."""
        await asyncio.to_thread(self._close)


NO_TRACING = Tracing()


def open_tracing(process: str, instance: str, endpoint: str) -> Tracing:
    """Opens the export of a process's spans to the collector at `endpoint`; empty: no export. Raises `SettingError`."""
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
    return Tracing(
        provider.get_tracer("inflight"), lambda: flush(provider.shutdown, exporter.shutdown, FLUSH_TIMEOUT_S)
    )


def flush(send_all: Callable[[], object], give_up: Callable[[], object], timeout_s: float) -> None:
    """Sends the collected spans. After `timeout_s`, `give_up` ends that, because without an answer each of many batches
    would take its own timeout."""
    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        send_all()
    finally:
        timer.cancel()
