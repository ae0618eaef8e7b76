"""The blocking client: the same calls as `client.aio`, for programs without an event loop.

    with Client("localhost:50051") as client:
        for delta in client.generate(chat="What is in-flight batching?", max_tokens=200):
            print(delta.text, end="", flush=True)

Owns a gRPC channel and the calls on it; may be used from several threads, each stream from one at a time. A stream that
is left early, by `break`, an exception or `cancel`, is cancelled on the server too, which frees its seat.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
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
from client.errors import from_rpc_error
from client.events import Completion, Delta, Event, FinishReason, Timing, Transcript, Usage


class Client:
    """A client of one or several routers, each `host:port`; several share the calls between them.

    `metadata` goes with every call. `retries` lets gRPC repeat a call that found no router or executor, before anything
    was produced.
    """

    def __init__(
        self,
        *targets: str,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Mapping[str, str] | None = None,
        retries: bool = True,
    ) -> None:
        target = channel_target(targets)
        options = client_options(targets, retries=retries)
        self._metadata = tuple((metadata or {}).items())
        self._channel = (
            grpc.insecure_channel(target, options)
            if credentials is None
            else grpc.secure_channel(target, credentials, options)
        )
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what still runs and closes the channel."""
        self._channel.close()

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

    def complete(
        self,
        prompt: str | bytes | None = None,
        *,
        chat: requests.Chat | None = None,
        token_ids: Sequence[int] | None = None,
        timeout: float | None = None,
        **options: Unpack[requests.GenerateOptions],
    ) -> Completion:
        """Like `generate`, but waits for the whole result."""
        return self.generate(prompt, chat=chat, token_ids=token_ids, timeout=timeout, **options).result()

    def send(self, request: inference_pb2.GenerateRequest, *, timeout: float | None = None) -> Stream:
        """Sends a request that the caller has built, for what `generate` has no keyword for."""
        return Stream(self._stub.Generate(request, timeout=timeout, metadata=self._metadata))

    def cancel(
        self, request_id: str, *, resume_token: str = "", model: str = "", timeout: float = UNARY_TIMEOUT_S
    ) -> RequestState:
        """Ends a request by its id and says where it was. Its own stream says when it has ended."""
        request = inference_pb2.CancelRequest(request_id=request_id, resume_token=resume_token, model=model)
        return decode_state(self._unary("Cancel", request, timeout).state)

    def get_request(self, request_id: str, *, model: str = "", timeout: float = UNARY_TIMEOUT_S) -> RequestStanding:
        """Where a request stands and, while it waits, what it waits for. Any router of the pool knows."""
        request = inference_pb2.GetRequestRequest(request_id=request_id, model=model)
        return decode_standing(self._unary("GetRequest", request, timeout))

    def tokenize(
        self,
        text: str | None = None,
        *,
        chat: requests.Chat | None = None,
        model: str | None = None,
        timeout: float = UNARY_TIMEOUT_S,
    ) -> tuple[int, ...]:
        """The token ids of a text or of a conversation."""
        request = requests.tokenize_request(text, chat=chat, model=model)
        return tuple(self._unary("Tokenize", request, timeout).token_ids)

    def detokenize(
        self, token_ids: Sequence[int], *, model: str | None = None, timeout: float = UNARY_TIMEOUT_S
    ) -> str:
        """The text of token ids."""
        request = requests.detokenize_request(token_ids, model=model)
        return str(self._unary("Detokenize", request, timeout).text)

    def list_models(self, *, timeout: float = UNARY_TIMEOUT_S) -> tuple[Model, ...]:
        """The models that can be asked for."""
        return decode_models(self._unary("ListModels", inference_pb2.ListModelsRequest(), timeout))

    def capacity(self, *, model: str = "", timeout: float = UNARY_TIMEOUT_S) -> Capacity:
        """What every executor holds and what waits."""
        return decode_capacity(self._unary("GetCapacity", inference_pb2.GetCapacityRequest(model=model), timeout))

    def _unary(self, method: str, request: Any, timeout: float) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None


class Stream:
    """The answer to one request: iterate over it for its deltas, or over `events()` for everything.

    It is read once. `request_id` is known from the first event on, `usage` and `timing` when it has ended.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._transcript = Transcript()
        self._cancelled = False

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def events(self) -> Generator[Event, None, None]:
        """Every event, in order.

        Raises:
            InflightError: the request was refused, or broke off.
        """
        try:
            for response in self._call:
                event = self._transcript.add(response.event)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            if not self._cancelled:
                raise from_rpc_error(error) from None
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Ends the request, if it still runs; iterating ends without an error. May be called from another thread."""
        if self._call.is_active():
            self._cancelled = True
            self._call.cancel()
            self._transcript.mark_cancelled()

    def text(self) -> str:
        """Reads to the end and returns the text of the first choice."""
        for _ in self.events():
            pass
        return self._transcript.choices[0].text

    def result(self) -> Completion:
        """Reads to the end and returns the whole result."""
        self.text()
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

    def _deltas(self) -> Generator[Delta, None, None]:
        with closing(self.events()) as events:
            for event in events:
                if isinstance(event, Delta):
                    yield event
