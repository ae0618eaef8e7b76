"""Routers that open a stream to an executor and send nothing, or send requests and do not read the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from inflight.executor.serving import router_session as sessions
from inflight.executor.serving.router_session import Session
from inflight.v1 import executor_pb2, executor_pb2_grpc
from tests.integration.test_hostile_clients import NO_WINDOW, until
from tests.integration.test_requests import expected_ids
from tests.support.stack.cluster import ExecutorShape, RunningExecutor, start_executor
from tests.support.stack.router_stream import WAIT_S, make_submit, router_stream

# Echoed in no answer, but the request_id is: a few thousand of them are more than a connection holds unread.
LONG_ID = "x" * 400


@pytest.fixture
async def executor() -> AsyncIterator[RunningExecutor]:
    running = await start_executor("executor", "model", ExecutorShape())
    yield running
    await running.stop()


async def is_served(executor: RunningExecutor) -> None:
    async with router_stream(executor.address) as router:
        router.send(submits=[make_submit("honest", [1], 6)])
        await router.until(lambda: router.of("honest") and router.of("honest")[0].end)
    assert router.of("honest")[0].token_ids == expected_ids([1], 6)


async def test_stream_without_a_hello_is_ended(executor: RunningExecutor) -> None:
    executor.service._hello_timeout_s = 0.05
    async with grpc.aio.insecure_channel(executor.address) as channel:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        call = stub.Serve()
        with pytest.raises(grpc.aio.AioRpcError, match=r"hello: did not arrive within 0\.05 s") as error:
            await asyncio.wait_for(call.read(), WAIT_S)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    executor.service._hello_timeout_s = WAIT_S
    await is_served(executor)


async def test_no_more_is_taken_from_a_router_while_too_many_of_its_answers_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "MAX_WAITING_ANSWERS", 3)
    session = Session("router", 1, 64)
    for attempt in range(3):
        await asyncio.wait_for(session.has_room(), WAIT_S)
        session.reject("a", attempt, executor_pb2.REJECT_REASON_INVALID, "")
    waiting = asyncio.create_task(session.has_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    response = session.take()
    assert response is not None
    assert len(response.rejected) == 3
    await asyncio.wait_for(waiting, WAIT_S)


async def test_router_that_does_not_read_its_rejections_holds_itself_up_alone(
    executor: RunningExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_WAITING_ANSWERS", 10)
    flood = executor_pb2.ServeRequest(
        submits=[executor_pb2.Submit(request_id=f"{LONG_ID}{number}", attempt=1) for number in range(10)]
    )
    hello = executor_pb2.Hello(router_id="flood", protocol_version=2, generation=1)
    async with grpc.aio.insecure_channel(executor.address, options=NO_WINDOW) as channel:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        call = stub.Serve()
        await call.write(executor_pb2.ServeRequest(hello=hello))

        async def write() -> None:
            while True:
                await call.write(flood)

        writing = asyncio.create_task(write())
        # When the stream is not read, the buffers fill up, and then the connection; others are served all the same
        (session,) = await joined(executor)
        await until(lambda: session._num_answers >= 10)
        await is_served(executor)
        assert session._num_answers < 20
        writing.cancel()
        call.cancel()


async def joined(executor: RunningExecutor) -> set[Session]:
    """The sessions of the executor, once there is one."""
    await until(lambda: executor.service._sessions)
    return executor.service._sessions
