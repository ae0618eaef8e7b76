"""A router over a ledger whose answers a test writes down, and links whose executors the test plays. No network.

For what the real ledger decides only in the right moment: that a request is refused, waits, is preempted or lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from inflight.common.errors import RequestError
from inflight.router.api.service import InferenceService
from inflight.router.auth.caller import AnonymousAuthenticator
from inflight.router.auth.resume_token import ResumeTokens
from inflight.router.config.tenants import NO_CONFIG, TenantConfig, TenantConfigFile
from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.dispatch.pools import ModelPool, ModelPools
from inflight.router.executors.link import ExecutorLink
from inflight.router.ledger.ledger import Ledger, OnEvent
from inflight.router.ledger.types import (
    Attempt,
    CancelOutcome,
    ChargeOutcome,
    DayUsage,
    Demand,
    Ending,
    ExecutorReport,
    ExecutorUsage,
    Explanation,
    LedgerEvent,
    Placement,
    PoolEvents,
    Queued,
    Refused,
    ReportOutcome,
    Snapshot,
    TenantLimits,
)
from inflight.router.lifecycle.events import LifecycleState, Submit
from inflight.router.request.delivery import Delivery
from inflight.router.settings import RouterSettings
from inflight.router.stats.source import StatsSource
from inflight.router.stream.request_stream import RequestStream
from inflight.router.telemetry.latencies import Latencies
from inflight.router.text.output import OutputText
from inflight.router.text.tokenizer import TextModel
from inflight.v1 import executor_pb2, inference_pb2, types_pb2
from tests.support.device.fake_device import VOCABULARY_SIZE
from tests.support.stack.cluster import tiny_tokenizer


class ScriptedLedger:
    """Answers from what the test has put there; what it has no answer for waits in line. Remembers what it was told."""

    def __init__(self, on_event: Callable[[LedgerEvent], None]) -> None:
        self.tell = on_event
        self.answers: deque[Any] = deque()
        self.before_answer: Callable[[], None] = lambda: None
        self.explanations: dict[str, Explanation] = {}
        self.cancels: dict[str, CancelOutcome] = {}
        self.demands: list[Demand] = []
        self.hand_backs: list[tuple[str, int, dict[str, Any]]] = []
        self.placement_blocks: list[int | None] = []
        self.cleared_suspects: list[tuple[str, int]] = []
        self.forgotten: frozenset[str] = frozenset()
        self.endings: list[Attempt | Ending] = []
        self.may_settle = asyncio.Event()
        self.may_settle.set()
        self.reports: list[ExecutorReport] = []
        self.router_id = "r"

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        pass

    async def submit(self, demand: Demand) -> Any:
        self.demands.append(demand)
        self.before_answer()
        return self._answer()

    async def hand_back(
        self,
        request_id: str,
        attempt: int,
        max_attempts: int,
        *,
        stood_still: bool = False,
        placement_blocks: int | None = None,
        **how: Any,
    ) -> Any:
        self.placement_blocks.append(placement_blocks)
        self.hand_backs.append((request_id, attempt, how | ({"stood_still": True} if stood_still else {})))
        return self._answer()

    async def adopt(self, request_id: str) -> Any:
        return self._answer()

    async def clear_suspect(self, request_id: str, attempt: int) -> None:
        self.cleared_suspects.append((request_id, attempt))

    async def settle(self, endings: Sequence[Attempt | Ending]) -> int:
        await self.may_settle.wait()
        self.endings.extend(endings)
        return len(endings)

    async def report_all(self, reports: Sequence[ExecutorReport]) -> list[ReportOutcome]:
        self.reports.extend(reports)
        return [ReportOutcome(taken=True) for _ in reports]

    def listen(self, listener: PoolEvents) -> None:
        pass

    async def cancel(self, request_id: str) -> CancelOutcome:
        return self.cancels.get(request_id, CancelOutcome(None))

    async def withdraw(self, request_id: str) -> CancelOutcome:
        return await self.cancel(request_id)

    async def check_rates(
        self, tenant: str, limits: TenantLimits, tokens: int, request_id: str = "", *, takes: bool = False
    ) -> Refused | None:
        return None

    async def explain(self, request_id: str) -> Explanation | None:
        return self.explanations.get(request_id)

    async def find_forgotten(self, waiting: Sequence[Attempt]) -> frozenset[str]:
        return self.forgotten & {one.request_id for one in waiting}

    async def charge(self, usage: ExecutorUsage) -> ChargeOutcome:
        return ChargeOutcome(usage.totals)

    async def usage(self, day: int) -> DayUsage:
        return DayUsage((), None)

    async def snapshot(self, max_tenant_queues: int = 0) -> Snapshot:
        return Snapshot((), ())

    def _answer(self) -> Any:
        answer = self.answers.popleft() if self.answers else Queued(0)
        if isinstance(answer, RequestError):
            raise answer
        return answer


class CallContext:
    """The context of a call without a deadline and without metadata. Keeps what is written."""

    def __init__(self) -> None:
        self.events: list[inference_pb2.StreamEvent] = []

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def write(self, response: bytes) -> None:
        self.events.append(inference_pb2.GenerateResponse.FromString(response).event)


class ScriptedRouter:
    """A router of some models, each with a scripted ledger."""

    def __init__(self, *models: str, rules: TenantConfig = NO_CONFIG, no_executor_grace_s: float = 1.0) -> None:
        self._no_executor_grace_s = no_executor_grace_s
        self.stores: dict[str, ScriptedLedger] = {}
        self.admission = TenantConfigFile(None, rules)
        self.pools = ModelPools(
            [self._pool(model) for model in models], "router", lambda: self.admission.config.variants
        )
        self.tokens = ResumeTokens(b"secret")
        self.stats = StatsSource(self.pools, "router", Latencies(models))
        self.service = InferenceService(
            self.pools, RouterSettings(), self.admission, AnonymousAuthenticator(), self.tokens, self.stats
        )

    def _pool(self, model: str) -> ModelPool:
        def open_ledger(on_event: OnEvent) -> Ledger:
            self.stores[model] = ScriptedLedger(on_event)
            return self.stores[model]

        return ModelPool(model, TextModel(tiny_tokenizer()), Dispatcher(open_ledger, 3, self._no_executor_grace_s))

    def link(self, executor_id: str, model: str, **described: Any) -> ExecutorLink:
        """Links an executor that describes itself so; the test plays it by `ExecutorLink.receive`."""
        link = ExecutorLink(f"{executor_id}:1", "router", self.pools)
        link.description = executor_pb2.DescribeResponse(
            executor_id=executor_id,
            generation=1,
            protocol_version=2,
            model=model,
            block_size=4,
            total_blocks=32,
            context_length=64,
            vocabulary_size=VOCABULARY_SIZE,
            **described,
        )
        events = self.pools.on_linked(link)
        assert not isinstance(events, str)
        link.come_up(events)
        return link

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Lets the dispatchers work."""
        work = asyncio.create_task(self.pools.run((), 1.0))
        await settled()
        try:
            yield
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work


