"""`InferenceService`: the RPCs that clients call.

`Generate` is the table of contents of a request: find the model, prepare, submit, relay. Every problem of a request is
a `RequestError`, which the server's interceptor translates into a status.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any, Generic, TypeVar

import grpc.aio
from opentelemetry.trace import NoOpTracer, Span, Tracer

from inflight.common.errors import Reason, RequestError
from inflight.common.rpc.status import Unparsed, takes_unparsed
from inflight.router.api.constraining import Constraining
from inflight.router.api.embedding import (
    MAX_AT_ONCE,
    base_request,
    check_embed,
    of_input,
    pooling_of,
    requests_of,
    result_of,
)
from inflight.router.api.generate_many import ManyCall, StreamLimit, shortest, stream_metadata, varint
from inflight.router.api.prepare import RequestPreparation, model_limits
from inflight.router.api.request_status import REQUEST_STATE_PROTO, request_standing
from inflight.router.api.resume import ResumeAuthorizer, ResumeGrant, check_positions, resumed_positions
from inflight.router.api.tokenizing import MAX_CONTEXTS, Tokenizing, take_rates
from inflight.router.auth.caller import (
    Authenticator,
    Caller,
    Metadata,
    authorize,
    effective_tenant,
    model_of,
    sees_model,
    verified_caller,
)
from inflight.router.auth.resume_token import ResumeTokens
from inflight.router.config.tenants import TenantConfigFile
from inflight.router.dispatch.dispatcher import Dispatcher
from inflight.router.dispatch.pools import ModelPool, ModelPools
from inflight.router.ledger.types import NO_LIMITS, Adopted, LedgerState, Queued, TenantLimits
from inflight.router.lifecycle.events import Admitted
from inflight.router.request.delivery import ReadPosition
from inflight.router.request.errors import draining, not_in_the_ledger, unknown_request
from inflight.router.request.validation import validate_detokenize, validate_tokenize
from inflight.router.settings import RouterSettings
from inflight.router.stats.capacity import add_capacity, described_model, described_variants
from inflight.router.stats.source import StatsSource
from inflight.router.stats.usage import prices_of, usage_seen_by
from inflight.router.stream.choices import AnyRelay, relay_of, run_all
from inflight.router.stream.relay import EventWriter, Relay, TimedWriter, Write, grace_after
from inflight.router.stream.request_stream import Reader, RequestStream
from inflight.router.telemetry.events import NO_OBSERVERS, RequestObservers, class_name
from inflight.router.telemetry.tracing import call_span
from inflight.v1 import inference_pb2, inference_pb2_grpc

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")


@dataclasses.dataclass(slots=True)
class Arrival:
    """A request as far as it has come: its arrival, its reader, its model and its stream."""

    at: float
    reader: Reader
    model: str = ""
    stream: RequestStream | None = None

    @property
    def is_refused(self) -> bool:
        """Whether an error now is a refusal: the ledger never had the request."""
        return self.stream is None or not self.stream.record.is_admitted


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Serves clients. Holds no state except the running requests."""

    def __init__(
        self,
        pools: ModelPools,
        settings: RouterSettings,
        tenants: TenantConfigFile,
        authenticator: Authenticator,
        tokens: ResumeTokens,
        stats: StatsSource,
        observers: RequestObservers = NO_OBSERVERS,
        tracer: Tracer | None = None,
    ) -> None:
        self._pools = pools
        self._observers = observers
        self._stats = stats
        self._tracer = tracer or NoOpTracer()
        self._authenticator = authenticator
        self._settings = settings
        self._tenants = tenants
        self._grants = ResumeAuthorizer(pools, tokens)
        self._tokenizing = Tokenizing()
        self._constraining = Constraining()
        self._preparation = RequestPreparation(
            settings, tenants, tokens, self._tokenizing, self._constraining, self._tracer
        )
        self._stream_limit = StreamLimit(settings.max_streams_per_connection)
        self._is_draining = False
        # Of the readers, in the order in which their calls arrive.
        self._reader_numbers = itertools.count(1)
        self._num_streams = 0
        self._no_stream = asyncio.Event()
        self._no_stream.set()

    async def warm_up(self) -> None:
        """Starts what the first constraint would wait for."""
        try:
            await self._constraining.start_process()
        except OSError as error:
            log.warning("no process that compiles constraints could be started; the first one tries again: %s", error)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests from now on, ends those that wait, and gives running ones `timeout_s` seconds to end.
        Requests that still run then are left to other routers, where their clients can resume them."""
        self._is_draining = True
        dispatchers = [pool.dispatcher for pool in self._pools.by_name.values()]
        for dispatcher in dispatchers:
            dispatcher.drain_waiting()
        try:
            async with asyncio.timeout(timeout_s):
                for dispatcher in dispatchers:
                    await dispatcher.wait_until_empty()
                await self._no_stream.wait()
        except TimeoutError:
            log.warning("drain: %d streams still run; clients resume them on other routers", self._num_streams)
        for dispatcher in dispatchers:
            dispatcher.leave_running()
        self._stats.close()

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Context) -> None:
        write = self._patient(writer(context))
        identify = functools.partial(self._caller, context)
        await self.generate(request, identify, metadata_of(context), write, context.time_remaining())

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        identify: Callable[[], Caller],
        metadata: Metadata,
        write: Write,
        remaining_s: float | None,
    ) -> None:
        """Serves one request of any protocol and writes its events. `identify` returns the caller or raises
        `RequestError`. `metadata` is that of the call; `remaining_s` is the time left until the deadline of the call.
        """
        arrival = Arrival(time.monotonic(), self._new_reader())
        try:
            caller = identify()
            if not request.adapter_id:
                request.model, request.adapter_id = self._pools.split_adapter(request.model)
            authorize(request, caller)
            with self._serving(), self._span("generate", metadata):
                await self._generate(request, caller, write, remaining_s, arrival)
        except RequestError as error:
            if arrival.is_refused:
                self._observers.refused(arrival.model, class_name(request.priority), error.reason)
            raise

    async def _generate(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        write: Write,
        remaining_s: float | None,
        arrival: Arrival,
    ) -> None:
        pool = self._pools.find(request.model, sticky_key(request), caller.models)
        arrival.model = pool.name
        meter = self._pools.meters.meter(request.model, pool.name)
        meter.arrive()
        try:
            prepared = await self._preparation.prepare(request, pool, arrival.at, remaining_s)
            arrival.stream = prepared[0]
            relay = await self._begin(request, prepared, pool, write, arrival.reader)
            streams = relay.streams
            arrival.stream = streams[0]
        except RequestError:
            meter.refuse()
            raise
        try:
            await self._relay(relay, pool, arrival.reader)
        finally:
            meter.end(*streams)
        log.info(
            "request %s %s; metadata %s", streams[0].request_id, relay.summary, dict(sorted(request.metadata.items()))
        )

    def _new_reader(self) -> Reader:
        """Returns the reader of a call that has just arrived."""
        return Reader(next(self._reader_numbers))

    async def _begin(
        self,
        request: inference_pb2.GenerateRequest,
        streams: Sequence[RequestStream],
        pool: ModelPool,
        write: Write,
        reader: Reader,
    ) -> AnyRelay:
        """Submits the choices of a request or finds those that it repeats. Returns the relay for the client."""
        prior = request.prior_output
        # Output behind the end of the request is not read.
        position = ReadPosition(len(streams[0].output_ids), prior.text_bytes if prior.HasField("text_bytes") else None)
        if streams[0].has_been_accepted:  # the output that the client brought ends it
            streams[0].attend(reader)
            return relay_of(streams, write, [position], reader)
        joined, outcome = await join_all(streams, pool.dispatcher, reader)
        relay = relay_of(joined, write, [position], reader)
        if isinstance(outcome, Queued) and request.want_queue_events:
            pool.dispatcher.watch_queue(joined[0], outcome)
            await self._send_queued(relay, outcome, pool, reader)
        return relay

    async def _send_queued(self, relay: AnyRelay, outcome: Queued, pool: ModelPool, reader: Reader) -> None:
        try:
            await relay.queued(outcome)
        except asyncio.CancelledError:
            _leave(relay, pool, reader)
            raise
        except RequestError as error:
            _leave(relay, pool, reader, grace_after(error))
            raise

    async def _relay(self, relay: AnyRelay, pool: ModelPool, reader: Reader) -> None:
        """Writes events to the client until the request ends."""
        grace_s = 0.0
        try:
            await relay.run()
        except RequestError as error:
            grace_s = grace_after(error)
            raise
        finally:
            _leave(relay, pool, reader, grace_s)

    def _span(self, call: str, metadata: Metadata) -> AbstractContextManager[Span]:
        return call_span(self._tracer, f"inflight.{call}", metadata)

    def _caller(self, context: Context) -> Caller:
        """Returns the caller. Raises `RequestError` for invalid credentials."""
        return verified_caller() or self._authenticator.identify(metadata_of(context))

    def _pool_of(self, model: str, caller: Caller) -> ModelPool:
        base, _ = self._pools.split_adapter(model)
        return self._pools.find(model_of(caller, base), seen=caller.models)

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Counts a stream while it is served. Raises `RequestError` if the router takes no new ones."""
        if self._is_draining:
            raise draining("the router is draining")
        self._num_streams += 1
        self._no_stream.clear()
        try:
            yield
        finally:
            self._num_streams -= 1
            if not self._num_streams:
                self._no_stream.set()

    async def Resume(self, request: inference_pb2.ResumeRequest, context: Context) -> None:
        """Continues the stream of a request of any router."""
        write = self._patient(writer(context))
        await self._resume(request, self._caller(context), metadata_of(context), write)

    async def _resume(
        self, request: inference_pb2.ResumeRequest, caller: Caller, metadata: Metadata, write: Write
    ) -> None:
        reader = self._new_reader()
        grant = self._grants.grant_by_token(request.request_id, request.resume_token, caller)
        (pool,), positions = grant.pools, resumed_positions(request, len(grant.choices))
        with self._serving(), self._span("resume", metadata):
            # The first choice alone: of several calls, the one that gets it last gets all of them.
            first = await self._find(grant.choices[0], pool)
            streams = [first, *await run_all([self._find(choice, pool) for choice in grant.choices[1:]])]
            check_positions(positions, streams)
            relay = relay_of(streams, write, positions, reader)
            for stream in streams:
                stream.attend(reader)
                stream.record.resumed()
            await self._relay(relay, pool, reader)
            log.info("request %s, resumed, %s", streams[0].request_id, relay.summary)

    @takes_unparsed
    async def GenerateMany(
        self, requests: AsyncIterator[inference_pb2.GenerateManyRequest | Unparsed], context: Context
    ) -> None:
        """Serves streams of `Generate` and `Resume` on one call."""
        of_call = metadata_of(context)
        # The caller is verified again for each stream: credentials can expire during the call.
        identify = functools.partial(self._authenticator.identify, of_call)

        async def serve(message: inference_pb2.GenerateManyRequest, write: EventWriter) -> None:
            metadata = stream_metadata(of_call, message)
            remaining_s = shortest(context.time_remaining(), message)
            if message.HasField("generate"):
                await self.generate(message.generate, identify, metadata, write, remaining_s)
            else:
                async with asyncio.timeout(remaining_s):
                    await self._resume(message.resume, identify(), metadata, write)

        write = TimedWriter(context.write, self._settings.write_timeout_s)
        call = ManyCall(serve, write, self._settings.write_timeout_s, self._stream_limit, context.peer())
        await call.run(requests)

    async def _find(self, named_id: str, pool: ModelPool) -> RequestStream:
        """Returns the stream of a choice, of any router."""
        stream = await pool.dispatcher.find(named_id)
        if stream is not None:
            return stream
        return await pool.dispatcher.resume(named_id, functools.partial(self._preparation.restore, pool))

    def _patient(self, write: Write) -> Write:
        return TimedWriter(write, self._settings.write_timeout_s)

    async def Cancel(self, request: inference_pb2.CancelRequest, context: Context) -> inference_pb2.CancelResponse:
        """Cancels a request of any router."""
        grant = self._grants.grant(request, self._caller(context))
        found = [one.answer for one in await _ask_of_choices(grant, Dispatcher.cancel)]
        if not found:
            raise unknown_request()
        was = next((state for state in found if state is not LedgerState.ENDED), LedgerState.ENDED)
        return inference_pb2.CancelResponse(state=REQUEST_STATE_PROTO[was])

    async def GetRequest(
        self, request: inference_pb2.GetRequestRequest, context: Context
    ) -> inference_pb2.GetRequestResponse:
        """Returns the state of a request of any router."""
        grant = self._grants.grant(request, self._caller(context))
        found = await _ask_of_choices(grant, Dispatcher.explain)
        if not found:
            raise not_in_the_ledger()
        # Another model may have served a request of the same id earlier.
        one = min(found, key=lambda one: _PROGRESS[one.answer.state])
        dispatcher, explanation = one.pool.dispatcher, one.answer
        link = dispatcher.link_of(explanation.executor_id or "")
        response = request_standing(request.request_id, one.choice, explanation, link, dispatcher.stream_of(one.choice))
        streams = [dispatcher.stream_of(other.choice) for other in found if other.pool is one.pool]
        response.output_tokens = sum(len(stream.output_ids) for stream in streams if stream is not None)
        if request.model in self._pools.variants:
            response.variant = one.pool.name
        return response

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Returns the token ids of text or chat messages."""
        caller = self._caller(context)
        pool, tenant = self._pool_of(request.model, caller), effective_tenant(caller, "")
        limits = model_limits(pool, self._settings)
        validate_tokenize(request, limits)
        await take_rates(pool.dispatcher, tenant, self._limits_of(tenant))
        most = MAX_CONTEXTS * limits.context_length
        if request.HasField("chat"):
            adds = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
            encoding = self._tokenizing.encode_chat(pool.text, request.chat, most, tenant, add_generation_prompt=adds)
        else:
            adds = request.add_special_tokens if request.HasField("add_special_tokens") else True
            encoding = self._tokenizing.encode_text(pool.text, request.text, most, tenant, add_special_tokens=adds)
        token_ids = await encoding
        names = await self._tokenizing.names(pool.text, token_ids, tenant) if request.want_token_names else ()
        return inference_pb2.TokenizeResponse(
            token_ids=token_ids, token_names=names, context_length=limits.context_length
        )

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Returns the text of token ids."""
        caller = self._caller(context)
        pool, tenant = self._pool_of(request.model, caller), effective_tenant(caller, "")
        token_ids = validate_detokenize(request, model_limits(pool, self._settings))
        await take_rates(pool.dispatcher, tenant, self._limits_of(tenant))
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._tokenizing.decode(pool.text, token_ids, tenant, skip_special_tokens=skip)
        return inference_pb2.DetokenizeResponse(text=text)

    def _limits_of(self, tenant: str) -> TenantLimits:
        return self._tenants.config.limits_of(tenant) or NO_LIMITS

    async def Embed(self, request: inference_pb2.EmbedRequest, context: Context) -> inference_pb2.EmbedResponse:
        """Returns an embedding or a score of each input."""
        arrived, caller, base = time.monotonic(), self._caller(context), base_request(request)
        base.model, base.adapter_id = self._pools.split_adapter(base.model)
        authorize(base, caller)
        with self._serving(), self._span("embed", metadata_of(context)):
            pool = self._pools.find(base.model, sticky_key(base), caller.models)
            pooling = pooling_of(pool)
            check_embed(request, pooling)
            remaining_s = context.time_remaining()
            try:
                opened = [
                    await self._prepare_input(index, asked, pool, arrived, remaining_s, request.dimensions)
                    for index, asked in enumerate(requests_of(request, base, pool))
                ]
            except RequestError as error:
                self._observers.refused(pool.name, class_name(base.priority), error.reason)
                raise
            turns = asyncio.Semaphore(MAX_AT_ONCE)
            priority_class = class_name(base.priority)
            results = await run_all([self._embed(one, pool, priority_class, turns) for one in opened])
        log.info("embed: %d inputs of %d tokens", len(results), sum(one.prompt_tokens for one in results))
        return inference_pb2.EmbedResponse(model=pool.name, pooling=pooling, results=results)

    async def _prepare_input(
        self,
        index: int,
        asked: inference_pb2.GenerateRequest,
        pool: ModelPool,
        arrived: float,
        remaining_s: float | None,
        dimensions: int,
    ) -> Callable[[], RequestStream]:
        await asyncio.sleep(0)  # short texts are tokenized at once, and there may be many: others go on in between
        try:
            return await self._preparation.prepare_pooled(asked, pool, arrived, remaining_s, dimensions)
        except RequestError as error:
            raise of_input(error, index) from None

    async def _embed(
        self, open_stream: Callable[[], RequestStream], pool: ModelPool, priority_class: str, turns: asyncio.Semaphore
    ) -> inference_pb2.Pooled:
        """Serves one input of a call, when its turn has come."""
        async with turns:
            reader, opened = self._new_reader(), open_stream()
            try:
                (stream,), _ = await join_all([opened], pool.dispatcher, reader)
            except RequestError as error:
                if not opened.record.is_admitted:
                    self._observers.refused(pool.name, priority_class, error.reason)
                raise
            try:
                await Relay(stream, None, reader=reader).run()
            finally:
                pool.dispatcher.leave(stream, reader)
        return result_of(stream)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        """Lists the models that the caller may ask for."""
        caller = self._caller(context)
        models = [described_model(pool) for pool in self._pools.by_name.values()]
        models += [described_variants(name, self._pools.find_all(name)) for name in self._pools.variants]
        models = [model for model in models if sees_model(caller, model.name)]
        tenant = effective_tenant(caller, "")
        allowed = self._tenants.config.adapters_of(tenant)
        if allowed is not None:
            for model in models:
                seen = [adapter for adapter in model.adapters if adapter.name in allowed]
                model.ClearField("adapters")
                model.adapters.extend(seen)
        models.sort(key=lambda model: model.name)
        return inference_pb2.ListModelsResponse(models=models, tenant=tenant)

    async def GetCapacity(
        self, request: inference_pb2.GetCapacityRequest, context: Context
    ) -> inference_pb2.GetCapacityResponse:
        """Returns what every executor of the caller's models holds and what waits; tenants are not named."""
        caller = self._caller(context)
        response = inference_pb2.GetCapacityResponse()
        for pool in self._pools.seen_by(caller, request.model):
            add_capacity(response, pool, await pool.dispatcher.snapshot())
            for link in self._pools.unused(pool.name) if caller.is_operator else ():
                response.unused.add(
                    executor_id=link.executor_id, model=pool.name, address=link.address, reason=link.problem
                )
        names = self._pools.names_seen_by(caller, request.model)
        for name, variants in sorted(self._pools.variants.items()):
            if name in names:
                response.variants.extend(self._pools.meters.to_proto(name, variants))
        return response

    async def GetStats(self, request: inference_pb2.GetStatsRequest, context: Context) -> None:
        """Streams statistics until the caller leaves, loses its access, or the router stops."""
        caller = self._caller(context)
        async with aclosing(self._stats.watch(request, caller)) as stats:
            async for response in stats:
                # Credentials expire and change while the stream lasts.
                if self._authenticator.identify(metadata_of(context)) != caller:
                    raise RequestError(Reason.UNAUTHENTICATED, "the caller's permissions have changed; call again")
                await context.write(response)

    async def GetUsage(
        self, request: inference_pb2.GetUsageRequest, context: Context
    ) -> inference_pb2.GetUsageResponse:
        """Returns what the tenants that the caller may see have used."""
        return await usage_seen_by(self._caller(context), request, self._pools, prices_of(self._settings))


