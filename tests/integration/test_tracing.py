"""One trace from a client's own span to the executor's steps, as a real collector receives it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from inflight import AsyncClient
from inflight.common.errors import Reason
from inflight.common.settings import SettingError
from inflight.common.telemetry.trace_context import traceparent_of
from inflight.common.telemetry.tracing import Tracing, open_tracing
from inflight.errors import InflightError
from inflight.router.settings import RouterSettings
from tests.support.stack.cluster import ExecutorShape, run_router, start_executor, until_ready


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


SHAPE = ExecutorShape()
# All that a span may contain: numbers, names of the configuration, and words of the router's own.
ATTRIBUTES = {
    *("db.operation.name", "db.stored_procedure.name", "db.system.name", "error.type"),
    *("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "gen_ai.response.finish_reasons"),
    *("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"),
    *("inflight.attempt", "inflight.cached_tokens", "inflight.executor_id", "inflight.prior_tokens"),
    "inflight.priority_class",
}


class Traced:
    """A router and an executor that send their spans to one collector, and so do their clients."""

    def __init__(self, redis_url: str, model: str) -> None:
        self.redis_url = redis_url
        self.model = model

    async def run(self, collector: Collector, ask: Any) -> None:
        """Has `ask(address, tracing)` done, and all spans sent."""
        executors = open_tracing("executor", "e", collector.address)
        clients = open_tracing("client", "c", collector.address)
        executor = await start_executor("executor-0", self.model, SHAPE, tracing=executors)
        settings = RouterSettings(no_executor_grace_s=60.0, otlp_endpoint=collector.address)
        try:
            async with run_router("r", self.model, self.redis_url, [executor.address], settings) as router:
                await until_ready(router, 1)
                await ask(router.address, clients)
                await asyncio.wait_for(router.pools.by_name[self.model].dispatcher.wait_until_empty(), 60)
                await router.parts.tracing.aclose()
        finally:
            await executor.stop()
            for tracing in (executors, clients):
                await tracing.aclose()


def ask_within_a_span() -> Any:
    async def ask(address: str, tracing: Tracing) -> None:
        async with AsyncClient(address) as client:
            with tracing.tracer.start_as_current_span("the user's own"):
                await client.complete(token_ids=[1, 2, 3, 4, 0], max_tokens=6, ignore_eos=True)

    return ask


async def test_one_trace_spans_client_router_redis_and_executor(redis_url: str, pool: str) -> None:
    async with run_collector() as collector:
        await Traced(redis_url, pool).run(collector, ask_within_a_span())
    (own,) = collector.named("the user's own")
    assert {one.span.trace_id for one in collector.spans} == {own.span.trace_id}
    assert collector.children_of(own) == ["inflight.generate"]
    (call,) = collector.named("inflight.generate")
    assert collector.children_of(call) == [
        "inflight.tokenize",
        "inflight.ledger submit",
        "inflight.queue",
        "inflight.placement",
    ]
    (placement,) = collector.named("inflight.placement")
    assert collector.children_of(placement) == ["inflight.sequence"]
    (sequence,) = collector.named("inflight.sequence")
    assert collector.children_of(sequence) == ["inflight.prefill", "inflight.decode"]
    services = {one.span.name: one.service for one in collector.spans}
    assert services["inflight.ledger submit"] == "inflight-router"
    assert services["inflight.sequence"] == "inflight-executor"


async def test_spans_say_how_much_and_how_it_ended(redis_url: str, pool: str) -> None:
    async with run_collector() as collector:
        await Traced(redis_url, pool).run(collector, ask_within_a_span())

    def attributes(name: str) -> dict[str, Any]:
        one: CollectedSpan = collector.named(name)[0]
        return one.attributes

    call = attributes("inflight.generate")
    assert call["gen_ai.request.model"] == pool
    assert call["gen_ai.operation.name"] == "text_completion"
    assert (call["gen_ai.usage.input_tokens"], call["gen_ai.usage.output_tokens"]) == (5, 6)
    assert call["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes("inflight.placement")["inflight.executor_id"] == "executor-0"
    assert attributes("inflight.ledger submit")["db.system.name"] == "redis"
    assert attributes("inflight.prefill")["gen_ai.usage.input_tokens"] == 5
    assert attributes("inflight.decode")["gen_ai.usage.output_tokens"] == 5
    assert {name for one in collector.spans for name in one.attributes} <= ATTRIBUTES
    # And no event of any span holds a text
    assert {e.name for one in collector.spans for e in one.span.events} <= {"boarded", "first token sent"}


async def test_request_that_its_client_does_not_sample_is_traced_nowhere(redis_url: str, pool: str) -> None:
    unsampled = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-00"

    async def ask(address: str, tracing: Tracing) -> None:
        async with AsyncClient(address, metadata={"traceparent": unsampled}) as client:
            await client.complete(token_ids=[1, 2], max_tokens=2)

    async with run_collector() as collector:
        await Traced(redis_url, pool).run(collector, ask)
    assert not collector.spans


async def test_refusal_is_an_error_with_its_reason_and_without_its_text(redis_url: str, pool: str) -> None:
    async def ask(address: str, tracing: Tracing) -> None:
        async with AsyncClient(address) as client:
            with pytest.raises(InflightError):
                await client.complete(token_ids=[1, 2], max_tokens=1 << 20)

    async with run_collector() as collector:
        await Traced(redis_url, pool).run(collector, ask)
    (call,) = collector.named("inflight.generate")
    assert call.attributes["error.type"] == Reason.INVALID_FIELD.value
    assert call.span.status.code == 2
    assert not call.span.status.message
    assert not call.span.events


async def test_collector_that_is_away_delays_no_request(redis_url: str, pool: str) -> None:
    unreachable = Collector("http://127.0.0.1:1")
    async with asyncio.timeout(60):
        await Traced(redis_url, pool).run(unreachable, ask_within_a_span())


@pytest.mark.parametrize("endpoint", ["collector:4317", "ftp://collector:4317", "http://"])
def test_endpoint_that_is_no_url_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(SettingError, match=r"--otlp-endpoint .* is not http://host:port"):
        open_tracing("router", "r", endpoint)


def test_without_an_endpoint_nothing_is_recorded() -> None:
    tracing = open_tracing("router", "r", "")
    assert not tracing.is_on
    assert traceparent_of(tracing.tracer.start_span("x")) == ""


def test_without_the_sdk_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingError, match=r"--otlp-endpoint .* pip install 'inflight\[otel\]'"):
        open_tracing("router", "r", "http://127.0.0.1:4317")


def test_client_library_loads_no_more_than_the_api() -> None:
    program = "import sys, inflight.aio; sys.exit(any(m.startswith('opentelemetry.sdk') for m in sys.modules))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
