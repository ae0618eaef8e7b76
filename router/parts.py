"""What a router process is made of, built from its settings and wired together. Nothing is started here."""

from __future__ import annotations

import functools
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from inflight.kserve import grpc_service_pb2_grpc
from inflight.v1 import inference_pb2_grpc
from prometheus_client import CollectorRegistry

from common.http_port import HttpPort
from common.server import GrpcServer
from common.tls import TlsFiles
from common.tracing import Tracing, open_tracing
from router.admission_file import AdmissionFile
from router.board.events import EventLog
from router.board.feed import Feeds
from router.board.history import SAMPLE_S, History
from router.board.requests import RequestLog
from router.board.routes import board_routes
from router.board.sampling import Sampler
from router.board.watching import Watching
from router.call_check import caller_check
from router.client_port import connection_limits_of, open_tls
from router.dispatch import Dispatcher
from router.doors import Doors
from router.executor_channels import ExecutorChannels
from router.http_app import http_app
from router.kserve import service as kserve
from router.latencies import Latencies
from router.looked_up import LookedUpMetrics
from router.metrics import RouterMetrics
from router.observing import Listener, Listeners
from router.pools import Pool, Pools
from router.request_limits import REQUEST_WIRE_LIMITS
from router.resume_secret import Learn, ResumeTokens
from router.service import InferenceService
from router.settings import RouterSettings
from router.stats import StatsSource
from router.store.ledgers import Ledgers
from router.store.settings import StoreSettings
from router.store.types import StoreCall
from router.text.tokenizer import TextModel
from router.tracing import RequestTracer, trace_store_calls

SERVICE_NAME = "inflight.v1.InferenceService"


@dataclass(frozen=True, slots=True)
class RouterParts:
    """A router, built and not started. `http` is there where the settings name an address for it."""

    router_id: str
    admission: AdmissionFile
    doors: Doors
    certificates: tuple[TlsFiles, ...]
    ledgers: Ledgers
    tokens: ResumeTokens
    pools: Pools
    stats: StatsSource
    service: InferenceService
    server: GrpcServer
    tracing: Tracing
    http: HttpPort | None
    # What the board shows beside the statistics; `sampler` is there where there is a board.
    watching: Watching
    sampler: Sampler | None


def build(settings: RouterSettings, texts: Mapping[str, TextModel], registry: CollectorRegistry) -> RouterParts:
    """Everything that the settings ask for; what it counts goes into `registry`. Raises `SettingError`."""
    watching = Watching(History(), EventLog(), RequestLog())
    has_board = settings.board and bool(settings.http_listen)
    admission = AdmissionFile.open(settings.admission_file, frozenset(texts), watching.events.admission_file_read)
    tls, channels = open_tls(settings), ExecutorChannels.of(settings)
    doors = Doors(settings, lambda: {*texts, *admission.rules.variants})
    router_id = settings.router_id or _default_router_id(settings.listen)
    tracing = open_tracing("router", router_id, settings.otlp_endpoint)
    metrics, latencies = RouterMetrics(registry, texts), Latencies(texts)
    heard: list[Listener] = [metrics, latencies, *([watching.requests] if has_board else [])]
    listeners = Listeners(heard, RequestTracer(tracing.tracer) if tracing.is_on else None)

    def store_called(call: StoreCall) -> None:
        metrics.store_called(call)
        watching.events.store_called(call)
        trace_store_calls(tracing.tracer, call)

    redis_url = settings.redis_url.get_secret_value()
    ledgers = Ledgers(redis_url, router_id, store_settings_of(settings), store_called)
    tokens = resume_tokens(settings, ledgers.learn_secret)
    models = [Pool(name, text, _dispatcher(name, ledgers, settings, tokens), listeners) for name, text in texts.items()]
    pools = Pools(models, router_id, lambda: admission.rules.variants, channels, watching.events)
    stats = StatsSource(pools, router_id, latencies)
    service = InferenceService(pools, settings, admission, doors.door, tokens, stats, listeners, tracing.tracer)
    board = board_routes(Feeds(stats), doors.door, watching) if has_board else []
    sampler = Sampler(watching.history, watching.requests, latencies, lambda: stats.looks(SAMPLE_S / 2))
    server = GrpcServer(
        [SERVICE_NAME, kserve.SERVICE_NAME],
        limits=connection_limits_of(settings),
        tls=tls,
        check_caller=caller_check(doors.door),
        wire_limits=REQUEST_WIRE_LIMITS,
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server.grpc)
    kserve_service = kserve.KServeService(pools, doors.door, service, settings)
    grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(kserve_service, server.grpc)
    return RouterParts(
        router_id=router_id,
        admission=admission,
        doors=doors,
        certificates=tuple(files for files in (tls, channels.tls) if files is not None),
        ledgers=ledgers,
        tokens=tokens,
        pools=pools,
        stats=stats,
        service=service,
        server=server,
        tracing=tracing,
        http=HttpPort(http_app(registry, board, LookedUpMetrics(registry, models).refresh))
        if settings.http_listen
        else None,
        watching=watching,
        sampler=sampler if has_board else None,
    )


def store_settings_of(settings: RouterSettings) -> StoreSettings:
    """What the store is told of the router's settings."""
    return StoreSettings(
        max_queue_requests=settings.max_queue_requests,
        max_queue_tokens=settings.max_queue_tokens,
        max_queue_bytes=settings.max_queue_bytes,
        max_bypass=settings.max_bypass,
        age_ms=max(1, round(settings.age_s * 1000)),
        preempt_for_priority=settings.preempt_for_priority,
        remember_ended_ms=max(60_000, round(settings.resume_ttl_s * 1000)) + 15_000,
    )


def resume_tokens(settings: RouterSettings, learn: Learn) -> ResumeTokens:
    """Resume tokens with the secret that is set, or else with the one that the ledger keeps."""
    secret = settings.resume_secret
    return ResumeTokens(None if secret is None else secret.get_secret_value().encode(), learn)


def _dispatcher(model: str, ledgers: Ledgers, settings: RouterSettings, tokens: ResumeTokens) -> Dispatcher:
    return Dispatcher(
        functools.partial(ledgers.open, model),
        settings.max_attempts,
        settings.no_executor_grace_s,
        settings.queue_event_interval_s,
        settings.resume_ttl_s,
        tokens.check_again,
    )


def _default_router_id(listen: str) -> str:
    """New at every start: mail for the one before it must not reach this one."""
    return f"{socket.gethostname()}:{listen.rpartition(':')[2]}:{secrets.token_hex(4)}"
