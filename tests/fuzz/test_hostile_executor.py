"""An executor that sends what cannot be true, over real gRPC: only its own link breaks, with the reason in the log.

Its requests go on at the honest executor, whose streams notice nothing, and the ledger is as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.lifecycle.events import Detached, LinkEvent
from inflight.router.lifecycle.lifecycle import IllegalTransition
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2, executor_pb2_grpc, inference_pb2, resume_pb2
from tests.fuzz.served import HANG_S, check_unharmed
from tests.fuzz.test_frames_to_a_router import HOSTILE_ATTACHMENTS, HOSTILE_FRAMES
from tests.integration.test_requests import collect, expected_ids, ids_of, rest
from tests.support.device.fake_device import VOCABULARY_SIZE
from tests.support.stack.cluster import (
    Cluster,
    ExecutorShape,
    RunningRouter,
    run_router,
    start_executor,
    token_request,
    until_ready,
)

GENERATION = 1
# One of each kind; test_frames_to_a_router has them all.
KINDS = (
    "token of an unknown slot",
    "columns of different lengths",
    "token outside the vocabulary",
    "another generation",
    "speed that is no number",
    "huge list of held sequences",
    "held sequence with the last attempt that there is",
)
ATTACHMENTS = ("answer format {", "empty stop string", "deadline near 2^64", "2^32 choices")

Answer = executor_pb2.ServeResponse | bytes


class HostileExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """Accepts what it is offered and answers it with the hostile frame. Answers an Attach with the hostile attachment.
    Then it refuses further streams of that router."""

    def __init__(
        self,
        model: str,
        frame: Answer | None = None,
        attachment: executor_pb2.SequenceAttached | None = None,
        **described: Any,
    ) -> None:
        self.description = executor_pb2.DescribeResponse(
            executor_id="hostile",
            generation=GENERATION,
            protocol_version=2,
            model=model,
            block_size=4,
            total_blocks=32,
            max_num_sequences=4,
            context_length=64,
            vocabulary_size=VOCABULARY_SIZE,
        )
        self.description.MergeFrom(executor_pb2.DescribeResponse(**described))
        self.broken = asyncio.Event()
        self.submitted: executor_pb2.Submit | None = None
        self._frame = frame
        self._attachment = attachment
        self._routers: set[str] = set()
        self._num_reports = 0
        self._writing = asyncio.Lock()  # gRPC allows one write of a stream at a time

    async def Describe(
        self, request: executor_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> executor_pb2.DescribeResponse:
        return self.description

    async def Serve(
        self,
        request_iterator: AsyncIterator[executor_pb2.ServeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        reporting = asyncio.create_task(self._keep_reporting(context))
        try:
            await self._answer(request_iterator, context)
        finally:
            reporting.cancel()

    async def _answer(
        self,
        request_iterator: AsyncIterator[executor_pb2.ServeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        async for request in request_iterator:
            if request.HasField("hello"):
                if request.hello.router_id in self._routers:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
                self._routers.add(request.hello.router_id)
            for submit in request.submits:
                self.submitted = submit
                accepted = executor_pb2.ServeResponse(generation=GENERATION)
                accepted.accepted.add(request_id=submit.request_id, attempt=submit.attempt, slots=[0])
                await self._write(context, accepted)
                if self._frame is not None:
                    await self._write_last(context, self._frame)
            for attach in request.attaches:
                if self._attachment is not None:
                    answer = executor_pb2.ServeResponse(generation=GENERATION, attached=[self._attachment])
                    answer.attached[0].request_id = answer.attached[0].submit.request_id = attach.request_id
                    answer.attached[0].attempt = attach.attempt
                    await self._write_last(context, answer)

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any], answer: Answer) -> None:
        async with self._writing:
            await context.write(answer)

    async def _write_last(self, context: grpc.aio.ServicerContext[Any, Any], answer: Answer) -> None:
        try:
            await self._write(context, answer)
            await asyncio.Event().wait()
        finally:
            self.broken.set()  # the router has cancelled the stream

    async def _keep_reporting(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while True:
            self._num_reports += 1
            report = executor_pb2.Report(seq=self._num_reports, total_blocks=32, budget_blocks=32, budget_sequences=4)
            await self._write(context, executor_pb2.ServeResponse(generation=GENERATION, report=report))
            await asyncio.sleep(0.1)


@asynccontextmanager
async def listening(hostile: HostileExecutor) -> AsyncIterator[str]:
    """Yields the address of the executor. It sends bytes as they are, and messages serialized."""
    server = grpc.aio.server()
    methods: dict[str, Any] = {
        "Describe": grpc.unary_unary_rpc_method_handler(
            hostile.Describe, None, executor_pb2.DescribeResponse.SerializeToString
        ),
        "Serve": grpc.stream_stream_rpc_method_handler(
            hostile.Serve, executor_pb2.ServeRequest.FromString, _serialized
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inflight.v1.ExecutorService", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def _serialized(answer: Answer) -> bytes:
    return answer if isinstance(answer, bytes) else answer.SerializeToString()


def breaches(router: RunningRouter) -> float:
    """The metric of links that ended because the executor broke the protocol."""
    return router.registry.get_sample_value("inflight_executor_protocol_breaches_total") or 0.0


async def check_frame_harms_only_its_link(
    redis_url: str, pool: str, frame: Answer, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Sends the frame to two routers. Their requests continue at the honest executor, and the log names the hostile one
    and `why`."""
    caplog.set_level(logging.WARNING, "inflight.router.executors.link")
    honest = await start_executor("honest", pool, ExecutorShape())
    hostile = HostileExecutor(pool, frame)
    try:
        async with AsyncExitStack() as stack:
            addresses = [honest.address, await stack.enter_async_context(listening(hostile))]
            routers = [
                await stack.enter_async_context(run_router(f"{pool}-{i}", pool, redis_url, addresses)) for i in range(2)
            ]
            for router in routers:
                await until_ready(router, 2)
            for router in routers:
                hostile.broken.clear()
                honest.brake.hold()
                # The honest executor has four seats, so others are placed on the hostile one
                requests = [token_request([i, 1], 20) for i in range(5)]
                streams = [asyncio.create_task(collect(router, request, HANG_S)) for request in requests]
                await asyncio.wait_for(hostile.broken.wait(), HANG_S)
                honest.brake.release()
                for i, stream in enumerate(streams):
                    assert ids_of(await stream) == expected_ids([i, 1], 20)
                assert breaches(router) == 1
            texts = [record.getMessage() for record in caplog.records if "breaks the protocol" in record.message]
            # The text has another request's id than the unit test's
            found = [text for text in texts if "executor hostile at" in text and why.split(" of r ")[0] in text]
            assert len(found) == 2, texts
            await check_unharmed(Cluster([honest], routers))
    finally:
        await honest.stop()


