"""The parts of a router process, built from its settings and wired together. Nothing is started here."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import BaseRoute

from inflight.common.http.metrics_page import Refresh, metrics_route
from inflight.common.http.port import HttpPort
from inflight.common.process import new_process_id
from inflight.common.rpc.server import GrpcServer
from inflight.common.rpc.tls import TlsFiles
from inflight.common.telemetry.tracing import Tracing, open_tracing
from inflight.kserve import grpc_service_pb2_grpc
from inflight.router.api.service import InferenceService
from inflight.router.auth.authenticator import Authentication
from inflight.router.auth.caller import Authenticator
from inflight.router.auth.client_tls import connection_limits_of, open_tls
from inflight.router.auth.resume_token import Learn, ResumeTokens
from inflight.router.config.tenants import TenantConfigFile
from inflight.router.dashboard.feed import Feeds
from inflight.router.dashboard.history import SAMPLE_S, History
from inflight.router.dashboard.requests import RequestLog
from inflight.router.dashboard.routes import dashboard_routes
from inflight.router.dashboard.sampling import Sampler
from inflight.router.dashboard.watching import Watching
from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.dispatch.pools import ModelPool, ModelPools
from inflight.router.executors.channel import ExecutorChannels
from inflight.router.kserve import service as kserve
from inflight.router.ledger.ledgers import Ledgers
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import LedgerCall
from inflight.router.settings import RouterSettings
from inflight.router.stats.gauges import ScrapeGauges
from inflight.router.stats.source import StatsSource
from inflight.router.stats.usage import prices_of, usage_seen_by
from inflight.router.telemetry.event_log import EventLog
from inflight.router.telemetry.events import RequestObserver, RequestObservers
from inflight.router.telemetry.latencies import Latencies
from inflight.router.telemetry.metrics import RouterMetrics, TenantCosts
from inflight.router.telemetry.tracing import RequestTracer, trace_ledger_calls
from inflight.router.text.count_limits import REQUEST_WIRE_LIMITS
from inflight.router.text.tokenizer import TextModel
from inflight.v1 import inference_pb2_grpc


def http_app(
    registry: CollectorRegistry, extra_routes: Sequence[BaseRoute], refresh: Refresh | None = None
) -> Starlette:
    """Returns the HTTP application: `/metrics` of `registry`, refreshed by `refresh` at each scrape, and
    `extra_routes`."""
    return Starlette(routes=[metrics_route(registry, refresh), *extra_routes])


SERVICE_NAME = "inflight.v1.InferenceService"


@dataclass(frozen=True, slots=True)
class RouterApp:
    """A router, built and not started. `http` is None without an address in the settings."""

    router_id: str
    tenants: TenantConfigFile
    authentication: Authentication
    certificates: tuple[TlsFiles, ...]
    ledgers: Ledgers
    tokens: ResumeTokens
    pools: ModelPools
    stats: StatsSource
    service: InferenceService
    server: GrpcServer
    tracing: Tracing
    http: HttpPort | None
    # Sources of the dashboard besides the statistics; `sampler` is None without a dashboard.
    watching: Watching
    sampler: Sampler | None


def build_router(settings: RouterSettings, texts: Mapping[str, TextModel], registry: CollectorRegistry) -> RouterApp:
    """Builds a router from its settings, with its metrics in `registry`. Raises `SettingError`."""
    watching = Watching(History(), EventLog(), RequestLog())
    has_dashboard = settings.board and bool(settings.http_listen)
    tenants = TenantConfigFile.open(settings.admission_file, frozenset(texts), watching.events.admission_file_read)
    tls, channels = open_tls(settings), ExecutorChannels.of(settings)
    authentication = Authentication(settings, lambda: {*texts, *tenants.config.variants})
    router_id = settings.router_id or new_process_id(settings.listen)
    tracing = open_tracing("router", router_id, settings.otlp_endpoint)
    metrics, latencies = RouterMetrics(registry, texts, tenant_costs_of(settings)), Latencies(texts)
    heard: list[RequestObserver] = [metrics, latencies, *([watching.requests] if has_dashboard else [])]
    observers = RequestObservers(heard, RequestTracer(tracing.tracer) if tracing.is_on else None)

    def ledger_called(call: LedgerCall) -> None:
        metrics.ledger_called(call)
        watching.events.ledger_called(call)
        trace_ledger_calls(tracing.tracer, call)

    ledgers = Ledgers(settings.redis_url.get_secret_value(), router_id, ledger_settings_of(settings), ledger_called)
    tokens = resume_tokens(settings, ledgers.learn_secret)
    models = [
        ModelPool(name, text, _dispatcher(name, ledgers, settings, tokens, metrics), observers)
        for name, text in texts.items()
    ]
    variants, breached = (lambda: tenants.config.variants), metrics.breaches.inc
    max_output_delay_s = settings.max_output_delay_ms / 1000
    pools = ModelPools(models, router_id, variants, channels, watching.events, breached, max_output_delay_s)
    stats = StatsSource(pools, router_id, latencies)
    service = InferenceService(
        pools, settings, tenants, authentication.authenticator, tokens, stats, observers, tracing.tracer
    )
    board = _board(stats, authentication.authenticator, watching, pools, settings) if has_dashboard else []
    sampler = Sampler(watching.history, watching.requests, latencies, lambda: stats.looks(SAMPLE_S / 2))
    scrape = ScrapeGauges(registry, models).refresh
    server = GrpcServer(
        [SERVICE_NAME, kserve.SERVICE_NAME],
        limits=connection_limits_of(settings),
        tls=tls,
        check_caller=authentication.check_call,
        wire_limits=REQUEST_WIRE_LIMITS,
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server.grpc)
    kserve_service = kserve.KServeService(pools, authentication.authenticator, service, settings)
    grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(kserve_service, server.grpc)
    return RouterApp(
        router_id=router_id,
        tenants=tenants,
        authentication=authentication,
        certificates=tuple(files for files in (tls, channels.tls) if files is not None),
        ledgers=ledgers,
        tokens=tokens,
        pools=pools,
        stats=stats,
        service=service,
        server=server,
        tracing=tracing,
        http=HttpPort(http_app(registry, board, scrape)) if settings.http_listen else None,
        watching=watching,
        sampler=sampler if has_dashboard else None,
    )


def _board(
    stats: StatsSource, authenticator: Authenticator, watching: Watching, pools: ModelPools, settings: RouterSettings
) -> list[BaseRoute]:
    usage = functools.partial(usage_seen_by, pools=pools, prices=prices_of(settings))
    return dashboard_routes(Feeds(stats), authenticator, watching, usage)


def tenant_costs_of(settings: RouterSettings) -> TenantCosts | None:
    """Returns the tenants that have metrics of their own; None if there are none."""
    prices, tenants = prices_of(settings), frozenset(settings.usage_metrics_tenants)
    return TenantCosts(tenants, prices.currency, prices.cost) if tenants else None


def ledger_settings_of(settings: RouterSettings) -> LedgerSettings:
    """Returns the ledger's part of the router's settings."""
    return LedgerSettings(
        max_queue_requests=settings.max_queue_requests,
        max_queue_tokens=settings.max_queue_tokens,
        max_queue_bytes=settings.max_queue_bytes,
        max_bypass=settings.max_bypass,
        tolerated_ttft_ms=round(settings.tolerated_ttft_s * 1000),
        age_ms=max(1, round(settings.age_s * 1000)),
        preempt_for_priority=settings.preempt_for_priority,
        remember_ended_ms=max(60_000, round(settings.resume_ttl_s * 1000)) + 15_000,
    )


def resume_tokens(settings: RouterSettings, learn: Learn) -> ResumeTokens:
    """Returns resume tokens with the configured secret, or with the one in the ledger."""
    secret = settings.resume_secret
    return ResumeTokens(None if secret is None else secret.get_secret_value().encode(), learn)


def _dispatcher(
    model: str, ledgers: Ledgers, settings: RouterSettings, tokens: ResumeTokens, metrics: RouterMetrics
) -> Dispatcher:
    return Dispatcher(
        functools.partial(ledgers.open, model),
        settings.max_attempts,
        settings.no_executor_grace_s,
        settings.queue_event_interval_s,
        settings.resume_ttl_s,
        tokens.check_again,
        functools.partial(metrics.charged, model),
    )
