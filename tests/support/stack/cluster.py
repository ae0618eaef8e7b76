"""Routers and executors in one process: real gRPC, real Redis, real scheduler; the device is a hash.

For tests of everything between client and device. Executors run `FakeDevice`, whose tokens depend on everything before
them, so a wrong token anywhere shows. A `Brake` holds an executor's device, so that a test decides when steps happen.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import grpc.aio
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from inflight.common.protocol import PROTOCOL_VERSION
from inflight.common.rpc.options import NO_PROXY
from inflight.common.rpc.server import GrpcServer
from inflight.common.telemetry.tracing import NO_TRACING, Tracing
from inflight.executor.adapters.store import AdapterStore
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput
from inflight.executor.engine.runner import PendingStep
from inflight.executor.engine.watchdog import watch_engine
from inflight.executor.logits.grammar import GrammarCompiler
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import KvWindow
from inflight.executor.scheduler.scheduler import Batching, Scheduler, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.sequence import StepPlan, TokenLogprobs
from inflight.executor.serving.placements import RetentionPolicy
from inflight.executor.serving.report import policy_proto
from inflight.executor.serving.service import ExecutorService, Identity
from inflight.executor.serving.submission import SubmissionLimits
from inflight.executor.speculation.proposer import Proposer
from inflight.router import app
from inflight.router.api.service import InferenceService
from inflight.router.app import RouterApp, build_router, ledger_settings_of
from inflight.router.auth.resume_token import ResumeTokens
from inflight.router.dispatch import dispatcher
from inflight.router.dispatch.pools import ModelPools
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.settings import RouterSettings
from inflight.router.stats.source import StatsSource
from inflight.router.text.tokenizer import TextModel
from inflight.v1 import (
    executor_pb2,
    executor_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    types_pb2,
)
from tests.support.device.fake_device import VOCABULARY_SIZE, FakeDevice
from tests.support.scheduler.drafting import eager

BLOCK_SIZE = 4
CONTEXT_LENGTH = 64
# Drafts of a sequence in a step, where an executor drafts.
NUM_DRAFTS = 7
# For what a machine that stands still for seconds would end: calls of Redis, and requests without an executor.
PATIENCE_S = 60.0
PATIENCE_MS = 60_000


class Brake:
    """Lets a device run steps: all of them while released, a number of them while held."""

    def __init__(self) -> None:
        self._steps = threading.Semaphore(0)
        self._held = False
        # While a step waits for its permission: the engine takes nothing in.
        self.is_waited_for = threading.Event()

    def hold(self) -> None:
        """From the next step on, every step needs a permission."""
        self._held = True

    def permit(self, num_steps: int) -> None:
        """Permits so many steps. Until the next one waits no step waits for a permission."""
        self.is_waited_for.clear()
        for _ in range(num_steps):
            self._steps.release()

    def release(self) -> None:
        """Lets everything run again."""
        self._held = False
        self._steps.release()

    def wait(self) -> None:
        """Called by the device before a step."""
        if self._held:
            self.is_waited_for.set()
            self._steps.acquire()
            self.is_waited_for.clear()


@dataclass(frozen=True, slots=True)
class ExecutorShape:
    """How large an executor is, and how it drafts. A block has 4 tokens, the context 64."""

    num_blocks: int = 32
    max_num_sequences: int = 4
    num_standby_sequences: int = 0
    batching: Batching = Batching.INFLIGHT
    policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    num_host_blocks: int = 0
    overlap: bool = True
    make_proposer: Callable[[], Proposer] | None = None
    kv_window: KvWindow | None = None
    adapters: AdapterStore | None = None


class BrakedStep:
    """A step that ends when the brake lets it."""

    allows_next = True
    copied_s = 0.0
    began_s = 0.0
    ended_s = 0.0

    def __init__(self, step: PendingStep, brake: Brake) -> None:
        self._step = step
        self._brake = brake

    def result(self) -> tuple[int | None, ...]:
        self._brake.wait()
        return self._step.result()

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        return self._step.logprobs()


class BrakedDevice:
    """The fake device behind a brake."""

    def __init__(self, device: FakeDevice, brake: Brake) -> None:
        self._device = device
        self._brake = brake
        self.boarded: list[str] = []

    def launch(self, plan: StepPlan) -> PendingStep:
        self.boarded.extend(sequence.request_id for sequence in plan.boarded)
        return BrakedStep(self._device.launch(plan), self._brake)

    def close(self) -> None:
        """See `StepRunner`."""


@dataclass(slots=True)
class RunningExecutor:
    """An executor that serves."""

    address: str
    scheduler: Scheduler
    brake: Brake
    device: BrakedDevice
    engine: Engine
    server: GrpcServer
    work: list[asyncio.Task[None]]
    service: ExecutorService

    def permit_for_commands(self, num_steps: int = 1) -> None:
        """Permits steps if commands wait for the end of one. On a slow machine, steps that are permitted before the
        commands come may end a request too early."""
        if self.brake.is_waited_for.is_set() and not self.engine._inbox.empty():
            self.brake.permit(num_steps)

    async def stop(self) -> None:
        """Ends it as a crash looks to routers: their streams break, nothing is handed back."""
        await self.server.grpc.stop(None)
        self.brake.release()
        await asyncio.to_thread(self.engine.stop)
        for running in self.work:
            running.cancel()


@dataclass(slots=True)
class RunningRouter:
    """A router that serves, and a stub for it."""

    address: str
    stub: inference_pb2_grpc.InferenceServiceStub
    parts: RouterApp
    registry: CollectorRegistry
    work: asyncio.Task[None]

    @property
    def pools(self) -> ModelPools:
        """Its models."""
        return self.parts.pools

    @property
    def service(self) -> InferenceService:
        """What clients call."""
        return self.parts.service

    @property
    def server(self) -> GrpcServer:
        """Where they call it."""
        return self.parts.server

    @property
    def stats(self) -> StatsSource:
        """How everything stands."""
        return self.parts.stats

    @property
    def tokens(self) -> ResumeTokens:
        """Its resume tokens."""
        return self.parts.tokens

    async def kill(self) -> None:
        """Ends it as a crash looks to others: nothing is told to the ledger or to executors any more."""
        self.work.cancel()
        await asyncio.wait([self.work])
        await self.server.grpc.stop(None)


@dataclass(slots=True)
class Cluster:
    """What a test holds."""

    executors: list[RunningExecutor] = field(default_factory=list)
    routers: list[RunningRouter] = field(default_factory=list)


async def start_executor(
    name: str,
    model: str,
    shape: ExecutorShape,
    generation: int = 1,
    port: int = 0,
    *,
    host: str = "127.0.0.1",
    retention: RetentionPolicy | None = None,
    watchdog_s: float | None = None,
    tracing: Tracing = NO_TRACING,
    grammars: GrammarCompiler | None = None,
) -> RunningExecutor:
    """Starts an executor on a free port, or on the port given; without `watchdog_s` it may stand still."""
    loop = asyncio.get_running_loop()
    pool = BlockPool(shape.num_blocks, BLOCK_SIZE)
    limits = SchedulerLimits(
        max_num_sequences=shape.max_num_sequences,
        num_standby_sequences=shape.num_standby_sequences,
        max_num_tokens=16,
        context_length=CONTEXT_LENGTH,
        enable_chunked_context=True,
        batching=shape.batching,
        enable_prefix_cache=True,
        policy=shape.policy,
        kv_window=shape.kv_window,
        num_host_blocks=shape.num_host_blocks,
    )
    drafting = None if shape.make_proposer is None else eager(shape.make_proposer)
    brake, scheduler = Brake(), Scheduler(limits, pool, drafting)

    def publish(output: EngineOutput) -> None:
        with suppress(RuntimeError):  # the test is over and its loop closed
            loop.call_soon_threadsafe(service.on_output, output)

    num_window_tokens = 0 if shape.kv_window is None else shape.kv_window.num_tokens
    device = BrakedDevice(FakeDevice(pool, scheduler.windows, num_window_tokens), brake)
    engine = Engine(scheduler, device, publish, lambda error: None, overlap=shape.overlap)
    identity = _identity(name, model, shape, generation, limits)
    service = ExecutorService(identity, engine, retention, tracing=tracing, grammars=grammars, adapters=shape.adapters)
    server = GrpcServer(["inflight.v1.ExecutorService"])
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(service, server.grpc)
    address = await server.start(f"{host}:{port}")
    engine.start()
    await server.set_serving(True)

    async def on_change(is_stalled: bool) -> None:
        service.set_stalled(is_stalled)
        await server.set_serving(not is_stalled)

    work = [asyncio.create_task(service.run())]
    if watchdog_s is not None:
        work.append(asyncio.create_task(watch_engine(service, watchdog_s, on_change)))
    return RunningExecutor(address, scheduler, brake, device, engine, server, work, service)


def _identity(name: str, model: str, shape: ExecutorShape, generation: int, limits: SchedulerLimits) -> Identity:
    num_adapter_slots = 0 if shape.adapters is None else shape.adapters.num_slots
    description = executor_pb2.DescribeResponse(
        executor_id=name,
        generation=generation,
        protocol_version=PROTOCOL_VERSION,
        model=model,
        block_size=BLOCK_SIZE,
        total_blocks=shape.num_blocks,
        max_num_sequences=shape.max_num_sequences,
        num_standby_sequences=shape.num_standby_sequences,
        max_num_tokens=16,
        context_length=CONTEXT_LENGTH,
        vocabulary_size=VOCABULARY_SIZE,
        eos_token_ids=[],
        default_sampling=types_pb2.SamplingParams(),
        batching=types_pb2.BATCHING_MODE_INFLIGHT,
        scheduler_policy=policy_proto(limits),
        host_blocks=shape.num_host_blocks,
        num_adapter_slots=num_adapter_slots,
    )
    max_drafts = 0 if shape.make_proposer is None else NUM_DRAFTS
    submission = SubmissionLimits(
        CONTEXT_LENGTH,
        VOCABULARY_SIZE,
        frozenset(),
        max_drafts=max_drafts,
        num_adapter_slots=num_adapter_slots,
    )
    return Identity(description, submission)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of the words `t0` to `t4`, joined by nothing."""
    words = {f"t{i}": i for i in range(VOCABULARY_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


async def _work(pools: ModelPools, tokens: ResumeTokens, addresses: list[str]) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(pools.run(addresses, 0.1))
        tasks.create_task(tokens.run())


def _patient_settings_of(settings: RouterSettings) -> LedgerSettings:
    return replace(ledger_settings_of(settings), call_timeout_ms=PATIENCE_MS)


@asynccontextmanager
async def run_router(
    name: str,
    model: str,
    redis_url: str,
    addresses: list[str],
    settings: RouterSettings | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[RunningRouter]:
    """A router of one model, ready to be called once an executor is linked. It waits a minute for Redis, and by default
    for an executor."""
    settings = settings or RouterSettings(no_executor_grace_s=PATIENCE_S)
    own = {"redis_url": SecretStr(redis_url), "router_id": name}
    registry = CollectorRegistry()
    with patch.object(app, "ledger_settings_of", _patient_settings_of):
        parts = build_router(settings.model_copy(update=own), {model: TextModel(tiny_tokenizer())}, registry)
    address = await parts.server.start(f"{host}:0")
    work = asyncio.create_task(_work(parts.pools, parts.tokens, addresses))
    with patch.object(dispatcher, "SUBMIT_TURN_S", PATIENCE_S):
        async with grpc.aio.insecure_channel(address, [NO_PROXY]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            try:
                yield RunningRouter(address, stub, parts, registry, work)
            finally:
                await parts.server.grpc.stop(None)
                work.cancel()
                with suppress(asyncio.CancelledError):
                    await work
                await parts.ledgers.aclose()


@asynccontextmanager
async def run_cluster(
    redis_url: str,
    model: str,
    *,
    executors: int = 1,
    routers: int = 1,
    shape: ExecutorShape | None = None,
    settings: RouterSettings | None = None,
    metadata: tuple[tuple[str, str], ...] = (),
) -> AsyncIterator[Cluster]:
    """A cluster whose routers all know all executors and are linked to them. `metadata` opens their door."""
    cluster = Cluster()
    async with AsyncExitStack() as stack:
        for i in range(executors):
            executor = await start_executor(f"executor-{i}", model, shape or ExecutorShape())
            cluster.executors.append(executor)
            stack.push_async_callback(executor.stop)
        addresses = [executor.address for executor in cluster.executors]
        for i in range(routers):
            router = await stack.enter_async_context(
                run_router(f"{model}-router-{i}", model, redis_url, addresses, settings)
            )
            cluster.routers.append(router)
        for router in cluster.routers:
            await until_ready(router, executors, metadata)
        yield cluster


async def until_ready(router: RunningRouter, num_executors: int, metadata: tuple[tuple[str, str], ...] = ()) -> None:
    """Waits until the router has links to so many executors and the ledger knows them."""
    async with asyncio.timeout(60):
        await router.tokens.known()
        while True:
            response = await router.stub.GetCapacity(inference_pb2.GetCapacityRequest(), metadata=metadata)
            if sum(executor.accepting for executor in response.executors) == num_executors:
                return
            await asyncio.sleep(0.01)


def token_request(
    prompt_ids: list[int], max_tokens: int, *, request_id: str = "", **fields: object
) -> inference_pb2.GenerateRequest:
    """A request by token ids that wants token ids back."""
    fields = {"output": inference_pb2.OutputOptions(token_ids=True), **fields}
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=inference_pb2.TokenIds(ids=prompt_ids),
        sampling=types_pb2.SamplingParams(temperature=0),
        stopping=types_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )
