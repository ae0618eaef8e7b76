"""The asynchronous client.

    async with Client("localhost:50051") as client:
        async for delta in client.generate(chat="What is in-flight batching?", max_tokens=200):
            print(delta.text, end="", flush=True)

Owns a channel and the calls on it. A stream that is left early, by `break`, an exception or `cancel`, is cancelled on
the server too, which frees its seat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio
from inflight.v1 import inference_pb2, inference_pb2_grpc

from client import requests
from client.catalogue import (
    Capacity,
    Model,
    RequestStanding,
    RequestState,
    decode_capacity,
    decode_models,
    decode_standing,
    decode_state,
)
from client.channel import UNARY_TIMEOUT_S, channel_target, client_options
from client.errors import InflightError, from_rpc_error
from client.events import Completion, Delta, Event, FinishReason, Timing, Transcript, Usage


class Client:
    """A client of one or several routers, each `host:port`; several share the calls between them.

    The channel opens with the first call, in the event loop that is running then. `metadata` goes with every call.
    `retries` lets gRPC repeat a call that found no router or executor, before anything was produced.
    """

    def __init__(
        self,
        *targets: str,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Mapping[str, str] | None = None,
        retries: bool = True,
    ) -> None:
        self._target = channel_target(targets)
        self._options = client_options(targets, retries=retries)
        self._credentials = credentials
        self._metadata = tuple((metadata or {}).items())
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what still runs and closes the channel. A later call opens a new one."""
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close(None)

    def generate(
        self,
        prompt: str | bytes | None = None,
        *,
        chat: requests.Chat | None = None,
        token_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Unpack[requests.GenerateOptions],
    ) -> Stream:
        """Generates for one prompt, given as text, as chat or as token ids. The request is sent at once.

        Iterate over the result for its deltas. `timeout` ends the whole request after that many seconds.
        """
        request = requests.generate_request(prompt, chat=chat, token_ids=token_ids, options=options)
        return self.send(request, timeout=timeout)

    async def complete(
        self,
        prompt: str | bytes | None = None,
        *,
        chat: requests.Chat | None = None,
        token_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Unpack[requests.GenerateOptions],
    ) -> Completion:
        """Like `generate`, but waits for the whole result."""
        return await self.generate(prompt, chat=chat, token_ids=token_ids, timeout=timeout, **options).result()

    def send(self, request: inference_pb2.GenerateRequest, *, timeout: float | None = None) -> Stream:
        """Sends a request that the caller has built, for what `generate` has no keyword for."""
        return Stream(self._open().Generate(request, timeout=timeout, metadata=self._metadata))

    async def cancel(
        self, request_id: str, *, resume_token: str = "", model: str = "", timeout: float = UNARY_TIMEOUT_S
    ) -> RequestState:
        """Ends a request by its id and says where it was. Its own stream says when it has ended."""
        request = inference_pb2.CancelRequest(request_id=request_id, resume_token=resume_token, model=model)
        return decode_state((await self._unary("Cancel", request, timeout)).state)

    async def get_request(
        self, request_id: str, *, model: str = "", timeout: float = UNARY_TIMEOUT_S
    ) -> RequestStanding:
        """Where a request stands and, while it waits, what it waits for. Any router of the pool knows."""
        request = inference_pb2.GetRequestRequest(request_id=request_id, model=model)
        return decode_standing(await self._unary("GetRequest", request, timeout))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        chat: requests.Chat | None = None,
        model: str | None = None,
        timeout: float = UNARY_TIMEOUT_S,
    ) -> tuple[int, ...]:
        """The token ids of a text or of a conversation."""
        request = requests.tokenize_request(text, chat=chat, model=model)
        return tuple((await self._unary("Tokenize", request, timeout)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, timeout: float = UNARY_TIMEOUT_S
    ) -> str:
        """The text of token ids."""
        request = requests.detokenize_request(token_ids, model=model)
        return str((await self._unary("Detokenize", request, timeout)).text)

    async def list_models(self, *, timeout: float = UNARY_TIMEOUT_S) -> tuple[Model, ...]:
        """The models that can be asked for."""
        return decode_models(await self._unary("ListModels", inference_pb2.ListModelsRequest(), timeout))

    async def capacity(self, *, model: str = "", timeout: float = UNARY_TIMEOUT_S) -> Capacity:
        """What every executor holds and what waits."""
        return decode_capacity(await self._unary("GetCapacity", inference_pb2.GetCapacityRequest(model=model), timeout))

    async def _unary(self, method: str, request: Any, timeout: float) -> Any:
        try:
            return await getattr(self._open(), method)(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    def _open(self) -> Any:
        if self._stub is None:
            self._channel = (
                grpc.aio.insecure_channel(self._target, self._options)
                if self._credentials is None
                else grpc.aio.secure_channel(self._target, self._credentials, self._options)
            )
            self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        return self._stub


class Stream:
    """The answer to one request: iterate over it for its deltas, or over `events()` for everything.

    It is read once. `request_id` is known from the first event on, `usage` and `timing` when it has ended.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._transcript = Transcript()
        self._cancelled = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Every event, in order.

        Raises:
            InflightError: the request was refused, or broke off.
        """
        try:
            async for response in self._call:
                event = self._transcript.add(response.event)
                if event is not None:
                    yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            # gRPC raises this also where the call, not the task, was cancelled.
            if _task_is_cancelled():
                raise
            if not self._cancelled:
                raise InflightError(grpc.StatusCode.CANCELLED, "the client was closed") from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the request, if it still runs; iterating ends without an error."""
        if self._call.cancel():
            self._cancelled = True
            self._transcript.mark_cancelled()

    async def text(self) -> str:
        """Reads to the end and returns the text of the first choice."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self._transcript.choices[0].text

    async def result(self) -> Completion:
        """Reads to the end and returns the whole result."""
        await self.text()
        return self._transcript.result()

    @property
    def request_id(self) -> str | None:
        """The request's id."""
        return self._transcript.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first choice ended."""
        return self._transcript.choices[0].finish_reason

    @property
    def usage(self) -> Usage | None:
        """Tokens counted."""
        return self._transcript.usage

    @property
    def timing(self) -> Timing | None:
        """Where the time went."""
        return self._transcript.timing

    @property
    def transcript(self) -> Transcript:
        """All that the stream has brought so far."""
        return self._transcript

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        async with aclosing(self.events()) as events:
            async for event in events:
                if isinstance(event, Delta):
                    yield event


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
