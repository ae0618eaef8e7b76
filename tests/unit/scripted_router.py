"""A router whose answers a test writes down: the real client API over real gRPC, with nothing behind it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import status_pb2

from inflight.common.errors import DETAILS_KEY, RequestError, not_implemented
from inflight.common.rpc.status import to_rpc_status
from inflight.v1 import inference_pb2, inference_pb2_grpc, types_pb2

Script = Callable[[inference_pb2.GenerateRequest, "grpc.ServicerContext"], Iterator[inference_pb2.StreamEvent]]
ResumeScript = Callable[[inference_pb2.ResumeRequest, "grpc.ServicerContext"], Iterator[inference_pb2.StreamEvent]]

WORDS = ("The ", "capital ", "is ", "Paris", ".")


class ScriptedRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Answers `Generate` by `script`, `Resume` by `resume` and the rest from its attributes.

    Remembers what it was asked. Without a script for it, resuming is not built.
    """

    def __init__(self, script: Script | None = None, resume: ResumeScript | None = None) -> None:
        self.script = script or (lambda request, context: speak(WORDS))
        self.resume = resume or cannot_resume
        self.metadata: list[dict[str, Any]] = []
        self.requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.ended = threading.Event()
        self.models = [inference_pb2.Model(name="smol", context_length=2048, has_chat_template=True, num_executors=1)]
        self.capacity = inference_pb2.GetCapacityResponse()
        self.usage = inference_pb2.GetUsageResponse(currency="EUR")
        # What `Embed` makes of a text.
        self.embedding: Callable[[str], list[float]] = lambda text: [float(len(text)), 1.0]
        self.standing = inference_pb2.GetRequestResponse()
        # What `GetStats` says, one message after the other without a wait; then it stays silent.
        self.stats: list[inference_pb2.GetStatsResponse] = []
        self.stats_left = threading.Event()
        self._telling: list[threading.Event] = []

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.put(request)
        self.metadata.append(dict(context.invocation_metadata()))
        context.add_callback(self.ended.set)
        try:
            for event in self.script(request, context):
                yield inference_pb2.GenerateResponse(event=event)
        except RequestError as error:
            abort(context, error)

    def Resume(
        self, request: inference_pb2.ResumeRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.ResumeResponse]:
        self.requests.put(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            for event in self.resume(request, context):
                yield inference_pb2.ResumeResponse(event=event)
        except RequestError as error:
            abort(context, error)

    def Cancel(
        self, request: inference_pb2.CancelRequest, context: grpc.ServicerContext
    ) -> inference_pb2.CancelResponse:
        self.requests.put(request)
        return inference_pb2.CancelResponse(state=inference_pb2.REQUEST_STATE_PLACED)

    def GetRequest(
        self, request: inference_pb2.GetRequestRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetRequestResponse:
        self.requests.put(request)
        self.standing.request_id = request.request_id
        return self.standing

    def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        self.requests.put(request)
        return inference_pb2.TokenizeResponse(token_ids=list(request.text.encode()))

    def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: grpc.ServicerContext
    ) -> inference_pb2.DetokenizeResponse:
        self.requests.put(request)
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=self.models, tenant="default")

    def GetCapacity(
        self, request: inference_pb2.GetCapacityRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetCapacityResponse:
        return self.capacity

    def Embed(self, request: inference_pb2.EmbedRequest, context: grpc.ServicerContext) -> inference_pb2.EmbedResponse:
        self.requests.put(request)
        results = [
            inference_pb2.Pooled(values=self.embedding(one.text), prompt_tokens=len(one.text)) for one in request.inputs
        ]
        return inference_pb2.EmbedResponse(results=results)

    def GetUsage(
        self, request: inference_pb2.GetUsageRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetUsageResponse:
        self.requests.put(request)
        return self.usage

    def GetStats(
        self, request: inference_pb2.GetStatsRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GetStatsResponse]:
        self.requests.put(request)
        over = threading.Event()
        self._telling.append(over)
        context.add_callback(over.set)
        context.add_callback(self.stats_left.set)
        yield from self.stats
        over.wait()

    def end_stats(self) -> None:
        """Ends the calls of `GetStats` that there are."""
        for over in self._telling:
            over.set()


def cannot_resume(
    request: inference_pb2.ResumeRequest, context: grpc.ServicerContext
) -> Iterator[inference_pb2.StreamEvent]:
    raise not_implemented("resume_token", "Resume is")


def abort(context: grpc.ServicerContext, error: RequestError) -> None:
    """Ends the call as the real routers do."""
    status: status_pb2.Status = to_rpc_status(error)
    context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()),))
    context.abort(error.code, status.message)


@contextmanager
def serving(router: ScriptedRouter, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """Serves the router on a free port and yields its address."""
    with futures.ThreadPoolExecutor(max_workers=16) as threads:
        server = grpc.server(threads)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
        if credentials is None:
            port = server.add_insecure_port("127.0.0.1:0")
        else:
            port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def speak(
    words: Sequence[str], *, request_id: str = "r1", prompt_tokens: int = 7
) -> Iterator[inference_pb2.StreamEvent]:
    """A whole answer: a token per word, then the end."""
    yield accepted(request_id, prompt_tokens)
    yield started()
    for offset, word in enumerate(words):
        yield delta(word, offset)
    yield from ending(len(words), prompt_tokens)


def accepted(request_id: str = "r1", prompt_tokens: int = 7) -> inference_pb2.StreamEvent:
    return inference_pb2.StreamEvent(
        accepted=inference_pb2.Accepted(request_id=request_id, resume_token="secret", prompt_tokens=prompt_tokens)
    )


def started(executor_id: str = "executor-0") -> inference_pb2.StreamEvent:
    return inference_pb2.StreamEvent(started=inference_pb2.Started(executor_id=executor_id, queue=seconds(0.25)))


def delta(text: str, offset: int) -> inference_pb2.StreamEvent:
    return inference_pb2.StreamEvent(
        delta=inference_pb2.Delta(offset=offset, num_tokens=1, token_ids=[100 + offset], text=text)
    )


def ending(num_tokens: int, prompt_tokens: int = 7) -> Iterator[inference_pb2.StreamEvent]:
    yield inference_pb2.StreamEvent(
        finished=inference_pb2.Finished(reason=types_pb2.FINISH_REASON_STOP_TOKEN, stop_token_id=2)
    )
    yield inference_pb2.StreamEvent(
        done=inference_pb2.Done(
            usage=types_pb2.Usage(prompt_tokens=prompt_tokens, output_tokens=num_tokens),
            timing=types_pb2.Timing(queue=seconds(0.25), time_to_first_token=seconds(0.5), decode=seconds(1.0)),
        )
    )


def seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(value * 1e9))
    return duration


def asked(router: ScriptedRouter) -> list[Any]:
    """The requests that the router was sent since the last look."""
    requests = []
    while True:
        try:
            requests.append(router.requests.get_nowait())
        except queue.Empty:
            return requests
