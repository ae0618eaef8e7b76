"""The executor process: it builds everything, serves, drains and stops.

Exit codes: 0 after a drain, 2 for a setting or model that cannot be used, 3 for an address that cannot be listened on,
1 when an indispensable part failed: the engine's thread, the device, the reports.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
import time
from collections.abc import Coroutine
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from starlette.applications import Starlette

from inflight.common.http.metrics_page import metrics_route
from inflight.common.http.port import HttpPort
from inflight.common.kv_size import KvBudget, KvGroups, most_seats, num_host_kv_blocks, num_kv_blocks, num_seats
from inflight.common.machine import num_available_memory_bytes
from inflight.common.model_source import ModelSource, load_tokenizer, resolve_model
from inflight.common.process import EXIT_FAILED
from inflight.common.protocol import PROTOCOL_VERSION
from inflight.common.rpc.server import LINK_WIRE_LIMITS, MAX_LINK_BYTES, ConnectionLimits, GrpcServer, Signals
from inflight.common.rpc.tls import TlsFiles
from inflight.common.settings import SettingError
from inflight.common.telemetry.tracing import Tracing, open_tracing
from inflight.executor.adapters.folder import AdapterFolder
from inflight.executor.adapters.store import AdapterStore
from inflight.executor.adapters.weights import AdapterLimits
from inflight.executor.attention.flashinfer import NAME as FLASHINFER
from inflight.executor.attention.gpu_host_tier import staging_bytes
from inflight.executor.checkpoint.files import GenerationDefaults
from inflight.executor.checkpoint.shards import WHOLE
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.gc import GarbageCollection
from inflight.executor.engine.output import EngineOutput
from inflight.executor.engine.prefill_budget import PrefillBudget
from inflight.executor.engine.runner import StepRunner
from inflight.executor.engine.watchdog import watch_engine
from inflight.executor.kv_groups import choose_kv_groups
from inflight.executor.logits.grammar import GrammarCompiler
from inflight.executor.model.model import PagedModel
from inflight.executor.model.runner import ModelRunner
from inflight.executor.parallel.decoder import ParallelDecoder
from inflight.executor.parallel.leader import WorkerGroup
from inflight.executor.ranks import check_devices, check_parallel, load_shard, open_group, threads_per_rank
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.drafting import Drafting
from inflight.executor.scheduler.limits import InterTokenTargets, KvWindow
from inflight.executor.scheduler.scheduler import Batching, Scheduler, SchedulerLimits, SchedulerPolicy
from inflight.executor.serving.metrics import executor_metrics
from inflight.executor.serving.placements import RetentionPolicy
from inflight.executor.serving.report import policy_proto
from inflight.executor.serving.router_auth import PeerNameCheck
from inflight.executor.serving.service import ExecutorService, Identity
from inflight.executor.serving.submission import SubmissionLimits
from inflight.executor.settings import ExecutorSettings
from inflight.executor.speculation.budget import DraftBudget
from inflight.executor.speculation.choice import choose_proposer
from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2

if TYPE_CHECKING:
    from inflight.executor.parallel.device_messages import RunnerSizes

log = logging.getLogger(__name__)

SERVICE_NAME = "inflight.v1.ExecutorService"
# Time for routers to receive the last frames before their streams are cut.
CLOSE_TIMEOUT_S = 1.0
STOP_GRACE_S = 1.0
# Time for the step in flight to end; its results are not used.
ENGINE_STOP_TIMEOUT_S = 5.0

BATCHING_PROTO = {
    "inflight": types_pb2.BATCHING_MODE_INFLIGHT,
    "static": types_pb2.BATCHING_MODE_STATIC,
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model, and the sizes of its KV pool and its batches."""

    source: ModelSource
    model: PagedModel
    num_blocks: int
    limits: SchedulerLimits
    adapters: AdapterStore | None = None
    group: WorkerGroup | None = None


