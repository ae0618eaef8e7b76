"""Several requests on one stream: side by side, answered one write at a time, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.kserve import grpc_service_pb2
from inflight.router.kserve.infer_stream import InferStream

Request = grpc_service_pb2.ModelInferRequest
Response = grpc_service_pb2.ModelStreamInferResponse


async def requests_of(*ids: str) -> AsyncIterator[Request]:
    for request_id in ids:
        yield Request(id=request_id)


class Client:
    """Reads what is written, and sees that no two writes overlap."""

    def __init__(self) -> None:
        self.read: list[tuple[str, str]] = []
        self._is_writing = False

    async def write(self, response: Response) -> None:
        assert not self._is_writing
        self._is_writing = True
        await asyncio.sleep(0)
        self._is_writing = False
        self.read.append((response.infer_response.id, response.error_message))


async def echo(request: Request, send: Callable[[Any], Awaitable[None]]) -> None:
    for _ in range(2):
        await send(grpc_service_pb2.ModelInferResponse(id=request.id))


async def test_requests_run_side_by_side_and_writes_do_not_overlap() -> None:
    client = Client()
    await InferStream(echo, client.write, asyncio.Semaphore(10), is_strict=False).run(requests_of("a", "b"))
    assert client.read == [("a", ""), ("b", ""), ("a", ""), ("b", "")]


async def test_no_more_run_than_there_is_room_for() -> None:
    running = most = 0

    async def serve(request: Request, send: object) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await InferStream(serve, Client().write, asyncio.Semaphore(2), is_strict=False).run(requests_of(*"abcdefg"))
    assert most == 2


async def test_streams_of_a_connection_share_their_room_and_give_it_back() -> None:
    room, running, go_on = asyncio.Semaphore(2), [], asyncio.Event()

    async def serve(request: Request, send: object) -> None:
        running.append(request.id)
        await go_on.wait()

    streams = [InferStream(serve, Client().write, room, is_strict=False) for _ in range(3)]
    runs = [asyncio.create_task(stream.run(requests_of("a"))) for stream in streams]
    for _ in range(9):
        await asyncio.sleep(0)
    assert len(running) == 2
    runs[0].cancel()
    go_on.set()
    await asyncio.wait(runs)
    assert len(running) == 3
    assert room._value == 2


async def refuse(request: Request, send: Callable[[Any], Awaitable[None]]) -> None:
    if request.id != "right":
        raise RequestError(Reason[request.id], "no", retry_after_ms=5)
    await echo(request, send)


async def test_refusal_is_a_message_and_the_stream_goes_on() -> None:
    client = Client()
    await InferStream(refuse, client.write, asyncio.Semaphore(10), is_strict=False).run(
        requests_of("QUEUE_FULL", "right")
    )
    assert sorted(client.read) == [("QUEUE_FULL", "no"), ("right", ""), ("right", "")]


@pytest.mark.parametrize(("request_id", "is_strict"), [("QUEUE_FULL", True), ("STALLED", False)])
async def test_refusal_ends_a_strict_stream_and_a_stalled_reader_any(request_id: str, is_strict: bool) -> None:
    client = Client()
    with pytest.raises(RequestError) as error:
        await InferStream(refuse, client.write, asyncio.Semaphore(10), is_strict=is_strict).run(requests_of(request_id))
    assert error.value.reason is Reason[request_id]
    assert not client.read


async def test_end_of_the_call_ends_every_request() -> None:
    ended = []

    async def serve(request: Request, send: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(request.id)

    run = asyncio.create_task(
        InferStream(serve, Client().write, asyncio.Semaphore(10), is_strict=False).run(requests_of("a", "b"))
    )
    for _ in range(5):
        await asyncio.sleep(0)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert sorted(ended) == ["a", "b"]


async def test_bug_of_ours_is_no_refusal() -> None:
    async def serve(request: Request, send: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await InferStream(serve, Client().write, asyncio.Semaphore(10), is_strict=False).run(requests_of("a"))
