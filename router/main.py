"""The router process: builds everything, serves, drains, stops.

Exit codes: 0 after a drain, 2 for a setting or model that cannot be used, 3 for an address that cannot be listened on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import logging
import secrets
import socket
from collections.abc import Callable, Sequence

from inflight.kserve import grpc_service_pb2_grpc
from inflight.v1 import inference_pb2_grpc

from common.logs import start_logging
from common.model_source import ModelSource, load_tokenizer, resolve_model
from common.process import EXIT_FAILED, run_process
from common.server import GrpcServer, Signals, check_listen
from common.settings import SettingError, describe, load
from common.tls import TlsFiles
from router.admission_file import AdmissionFile
from router.client_port import connection_limits_of, open_tls
from router.dispatch import Dispatcher
from router.doors import Doors
from router.executor_channels import ExecutorChannels
from router.kserve import service as kserve
from router.pools import Pool, Pools
from router.resume_secret import Learn, ResumeTokens
from router.service import InferenceService
from router.settings import RouterSettings
from router.store.connection import connect
from router.store.secret import learn_secret
from router.store.settings import StoreSettings
from router.store.store import AdmissionStore
from router.store.types import StoreEvent
from router.text.tokenizer import TextModel

log = logging.getLogger(__name__)

OnEvent = Callable[[StoreEvent], None]
OpenStore = Callable[[str, OnEvent], AdmissionStore]

SERVICE_NAME = "inflight.v1.InferenceService"


def main(argv: Sequence[str]) -> int:
    """Runs a router until it is told to stop; returns the exit code."""
    return run_process(lambda: _run_with_settings(argv))


def _run_with_settings(argv: Sequence[str]) -> int:
    settings = load(RouterSettings, "inflight router", argv)
    start_logging("router", settings.log_level)
    for line in describe(settings):
        log.info("setting %s", line)
    check_listen(settings.listen)
    if settings.health_listen:
        check_listen(settings.health_listen)
    return asyncio.run(run(settings, load_texts(settings)))


def load_texts(settings: RouterSettings) -> dict[str, TextModel]:
    """The text side of every model, by name."""
    texts: dict[str, TextModel] = {}
    for entry in settings.model:
        source = _source(entry)
        if source.name in texts:
            raise SettingError(f"model: {source.name} is there twice; give one of them another name with name=source")
        texts[source.name] = TextModel(load_tokenizer(source))
    return texts


def _source(entry: str) -> ModelSource:
    name, separator, source = entry.partition("=")
    if not separator:
        return resolve_model(entry)
    return dataclasses.replace(resolve_model(source), name=name)


async def run(settings: RouterSettings, texts: dict[str, TextModel]) -> int:
    """start → serve → drain → stop."""
    admission = AdmissionFile.open(settings.admission_file, frozenset(texts))
    tls, channels = open_tls(settings), ExecutorChannels.of(settings)
    doors = Doors(settings)
    signals = Signals(asyncio.get_running_loop())
    router_id = settings.router_id or _default_router_id(settings.listen)
    store_settings = store_settings_of(settings)
    redis = connect(settings.redis_url.get_secret_value(), store_settings)

    def open_store(pool: str, on_event: OnEvent) -> AdmissionStore:
        return AdmissionStore(redis, pool, router_id, store_settings, on_event)

    tokens = resume_tokens(settings, functools.partial(learn_secret, redis, store_settings))
    models = [_pool(name, text, open_store, settings, tokens) for name, text in texts.items()]
    pools = Pools(models, router_id, lambda: admission.rules.variants, channels)
    service = InferenceService(pools, settings, admission, doors.door, tokens)
    server = GrpcServer([SERVICE_NAME, kserve.SERVICE_NAME], limits=connection_limits_of(settings), tls=tls)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server.grpc)
    kserve_service = kserve.KServeService(pools, doors.door, service, settings)
    grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(kserve_service, server.grpc)
    address = await server.start(settings.listen)
    if settings.health_listen:
        await server.start_health(settings.health_listen)
    gc.freeze()
    work = asyncio.create_task(_work(pools, admission, doors, tokens, (tls, channels.tls), settings), name="work")
    readiness = asyncio.create_task(_follow_readiness(pools, server), name="readiness")
    log.info("router %s serves %s on %s", router_id, ", ".join(sorted(texts)), address)

    drain = asyncio.create_task(signals.drain.wait())
    await asyncio.wait((drain, work), return_when=asyncio.FIRST_COMPLETED)

    readiness.cancel()
    await server.set_serving(False)
    # Where the work has failed nothing can end any more: its streams are resumed elsewhere.
    await service.drain(settings.drain_timeout_s if drain.done() else 0.0)
    await server.stop(grace_s=1.0)  # what is left are watches of health, which never end by themselves
    await pools.close()
    drain.cancel()
    work.cancel()
    await asyncio.wait((work,))
    await redis.aclose()
    if not work.cancelled() and work.exception() is not None:
        log.error("the router failed", exc_info=work.exception())
        return EXIT_FAILED
    log.info("stopped")
    return 0


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


async def _work(
    pools: Pools,
    admission: AdmissionFile,
    doors: Doors,
    tokens: ResumeTokens,
    certificates: Sequence[TlsFiles | None],
    settings: RouterSettings,
) -> None:
    """What goes on beside the clients' calls."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pools.run(settings.executors, settings.resolve_interval_s), name="pools")
        tasks.create_task(admission.follow(), name="admission file")
        tasks.create_task(doors.follow(), name="doors")
        tasks.create_task(tokens.run(), name="resume secret")
        for files in certificates:
            if files is not None:
                tasks.create_task(files.follow(), name="certificates")


def _pool(name: str, text: TextModel, open_store: OpenStore, settings: RouterSettings, tokens: ResumeTokens) -> Pool:
    dispatcher = Dispatcher(
        functools.partial(open_store, name),
        settings.max_attempts,
        settings.no_executor_grace_s,
        settings.queue_event_interval_s,
        settings.resume_ttl_s,
        tokens.check_again,
    )
    return Pool(name, text, dispatcher)


async def _follow_readiness(pools: Pools, server: GrpcServer) -> None:
    """Ready means: some model has an executor. A router without one still answers: UNAVAILABLE, try again."""
    while True:
        await server.set_serving(await pools.readiness_changed())


def _default_router_id(listen: str) -> str:
    """New at every start: mail for the one before it must not reach this one."""
    return f"{socket.gethostname()}:{listen.rpartition(':')[2]}:{secrets.token_hex(4)}"