def load_model(settings: ExecutorSettings) -> Loaded:
    """Starts the other ranks if there are any, loads the model and sizes its KV pool and its steps."""
    check_parallel(settings)
    check_devices(settings)
    group = open_group(settings)
    try:
        return _load_model(settings, group)
    except BaseException:
        if group is not None:
            group.close()
        raise


def _load_model(settings: ExecutorSettings, group: WorkerGroup | None) -> Loaded:
    if settings.max_num_tokens < settings.max_num_sequences:
        raise SettingError(
            f"max_num_tokens={settings.max_num_tokens} must be at least max_num_sequences={settings.max_num_sequences}"
        )
    torch.set_num_threads(threads_per_rank(settings))
    began = time.monotonic()
    source = resolve_model(settings.model)
    model = load_shard(settings, source, WHOLE if group is None else group.shard, group)
    model.open_flashinfer(settings.attention_backend)
    adapters = _adapters(settings, model, group)
    limits = _scheduler_limits(settings, model)
    num_blocks = num_kv_blocks(
        _kv_budget(settings, model, limits, group),
        settings.tokens_per_block,
        model.kv_bytes_per_block(settings.tokens_per_block),
    )
    groups = choose_kv_groups(settings, model, limits, num_blocks)
    if groups is None:
        limits = _with_seats(settings, limits, num_blocks)
    else:
        num_blocks, limits = groups.num_blocks, _with_groups(settings, model, limits, groups)
    limits = replace(limits, num_host_blocks=_num_host_blocks(settings, model, num_blocks, group))
    model.allocate_kv(num_blocks, settings.tokens_per_block, None if groups is None else groups.num_window_blocks)
    log.info(
        "%s on %s (%s, weights %s, KV %s, %s) is ready after %.1f s: %d KV blocks of %d tokens, %d seats%s, "
        "%s batching",
        source.name,
        model.device,
        model.dtype_name,
        model.weight_dtype_name,
        model.kv_cache_dtype_name,
        model.backend_name,
        time.monotonic() - began,
        num_blocks,
        settings.tokens_per_block,
        limits.max_num_sequences,
        "" if settings.max_num_sequences else " (from the size of the KV cache)",
        settings.batching,
    )
    if limits.num_host_blocks:
        log.info("%d KV blocks of host memory for preempted sequences and evicted prefixes", limits.num_host_blocks)
    return Loaded(source, model, num_blocks, limits, adapters, group)


def _adapters(settings: ExecutorSettings, model: PagedModel, group: WorkerGroup | None) -> AdapterStore | None:
    """Makes the adapter slots, before the KV pool is sized, and reads the adapters."""
    if settings.adapter_folder is None:
        return None
    what = f"adapter_folder={settings.adapter_folder}"
    decoder = model.parallel or model.native or model.gpu_decoder
    if decoder is None:
        raise SettingError(
            f"{what} needs a native forward pass, and this model runs with that of transformers on {model.device} "
            f"({model.backend_name})"
        )
    if not settings.adapter_folder.is_dir():
        raise SettingError(f"{what} is not a folder")
    num_slots, max_rank = settings.max_adapters, settings.max_adapter_rank
    num_bytes = num_slots * decoder.adapter_slot_bytes(max_rank)
    free_bytes = _free_bytes_for_weights(model) if group is None else group.free_bytes_per_rank
    if free_bytes is not None and num_bytes > free_bytes:
        raise SettingError(
            f"max_adapters={num_slots} of max_adapter_rank={max_rank} need {num_bytes} bytes and {free_bytes} are free"
        )
    decoder.reserve_adapters(num_slots, max_rank)
    log.info("%d adapter slots for ranks up to %d take %d bytes", num_slots, max_rank, num_bytes)
    folder = AdapterFolder(settings.adapter_folder, AdapterLimits(decoder.shape, max_rank))
    if isinstance(decoder, ParallelDecoder):
        return AdapterStore(folder, num_slots, decoder.load_adapter)
    return AdapterStore(folder, num_slots, lambda slot, _, weights: decoder.load_adapter(slot, weights))


def _free_bytes_for_weights(model: PagedModel) -> int | None:
    """Returns the memory that is free on the model's device; None if that is unknown."""
    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[0])
    return num_available_memory_bytes()


def _kv_budget(
    settings: ExecutorSettings, model: PagedModel, limits: SchedulerLimits, group: WorkerGroup | None
) -> KvBudget:
    if model.device.type == "cuda":

        def free_beside_steps() -> int:
            used = _working_bytes(settings, model, limits) + _staging_bytes(settings, model)
            return int(torch.cuda.mem_get_info(model.device)[0]) - used

        if model.gpu_ranks is None:
            free_bytes = free_beside_steps()
        else:
            free_bytes = model.gpu_ranks.least_free_bytes(_runner_sizes(settings, limits), free_beside_steps)
        fraction = settings.kv_cache_free_gpu_mem_fraction
    else:
        free_bytes = _free_bytes(group)
        fraction = settings.kv_cache_free_host_mem_fraction
    return KvBudget(settings.max_tokens_in_paged_kv_cache, free_bytes, fraction)


def _free_bytes(group: WorkerGroup | None) -> int:
    """Returns the memory that is free for each rank."""
    return (num_available_memory_bytes() or 0) if group is None else group.free_bytes_per_rank


def _num_host_blocks(settings: ExecutorSettings, model: PagedModel, num_blocks: int, group: WorkerGroup | None) -> int:
    """Returns the number of host blocks. The pool's own memory counts as free until it is written to, so it is
    subtracted."""
    bytes_per_block = model.kv_bytes_per_block(settings.tokens_per_block)
    free_bytes = _free_bytes(group)
    if model.device.type == "cpu":
        free_bytes -= num_blocks * bytes_per_block
    return num_host_kv_blocks(settings.kv_cache_host_memory_bytes, bytes_per_block, free_bytes)


