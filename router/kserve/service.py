"""`GRPCInferenceService`: KServe v2 with Triton's streaming, for clients that speak it already.

Translates each request and serves it by the same path as `InferenceService.Generate`: the same authentication, limits,
queue, deadlines and drain. docs/kserve.md says what is understood.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from weakref import WeakValueDictionary

import grpc.aio

from inflight.common.errors import Reason, RequestError
from inflight.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from inflight.router.api.service import InferenceService
from inflight.router.auth.caller import Authenticator, Caller, Metadata, model_of, sees_model, verified_caller
from inflight.router.dispatch.pools import ModelPool, ModelPools
from inflight.router.kserve.infer_stream import InferStream
from inflight.router.kserve.models import model_config, model_metadata
from inflight.router.kserve.responses import FINAL_RESPONSE, Responder, Send
from inflight.router.kserve.translation import VERSION, Inference, check_version, in_client_words, translate
from inflight.router.settings import RouterSettings
from inflight.router.stream.relay import TimedWriter

SERVICE_NAME = "inference.GRPCInferenceService"

# Of Triton's, those that are here in full; schedule_policy is `priority` and `timeout`.
EXTENSIONS = ("model_configuration", "parameters", "schedule_policy")

# Metadata with which a client asks for a status that ends its stream, instead of error messages.
STATUS_KEY = "triton_grpc_error"

# Triton's own wording, which clients check.
ONE_RESPONSE = (
    "ModelInfer RPC doesn't support models with decoupled transaction policy where `stream` is true: "
    "call ModelStreamInfer"
)

Context = grpc.aio.ServicerContext[Any, Any]


class KServeService(grpc_service_pb2_grpc.GRPCInferenceServiceServicer):
    """Serves clients of KServe v2. Its only state are running streams."""

    def __init__(
        self, pools: ModelPools, authenticator: Authenticator, generator: InferenceService, settings: RouterSettings
    ) -> None:
        self._pools = pools
        self._authenticator = authenticator
        self._generator = generator
        self._settings = settings
        # Free request slots of each connection with streams.
        self._rooms: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def ServerLive(
        self, request: grpc_service_pb2.ServerLiveRequest, context: Context
    ) -> grpc_service_pb2.ServerLiveResponse:
        """Reports that the server is live, without authentication, like health."""
        return grpc_service_pb2.ServerLiveResponse(live=True)

    async def ServerReady(
        self, request: grpc_service_pb2.ServerReadyRequest, context: Context
    ) -> grpc_service_pb2.ServerReadyResponse:
        """Reports whether the server accepts requests, without authentication, like health."""
        return grpc_service_pb2.ServerReadyResponse(ready=self._is_ready(*self._pools.by_name.values()))

    async def ModelReady(
        self, request: grpc_service_pb2.ModelReadyRequest, context: Context
    ) -> grpc_service_pb2.ModelReadyResponse:
        """Reports whether a model accepts requests. A model that the caller may not see counts as absent."""
        caller = self._caller(context)
        if request.version not in ("", VERSION):
            return grpc_service_pb2.ModelReadyResponse(ready=False)
        try:
            pools = self._pools_of(request.name, caller)
        except RequestError:
            return grpc_service_pb2.ModelReadyResponse(ready=False)
        return grpc_service_pb2.ModelReadyResponse(ready=self._is_ready(*pools))

    async def ServerMetadata(
        self, request: grpc_service_pb2.ServerMetadataRequest, context: Context
    ) -> grpc_service_pb2.ServerMetadataResponse:
        """Describes the server."""
        self._caller(context)
        return grpc_service_pb2.ServerMetadataResponse(name="inflight", version=_version(), extensions=EXTENSIONS)

    async def ModelMetadata(
        self, request: grpc_service_pb2.ModelMetadataRequest, context: Context
    ) -> grpc_service_pb2.ModelMetadataResponse:
        """Describes a model's tensors."""
        check_version("version", request.version)
        (pool, *_) = self._pools_of(request.name, self._caller(context))
        return model_metadata(request.name or pool.name)

    async def ModelConfig(
        self, request: grpc_service_pb2.ModelConfigRequest, context: Context
    ) -> grpc_service_pb2.ModelConfigResponse:
        """Describes a model's configuration, with limits while it has an executor."""
        check_version("version", request.version)
        pools = self._pools_of(request.name, self._caller(context))
        lengths = [pool.describe().context_length for pool in pools if pool.links]
        values = {"context_length": str(min(lengths))} if lengths else {}
        return model_config(request.name or pools[0].name, values)

    async def RepositoryIndex(
        self, request: grpc_service_pb2.RepositoryIndexRequest, context: Context
    ) -> grpc_service_pb2.RepositoryIndexResponse:
        """Lists the models that the caller can ask for."""
        caller = self._caller(context)
        response = grpc_service_pb2.RepositoryIndexResponse()
        for name in sorted({*self._pools.by_name, *self._pools.variants}):
            if not sees_model(caller, name):
                continue
            if self._is_ready(*self._pools.find_all(name)):
                response.models.add(name=name, version=VERSION, state="READY")
            elif not request.ready:
                response.models.add(name=name, version=VERSION, state="UNAVAILABLE", reason="it has no executor")
        return response

    async def ModelInfer(
        self, request: grpc_service_pb2.ModelInferRequest, context: Context
    ) -> grpc_service_pb2.ModelInferResponse:
        """Serves one request and returns its whole output at the end."""
        identify = functools.partial(self._caller, context)
        identify()  # a translation costs more than a refusal
        inference = translate(request)
        if inference.wanted.is_streamed:
            raise RequestError(Reason.NOT_IMPLEMENTED, ONE_RESPONSE)
        collected: list[grpc_service_pb2.ModelInferResponse] = []

        async def send(response: grpc_service_pb2.ModelInferResponse) -> None:
            collected.append(response)

        await self._infer(inference, identify, send, context)
        (response,) = collected
        del response.parameters[FINAL_RESPONSE]
        return response

    async def ModelStreamInfer(
        self, requests: AsyncIterator[grpc_service_pb2.ModelInferRequest], context: Context
    ) -> None:
        """Serves the requests of a stream concurrently."""
        self._caller(context)

        async def serve(request: grpc_service_pb2.ModelInferRequest, send: Send) -> None:
            # The caller is verified again for each request: credentials can expire during a stream.
            identify = functools.partial(self._authenticator.identify, _metadata(context))
            await self._infer(translate(request), identify, send, context)

        write = TimedWriter(context.write, self._settings.write_timeout_s)
        is_strict = (STATUS_KEY, "true") in _metadata(context)
        stream = InferStream(serve, write, self._room_of(context.peer()), is_strict=is_strict)
        await stream.run(requests)

    def _room_of(self, peer: str) -> asyncio.Semaphore:
        """All streams of a connection share the limit of requests per connection."""
        room = self._rooms.get(peer)
        if room is None:
            room = self._rooms[peer] = asyncio.Semaphore(self._settings.max_streams_per_connection)
        return room

    async def _infer(self, inference: Inference, identify: Callable[[], Caller], send: Send, context: Context) -> None:
        write = TimedWriter(Responder(inference.wanted, send).write, self._settings.write_timeout_s, needs_task=True)
        metadata = _metadata(context)
        try:
            await self._generator.generate(inference.generate, identify, metadata, write, context.time_remaining())
        except RequestError as error:
            raise in_client_words(error, inference.client_names) from error

    def _caller(self, context: Context) -> Caller:
        return verified_caller() or self._authenticator.identify(_metadata(context))

    def _pools_of(self, model: str, caller: Caller) -> tuple[ModelPool, ...]:
        """Returns every backend that a name can mean, at least one. Raises `RequestError`."""
        try:
            base, _ = self._pools.split_adapter(model)
            return self._pools.find_all(model_of(caller, base), caller.models)
        except RequestError as error:
            raise in_client_words(error, {"model": "name"}) from error

    def _is_ready(self, *pools: ModelPool) -> bool:
        return not self._generator.is_draining and any(pool.links for pool in pools)


def _metadata(context: Context) -> Metadata:
    """Returns (key, value) pairs, as authentication expects them."""
    return [(key, value) for key, value in context.invocation_metadata() or ()]


def _version() -> str:
    try:
        return version("inflight")
    except PackageNotFoundError:  # it runs from a folder of sources
        return ""
