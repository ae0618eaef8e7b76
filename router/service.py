"""`InferenceService`: what clients call.

`Generate` is the table of contents of a request: find the model, validate, tokenize, fit, admit, relay. Everything
that is wrong with a request is a `RequestError`; the server's interceptor turns it into a status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc.aio
from inflight.v1 import inference_pb2, inference_pb2_grpc

from common.errors import FieldViolation, Reason, RequestError, invalid, not_implemented
from router.admit import admit, choose_seed, deadlines_of, encode, model_limits
from router.capacity import add_capacity, model_of
from router.pools import Pools
from router.refusals import RETRY_AFTER_MS
from router.relay import Relay
from router.settings import RouterSettings
from router.store.types import Queued, RequestState
from router.validation import fit_tokens, validate_detokenize, validate_generate, validate_tokenize

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

REQUEST_STATE_PROTO: dict[RequestState, inference_pb2.RequestState] = {
    RequestState.WAITING: inference_pb2.REQUEST_STATE_WAITING,
    RequestState.LOST: inference_pb2.REQUEST_STATE_WAITING,
    RequestState.PLACED: inference_pb2.REQUEST_STATE_PLACED,
    RequestState.ENDED: inference_pb2.REQUEST_STATE_ENDED,
}


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves clients. Stateless but for the requests that run."""

    def __init__(self, pools: Pools, settings: RouterSettings) -> None:
        self._pools = pools
        self._settings = settings
        self._is_draining = False
        self._num_streams = 0
        self._no_stream = asyncio.Event()
        self._no_stream.set()

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests from now on and gives running ones `timeout_s` seconds to end."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._no_stream.wait(), timeout_s)
        except TimeoutError:
            log.warning("drain: %d streams still run", self._num_streams)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        """Generates for one prompt and streams what is produced."""
        arrived = time.monotonic()
        if self._is_draining:
            raise RequestError(Reason.DRAINING, "the router is draining", retry_after_ms=RETRY_AFTER_MS)
        pool = self._pools.find(request.model)
        limits = model_limits(pool, self._settings)
        spec = validate_generate(request, limits, choose_seed)
        prompt_ids = await encode(pool.text, spec.prompt)
        fitted = fit_tokens(prompt_ids, spec, limits)
        deadlines = deadlines_of(spec, arrived, context.time_remaining())
        admitted = admit(fitted, deadlines, arrived, pool)

        async def write(event: inference_pb2.StreamEvent) -> None:
            await context.write(inference_pb2.GenerateResponse(event=event))

        relay = Relay(admitted.stream, admitted.text, admitted.options, deadlines, write)
        self._count(+1)
        try:
            outcome = await pool.dispatcher.submit(admitted.stream)
            if isinstance(outcome, Queued) and spec.want_queue_events:
                await relay.queued(outcome.position)
            await relay.run()
            log.info("request %s %s; metadata %s", admitted.stream.request_id, relay.summary, dict(spec.metadata))
        finally:
            pool.dispatcher.release(admitted.stream)
            self._count(-1)

    def _count(self, change: int) -> None:
        self._num_streams += change
        if self._num_streams:
            self._no_stream.clear()
        else:
            self._no_stream.set()

    async def Resume(self, request: inference_pb2.ResumeRequest, context: Context) -> None:
        """Not built yet: streams end with their connection."""
        raise not_implemented("resume_token", "Resume is")

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelResponse:
        """Ends a request of any router."""
        if not request.request_id:
            raise invalid(FieldViolation("request_id", "must not be empty"))
        if request.resume_token:
            raise not_implemented("resume_token", "cancelling by token is")
        state = await self._pools.find(request.model).dispatcher.cancel(request.request_id)
        return inference_pb2.CancelResponse(state=REQUEST_STATE_PROTO[state])

    async def GetRequest(
        self, request: inference_pb2.GetRequestRequest, context: Context
    ) -> inference_pb2.GetRequestResponse:
        """Not built yet."""
        raise not_implemented("request_id", "GetRequest is")

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Turns text or chat messages into token ids."""
        pool = self._pools.find(request.model)
        prompt = validate_tokenize(request, model_limits(pool, self._settings))
        return inference_pb2.TokenizeResponse(token_ids=await encode(pool.text, prompt))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        pool = self._pools.find(request.model)
        token_ids = validate_detokenize(request, model_limits(pool, self._settings))
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return inference_pb2.DetokenizeResponse(text=pool.text.decode(token_ids, skip_special_tokens=skip))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Lists the models that can be asked for."""
        pools = sorted(self._pools.by_name.values(), key=lambda pool: pool.name)
        return inference_pb2.ListModelsResponse(models=[model_of(pool) for pool in pools])

    async def GetCapacity(
        self, request: inference_pb2.GetCapacityRequest, context: Context
    ) -> inference_pb2.GetCapacityResponse:
        """Says what every executor holds and what waits."""
        pools = [self._pools.find(request.model)] if request.model else self._pools.by_name.values()
        response = inference_pb2.GetCapacityResponse()
        for pool in sorted(pools, key=lambda pool: pool.name):
            add_capacity(response, pool, await pool.dispatcher.snapshot())
        return response
