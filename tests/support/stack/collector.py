"""An OpenTelemetry collector: a gRPC server that takes spans by OTLP and keeps them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span, and the service that sent it."""

    service: str
    span: trace_pb2.Span

    @property
    def attributes(self) -> dict[str, Any]:
        """Strings, whole numbers and lists of strings by name."""
        return {one.key: _value(one.value) for one in self.span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@dataclass(slots=True)
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What has come."""

    address: str = ""
    spans: list[CollectedSpan] = field(default_factory=list)

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """See opentelemetry-proto."""
        for one in request.resource_spans:
            names = {a.key: a.value.string_value for a in one.resource.attributes}
            for scope in one.scope_spans:
                self.spans += [CollectedSpan(names["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[CollectedSpan]:
        """Spans of a name, in the order in which they began."""
        found = [one for one in self.spans if one.span.name == name]
        return sorted(found, key=lambda one: one.span.start_time_unix_nano)

    def children_of(self, parent: CollectedSpan) -> list[str]:
        """Names of a span's children, in order."""
        found = [one.span for one in self.spans if one.span.parent_span_id == parent.span.span_id]
        return [span.name for span in sorted(found, key=lambda span: span.start_time_unix_nano)]


@asynccontextmanager
async def run_collector() -> AsyncIterator[Collector]:
    """A collector on a free port."""
    server, collector = grpc.aio.server(), Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)
