"""The process of an executor, whatever its engine is: what serves it, from its start to its stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette

from inflight.common.http.metrics_page import metrics_route
from inflight.common.http.port import HttpPort
from inflight.common.process import new_process_id
from inflight.common.protocol import PROTOCOL_VERSION
from inflight.common.rpc.server import LINK_WIRE_LIMITS, MAX_LINK_BYTES, ConnectionLimits, GrpcServer, Signals
from inflight.common.rpc.tls import TlsFiles
from inflight.common.telemetry.tracing import Tracing
from inflight.executor.checkpoint.files import GenerationDefaults
from inflight.executor.engine.output import EngineOutput
from inflight.executor.engine.watchdog import watch_engine
from inflight.executor.scheduler.limits import Batching, SchedulerLimits
from inflight.executor.serving.metrics import executor_metrics
from inflight.executor.serving.report import policy_proto
from inflight.executor.serving.router_auth import PeerNameCheck
from inflight.executor.serving.service import ExecutorService
from inflight.executor.settings import ExecutorSettings
from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2

log = logging.getLogger(__name__)

SERVICE_NAME = "inflight.v1.ExecutorService"
# Time for routers to receive the last frames before their streams are cut.
CLOSE_TIMEOUT_S = 1.0
STOP_GRACE_S = 1.0

BATCHING_PROTO = {
    Batching.INFLIGHT: types_pb2.BATCHING_MODE_INFLIGHT,
    Batching.STATIC: types_pb2.BATCHING_MODE_STATIC,
}


@dataclass(frozen=True, slots=True)
class Serving:
    """What serves an engine. `failed` is set when an indispensable part has failed."""

    service: ExecutorService
    server: GrpcServer
    http: HttpPort | None
    tracing: Tracing
    failed: asyncio.Event


def make_serving(
    settings: ExecutorSettings, service: ExecutorService, tracing: Tracing, failed: asyncio.Event, tls: TlsFiles | None
) -> Serving:
    """Makes the server of a service, and that of its metrics if there is to be one. Listens to nothing yet."""
    limits = ConnectionLimits(max_receive_bytes=MAX_LINK_BYTES)
    check_peer = None if tls is None else PeerNameCheck(settings.router_names).check
    server = GrpcServer([SERVICE_NAME], limits=limits, tls=tls, check_peer=check_peer, wire_limits=LINK_WIRE_LIMITS)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(service, server.grpc)
    http = HttpPort(Starlette(routes=[metrics_route(executor_metrics(service))])) if settings.http_listen else None
    return Serving(service, server, http, tracing, failed)


def take_output(service: ExecutorService, failed: asyncio.Event, output: EngineOutput) -> None:
    """Gives the output of an iteration to the service. Without it no stream could continue."""
    try:
        service.on_output(output)
    except Exception:
        log.exception("the output of a step is lost, and its streams cannot continue")
        failed.set()


async def serve(
    settings: ExecutorSettings,
    serving: Serving,
    tls: TlsFiles | None,
    start: Callable[[], None],
    others: SequenceOf[Callable[[], Coroutine[Any, Any, object]]] = (),
) -> bool:
    """Serves until the process is told to stop: listens, calls `start`, serves, drains and closes. Returns whether it
    ended by a failure: one of `others`, which run meanwhile, ended, or an indispensable part of `serving` failed."""
    signals = Signals(asyncio.get_running_loop())
    server = serving.server
    address = await server.start(settings.listen)
    if settings.health_listen:
        await server.start_health(settings.health_listen)
    if serving.http is not None:
        log.info("metrics on http://%s/metrics", await serving.http.start(settings.http_listen))
    start()
    # These tasks run during the drain as well. They end only by failing.
    work: list[asyncio.Task[Any]] = [
        asyncio.create_task(serving.service.run(), name="reports"),
        asyncio.create_task(_watch(serving, signals, settings.watchdog_s), name="watchdog"),
        asyncio.create_task(serving.failed.wait(), name="failure"),
        *(asyncio.create_task(other(), name=other.__qualname__) for other in others),
    ]
    if tls is not None:
        work.append(asyncio.create_task(tls.follow(), name="certificates"))
    await server.set_serving(True)
    log.info("serving on %s", address)

    has_failed = await _until(signals.drain.wait(), work)
    await server.set_serving(False)
    has_failed = has_failed or await _until(serving.service.drain(settings.drain_timeout_s), work)
    if not has_failed:
        # After a failure the streams are cut: a request that crashes engines must not count as handed back.
        serving.service.hand_back()
        await serving.service.close(CLOSE_TIMEOUT_S)
    for task in work:
        task.cancel()
    await server.stop(grace_s=0.0 if has_failed else STOP_GRACE_S)
    if serving.http is not None:
        await serving.http.stop()
    await serving.tracing.aclose()
    return has_failed


async def _watch(serving: Serving, signals: Signals, limit_s: float) -> None:
    async def on_change(is_stalled: bool) -> None:
        serving.service.set_stalled(is_stalled)
        await serving.server.set_live(not is_stalled)
        await serving.server.set_serving(not (is_stalled or signals.drain.is_set()))

    await watch_engine(serving.service, limit_s, on_change)


async def _until(awaited: Coroutine[Any, Any, object], work: SequenceOf[asyncio.Task[Any]]) -> bool:
    """Waits for `awaited`. Returns True if one of the tasks in `work` ends first, which is a failure."""
    waiting = asyncio.ensure_future(awaited)
    await asyncio.wait((waiting, *work), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    ended = [task for task in work if task.done()]
    for task in ended:
        log.error("task %s ended", task.get_name(), exc_info=task.exception())
    return bool(ended)


def default_sampling(defaults: GenerationDefaults) -> types_pb2.SamplingParams:
    """Returns the defaults of a model as `Describe` has them."""
    bad_word_ids = [types_pb2.TokenSequence(ids=ids) for ids in defaults.bad_word_ids]
    return types_pb2.SamplingParams(bad_word_ids=bad_word_ids, **defaults.sampling)


def describe_executor(
    settings: ExecutorSettings, limits: SchedulerLimits, name: str, device: str, **of_engine: Any
) -> executor_pb2.DescribeResponse:
    """Returns the response of `Describe`. `name` and `device` are those of the model, `of_engine` are the fields that
    engines have in ways of their own.

    The generation is the time of the start. If a clock was set back in between, it is older than the previous one. The
    ledger then refuses its reports until the lease of the previous generation has expired, a few seconds after its last
    report.
    """
    return executor_pb2.DescribeResponse(
        executor_id=settings.executor_id or new_process_id(settings.listen),
        generation=time.time_ns() // 1_000_000,
        protocol_version=PROTOCOL_VERSION,
        model=settings.served_model_name or name,
        max_num_sequences=limits.max_num_sequences,
        num_standby_sequences=limits.num_standby_sequences,
        max_num_tokens=limits.max_num_tokens,
        context_length=limits.context_length,
        batching=BATCHING_PROTO[limits.batching],
        scheduler_policy=policy_proto(limits),
        device=device,
        executor_class=settings.executor_class or device.partition(":")[0],
        **of_engine,
    )