@dataclasses.dataclass(frozen=True, slots=True)
class ChoiceAnswer(Generic[Answer]):
    """What the ledger of a model says about a choice."""

    pool: ModelPool
    choice: str
    answer: Answer


# GetRequest describes the choice that has come the least far.
_PROGRESS = {LedgerState.WAITING: 0, LedgerState.LOST: 0, LedgerState.PLACED: 1, LedgerState.ENDED: 2}


async def _ask_of_choices(
    grant: ResumeGrant, ask: Callable[[Dispatcher, str], Awaitable[Answer | None]]
) -> list[ChoiceAnswer[Answer]]:
    """Asks about every choice of a request and returns the answers for those that are known."""
    found: list[ChoiceAnswer[Answer]] = []
    for choice in grant.choices:
        answers = [(pool, await ask(pool.dispatcher, choice)) for pool in grant.pools]
        known = [ChoiceAnswer(pool, choice, answer) for pool, answer in answers if answer is not None]
        if not (known or grant.is_exact):
            break
        found += known
    return found


async def join_all(
    streams: Sequence[RequestStream], dispatcher: Dispatcher, reader: Reader
) -> tuple[list[RequestStream], Admitted | None]:
    """Submits every choice of a request, or finds it where it already waits or runs, for a reader that then attends it.
    Returns the choices and the ledger's answer for the first of them; None if this router already served it. Raises
    `RequestError`.

    The first choice is submitted alone. With it the ledger admits or refuses the whole request, and of several calls
    the one that gets it last gets all choices. The others follow at once, so that they share the first one's prompt
    through the prefix cache. If one of them fails, all that no other call reads are ended.
    """
    # The ledger's answers for the choices so far.
    outcomes: dict[RequestStream, Admitted | None] = {}

    async def join(stream: RequestStream) -> RequestStream:
        joined, outcome = await _join(stream, dispatcher, reader)
        outcomes[joined] = outcome
        return joined

    try:
        first = await join(streams[0])
        return [first, *await run_all([join(stream) for stream in streams[1:]])], outcomes[first]
    except BaseException:
        for stream, outcome in outcomes.items():
            is_new = outcome is not None and not isinstance(outcome, Adopted)
            if is_new and stream.reader is reader and not reader.is_displaced:
                dispatcher.release(stream)
            else:
                dispatcher.leave(stream, reader)
        raise


