"""The process of an executor whose engine is vLLM: starts vLLM, serves it, drains and stops.

Exit codes are those of `inflight.executor.main`; 1 also when vLLM's engine has died.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from concurrent.futures import Future

from inflight.common.machine import num_usable_cores
from inflight.common.model_source import ModelError, ModelSource, resolve_model
from inflight.common.process import EXIT_FAILED
from inflight.common.rpc.tls import TlsFiles
from inflight.common.telemetry.tracing import open_tracing
from inflight.executor.checkpoint.files import read_generation_defaults
from inflight.executor.engine.output import EngineOutput
from inflight.executor.model.end_tokens import find_end_tokens
from inflight.executor.scheduler.limits import Batching, SchedulerLimits
from inflight.executor.scheduler.sequence import Constraint
from inflight.executor.serving.placements import RetentionPolicy
from inflight.executor.serving.process import (
    Serving,
    default_sampling,
    describe_executor,
    make_serving,
    serve,
    take_output,
)
from inflight.executor.serving.service import ExecutorService, Identity
from inflight.executor.serving.submission import SubmissionLimits
from inflight.executor.settings import ExecutorSettings
from inflight.executor.vllm.adapters import open_adapters
from inflight.executor.vllm.arguments import engine_arguments
from inflight.executor.vllm.backend import Backend
from inflight.executor.vllm.engine import VllmEngine
from inflight.executor.vllm.internals import start_vllm
from inflight.executor.vllm.parameters import INEXACT_RESUME, INEXACT_WITHOUT_REPLAY, unsupported

log = logging.getLogger(__name__)


class CompiledByVllm:
    """Implements `Grammars`: vLLM compiles a grammar when it gets the request."""

    def find(self, key: bytes) -> bool:
        """Returns that nothing has to be compiled here."""
        return True

    def compile(self, constraint: Constraint) -> Future[None]:
        """Is never called, since every grammar is found."""
        raise AssertionError("vLLM compiles grammars")

    def close(self) -> None:
        """Nothing is being compiled."""


async def run_vllm_executor(settings: ExecutorSettings, tls: TlsFiles | None) -> int:
    """Runs the process: start → serve → drain → stop."""
    source = resolve_model(settings.model)
    if source.gguf_file is not None:
        raise ModelError(
            f"vLLM reads no GGUF file, and {source.name!r} is one: give a Hugging Face folder (`inflight up "
            "--engine vllm` makes one of the file)"
        )
    _limit_threads(settings.num_threads)
    backend = await start_vllm(engine_arguments(settings, source.folder))
    try:
        engine, serving = build_vllm_executor(settings, source, backend, tls)
        adapters = serving.service.adapters
        others = [backend.wait_until_lost, *([] if adapters is None else [adapters.follow])]
        has_failed = await serve(settings, serving, tls, engine.start, others)
        await engine.close()
    finally:
        backend.close()
    log.info("stopped")
    return EXIT_FAILED if has_failed else 0


def build_vllm_executor(
    settings: ExecutorSettings, source: ModelSource, backend: Backend, tls: TlsFiles | None
) -> tuple[VllmEngine, Serving]:
    """Builds and connects all parts around a started vLLM."""
    failed = asyncio.Event()

    def publish(output: EngineOutput) -> None:
        take_output(service, failed, output)

    limits = scheduler_limits(settings, backend)
    if not backend.facts.can_replay:
        log.warning("this vLLM cannot generate output again: exact_resume is refused, as docs/engines.md says")
    engine = VllmEngine(backend, limits, publish, failed.set)
    own_identity = identity(settings, source, backend, limits)
    retention = RetentionPolicy(settings.orphan_grace_s, settings.retain_ended_s)
    tracing = open_tracing("executor", own_identity.description.executor_id, settings.otlp_endpoint)
    adapters = open_adapters(settings, backend)
    service = ExecutorService(
        own_identity, engine, retention, tracing=tracing, grammars=CompiledByVllm(), adapters=adapters
    )
    return engine, make_serving(settings, service, tracing, failed, tls)


def scheduler_limits(settings: ExecutorSettings, backend: Backend) -> SchedulerLimits:
    """Returns the limits: vLLM's, and our standby."""
    facts = backend.facts
    return SchedulerLimits(
        max_num_sequences=facts.max_num_sequences,
        num_standby_sequences=settings.num_standby_sequences,
        max_num_tokens=max(facts.max_num_tokens, facts.max_num_sequences),
        context_length=facts.context_length,
        enable_chunked_context=settings.enable_chunked_context,
        batching=Batching.INFLIGHT,
        enable_prefix_cache=settings.enable_kv_cache_reuse,
    )


def identity(settings: ExecutorSettings, source: ModelSource, backend: Backend, limits: SchedulerLimits) -> Identity:
    """Returns what `Describe` tells routers of this executor."""
    facts = backend.facts
    end_ids = find_end_tokens(source, source.folder, facts.vocabulary_size, settings.eos_token_ids)
    description = describe_executor(
        settings,
        limits,
        source.name,
        facts.device,
        model_revision=source.revision,
        block_size=facts.block_size,
        total_blocks=facts.num_blocks,
        vocabulary_size=facts.vocabulary_size,
        eos_token_ids=end_ids,
        default_sampling=default_sampling(read_generation_defaults(source.folder, end_ids)),
        backend=f"vllm {facts.version}",
        dtype=facts.dtype,
        weight_dtype=facts.weight_dtype,
        kv_cache_dtype=facts.kv_cache_dtype,
        tensor_parallel_size=facts.tensor_parallel_size,
        inexact_resume=INEXACT_RESUME if facts.can_replay else INEXACT_WITHOUT_REPLAY,
        num_adapter_slots=facts.num_adapter_slots,
    )
    submission = SubmissionLimits(
        limits.context_length,
        facts.vocabulary_size,
        frozenset(end_ids),
        num_adapter_slots=facts.num_adapter_slots,
        unsupported=functools.partial(unsupported, can_replay=facts.can_replay),
    )
    return Identity(description, submission)


def _limit_threads(num_threads: int) -> None:
    """Limits vLLM's threads on a CPU if they are fewer than its cores. It would bind them to the first cores, where
    those of another executor on this machine are as well."""
    if 0 < num_threads < num_usable_cores():
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
