"""The asynchronous client.

    async with AsyncClient("localhost:50051") as client:
        async for delta in client.generate(chat="What is in-flight batching?", max_tokens=200):
            print(delta.text, end="", flush=True)

The client owns a channel and the calls on it. If the caller leaves a stream early, by `break`, an exception or
`cancel`, the request is also cancelled on the server, which frees its seat.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from random import Random
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2

from inflight import requests
from inflight.access import UNARY_TIMEOUT_S, AccessOptions, open_access
from inflight.aio_connection import CALL_FAILURES, AsyncConnection, AsyncStreamCalls
from inflight.aio_stream import AsyncStream
from inflight.beams.search import Beam, BeamParams, BeamSearch, EarlyStopping
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
from inflight.embeddings.calls import (
    Embedding,
    EmbedOptions,
    Input,
    Score,
    decode_embeddings,
    decode_scores,
    embed_request,
    score_request,
)
from inflight.events import Completion, Logprob
from inflight.recovery import Recovery, RecoveryPolicy, new_idempotency_key
from inflight.statistics import Statistics, TenantUsage, decode_stats, decode_usage, stats_request
from inflight.v1 import inference_pb2

__all__ = ["AsyncClient", "AsyncStream"]


class AsyncClient:
    """A client of one or several routers, each `host:port`. Calls are balanced over several routers.

    - `access` sets credentials and TLS, see `AccessOptions`.
    - `metadata` is sent with every call.
    - `retries` repeats a call that found no router or executor, before any output.
    - `resume` continues a stream whose connection breaks, on any of the routers, until `resume_timeout` seconds have
      passed without new output. For that each request gets an idempotency key, unless it has one or a `request_id`.
    - With `share_calls` and `resume`, streams share calls of `GenerateMany`, which costs less processor time.

    No request is hedged, because a request has one reader.
    """

    def __init__(
        self,
        *targets: str,
        metadata: Mapping[str, str] | None = None,
        retries: bool = True,
        resume: bool = True,
        resume_timeout: float = 60.0,
        share_calls: bool = True,
        **access: Unpack[AccessOptions],
    ) -> None:
        self._connection = AsyncConnection(open_access(targets, access, metadata=metadata, retries=retries))
        self._connection.share_calls = share_calls and resume
        self._policy = RecoveryPolicy(resume, retries, resume_timeout)
        self._targets = targets

    def __repr__(self) -> str:
        return f"<AsyncClient of {', '.join(self._targets)}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels the streams that are still open and closes the channel."""
        await self._connection.close()

    def generate(
        self,
        prompt: str | bytes | None = None,
        *,
        chat: requests.Chat | None = None,
        token_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Unpack[requests.GenerateOptions],
    ) -> AsyncStream:
        """Generates for one prompt, given as text, as chat or as token ids. The request is sent at once.

        Iterating over the result yields its deltas. `timeout` limits the whole request, in seconds, including the
        continuation of its stream after a broken connection.
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
        """Generates and waits for the whole result."""
        return await self.generate(prompt, chat=chat, token_ids=token_ids, timeout=timeout, **options).result()

    async def beam_search(
        self,
        prompt: str | None = None,
        *,
        chat: requests.Chat | None = None,
        token_ids: Sequence[int] | None = None,
        beams: int = 4,
        max_tokens: int = 64,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        stop_token_ids: Sequence[int] = (),
        timeout: float | None = None,
        **options: Unpack[requests.BeamOptions],
    ) -> tuple[Beam, ...]:
        """Returns the outputs that a beam search finds, the best first, as transformers does with `num_beams`.

        This is slow: each token of each beam is a separate request, which finds its prefix in the prefix cache. Log
        probabilities are those of the model, without temperature and penalties. A step needs the (1 + number of end
        tokens) * beams likeliest tokens, and a request reports at most 20. So with one end token there can be at most
        10 beams.

        Raises:
            InflightError: a request was refused or failed.
            ValueError: a parameter is not allowed.
        """
        if token_ids is not None and (prompt is not None or chat is not None):
            raise TypeError("give exactly one of prompt, chat and token_ids")
        model = options.get("model")
        prompt_ids = await self.tokenize(prompt, chat=chat, model=model) if token_ids is None else tuple(token_ids)
        models = [one for one in await self.list_models() if model in (None, one.name)]
        ends = frozenset(stop_token_ids).union(*(one.eos_token_ids for one in models))
        search = BeamSearch(BeamParams(beams, max_tokens, length_penalty, early_stopping, ends))
        until_s = None if timeout is None else time.monotonic() + timeout
        while search.running:
            search.step(await self._likeliest(prompt_ids, search, until_s, options))
        texts = [await self.detokenize(beam.token_ids, model=model) for beam in search.finished]
        return tuple(replace(beam, text=text) for beam, text in zip(search.finished, texts, strict=True))

    async def _likeliest(
        self, prompt_ids: tuple[int, ...], search: BeamSearch, until_s: float | None, options: requests.BeamOptions
    ) -> list[tuple[Logprob, ...]]:
        """Returns the likeliest next tokens for each running beam of a search."""
        streams = [
            self.generate(
                token_ids=[*prompt_ids, *output_ids],
                timeout=None if until_s is None else max(0.0, until_s - time.monotonic()),
                max_tokens=1,
                temperature=0,
                ignore_eos=True,
                want_text=False,
                top_logprobs=search.num_candidates,
                **options,
            )
            for output_ids in search.running
        ]
        try:
            positions = [(await stream.result()).logprobs[0] for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()
        return [() if position is None else position.top for position in positions]

    def send(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> AsyncStream:
        """Sends a request message. It can set fields for which `generate` has no keyword.

        `metadata` is sent with the calls of this request, for a program that acts for several users.
        """
        recovery = Recovery.of_request(
            request,
            self._policy,
            timeout_s=timeout,
            now_s=time.monotonic(),
            random=Random(),
            new_key=new_idempotency_key,
        )
        return AsyncStream(recovery, AsyncStreamCalls(self._connection, metadata))

    def resume(
        self,
        request_id: str,
        resume_token: str,
        *,
        offset: int | Sequence[int] = 0,
        text_bytes: int | Sequence[int] | None = None,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> AsyncStream:
        """Continues the stream of a request that is running or ended recently. Another program may have sent it.

        `offset` is the number of output tokens that the caller has. `text_bytes` is the number of bytes of text that it
        has; by default this is the text of those tokens. For a request with several choices both have a number for each
        choice. Another reader of the request is disconnected.
        """
        request = requests.resume_request(request_id, resume_token, offset=offset, text_bytes=text_bytes)
        recovery = Recovery.of_running(
            request, self._policy, timeout_s=timeout, now_s=time.monotonic(), random=Random()
        )
        return AsyncStream(recovery, AsyncStreamCalls(self._connection, metadata))

    async def cancel(
        self,
        request_id: str,
        *,
        resume_token: str = "",
        model: str = "",
        tenant: str = "",
        timeout: float = UNARY_TIMEOUT_S,
        metadata: Mapping[str, str] | None = None,
    ) -> RequestState:
        """Cancels a request by its id and returns the state that it was in. The stream of the request reports the end.

        `resume_token` is required if the router authenticates callers and the caller is not an operator.
        """
        request = inference_pb2.CancelRequest(
            request_id=request_id, resume_token=resume_token, model=model, tenant=tenant
        )
        answer = await self._unary("Cancel", request, timeout, metadata)
        return decode_state(answer.state)

    async def get_request(
        self,
        request_id: str,
        *,
        resume_token: str = "",
        model: str = "",
        tenant: str = "",
        timeout: float = UNARY_TIMEOUT_S,
    ) -> RequestStanding:
        """Returns the state of a request and, while it waits, what it waits for. Every router of the model can answer.

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
        """Returns the token ids of a text or of a conversation."""
        request = requests.tokenize_request(text, chat=chat, model=model)
        answer = await self.send_tokenize(request, timeout=timeout)
        return tuple(answer.token_ids)

    async def send_tokenize(
        self,
        request: inference_pb2.TokenizeRequest,
        *,
        timeout: float = UNARY_TIMEOUT_S,
        metadata: Mapping[str, str] | None = None,
    ) -> inference_pb2.TokenizeResponse:
        """Sends a request message. It can set fields for which `tokenize` has no keyword. `metadata` as for `send`."""
        answer: inference_pb2.TokenizeResponse = await self._unary("Tokenize", request, timeout, metadata)
        return answer

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str | None = None,
        skip_special_tokens: bool = True,
        timeout: float = UNARY_TIMEOUT_S,
        metadata: Mapping[str, str] | None = None,
    ) -> str:
        """Returns the text of token ids. `metadata` as for `send`."""
        request = requests.detokenize_request(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        answer = await self._unary("Detokenize", request, timeout, metadata)
        return str(answer.text)

    async def embed(
        self,
        inputs: Input | Sequence[Input],
        *,
        dimensions: int | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> tuple[Embedding, ...]:
        """Returns the embedding of each input, a text or a list of token ids, with a model that makes embeddings.

        `dimensions` keeps the first numbers of each, for models that were trained for that. `timeout` limits the call,
        in seconds.

        Raises:
            InflightError: an input was refused or failed; then there is no result for any.
        """
        return decode_embeddings(await self.send_embed(embed_request(inputs, dimensions, options), timeout=timeout))

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> tuple[Score, ...]:
        """Returns how relevant each document is for a query, with a model that makes scores. `instruction` says what
        relevance means, in the words of the model. `timeout` and errors as for `embed`."""
        request = score_request(query, documents, instruction, options)
        return decode_scores(await self.send_embed(request, timeout=timeout))

    async def send_embed(
        self,
        request: inference_pb2.EmbedRequest,
        *,
        timeout: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> inference_pb2.EmbedResponse:
        """Sends a request message for embeddings or scores. `metadata` as for `send`."""
        answer: inference_pb2.EmbedResponse = await self._unary("Embed", request, timeout, metadata)
        return answer

    async def list_models(
        self, *, timeout: float = UNARY_TIMEOUT_S, metadata: Mapping[str, str] | None = None
    ) -> tuple[Model, ...]:
        """Returns the models that the routers serve."""
        return decode_models(await self._unary("ListModels", inference_pb2.ListModelsRequest(), timeout, metadata))

    async def tenant(self, *, timeout: float = UNARY_TIMEOUT_S, metadata: Mapping[str, str] | None = None) -> str:
        """Returns the tenant of requests of the caller that name none; empty from a router of an earlier version."""
        answer = await self._unary("ListModels", inference_pb2.ListModelsRequest(), timeout, metadata)
        return str(answer.tenant)

    async def is_serving(self, *, timeout: float = UNARY_TIMEOUT_S) -> bool:
        """Returns whether the router that answers has an executor."""
        try:
            answer = await self._connection.health_stub().Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.RpcError as error:
            self._connection.error_of(error)
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def capacity(self, *, model: str = "", timeout: float = UNARY_TIMEOUT_S) -> Capacity:
        """Returns the utilization of every executor, and the queues."""
        return decode_capacity(await self._unary("GetCapacity", inference_pb2.GetCapacityRequest(model=model), timeout))

    async def usage(
        self, *, since: str = "", until: str = "", model: str = "", tenant: str = "", timeout: float = UNARY_TIMEOUT_S
    ) -> TenantUsage:
        """Returns what tenants have used, by day. `since` and `until` are days of UTC, YYYY-MM-DD, both included;
        empty: today. An operator sees every tenant, any other caller its own."""
        request = inference_pb2.GetUsageRequest(model=model, since=since, until=until, tenant=tenant)
        return decode_usage(await self._unary("GetUsage", request, timeout))

    async def stats(
        self,
        *,
        model: str = "",
        interval: float = 1.0,
        want_iterations: bool = False,
        want_sequences: bool = False,
        timeout: float | None = None,
    ) -> AsyncGenerator[Statistics]:
        """Yields statistics every `interval` seconds, until the caller leaves the loop.

        `want_iterations` adds every step since the previous message. `want_sequences` adds the sequences of each
        executor.
        """
        request = stats_request(model, interval, want_iterations=want_iterations, want_sequences=want_sequences)
        call = self._connection.stub().GetStats(request, timeout=timeout, metadata=self._connection.metadata())
        try:
            async for wire in call:
                yield decode_stats(wire)
        except CALL_FAILURES as failure:
            raise self._connection.error_of(failure) from None
        finally:
            call.cancel()

    async def _unary(
        self, method: str, request: Any, timeout: float | None, metadata: Mapping[str, str] | None = None
    ) -> Any:
        call = getattr(self._connection.stub(), method)
        try:
            return await call(request, timeout=timeout, metadata=self._connection.metadata(metadata))
        except grpc.RpcError as error:
            raise self._connection.error_of(error) from None