@pytest.mark.parametrize("name", KINDS)
async def test_hostile_frame_breaks_that_link_and_nothing_else(
    redis_url: str, pool: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_frame, why = HOSTILE_FRAMES[name]
    await check_frame_harms_only_its_link(redis_url, pool, make_frame(), why, caplog)


async def test_bytes_that_are_no_message_break_that_link_and_nothing_else(
    redis_url: str, pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    await check_frame_harms_only_its_link(redis_url, pool, b"\xff\xff\xff", "its response", caplog)


async def test_frame_that_no_check_foresees_breaks_that_link_and_nothing_else(
    redis_url: str, pool: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A bug of the router: the life cycle does not allow an event that a checked frame causes
    on_request = Dispatcher.on_request

    def with_bug(dispatcher: Dispatcher, stream: RequestStream, event: LinkEvent) -> None:
        if isinstance(event, Detached):
            raise IllegalTransition(f"{stream.request_id}: Detached in state PLACED")
        on_request(dispatcher, stream, event)

    monkeypatch.setattr(Dispatcher, "on_request", with_bug)
    frame = executor_pb2.ServeResponse(generation=GENERATION, step=executor_pb2.StepFrame(frame=1, detached=[0]))
    await check_frame_harms_only_its_link(redis_url, pool, frame, "IllegalTransition: ", caplog)


@pytest.mark.parametrize("name", ATTACHMENTS)
async def test_hostile_answer_to_an_attach_breaks_that_link_and_nothing_else(
    redis_url: str, pool: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "inflight.router.executors.link")
    make_attachment, why = HOSTILE_ATTACHMENTS[name]
    attachment = make_attachment()
    attachment.submit.router_context = renamed(attachment.submit.router_context, "named")
    hostile = HostileExecutor(pool, attachment=attachment)
    async with AsyncExitStack() as stack:
        address = await stack.enter_async_context(listening(hostile))
        routers = [
            await stack.enter_async_context(run_router(f"{pool}-{i}", pool, redis_url, [address])) for i in range(2)
        ]
        for router in routers:
            await until_ready(router, 1)
        first = routers[0].stub.Generate(token_request([1, 2], 20, request_id="named"))
        event = (await first.read()).event
        while not event.HasField("accepted"):
            event = (await first.read()).event
        resume = inference_pb2.ResumeRequest(request_id="named", resume_token=event.accepted.resume_token)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await rest(routers[1].stub.Resume(resume, timeout=HANG_S))
        assert refused.value.code() is grpc.StatusCode.DATA_LOSS
        first.cancel()
        assert breaches(routers[1]) == 1
        assert not any(router.work.done() for router in routers)
        (text,) = [text for text in caplog.messages if "breaks the protocol" in text]
        assert why.replace("\\", "").split(" of r ")[0] in text


def renamed(router_context: bytes, request_id: str) -> bytes:
    """The context of another request."""
    context = resume_pb2.RouterContext.FromString(router_context)
    context.request_id = request_id
    return context.SerializeToString()


@pytest.mark.parametrize("is_first", [True, False])
async def test_executor_with_a_short_context_does_not_decide_for_the_model(
    redis_url: str, pool: str, is_first: bool
) -> None:
    honest = await start_executor("honest", pool, ExecutorShape())
    try:
        async with (
            listening(HostileExecutor(pool, executor_id="a", context_length=2)) as hostile,
            run_router(
                pool, pool, redis_url, [hostile, honest.address] if is_first else [honest.address, hostile]
            ) as router,
        ):
            await until_ready(router, 2)
            assert ids_of(await collect(router, token_request([1, 2], 20), HANG_S)) == expected_ids([1, 2], 20)
    finally:
        await honest.stop()
