"""The asynchronous client.

    async with Client("localhost:50051") as client:
        async for delta in client.generate(chat="What is in-flight batching?", max_tokens=200):
            print(delta.text, end="", flush=True)

Owns a channel and the calls on it. A stream that is left early, by `break`, an exception or `cancel`, is cancelled on
the server too, which frees its seat.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.cancellation import task_is_cancelled
from inflight import requests
from inflight.access import AccessOptions, open_access
from inflight.aio_stream import Stream
from inflight.catalogue import (
    Capacity,
    Model,
    RequestStanding,
    RequestState,
    decode_capacity,
    decode_models,
    decode_standing,
    decode_state,
)
from inflight.channel import UNARY_TIMEOUT_S
from inflight.errors import client_closed, from_rpc_error
from inflight.events import Completion
from inflight.recovery import Call, Recovery, RecoveryPolicy, new_idempotency_key
from inflight.statistics import Statistics, decode_stats, stats_request
from inflight.v1 import inference_pb2, inference_pb2_grpc

__all__ = ["Client", "Stream"]


class Client:
    """A client of one or several routers, each `host:port`; several share the calls between them.

    The channel opens with the first call, in the event loop that is running then.

    `access` says who calls and how the connection is protected, see `AccessOptions`. `metadata` goes with every call.
    `retries` lets a call be repeated that found no router or executor, before anything was produced. `resume` lets a
    stream go on by itself when its connection breaks, on any of the routers, until `resume_timeout` seconds have passed
    without anything new; for that each request gets an idempotency key, unless it has a key or a `request_id`. Nothing
    is hedged: a request has one reader.
    """

    def __init__(
        self,
        *targets: str,
        metadata: Mapping[str, str] | None = None,
        retries: bool = True,
        resume: bool = True,
        resume_timeout: float = 60.0,
        **access: Unpack[AccessOptions],
    ) -> None:
        self._access = open_access(targets, access, metadata=metadata, retries=retries)
        self._policy = RecoveryPolicy(resume, retries, resume_timeout)
        self._targets = targets
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"<inflight.aio.Client of {', '.join(self._targets)}>"

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

        Iterate over the result for its deltas. `timeout` ends the whole request after that many seconds,
        however often its stream was resumed.
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

    def send(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Stream:
        """Sends a request that the caller has built, for what `generate` has no keyword for.

        `metadata` goes with this request's calls, for who speaks on behalf of many.
        """
        recovery = Recovery.of_request(
            request,
            self._policy,
            timeout_s=timeout,
            now_s=time.monotonic(),
            random=Random(),
            new_key=new_idempotency_key,
        )
        return Stream(recovery, self._caller(metadata))

    def resume(
        self,
        request_id: str,
        resume_token: str,
        *,
        offset: int = 0,
        text_bytes: int | None = None,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Stream:
        """The rest of the stream of a request that runs, or ended lately; of another program's, perhaps.

        `offset` is the number of output tokens that the caller has, `text_bytes` the bytes of text that it has of them;
        left out, those that the tokens stand for. Whoever else reads the request is cut off.
        """
        request = requests.resume_request(request_id, resume_token, offset=offset, text_bytes=text_bytes)
        recovery = Recovery.of_running(
            request, self._policy, timeout_s=timeout, now_s=time.monotonic(), random=Random()
        )
        return Stream(recovery, self._caller(metadata))

    async def cancel(
        self,
        request_id: str,
        *,
        resume_token: str = "",
        model: str = "",
        tenant: str = "",
        timeout: float = UNARY_TIMEOUT_S,
    ) -> RequestState:
        """Ends a request by its id and says where it was. Its own stream says when it has ended.

        `resume_token` is needed where the router identifies its callers, unless the caller is an operator.
        """
        request = inference_pb2.CancelRequest(
            request_id=request_id, resume_token=resume_token, model=model, tenant=tenant
        )
        return decode_state((await self._unary("Cancel", request, timeout)).state)

    async def get_request(
        self,
        request_id: str,
        *,
        resume_token: str = "",
        model: str = "",
        tenant: str = "",
        timeout: float = UNARY_TIMEOUT_S,
    ) -> RequestStanding:
        """Where a request stands and, while it waits, what it waits for. Any router of the pool knows.

        `resume_token` as for `cancel`.
        """
        request = inference_pb2.GetRequestRequest(
            request_id=request_id, resume_token=resume_token, model=model, tenant=tenant
        )
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

    async def list_models(
        self, *, timeout: float = UNARY_TIMEOUT_S, metadata: Mapping[str, str] | None = None
    ) -> tuple[Model, ...]:
        """The models that can be asked for."""
        return decode_models(await self._unary("ListModels", inference_pb2.ListModelsRequest(), timeout, metadata))

    async def is_serving(self, *, timeout: float = UNARY_TIMEOUT_S) -> bool:
        """Whether the router that answers has an executor to serve with."""
        self._open()
        health: Any = health_pb2_grpc.HealthStub(self._channel)
        try:
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def capacity(self, *, model: str = "", timeout: float = UNARY_TIMEOUT_S) -> Capacity:
        """What every executor holds and what waits."""
        return decode_capacity(await self._unary("GetCapacity", inference_pb2.GetCapacityRequest(model=model), timeout))

    async def stats(
        self,
        *,
        model: str = "",
        interval: float = 1.0,
        want_iterations: bool = False,
        want_sequences: bool = False,
        timeout: float | None = None,
    ) -> AsyncGenerator[Statistics, None]:
        """How everything stands, again and again every `interval` seconds until the caller leaves the loop.

        `want_iterations` tells of every step since the message before, `want_sequences` of who sits where.
        """
        request = stats_request(model, interval, want_iterations=want_iterations, want_sequences=want_sequences)
        call = self._open().GetStats(request, timeout=timeout, metadata=self._metadata(None))
        try:
            async for wire in call:
                yield decode_stats(wire)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            raise client_closed() from None
        finally:
            call.cancel()

    async def _unary(self, method: str, request: Any, timeout: float, metadata: Mapping[str, str] | None = None) -> Any:
        call = getattr(self._open(), method)
        try:
            return await call(request, timeout=timeout, metadata=self._metadata(metadata))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    def _open(self) -> Any:
        loop = _running_loop()
        if self._stub is None:
            self._loop = loop
            target, options, credentials = self._access.target, self._access.options, self._access.credentials
            self._channel = (
                grpc.aio.insecure_channel(target, options)
                if credentials is None
                else grpc.aio.secure_channel(target, credentials, options)
            )
            self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        if self._loop is not loop:
            raise RuntimeError("this client is open in another event loop: close it there, or make one for each loop")
        return self._stub

    def _metadata(self, of_call: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
        return (*self._access.metadata(), *(of_call or {}).items())

    def _caller(self, metadata: Mapping[str, str] | None = None) -> Callable[[Call], Any]:
        """Makes the calls of one stream, all on the channel that is open now."""
        stub = self._open()

        def start(call: Call) -> Any:
            if self._stub is not stub:
                raise client_closed()
            return getattr(stub, call.method)(call.request, timeout=call.timeout_s, metadata=self._metadata(metadata))

        return start


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("inflight.aio is for coroutines; without an event loop use inflight.sync") from None
