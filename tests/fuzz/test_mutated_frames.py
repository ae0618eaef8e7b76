"""Mutated messages of an executor against two routers: at most the link to that executor ends.

The first test has 250,000 messages and no network: links, life cycles, dispatchers and streams are real, the ledger
is scripted. A message that the checks refuse ends its link; the test then goes on with the next message, because the
checks change nothing. The second test sends some over gRPC to two whole routers with a real ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc.aio
import pytest

from inflight.common.errors import RequestError
from inflight.router.api.prepare import model_limits
from inflight.router.auth.caller import ANYBODY
from inflight.router.dispatch.ledger_writer import ledger_report
from inflight.router.executors import link as link_module
from inflight.router.executors.frame_checks import check_description
from inflight.router.executors.link import ExecutorLink
from inflight.router.executors.step_feed import StepFeed
from inflight.router.ledger.codec import report_args
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import Adopted, Demand, Snapshot
from inflight.router.lifecycle.events import LifecycleState
from inflight.router.request.executor_context import FrameError
from inflight.router.settings import RouterSettings
from inflight.router.stats.capacity import described_model, executor_capacities
from inflight.router.stats.source import seen_sequence
from inflight.router.stream.relay import Relay
from inflight.router.stream.request_stream import Reader, RequestStream
from inflight.v1 import executor_pb2, inference_pb2, resume_pb2, types_pb2
from tests.fuzz.mutation import Mutator
from tests.fuzz.served import HANG_S, check_unharmed
from tests.fuzz.test_frames_to_a_router import DESCRIPTION, resubmitted, stored_format
from tests.fuzz.test_hostile_executor import GENERATION, HostileExecutor, listening
from tests.integration.test_requests import collect
from tests.support.device.fake_device import VOCABULARY_SIZE
from tests.support.ledger.scripted_store import ScriptedRouter, new_stream, place, placement, settled, steps
from tests.support.stack.cluster import (
    Cluster,
    ExecutorShape,
    RunningRouter,
    run_router,
    start_executor,
    token_request,
    until_ready,
)

NUM_MESSAGES = 250_000
NUM_ROUTERS = 2
# Messages to one request. Then the request ends and another one begins.
MESSAGES_PER_REQUEST = 400
NUM_LINKS = 30
SETTINGS, ROUTER_SETTINGS = LedgerSettings(), RouterSettings()
TOOL_FORMAT = {"name": "x", "layout": "object", "begin": "<", "end": ">"}


def templates() -> list[executor_pb2.ServeResponse]:
    """Valid messages about request `r` in slot 0."""
    step = executor_pb2.StepFrame(frame=2, slots=[0, 0], offsets=[0, 1], token_ids=[1, 2])
    step.started.add(slot=0, cached_tokens=4)
    token = types_pb2.TokenLogprob(token_id=1, logprob=-1, rank=1)
    values = types_pb2.PositionLogprobs(chosen=token, top=[token])
    step.logprobs.add(slot=0, offset=0, values=values)
    ended = executor_pb2.StepFrame(frame=3)
    ended.finished.add(slot=0, reason="FINISH_REASON_STOP_TOKEN", stop_token_id=2)
    scored = executor_pb2.StepFrame(frame=4, paused=[0], detached=[0])
    scored.prompt_logprobs.add(slot=0, position=1, values=[values])
    report = executor_pb2.Report(seq=2, total_blocks=32, budget_blocks=32, budget_sequences=4, step_ms=1)
    report.held.add(request_id="r", attempt=1, reserved_blocks=1, phase="SEQUENCE_PHASE_STANDBY")
    report.adapters.add(name="a", hash="f" * 64, rank=8)
    report.bounds.add(constraint="STEP_CONSTRAINT_SEATS", num_steps=1)
    report.drafts.SetInParent()
    report.host_prefixes.SetInParent()
    report.states.SetInParent()
    report.checkpoint_names.append(7)
    return [
        executor_pb2.ServeResponse(generation=1, accepted=[{"request_id": "r", "attempt": 1, "slots": [0]}]),
        executor_pb2.ServeResponse(generation=1, rejected=[{"request_id": "r", "attempt": 1, "detail": "x"}]),
        executor_pb2.ServeResponse(generation=1, step=step),
        executor_pb2.ServeResponse(generation=1, step=ended),
        executor_pb2.ServeResponse(generation=1, step=scored),
        executor_pb2.ServeResponse(generation=1, report=report),
    ]


def attachment() -> executor_pb2.SequenceAttached:
    """A valid answer to an Attach for request `r`, with every field of its context."""
    one = resubmitted(deadline_ms=1000, num_top_logprobs=1, stream_interval=1)
    context = resume_pb2.RouterContext.FromString(one.submit.router_context)
    context.stop.append("t9")
    context.answer_format = stored_format(tools=TOOL_FORMAT, reasoning={"begin": "(", "end": ")"})
    context.resume_ttl.seconds = 5
    one.submit.router_context = context.SerializeToString()
    return one


class Target:
    """A router with a link to the executor under test, whose messages it gets, and one to another executor."""

    def __init__(self, seed: int) -> None:
        self.mutator = Mutator(seed)
        self.counts: Counter[str] = Counter()
        self._router = ScriptedRouter("m")
        self._pool = self._router.pools.find("m")
        self._link = self._router.link("e0", "m")
        self._link.description.CopyFrom(DESCRIPTION)
        self._templates = templates()
        self._attachment = attachment()
        self._stream: RequestStream | None = None
        self._is_applied = False
        receive = self._link.receive

        def receive_checked(response: executor_pb2.ServeResponse) -> None:
            self._is_applied = True
            receive(response)

        self._link.receive = receive_checked  # type: ignore[method-assign]

    async def run(self, num_messages: int) -> None:
        """Receives so many messages."""
        bystander_link, bystander = self._router.link("e1", "m"), new_stream(request_id="b")
        bystander_link._seated[0] = (bystander, 1)
        place(bystander, placement(executor_id="e1", request_id="b"))
        num_begun = 0
        async with self._router.running():
            while self.counts.total() < num_messages:
                await self._run_request(num_begun)
                bystander_link.receive(steps(num_begun % VOCABULARY_SIZE, offset=num_begun))
                num_begun += 1
                assert len(bystander.output_ids) == num_begun
                assert not any(task.done() for task in asyncio.all_tasks() if task.get_name().startswith("pool "))

    async def _run_request(self, number: int) -> None:
        """Sends messages to a request that was offered, runs, or is attached to."""
        begin: tuple[Callable[[], Any], ...] = (self._offer, self._seat, self._adopt)
        reader = await begin[number % len(begin)]()
        for _ in range(MESSAGES_PER_REQUEST):
            self._is_applied = False
            try:
                self._link.take_in(self._frame())
                self.counts["applied"] += 1
            except FrameError as error:
                if error.__cause__ is not None:
                    raise error.__cause__ from None
                self.counts["refused"] += 1
                if self._is_applied:
                    break
            if self._is_applied:
                await asyncio.sleep(0)
                self._check_report()
                if not (self._link._offered or self._link._seated or self._link._attaching):
                    break
        for _ in range(8):
            self._describe()
            self._watch()
        await self._end(reader)

    def _frame(self) -> executor_pb2.ServeResponse:
        frame = executor_pb2.ServeResponse()
        if self._link._attaching and self.mutator.random.random() < 0.8:
            frame.generation = 1
            attached = frame.attached.add()
            attached.CopyFrom(self._attachment)
            context = resume_pb2.RouterContext.FromString(attached.submit.router_context)
            self.mutator.mutate(context if self.mutator.random.random() < 0.5 else attached)
            if context.request_id == "r":
                attached.submit.router_context = context.SerializeToString()
        else:
            frame.CopyFrom(self.mutator.choice(self._templates))
            self.mutator.mutate(frame)
        return frame

    async def _offer(self) -> asyncio.Task[None] | None:
        """Request `r` is offered to the executor."""
        submit = executor_pb2.Submit(request_id="r", prompt_ids=[1] * 10, num_prompt_logprobs=1, num_top_logprobs=1)
        submit.stopping.max_tokens = 20
        stream = RequestStream(Demand("r", 2, 9), submit, 0.0)
        self._router.stores["m"].answers.append(placement())
        await self._pool.dispatcher.submit(stream)
        self._stream = stream
        return None

    async def _seat(self) -> asyncio.Task[None] | None:
        """The executor has accepted it."""
        await self._offer()
        self._link.receive(self._templates[0])
        return None

    async def _adopt(self) -> asyncio.Task[None]:
        """A client resumes it here, so that the router attaches to it and relays its output."""
        self._router.stores["m"].answers.append(Adopted(placement(), ended=False))
        reader = asyncio.create_task(self._read())
        await settled()
        assert self._link._attaching
        return reader

    async def _read(self) -> None:
        async def write(event: inference_pb2.StreamEvent) -> None:
            event.SerializeToString()

        def restore(attached: executor_pb2.SequenceAttached) -> RequestStream:
            return self._router.service._preparation.restore(self._pool, attached)

        with suppress(RequestError):
            stream = await self._pool.dispatcher.resume("r", restore)
            self._stream = stream
            reader = Reader(1)
            stream.attend(reader)
            await Relay(stream, write, reader=reader).run()

    async def _end(self, reader: asyncio.Task[None] | None) -> None:
        """The link breaks and the client leaves: nothing is left of the request."""
        self._link._break()
        await settled()
        if reader is not None:
            if reader.done():
                reader.result()
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
        if self._stream is not None:
            self._pool.dispatcher.release(self._stream)
            await settled()
            assert self._stream.life.state in (LifecycleState.ENDED, LifecycleState.LEFT), self._stream.life.state
            self._stream = None
        assert not self._pool.dispatcher.streams
        self._link.is_up = True
        events = self._router.pools.on_linked(self._link)
        assert not isinstance(events, str)
        self._link.come_up(events)
        self._router.stores["m"].answers.clear()

    def _check_report(self) -> None:
        """The ledger can count with a report that was applied."""
        if self._link.report is not None:
            report_args(ledger_report(self._link, self._link.report), SETTINGS)
            list(executor_capacities(self._pool, Snapshot((), ())))

    def _describe(self) -> None:
        link = ExecutorLink("e2:1", "router", self._router.pools)
        link.description.CopyFrom(DESCRIPTION)
        link.description.executor_id = "e2"
        link.description.eos_token_ids.append(4)
        link.description.default_sampling.temperature = 0.5
        self.mutator.mutate(link.description)
        self.counts["descriptions"] += 1
        try:
            check_description(link.description)
        except FrameError:
            return
        events = self._router.pools.on_linked(link)
        if isinstance(events, str):
            return
        link.come_up(events)
        assert model_limits(self._pool, ROUTER_SETTINGS).context_length >= 2
        described_model(self._pool).SerializeToString()
        link._break()

    def _watch(self) -> None:
        response = executor_pb2.WatchStepsResponse(generation=1)
        response.iterations.add(iter=1).parts.add(name="plan", ms=1)
        response.sequences.add(request_id="t/r", phase="SEQUENCE_PHASE_DECODE")
        self.mutator.mutate(response)
        self.counts["steps"] += 1
        feed = StepFeed(self._link)
        feed._receive(response)
        for sequence in feed.sequences:
            seen_sequence(sequence, ANYBODY).SerializeToString()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_ROUTERS))
async def test_mutated_messages_harm_no_router(seed: int) -> None:
    logging.disable(logging.CRITICAL)
    try:
        target = Target(seed)
        await target.run(NUM_MESSAGES // NUM_ROUTERS)
        assert min(target.counts[name] for name in ("applied", "refused", "descriptions", "steps")) > 250
    finally:
        logging.disable(logging.NOTSET)


class MutatingExecutor(HostileExecutor):
    """Answers what it is offered with valid messages and a mutated one, on any number of streams."""

    def __init__(self, model: str, seed: int) -> None:
        super().__init__(model)
        self.num_sent = 0
        self._mutator = Mutator(seed)
        self._templates = [*templates(), executor_pb2.ServeResponse(generation=1, attached=[attachment()])]

    async def _answer(
        self, request_iterator: AsyncIterator[executor_pb2.ServeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        async for request in request_iterator:
            for submit in request.submits:
                accepted = executor_pb2.ServeResponse(generation=GENERATION)
                accepted.accepted.add(request_id=submit.request_id, attempt=submit.attempt, slots=[self.num_sent])
                await self._write(context, accepted)
                frame = executor_pb2.ServeResponse()
                frame.CopyFrom(self._mutator.choice(self._templates))
                self._mutator.mutate(frame)
                self.num_sent += 1
                await self._write(context, frame)
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the next stream sends the next message")


async def ended(router: RunningRouter, request: inference_pb2.GenerateRequest) -> None:
    """Waits until a request has ended in any way. An executor that lies may end it with any result."""
    with suppress(grpc.aio.AioRpcError):
        await collect(router, request, HANG_S)


async def test_mutated_messages_over_grpc_harm_no_router(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "MAX_BREACH_BACKOFF_S", link_module.MIN_BACKOFF_S)
    monkeypatch.setattr(link_module, "MAX_BACKOFF_S", link_module.MIN_BACKOFF_S)
    honest = await start_executor("honest", pool, ExecutorShape())
    mutating = MutatingExecutor(pool, seed=0)
    try:
        async with AsyncExitStack() as stack:
            addresses = [honest.address, await stack.enter_async_context(listening(mutating))]
            routers = [
                await stack.enter_async_context(run_router(f"{pool}-{i}", pool, redis_url, addresses)) for i in range(2)
            ]
            for router in routers:
                await until_ready(router, 2)
            while mutating.num_sent < NUM_LINKS:
                # The honest executor has four seats, so others are placed on the mutating one
                async with asyncio.TaskGroup() as requests:
                    for number in range(12):
                        request = token_request([number % VOCABULARY_SIZE, 1], 8)
                        requests.create_task(ended(routers[number % NUM_ROUTERS], request))
            assert not any(router.work.done() for router in routers)
            await check_unharmed(Cluster([honest], routers))
    finally:
        await honest.stop()