async def _join(stream: RequestStream, dispatcher: Dispatcher, reader: Reader) -> tuple[RequestStream, Admitted | None]:
    known = await dispatcher.find_repeated(stream)
    if known is not None:
        known.attend(reader)
        known.record.resumed()
        await dispatcher.admitted(known)
        return known, None
    stream.attend(reader)
    outcome = await dispatcher.submit(stream)
    if isinstance(outcome, Adopted):
        stream.record.resumed()
    return stream, outcome


def _leave(relay: AnyRelay, pool: ModelPool, reader: Reader, grace_s: float = 0.0) -> None:
    for stream in relay.streams:
        pool.dispatcher.leave(stream, reader, grace_s)


def sticky_key(request: inference_pb2.GenerateRequest) -> str:
    """Returns the key that ties a request to one of several models: its session, else its tenant, else its id."""
    own = request.idempotency_key or request.request_id
    return request.session_id or request.tenant or own or secrets.token_hex(8)


def metadata_of(context: Context) -> Metadata:
    return tuple(context.invocation_metadata() or ())


def writer(context: Context) -> Callable[[inference_pb2.StreamEvent], Coroutine[Any, Any, None]]:
    """Returns a writer of events as responses of `Generate` and `Resume`, whose only field is the event. The event is
    serialized once; a response message would copy it first."""

    def write(event: inference_pb2.StreamEvent) -> Coroutine[Any, Any, None]:
        content = event.SerializeToString()
        return context.write(EVENT_TAG + varint(len(content)) + content)

    return write


# Field 1, a message.
EVENT_TAG = b"\x0a"
