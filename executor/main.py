"""The executor process: it builds everything, serves, drains and stops.

Exit codes: 0 after a drain, 2 for a setting or model that cannot be used, 3 for an address that cannot be listened on,
1 when an indispensable part failed: the engine's thread, the device, the reports.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from inflight.common.model_source import load_tokenizer
from inflight.common.process import EXIT_FAILED
from inflight.common.rpc.tls import TlsFiles
from inflight.common.telemetry.tracing import open_tracing
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.gc import GarbageCollection
from inflight.executor.engine.output import EngineOutput
from inflight.executor.engine.prefill_budget import PrefillBudget
from inflight.executor.engine.runner import StepRunner
from inflight.executor.loader import Loaded, step_sizes
from inflight.executor.logits.grammar import GrammarCompiler
from inflight.executor.model.runner import ModelRunner
from inflight.executor.parallel.leader import WorkerGroup
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.drafting import Drafting
from inflight.executor.scheduler.limits import InterTokenTargets
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.serving.placements import RetentionPolicy
from inflight.executor.serving.process import (
    Serving,
    default_sampling,
    describe_executor,
    make_serving,
    serve,
    take_output,
)
from inflight.executor.serving.report import pooling_proto
from inflight.executor.serving.service import ExecutorService, Identity
from inflight.executor.serving.submission import SubmissionLimits
from inflight.executor.settings import ExecutorSettings
from inflight.executor.speculation.budget import DraftBudget
from inflight.executor.speculation.choice import choose_proposer

log = logging.getLogger(__name__)

# Time for the step in flight to end; its results are not used.
ENGINE_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an executor process."""

    engine: Engine
    runner: StepRunner
    serving: Serving


async def run_executor(settings: ExecutorSettings, loaded: Loaded, tls: TlsFiles | None) -> int:
    """Runs the process: start → serve → drain → stop."""
    garbage_collection = GarbageCollection()
    parts = build_executor(settings, loaded, tls, garbage_collection)

    def start() -> None:
        garbage_collection.start()
        parts.engine.start()

    others = [] if loaded.adapters is None else [loaded.adapters.follow]
    has_failed = await serve(settings, parts.serving, tls, start, others)
    return await _stop_engine(parts, EXIT_FAILED if has_failed else 0, loaded.group)


def build_executor(
    settings: ExecutorSettings, loaded: Loaded, tls: TlsFiles | None, garbage_collection: GarbageCollection
) -> Parts:
    """Builds and connects all parts. The engine's thread publishes to the event loop."""
    loop, failed = asyncio.get_running_loop(), asyncio.Event()

    def publish(output: EngineOutput) -> None:
        loop.call_soon_threadsafe(take_output, service, failed, output)

    def on_failure() -> None:
        loop.call_soon_threadsafe(failed.set)

    def on_death(error: BaseException) -> None:
        on_failure()

    if loaded.group is not None:
        loaded.group.watch(on_failure)

    runner = start_runner(settings, loaded)
    engine = make_engine(settings, loaded, runner, publish, on_death, garbage_collection)
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
    return Parts(engine, runner, make_serving(settings, service, tracing, failed, tls))


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


def make_engine(
    settings: ExecutorSettings,
    loaded: Loaded,
    runner: StepRunner,
    publish: Callable[[EngineOutput], None],
    on_death: Callable[[BaseException], None],
    garbage_collection: GarbageCollection,
) -> Engine:
    """Builds the engine, which is not started yet, with its scheduler."""
    drafting = None
    if settings.speculation != "off":
        drafting = Drafting(choose_proposer(settings.speculation), DraftBudget())
    return Engine(
        Scheduler(loaded.limits, BlockPool(loaded.num_blocks, settings.tokens_per_block), drafting),
        runner,
        publish,
        on_death,
        overlap=settings.enable_overlap,
        prefill_budget=PrefillBudget(settings.max_inter_token_ms),
        garbage_collection=garbage_collection,
    )


def start_runner(settings: ExecutorSettings, loaded: Loaded) -> StepRunner:
    """Returns the runner of the model's steps. A GPU is driven from the engine's thread, a CPU model runs on its own
    thread."""
    model = loaded.model
    runner = model.forward.start_runner(model.kv, step_sizes(settings, loaded.limits))
    return runner or ModelRunner(model, loaded.limits, settings.tokens_per_block)


def identity(settings: ExecutorSettings, loaded: Loaded) -> Identity:
    """Returns what `Describe` tells routers of this executor."""
    model = loaded.model.description
    limits = loaded.limits
    description = describe_executor(
        settings,
        limits,
        loaded.source.name,
        str(loaded.model.device),
        model_revision=model.revision,
        block_size=settings.tokens_per_block,
        total_blocks=loaded.num_blocks,
        vocabulary_size=model.vocabulary_size,
        eos_token_ids=model.eos_token_ids,
        default_sampling=default_sampling(model.defaults),
        backend=loaded.model.forward.backend_name,
        dtype=model.dtype,
        weight_dtype=model.weight_dtype,
        kv_cache_dtype=model.kv_cache_dtype,
        host_blocks=limits.num_host_blocks,
        num_adapter_slots=0 if loaded.adapters is None else loaded.adapters.num_slots,
        tensor_parallel_size=settings.tensor_parallel_size,
        state_grid_tokens=0 if limits.states is None else limits.states.grid_tokens,
        pooling=pooling_proto(loaded.model.pooling),
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
        loaded.model.pooling,
    )
    return Identity(description, submission)
