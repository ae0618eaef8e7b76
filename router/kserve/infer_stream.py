"""One `ModelStreamInfer` call: concurrent requests on one stream.

Each request runs like a separate call and ends by itself. A refused request gets an error message, and the stream
continues, unless its client asked for statuses. When the call ends, all its requests are cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from inflight.common.errors import Reason, RequestError
from inflight.kserve import grpc_service_pb2
from inflight.router.kserve.responses import error_response

Write = Callable[[grpc_service_pb2.ModelStreamInferResponse], Awaitable[None]]
Serve = Callable[
    [grpc_service_pb2.ModelInferRequest, Callable[[grpc_service_pb2.ModelInferResponse], Awaitable[None]]],
    Awaitable[None],
]


class InferStream:
    """Serves the requests of one call. `is_strict`: the first refusal ends the call with its status. Without free slots
    in `room` the next request is not read, and gRPC's flow control stops the client."""

    def __init__(self, serve: Serve, write: Write, room: asyncio.Semaphore, *, is_strict: bool) -> None:
        self._serve = serve
        self._unordered_write = write
        self._is_strict = is_strict
        # gRPC allows one write at a time per call.
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
        """Returns the next request, with a slot taken; None, and no slot, at the end."""
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
            # A client that does not read would not read the message either.
            if self._is_strict or error.reason is Reason.STALLED:
                raise
            await self._write(error_response(request, error))

    async def _write(self, response: grpc_service_pb2.ModelStreamInferResponse) -> None:
        """Finishes a write that has started even if the call is about to end: gRPC never completes a call whose last
        write was cut off."""
        async with self._writing:
            writing = asyncio.ensure_future(self._unordered_write(response))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.gather(writing, return_exceptions=True)
                raise


def _told(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the error that ends the call: a refusal, if one request had any."""
    refusals, others = group.split(RequestError)
    return (refusals or others or group).exceptions[0]
