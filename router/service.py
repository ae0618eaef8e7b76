"""`InferenceService`: what clients call.

`Generate` is the table of contents of a request: find the model, validate, tokenize, fit, admit, relay. Everything
that is wrong with a request is a `RequestError`; the server's interceptor turns it into a status.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Any

import grpc.aio
from inflight.v1 import inference_pb2, inference_pb2_grpc

from common.errors import FieldViolation, Reason, RequestError, invalid, not_implemented
from router.admission_file import AdmissionFile
from router.admit import AdmittedRequest, admit, choose_seed, deadlines_of, encode, model_limits, tenant_limits
from router.callers import Caller, Door, authorize, model_of, sees_model
from router.capacity import add_capacity, described_model, described_variants
from router.explain import REQUEST_STATE_PROTO, request_standing
from router.patience import patient
from router.pools import Pool, Pools
from router.refusals import RETRY_AFTER_MS, unknown_request
from router.relay import Relay
from router.settings import RouterSettings
from router.store.types import Dropped, Placement, Queued, RequestState
from router.validation import fit_tokens, validate_detokenize, validate_generate, validate_tokenize
from router.variant_meter import VariantMeters

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves clients. Stateless but for the requests that run."""

    def __init__(self, pools: Pools, settings: RouterSettings, admission: AdmissionFile, door: Door) -> None:
        self._pools = pools
        self._door = door
        self._settings = settings
        self._admission = admission
        self._meters = VariantMeters()
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
        caller = self._caller(context)
        authorize(request, caller)
        if self._is_draining:
            raise RequestError(Reason.DRAINING, "the router is draining", retry_after_ms=RETRY_AFTER_MS)
        self._count(+1)
        try:
            await self._generate(request, caller, context)
        finally:
            self._count(-1)

    async def _generate(self, request: inference_pb2.GenerateRequest, caller: Caller, context: Context) -> None:
        arrived = time.monotonic()
        pool = self._pools.find(request.model, sticky_key(request), caller.models)
        meter = self._meters.meter(request.model, pool.name)
        meter.arrive()
        try:
            admitted = await self._admit(request, pool, arrived, context.time_remaining())
            outcome = await pool.dispatcher.submit(admitted.stream)
        except RequestError:
            meter.refuse()
            raise
        try:
            await self._relay(admitted, outcome, pool, context)
        finally:
            pool.dispatcher.release(admitted.stream)
            meter.end(admitted.stream)

    async def _admit(
        self, request: inference_pb2.GenerateRequest, pool: Pool, arrived: float, grpc_remaining_s: float | None
    ) -> AdmittedRequest:
        """From the request to what the ledger and the executors are asked for."""
        limits = model_limits(pool, self._settings)
        spec = validate_generate(request, limits, choose_seed)
        allowed = tenant_limits(spec, self._admission.rules)
        fitted = fit_tokens(await encode(pool.text, spec.prompt), spec, limits)
        return admit(fitted, allowed, deadlines_of(spec, arrived, grpc_remaining_s), arrived, pool)

    async def _relay(
        self, admitted: AdmittedRequest, outcome: Placement | Queued | Dropped, pool: Pool, context: Context
    ) -> None:
        """Tells the client what happens, to the end."""

        async def write(event: inference_pb2.StreamEvent) -> None:
            await context.write(inference_pb2.GenerateResponse(event=event))

        stream, spec = admitted.stream, admitted.spec
        within = patient(write, self._settings.write_timeout_s)
        relay = Relay(stream, admitted.text, admitted.options, admitted.deadlines, within)
        if isinstance(outcome, Queued) and spec.want_queue_events:
            await relay.queued(outcome)
            pool.dispatcher.watch_queue(stream, outcome)
        await relay.run()
        log.info("request %s %s; metadata %s", stream.request_id, relay.summary, dict(spec.metadata))

    def _caller(self, context: Context) -> Caller:
        """Who calls. Raises `RequestError` where the door does not know."""
        return self._door.identify(tuple(context.invocation_metadata() or ()))

    def _pool_of(self, model: str, caller: Caller) -> Pool:
        return self._pools.find(model_of(caller, model), seen=caller.models)

    def _seen_by(self, caller: Caller) -> list[str]:
        return [name for name in (*self._pools.by_name, *self._pools.variants) if sees_model(caller, name)]

    def _count(self, change: int) -> None:
        self._num_streams += change
        if self._num_streams:
            self._no_stream.clear()
        else:
            self._no_stream.set()

    async def Resume(self, request: inference_pb2.ResumeRequest, context: Context) -> None:
        """Not built yet: streams end with their connection."""
        self._caller(context)
        raise not_implemented("resume_token", "Resume is")

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelResponse:
        """Ends a request of any router."""
        self._caller(context)
        if not request.request_id:
            raise invalid(FieldViolation("request_id", "must not be empty"))
        if request.resume_token:
            raise not_implemented("resume_token", "cancelling by token is")
        was: RequestState | None = None
        for pool in self._pools.find_all(request.model):
            found = await pool.dispatcher.cancel(request.request_id)
            was = found if found is not None and was in (None, RequestState.ENDED) else was
        if was is None:
            raise unknown_request()
        return inference_pb2.CancelResponse(state=REQUEST_STATE_PROTO[was])

    async def GetRequest(
        self, request: inference_pb2.GetRequestRequest, context: Context
    ) -> inference_pb2.GetRequestResponse:
        """Says where a request of any router stands."""
        self._caller(context)
        if not request.request_id:
            raise invalid(FieldViolation("request_id", "must not be empty"))
        if request.resume_token:
            raise not_implemented("resume_token", "looking at a request by token is")
        pools = self._pools.find_all(request.model)
        found = [
            (pool, one) for pool in pools if (one := await pool.dispatcher.explain(request.request_id)) is not None
        ]
        if not found:
            raise unknown_request()
        # Another model may have served, some time ago, a request of the same id.
        pool, explanation = min(found, key=lambda one: one[1].state is RequestState.ENDED)
        dispatcher = pool.dispatcher
        link = dispatcher.link_of(explanation.executor_id or "")
        response = request_standing(request.request_id, explanation, link, dispatcher.stream_of(request.request_id))
        if request.model in self._pools.variants:
            response.variant = pool.name
        return response

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Turns text or chat messages into token ids."""
        pool = self._pool_of(request.model, self._caller(context))
        prompt = validate_tokenize(request, model_limits(pool, self._settings))
        return inference_pb2.TokenizeResponse(token_ids=await encode(pool.text, prompt))

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Turns token ids into text."""
        pool = self._pool_of(request.model, self._caller(context))
        token_ids = validate_detokenize(request, model_limits(pool, self._settings))
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return inference_pb2.DetokenizeResponse(text=pool.text.decode(token_ids, skip_special_tokens=skip))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Lists the models that the caller can ask for."""
        caller = self._caller(context)
        models = [described_model(pool) for pool in self._pools.by_name.values()]
        models += [described_variants(name, self._pools.find_all(name)) for name in self._pools.variants]
        models = [model for model in models if sees_model(caller, model.name)]
        models.sort(key=lambda model: model.name)
        return inference_pb2.ListModelsResponse(models=models)

    async def GetCapacity(
        self, request: inference_pb2.GetCapacityRequest, context: Context
    ) -> inference_pb2.GetCapacityResponse:
        """Says what every executor of the caller's models holds and what waits; never whose it is."""
        caller = self._caller(context)
        wanted = [model_of(caller, request.model)] if request.model else self._seen_by(caller)
        pools = {pool.name: pool for name in wanted for pool in self._pools.find_all(name, caller.models)}
        response = inference_pb2.GetCapacityResponse()
        for _, pool in sorted(pools.items()):
            add_capacity(response, pool, await pool.dispatcher.snapshot())
        for name, variants in sorted(self._pools.variants.items()):
            if name in wanted:
                response.variants.extend(self._meters.to_proto(name, variants))
        return response


def sticky_key(request: inference_pb2.GenerateRequest) -> str:
    """By what a request keeps to one of several models: its session, else its tenant, else itself."""
    return request.session_id or request.tenant or request.request_id or secrets.token_hex(8)