def placement(attempt: int = 1, executor_id: str = "e0", blocks: int = 0, request_id: str = "r") -> Placement:
    """Of request `r`, unless another is named."""
    return Placement(request_id, attempt, executor_id, 1, blocks=blocks)


def place(stream: RequestStream, placement: Placement) -> executor_pb2.Submit:
    """Places a request that no dispatcher has; returns what its executor is told."""
    if stream.life.state is LifecycleState.NEW:
        stream.life.handle(Submit())
    stream.life.handle(placement)
    return stream.place(placement)


def accepts(attempt: int, slot: int = 0, request_id: str = "r") -> executor_pb2.ServeResponse:
    """The executor takes request `r`, unless another is named."""
    response = executor_pb2.ServeResponse()
    response.accepted.add(request_id=request_id, attempt=attempt, slots=[slot])
    return response


def steps(
    *token_ids: int,
    offset: int = 0,
    cached: int | None = None,
    paused: bool = False,
    end: types_pb2.FinishReason | None = None,
    slot: int = 0,
) -> executor_pb2.ServeResponse:
    """A frame of one slot: it boards where `cached` is given, has tokens, gives up its seat or ends."""
    frame = executor_pb2.StepFrame(frame=1, slots=[slot] * len(token_ids), token_ids=token_ids)
    frame.offsets.extend(range(offset, offset + len(token_ids)))
    if cached is not None:
        frame.started.add(slot=slot, cached_tokens=cached)
    if paused:
        frame.paused.append(slot)
    if end is not None:
        frame.finished.add(slot=slot, reason=types_pb2.FinishReason.Name(end))
    return executor_pb2.ServeResponse(step=frame)


def new_stream(
    num_prompt_tokens: int = 10,
    deadline: float | None = None,
    delivery: Delivery | None = None,
    request_id: str = "r",
    max_tokens: int = 0,
) -> RequestStream:
    """Request `r`, unless another is named, whose whole need is 9 blocks; `max_tokens` 0: as many as come."""
    submit = executor_pb2.Submit(request_id=request_id, prompt_ids=[1] * num_prompt_tokens)
    submit.stopping.max_tokens = max_tokens
    return RequestStream(Demand(request_id, 2, 9, deadline_ms=500), submit, 0.0, deadline, delivery=delivery)


def new_delivery(**fields: Any) -> Delivery:
    """What a client of request `r` reads: ids and text, for as long as it is there."""
    return Delivery(
        accepted=inference_pb2.Accepted(request_id="r", prompt_tokens=10, max_tokens=100),
        new_text=lambda: OutputText(TextModel(tiny_tokenizer()).detokenizer()),
        name_token=lambda token: None,
        **{"wants_text": True, "wants_token_ids": True, **fields},
    )


async def settled() -> None:
    """Lets everything that was set off come to rest."""
    for _ in range(20):
        await asyncio.sleep(0)
