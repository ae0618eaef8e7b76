"""One `ModelStreamInfer` call: several requests side by side on one stream.

Each request runs as a call of its own would and ends by itself; one that is refused is answered with an error message,
and the stream goes on, unless its client asked for statuses. When the call goes away all its requests do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from common.errors import Reason, RequestError
from inflight.kserve import grpc_service_pb2
from router.kserve.responses import error_response

Write = Callable[[grpc_service_pb2.ModelStreamInferResponse], Awaitable[None]]
Serve = Callable[
    [grpc_service_pb2.ModelInferRequest, Callable[[grpc_service_pb2.ModelInferResponse], Awaitable[None]]],
    Awaitable[None],
]


class InferStream:
    """Serves the requests of one call. `is_strict`: the first refusal ends the call with its status. Where there is no
    `room` the next request is not read, and gRPC holds the client up."""

    def __init__(self, serve: Serve, write: Write, room: asyncio.Semaphore, *, is_strict: bool) -> None:
        self._serve = serve
        self._unordered_write = write
        self._is_strict = is_strict
        # A call takes one write at a time.
        self._writing = asyncio.Lock()
        self._room = room

    async def run(self, requests: AsyncIterator[grpc_service_pb2.ModelInferRequest]) -> None:
        """Serves until the client has sent its last request and all have ended. Raises `RequestError`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                unread = aiter(requests)
                while (request := await self._next(unread)) is not None:
                    serving = tasks.create_task(self._serve_one(request))
                    serving.add_done_callback(lambda _: self._room.release())
        except BaseExceptionGroup as group:
            raise _told(group) from group

    async def _next(
        self, requests: AsyncIterator[grpc_service_pb2.ModelInferRequest]
    ) -> grpc_service_pb2.ModelInferRequest | None:
        """The next request, with its place in the room; None, and no place, where there is no more."""
        await self._room.acquire()
        request = None
        try:
            request = await anext(requests, None)
        finally:
            if request is None:
                self._room.release()
        return request

    async def _serve_one(self, request: grpc_service_pb2.ModelInferRequest) -> None:
        async def send(response: grpc_service_pb2.ModelInferResponse) -> None:
            await self._write(grpc_service_pb2.ModelStreamInferResponse(infer_response=response))

        try:
            await self._serve(request, send)
        except RequestError as error:
            # Who does not read would not read the message either.
            if self._is_strict or error.reason is Reason.STALLED:
                raise
            await self._write(error_response(request, error))

    async def _write(self, response: grpc_service_pb2.ModelStreamInferResponse) -> None:
        """Ends a write that has begun even where the call is about to end: gRPC never answers a call that is ended with
        a write broken off."""
        async with self._writing:
            writing = asyncio.ensure_future(self._unordered_write(response))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.gather(writing, return_exceptions=True)
                raise


def _told(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What the call ends with: a refusal, where there is one among what several requests came to."""
    refusals, others = group.split(RequestError)
    return (refusals or others or group).exceptions[0]