def _staging_bytes(settings: ExecutorSettings, model: PagedModel) -> int:
    """Returns the GPU memory of the host tier, if there is one."""
    bytes_per_block = model.kv_bytes_per_block(settings.tokens_per_block)
    return staging_bytes(bytes_per_block, settings.kv_cache_host_memory_bytes // bytes_per_block)


def _working_bytes(settings: ExecutorSettings, model: PagedModel, limits: SchedulerLimits) -> int:
    """Returns the GPU memory of steps besides the KV. A model computed by transformers uses what the fraction leaves
    free."""
    if model.gpu_decoder is None:
        return 0
    from inflight.executor.model.gpu_memory import working_bytes  # imports triton, which only this needs

    return working_bytes(
        model,
        limits,
        settings.tokens_per_block,
        uses_graphs=settings.enable_cuda_graphs,
        max_graph_tokens=settings.cuda_graph_max_tokens,
    )


def _runner_sizes(settings: ExecutorSettings, limits: SchedulerLimits) -> RunnerSizes:
    """Returns what the runners of all ranks are made with."""
    from inflight.executor.parallel.device_messages import RunnerSizes  # imports triton, which only this needs

    return RunnerSizes.of(
        limits,
        settings.tokens_per_block,
        uses_graphs=settings.enable_cuda_graphs,
        max_graph_tokens=settings.cuda_graph_max_tokens,
    )


def _scheduler_limits(settings: ExecutorSettings, model: PagedModel) -> SchedulerLimits:
    """Returns the limits. If the seats are not set, they are the most there can be: the memory that steps take is
    measured with them, before the KV pool is sized."""
    max_num_sequences = settings.max_num_sequences or most_seats(model.device.type, settings.max_num_tokens)
    return SchedulerLimits(
        max_num_sequences=max_num_sequences,
        num_standby_sequences=_num_standby(settings, max_num_sequences),
        max_num_tokens=settings.max_num_tokens,
        context_length=settings.max_sequence_length or model.description.context_length,
        enable_chunked_context=settings.enable_chunked_context,
        batching=Batching(settings.batching),
        enable_prefix_cache=settings.enable_kv_cache_reuse,
        policy=SchedulerPolicy(settings.batch_scheduler_policy),
        max_drafts=0 if settings.speculation == "off" else settings.speculation_max_drafts,
    )


def _with_seats(settings: ExecutorSettings, limits: SchedulerLimits, num_blocks: int) -> SchedulerLimits:
    """Returns the limits with the seats that the KV pool is likely to fill, unless the setting gives their number."""
    if settings.max_num_sequences:
        return limits
    seats = num_seats(num_blocks, settings.tokens_per_block, limits.context_length, limits.max_num_sequences)
    return replace(limits, max_num_sequences=seats, num_standby_sequences=_num_standby(settings, seats))


def _with_groups(
    settings: ExecutorSettings, model: PagedModel, limits: SchedulerLimits, groups: KvGroups
) -> SchedulerLimits:
    num_tokens = max(window or 0 for window in model.sliding_windows)
    return replace(
        limits,
        max_num_sequences=groups.num_seats,
        num_standby_sequences=_num_standby(settings, groups.num_seats),
        kv_window=KvWindow(num_tokens, groups.num_window_blocks, groups.max_sequences),
    )


def _num_standby(settings: ExecutorSettings, max_num_sequences: int) -> int:
    """Returns the standby limit. A static batch is filled from a full batch that collected while the previous one
    ran."""
    return max_num_sequences if settings.batching == "static" else settings.num_standby_sequences


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an executor process. `failed` is set when an indispensable one has failed."""

    engine: Engine
    runner: StepRunner
    service: ExecutorService
    server: GrpcServer
    http: HttpPort | None
    tracing: Tracing
    failed: asyncio.Event


async def run_executor(settings: ExecutorSettings, loaded: Loaded, tls: TlsFiles | None) -> int:
    """Runs the process: start → serve → drain → stop."""
    signals = Signals(asyncio.get_running_loop())
    garbage_collection = GarbageCollection()
    parts = build_executor(settings, loaded, tls, garbage_collection)
    address = await parts.server.start(settings.listen)
    if settings.health_listen:
        await parts.server.start_health(settings.health_listen)
    if parts.http is not None:
        log.info("metrics on http://%s/metrics", await parts.http.start(settings.http_listen))
    garbage_collection.start()
    parts.engine.start()
    # These tasks run during the drain as well. They end only by failing.
    work = [
        asyncio.create_task(parts.service.run(), name="reports"),
        asyncio.create_task(_watch(parts, signals, settings.watchdog_s), name="watchdog"),
        asyncio.create_task(parts.failed.wait(), name="failure"),
    ]
    if loaded.adapters is not None:
        work.append(asyncio.create_task(loaded.adapters.follow(), name="adapters"))
    if tls is not None:
        work.append(asyncio.create_task(tls.follow(), name="certificates"))
    await parts.server.set_serving(True)
    log.info("serving on %s", address)

    has_failed = await _until(signals.drain.wait(), work)
    await parts.server.set_serving(False)
    has_failed = has_failed or await _until(parts.service.drain(settings.drain_timeout_s), work)
    if not has_failed:
        # After a failure the streams are cut: a request that crashes engines must not count as handed back.
        parts.service.hand_back()
        await parts.service.close(CLOSE_TIMEOUT_S)
    for task in work:
        task.cancel()
    await parts.server.stop(grace_s=0.0 if has_failed else STOP_GRACE_S)
    if parts.http is not None:
        await parts.http.stop()
    await parts.tracing.aclose()
    return await _stop_engine(parts, EXIT_FAILED if has_failed else 0, loaded.group)


def build_executor(
    settings: ExecutorSettings, loaded: Loaded, tls: TlsFiles | None, garbage_collection: GarbageCollection
) -> Parts:
    """Builds and connects all parts. The engine's thread publishes to the event loop."""
    loop, failed = asyncio.get_running_loop(), asyncio.Event()

    def take(output: EngineOutput) -> None:
        try:
            service.on_output(output)
        except Exception:
            log.exception("the output of a step is lost, and its streams cannot continue")
            failed.set()

    def publish(output: EngineOutput) -> None:
        loop.call_soon_threadsafe(take, output)

    def on_failure() -> None:
        loop.call_soon_threadsafe(failed.set)

    def on_death(error: BaseException) -> None:
        on_failure()

    if loaded.group is not None:
        loaded.group.watch(on_failure)

    runner = start_runner(settings, loaded)
    engine = Engine(
        Scheduler(loaded.limits, BlockPool(loaded.num_blocks, settings.tokens_per_block), make_drafting(settings)),
        runner,
        publish,
        on_death,
        overlap=settings.enable_overlap,
        prefill_budget=PrefillBudget(settings.max_inter_token_ms),
        garbage_collection=garbage_collection,
    )
    retention = RetentionPolicy(settings.orphan_grace_s, settings.retain_ended_s)
    own_identity = identity(settings, loaded)
    description = own_identity.description
    tracing = open_tracing("executor", description.executor_id, settings.otlp_endpoint)
    grammars = GrammarCompiler(
        functools.partial(load_tokenizer, loaded.source), description.vocabulary_size, description.eos_token_ids
    )
    service = ExecutorService(
        own_identity, engine, retention, tracing=tracing, grammars=grammars, adapters=loaded.adapters
    )
    server = _server(settings, tls)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(service, server.grpc)
    http = HttpPort(Starlette(routes=[metrics_route(executor_metrics(service))])) if settings.http_listen else None
    return Parts(engine, runner, service, server, http, tracing, failed)


async def _watch(parts: Parts, signals: Signals, limit_s: float) -> None:
    async def on_change(is_stalled: bool) -> None:
        parts.service.set_stalled(is_stalled)
        await parts.server.set_live(not is_stalled)
        await parts.server.set_serving(not (is_stalled or signals.drain.is_set()))

    await watch_engine(parts.service, limit_s, on_change)


async def _until(awaited: Coroutine[Any, Any, object], work: SequenceOf[asyncio.Task[Any]]) -> bool:
    """Waits for `awaited`. Returns True if one of the tasks in `work` ends first, which is a failure."""
    waiting = asyncio.ensure_future(awaited)
    await asyncio.wait((waiting, *work), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    ended = [task for task in work if task.done()]
    for task in ended:
        log.error("task %s ended", task.get_name(), exc_info=task.exception())
    return bool(ended)


async def _stop_engine(parts: Parts, exit_code: int, group: WorkerGroup | None) -> int:
    """Waits for the step in flight. A step that does not end cannot be stopped, so the process exits without it."""
    if not await asyncio.to_thread(parts.engine.stop, ENGINE_STOP_TIMEOUT_S):
        log.error("the step in flight does not end; leaving it")
        logging.shutdown()
        os._exit(exit_code)
    if group is not None:
        group.close()
    if exit_code == 0:
        parts.runner.close()
    elif group is not None:
        # The threads of an exchange that has failed would abort the interpreter's end.
        logging.shutdown()
        os._exit(exit_code)
    log.info("stopped")
    return exit_code


def _server(settings: ExecutorSettings, tls: TlsFiles | None) -> GrpcServer:
    limits = ConnectionLimits(max_receive_bytes=MAX_LINK_BYTES)
    check_peer = None if tls is None else PeerNameCheck(settings.router_names).check
    return GrpcServer([SERVICE_NAME], limits=limits, tls=tls, check_peer=check_peer, wire_limits=LINK_WIRE_LIMITS)


def make_drafting(settings: ExecutorSettings) -> Drafting | None:
    """Returns what drafts tokens by these settings; None if they turn it off."""
    if settings.speculation == "off":
        return None
    return Drafting(choose_proposer(settings.speculation), DraftBudget())


def start_runner(settings: ExecutorSettings, loaded: Loaded) -> StepRunner:
    """Returns the runner of the model's steps. A GPU is driven from the engine's thread, a CPU model runs on its own
    thread."""
    model = loaded.model
    if model.gpu_decoder is None:
        return ModelRunner(model, loaded.limits, settings.tokens_per_block)
    from inflight.executor.gpu.runner import GpuRunner  # imports triton, which only this needs

    if model.gpu_ranks is not None:
        model.gpu_ranks.start_runners(_runner_sizes(settings, loaded.limits))
    runner = GpuRunner(
        model.gpu_decoder,
        model.kv,
        loaded.limits,
        settings.tokens_per_block,
        uses_graphs=settings.enable_cuda_graphs,
        max_graph_tokens=settings.cuda_graph_max_tokens,
        flashinfer=model.flashinfer,
        followers=model.gpu_ranks,
    )
    runner.prepare()
    if runner.uses_flashinfer:
        model.backend_name = FLASHINFER
    else:
        model.flashinfer = None
    return runner


def identity(settings: ExecutorSettings, loaded: Loaded) -> Identity:
    """Returns what `Describe` tells routers of this executor.

    The generation is the time of the start. If a clock was set back in between, it is older than the previous one. The
    ledger then refuses its reports until the lease of the previous generation has expired, a few seconds after its last
    report.
    """
    model = loaded.model.description
    limits = loaded.limits
    description = executor_pb2.DescribeResponse(
        executor_id=settings.executor_id or _default_executor_id(settings.listen),
        generation=time.time_ns() // 1_000_000,
        protocol_version=PROTOCOL_VERSION,
        model=settings.served_model_name or loaded.source.name,
        model_revision=model.revision,
        block_size=settings.tokens_per_block,
        total_blocks=loaded.num_blocks,
        max_num_sequences=limits.max_num_sequences,
        num_standby_sequences=limits.num_standby_sequences,
        max_num_tokens=limits.max_num_tokens,
        context_length=limits.context_length,
        vocabulary_size=model.vocabulary_size,
        eos_token_ids=model.eos_token_ids,
        default_sampling=_default_sampling(model.defaults),
        batching=BATCHING_PROTO[settings.batching],
        scheduler_policy=policy_proto(limits),
        backend=loaded.model.backend_name,
        dtype=loaded.model.dtype_name,
        weight_dtype=loaded.model.weight_dtype_name,
        kv_cache_dtype=loaded.model.kv_cache_dtype_name,
        device=str(loaded.model.device),
        host_blocks=limits.num_host_blocks,
        num_adapter_slots=0 if loaded.adapters is None else loaded.adapters.num_slots,
        tensor_parallel_size=settings.tensor_parallel_size,
    )
    targets = InterTokenTargets(
        settings.inter_token_target_interactive_ms,
        settings.inter_token_target_standard_ms,
        settings.inter_token_target_batch_ms,
    )
    eos_token_ids = frozenset(model.eos_token_ids)
    submission = SubmissionLimits(
        limits.context_length,
        model.vocabulary_size,
        eos_token_ids,
        targets,
        limits.max_drafts,
        description.num_adapter_slots,
    )
    return Identity(description, submission)


def _default_sampling(defaults: GenerationDefaults) -> types_pb2.SamplingParams:
    bad_word_ids = [types_pb2.TokenSequence(ids=ids) for ids in defaults.bad_word_ids]
    return types_pb2.SamplingParams(bad_word_ids=bad_word_ids, **defaults.sampling)


def _default_executor_id(listen: str) -> str:
    """Returns host, port and a random number. Host and port alone are not unique: cloned machines have equal names."""
    return f"{socket.gethostname()}:{listen.rpartition(':')[2]}:{secrets.token_hex(4)}"
