"""Preparation of a request, from its message to the streams of its choices.

The form of an answer, its parts and what constrains it, follows from the request, its model and its prompt.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

from opentelemetry.trace import Tracer

from inflight.common.errors import FieldViolation, RequestError, invalid
from inflight.common.grammar import grammar_hash
from inflight.common.time_of_day import unix_ms
from inflight.router.api.attached import MAX_GRPC_DEADLINE_S, checked_context
from inflight.router.api.constraining import Constraining
from inflight.router.api.tokenizing import Tokenizing, check_rates
from inflight.router.auth.resume_token import ResumeTokens
from inflight.router.config.tenants import TenantConfigFile
from inflight.router.constraint.answer_grammar import AnswerRules, ToolSchema
from inflight.router.constraint.json_text import read_json
from inflight.router.constraint.source import DEFAULT_MAX_WHITESPACE, TOOLS, ConstraintSource, regex_grammar
from inflight.router.dispatch.pools import ModelPool
from inflight.router.ledger.types import NO_LIMITS, Demand, TenantLimits
from inflight.router.lifecycle.events import End
from inflight.router.request.delivery import Delivery
from inflight.router.request.ids import call_id, choice_of, client_id, prefix_hashes_of
from inflight.router.request.submit import ModelLimits, choices_of, keep_stop_tokens, new_submit, router_context
from inflight.router.request.validation import fit_tokens, seconds_of, validate_generate
from inflight.router.settings import RouterSettings
from inflight.router.stream.request_stream import RequestStream
from inflight.router.telemetry.events import RequestFacts, class_name
from inflight.router.text.output import OutputText
from inflight.router.text.stop_scope import StopScope
from inflight.router.text.tokenizer import TextModel
from inflight.router.tools.formats import AnswerFormat, answer_format
from inflight.router.tools.parser import AnswerParser
from inflight.v1 import executor_pb2, inference_pb2, resume_pb2, types_pb2

# In place of the content hash of an adapter whose name is absent. No executor serves it, so the ledger refuses a
# request that it does not know already.
ABSENT_ADAPTER = "0" * 64
# Words of schemas without effect that a client is told.
MAX_IGNORED_WORDS = 32
# As most models write JSON in calls: a space behind a colon or a comma.
MAX_WHITESPACE_IN_ARGUMENTS = 1


class RequestPreparation:
    """Every step between a request and the dispatcher: validation, rates, tokens, and the stream of its output."""

    def __init__(
        self,
        settings: RouterSettings,
        tenants: TenantConfigFile,
        tokens: ResumeTokens,
        tokenizing: Tokenizing,
        constraining: Constraining,
        tracer: Tracer,
    ) -> None:
        self._settings = settings
        self._tenants = tenants
        self._tokens = tokens
        self._tracer = tracer
        self._tokenizing = tokenizing
        self._constraining = constraining

    async def prepare(
        self,
        request: inference_pb2.GenerateRequest,
        pool: ModelPool,
        arrived: float,
        grpc_remaining_s: float | None,
    ) -> tuple[RequestStream, ...]:
        """Returns a stream for each choice of a request, ready for the dispatcher and the relay. If the output that its
        client brought already ends the request, they are accepted. Raises `RequestError`."""
        limits = model_limits(pool, self._settings)
        if pool.describe().pooling.is_only:
            text = f"{pool.name!r} does not generate: it makes embeddings or scores, by Embed or /v1/embeddings"
            raise invalid(FieldViolation("model", text))
        validate_generate(request, limits)
        context = router_context(request, arrived)
        submit = new_submit(request, context, limits)
        allowed = self._tenants.config.limits_of_served(context.tenant)
        if context.adapter_id:
            submit.adapter_hash = await self._adapter_hash(submit.request_id, context, pool)
        if allowed.has_rates:
            await check_rates(pool, request, context, allowed)
        with self._tracer.start_as_current_span("inflight.tokenize", record_exception=False):
            prompt_ids = await self._tokenizing.encode_prompt(pool.text, request, limits, context.tenant)
            vocabulary_size = limits.vocabulary_size
            await self._tokenizing.encode_bad_words(pool.text, submit.sampling, vocabulary_size, context.tenant)
        answer = answer_format_of(request, pool.text, prompt_ids)
        constraint = answer_constraint_of(request, pool.text, answer, self._settings.default_thinking_token_budget)
        fit_tokens(submit, prompt_ids, request, limits)
        if request.output.parts and answer.reasoning is not None:
            keep_stop_tokens(submit, context)
        if request.output.parts and (answer.tools or answer.reasoning):
            context.answer_format = answer.to_json()
        if not request.stopping.HasField("max_tokens"):
            context.reservation_tokens = self._settings.default_reservation_tokens
        if constraint is not None:
            compiled = await self._constraining.compiled(constraint, context.tenant)
            submit.constraint.grammar, submit.constraint.hash = compiled.grammar, grammar_hash(compiled.grammar)
            for name, reason in compiled.unenforced.items():
                context.unenforced_functions.add(name=name, reason=reason)
            context.ignored_schema_words.extend(sorted(set(compiled.ignored))[:MAX_IGNORED_WORDS])
        submit.router_context = context.SerializeToString()
        submits = choices_of(submit, context.num_choices) if context.num_choices else [submit]
        prior_ids, end = prior_output(request, submit, limits)
        deadlines = deadlines_s(request, grpc_remaining_s)
        streams = self._open_streams(submits, context, pool, limits, allowed, arrived, deadlines, prior_ids)
        if prior_ids:
            end_with_prior_output(streams[0], prior_ids, end)
        return streams

    async def prepare_pooled(
        self,
        request: inference_pb2.GenerateRequest,
        pool: ModelPool,
        arrived: float,
        grpc_remaining_s: float | None,
        dimensions: int,
    ) -> Callable[[], RequestStream]:
        """Prepares a request for an embedding or a score, and returns what opens its stream. Raises `RequestError`."""
        limits = model_limits(pool, self._settings)
        context_length = limits.context_length
        # Nothing follows its prompt.
        limits = dataclasses.replace(limits, context_length=context_length + 1)
        validate_generate(request, limits)
        context = router_context(request, arrived)
        context.operation = "embeddings"
        submit = new_submit(request, context, limits)
        submit.pooled.dimensions = dimensions
        allowed = self._tenants.config.limits_of_served(context.tenant)
        if context.adapter_id:
            submit.adapter_hash = await self._adapter_hash(submit.request_id, context, pool)
        if allowed.has_rates:
            await check_rates(pool, request, context, allowed)
        prompt_ids = await self._tokenizing.encode_prompt(pool.text, request, limits, context.tenant)
        if len(prompt_ids) > context_length:
            text = f"has {len(prompt_ids)} tokens, but the model's context is {context_length} tokens; shorten it"
            raise invalid(FieldViolation(request.WhichOneof("prompt") or "prompt", text))
        fit_tokens(submit, prompt_ids, request, limits)
        submit.stopping.max_tokens = 0
        submit.router_context = context.SerializeToString()
        deadlines = deadlines_s(request, grpc_remaining_s)

        def open_stream() -> RequestStream:
            (stream,) = self._open_streams([submit], context, pool, limits, allowed, arrived, deadlines)
            return stream

        return open_stream

    async def _adapter_hash(self, request_id: str, context: resume_pb2.RouterContext, pool: ModelPool) -> str:
        """Returns the content hash of an adapter that the tenant may use. `request_id` is the ledger's.

        A request keeps the adapter of its admission. So its repeat is taken also while the name is absent.
        """
        adapter_id = context.adapter_id
        allowed = self._tenants.config.adapters_of(context.tenant)
        try:
            return pool.adapter(adapter_id, allowed).hash
        except RequestError:
            may_repeat = bool(context.digest) and (allowed is None or adapter_id in allowed)
            if may_repeat and await pool.dispatcher.knows(request_id):
                return ABSENT_ADAPTER
            raise

    def restore(self, pool: ModelPool, attached: executor_pb2.SequenceAttached) -> RequestStream:
        """Rebuilds the stream of a request that another router admitted, from what its executor was told. Its deadline
        counts from now; that of its first token is dropped. Raises `FrameError` if the executor returns another
        request, or what no request can be."""
        submit, limits = attached.submit, model_limits(pool, self._settings)
        # An executor's own context may be longer than the one that new requests get.
        longest = max(link.description.context_length for link in pool.links)
        context = checked_context(attached, dataclasses.replace(limits, context_length=longest))
        now = time.monotonic()
        arrived = now - max(0, unix_ms() - context.arrived_unix_ms) / 1000
        allowed = self._tenants.config.limits_of(context.tenant) or NO_LIMITS
        total_s = now + submit.deadline_ms / 1000 - arrived if submit.HasField("deadline_ms") else None
        (stream,) = self._open_streams([submit], context, pool, limits, allowed, arrived, (None, total_s))
        return stream

    def _open_streams(
        self,
        submits: Sequence[executor_pb2.Submit],
        context: resume_pb2.RouterContext,
        pool: ModelPool,
        limits: ModelLimits,
        allowed: TenantLimits,
        arrived: float,
        deadlines: tuple[float | None, float | None],
        prior_ids: Sequence[int] = (),
    ) -> tuple[RequestStream, ...]:
        """Returns the streams of choices, from what their executors are told, whichever router admitted them. `arrived`
        is on the clock of `time.monotonic`; `deadlines` are those of the first token and of the end, in seconds after
        it; `prior_ids` are output that the client brought."""
        first_token_deadline, deadline = (None if after_s is None else arrived + after_s for after_s in deadlines)
        hashes = prefix_hashes_of(
            submits[0],
            limits.block_size,
            limits.state_grid_tokens,
            limits.eos_token_ids,
            pool.dispatcher.kept_states,
        )
        streams = []
        for submit in submits:
            name, is_first = client_id(submit.request_id), choice_of(submit.request_id) == 0
            demand = _demand(submit, context, allowed, limits.block_size, hashes, deadlines, is_first=is_first)
            delivery = _delivery(submit, context, pool, self._tokens, first_token_deadline, deadline)
            facts = RequestFacts(
                model=pool.name,
                operation=context.operation or "text_completion",
                priority_class=class_name(submit.priority),
                arrived=arrived,
                prompt_tokens=len(submit.prompt_ids),
                prior_tokens=len(prior_ids),
                request_id=name,
                tenant=context.tenant,
            )
            record = pool.observers.follow(facts)
            streams.append(RequestStream(demand, submit, arrived, deadline, prior_ids, delivery, record))
        return tuple(streams)


def model_limits(pool: ModelPool, settings: RouterSettings) -> ModelLimits:
    """Returns what a model allows. Raises `RequestError` while it has no executor."""
    description = pool.describe()
    return ModelLimits(
        context_length=description.context_length,
        vocabulary_size=description.vocabulary_size,
        eos_token_ids=frozenset(description.eos_token_ids),
        default_sampling=description.default_sampling,
        has_chat_template=pool.text.has_chat_template,
        block_size=description.block_size,
        state_grid_tokens=description.state_grid_tokens,
        max_prompt_bytes=settings.max_prompt_bytes,
    )


def prior_output(
    request: inference_pb2.GenerateRequest, submit: executor_pb2.Submit, limits: ModelLimits
) -> tuple[Sequence[int], End | None]:
    """Returns the output that the client brought, up to its end, and that end if it has one."""
    prior_ids, stopping = tuple(request.prior_output.output_ids), submit.stopping
    if not prior_ids:
        return (), None
    ending_ids = {*stopping.stop_token_ids, *(() if stopping.ignore_eos else limits.eos_token_ids)}
    for index, token_id in enumerate(prior_ids):
        if token_id in ending_ids and index >= stopping.min_tokens:
            return prior_ids[: index + 1], End(types_pb2.FINISH_REASON_STOP_TOKEN, token_id, False)
    is_full = len(prior_ids) == stopping.max_tokens
    return prior_ids, End(types_pb2.FINISH_REASON_LENGTH, None) if is_full else None


def end_with_prior_output(stream: RequestStream, prior_ids: Sequence[int], end: End | None) -> None:
    """Accepts a stream for which no executor is needed, because the output that its client brought ends it."""
    assert stream.delivery is not None
    if end is not None or stream.delivery.new_text().feed(0, prior_ids).matched is not None:
        stream.accept()
    if end is not None:
        stream.finish(end)


def deadlines_s(
    request: inference_pb2.GenerateRequest, grpc_remaining_s: float | None
) -> tuple[float | None, float | None]:
    """Returns the deadlines of the first token and of the whole request, in seconds from its arrival; None: none. The
    gRPC deadline counts as one for the whole request, unless the request may outlive its call."""
    asked = request.deadlines
    outlives_call = request.detach or bool(request.resume_ttl.ToNanoseconds())
    totals = [
        seconds_of(asked.total) if asked.HasField("total") else None,
        None if outlives_call else grpc_remaining_s,
    ]
    total_s = min((s for s in totals if s is not None and s < MAX_GRPC_DEADLINE_S), default=None)
    return seconds_of(asked.first_token) if asked.HasField("first_token") else None, total_s


def _demand(
    submit: executor_pb2.Submit,
    context: resume_pb2.RouterContext,
    allowed: TenantLimits,
    block_size: int,
    prefix_hashes: tuple[str, ...],
    deadlines: tuple[float | None, float | None],
    *,
    is_first: bool,
) -> Demand:
    next_s = min((after_s for after_s in deadlines if after_s is not None), default=None)
    _, total_s = deadlines
    num_prompt_tokens, max_tokens = len(submit.prompt_ids), submit.stopping.max_tokens
    return Demand(
        request_id=submit.request_id,
        priority_class=submit.priority,
        blocks=-(-(num_prompt_tokens + max_tokens) // block_size),
        deadline_ms=None if next_s is None else _rounded_ms(next_s),
        total_ms=None if total_s is None else round(total_s * 1000),
        tenant=context.tenant,
        limits=allowed,
        prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        block_size=block_size,
        reservation_tokens=context.reservation_tokens or None,
        num_bytes=submit.ByteSize(),
        prefix_hashes=prefix_hashes,
        digest=context.digest.hex(),
        num_choices=(context.num_choices or 1) if is_first else 0,  # the first choice admits all
        adapter=submit.adapter_hash,
    )


def _rounded_ms(seconds: float) -> int:
    """Returns milliseconds, coarse and rounded up.

    Equal timeouts of clients arrive some milliseconds apart. In the ledger's order by deadline they must be equal, so
    that arrival decides. The relay keeps the exact deadline and takes the request out of the queue when it passes.
    """
    nearest = float(f"{max(0.0, seconds) * 1000:.2g}")  # at most 5 % too few
    return int(nearest * 1.05) + 1


def _delivery(
    submit: executor_pb2.Submit,
    context: resume_pb2.RouterContext,
    pool: ModelPool,
    tokens: ResumeTokens,
    first_token_deadline: float | None,
    deadline: float | None,
) -> Delivery:
    num_choices = context.num_choices or 1
    kept_s = context.resume_ttl.ToNanoseconds() / 1e9 if context.HasField("resume_ttl") else None
    answer = answer_format(context.answer_format) if context.answer_format else None
    return Delivery(
        accepted=inference_pb2.Accepted(
            request_id=context.request_id,
            resume_token=tokens.make(context.tenant, pool.name, context.request_id, num_choices),
            prompt_tokens=len(submit.prompt_ids),
            sampling=submit.sampling,
            max_tokens=submit.stopping.max_tokens,
            has_parts=bool(context.answer_format),
            unenforced_functions=context.unenforced_functions,
            ignored_schema_words=context.ignored_schema_words,
        ),
        new_text=functools.partial(_new_text, pool.text, context, submit.stopping.min_tokens),
        name_token=functools.partial(_name_token, pool.text),
        wants_text=context.wants_text,
        wants_token_ids=context.wants_token_ids,
        first_token_deadline=first_token_deadline,
        deadline=deadline,
        wants_logprobs=submit.HasField("num_top_logprobs") and not context.hides_logprobs,
        prompt_ids=submit.prompt_ids,
        wants_prompt_logprobs=submit.HasField("num_prompt_logprobs"),
        echoes=context.echo,
        wants_resources=context.wants_resources,
        is_constrained=submit.HasField("constraint"),
        unattended_s=None if context.detach else kept_s or 0.0,
        kept_s=kept_s,
        digest=context.digest,
        num_choices=num_choices,
        num_sent_choices=context.num_sent_choices or 1,
        stream_interval=context.stream_interval or 1,
        new_parser=None if answer is None else functools.partial(AnswerParser, answer),
        call_id=functools.partial(call_id, submit.request_id),
    )


def _new_text(text: TextModel, context: resume_pb2.RouterContext, min_tokens: int) -> OutputText:
    return OutputText(
        text.detokenizer(shows_markers=bool(context.answer_format)),
        stops=context.stop,
        include_stop=context.include_stop,
        min_tokens=min_tokens,
        stop_tokens={token_id: text.token_bytes(token_id) for token_id in context.stop_token_ids},
        scope=_stop_scope(context),
    )


def _stop_scope(context: resume_pb2.RouterContext) -> StopScope | None:
    if not (context.answer_format and (context.stop or context.stop_token_ids)):
        return None
    answer = answer_format(context.answer_format)
    return None if answer.reasoning is None else StopScope(answer.reasoning, in_reasoning=answer.in_reasoning)


def _name_token(text: TextModel, token: types_pb2.TokenLogprob) -> None:
    token.text_bytes = text.token_bytes(token.token_id)
    token.is_special = token.token_id in text.special_token_ids


def answer_format_of(
    request: inference_pb2.GenerateRequest, text: TextModel, prompt_ids: Sequence[int]
) -> AnswerFormat:
    """Returns how the answer to a prompt is divided into reasoning, content and calls."""
    functions = _functions(request)
    if not functions and not request.output.parts:
        return AnswerFormat()
    tools = text.support.tools if functions else None
    texts = {}
    if tools is not None and tools.layout == "parameters":
        texts = {one.name: text_parameters(one.parameters) for one in functions}
    return AnswerFormat(
        tools,
        text.support.reasoning,
        text.opens_reasoning(prompt_ids),
        texts,
        must_call=_must_call(request),
        is_constrained=request.HasField("constraint"),
    )


def text_parameters(parameters: str) -> tuple[str, ...]:
    """Returns the parameters of a schema that are text."""
    properties = read_json(parameters).get("properties") if parameters else None
    if not isinstance(properties, dict):
        return ()
    return tuple(
        name for name, schema in properties.items() if isinstance(schema, dict) and schema.get("type") == "string"
    )


def answer_constraint_of(
    request: inference_pb2.GenerateRequest, text: TextModel, answer: AnswerFormat, default_budget: int | None = None
) -> ConstraintSource | None:
    """Returns what constrains the answer: the functions that it may call, or the request's constraint, which begins
    after the reasoning, or only the length of the reasoning. `default_budget` is that of requests without one."""
    constraint = constraint_source(request.constraint) if request.HasField("constraint") else None
    functions, choice = _functions(request), request.tool_choice
    most_reasoning = _most_reasoning(request, text, answer, default_budget)
    if not functions and most_reasoning is None and (constraint is None or answer.reasoning is None):
        return constraint
    rules = AnswerRules(
        # What only the parser needs would make equal grammars unequal.
        dataclasses.replace(answer, texts={}, must_call=False, is_constrained=False),
        functions,
        must_call=_must_call(request),
        may_repeat=bool(functions) and (choice.parallel if choice.HasField("parallel") else True),
        token_ids=text.marker_ids,
        most_reasoning=most_reasoning,
    )
    if functions or constraint is None:
        return ConstraintSource(TOOLS, (rules.to_json(),), MAX_WHITESPACE_IN_ARGUMENTS)
    return dataclasses.replace(constraint, reasoning=rules.to_json())


def constraint_source(constraint: types_pb2.Constraint) -> ConstraintSource:
    """Returns a valid constraint as plain values."""
    kind = constraint.WhichOneof("kind")
    if kind == "json_object":
        texts: tuple[str, ...] = ()
    elif kind == "choice":
        texts = tuple(constraint.choice.choices)
    else:
        texts = (getattr(constraint, kind),)
    given = constraint.HasField("max_whitespace")
    return ConstraintSource(kind, texts, constraint.max_whitespace if given else DEFAULT_MAX_WHITESPACE)


def _functions(request: inference_pb2.GenerateRequest) -> tuple[ToolSchema, ...]:
    """Returns the functions that the answer may call."""
    if request.tool_choice.mode == inference_pb2.ToolChoice.MODE_NONE:
        return ()
    names = request.tool_choice.names
    return tuple(
        ToolSchema(function.name, function.parameters, function.strict or bool(_input(function)), _input(function))
        for function in request.chat.functions
        if not names or function.name in names
    )


def _input(function: inference_pb2.Function) -> str:
    """Returns the grammar of a function's argument `input`; empty for none."""
    return regex_grammar(function.input_regex) if function.HasField("input_regex") else function.input_grammar


def _must_call(request: inference_pb2.GenerateRequest) -> bool:
    return request.tool_choice.mode == inference_pb2.ToolChoice.MODE_REQUIRED


def _most_reasoning(
    request: inference_pb2.GenerateRequest, text: TextModel, answer: AnswerFormat, default_budget: int | None
) -> int | None:
    """Returns the tokens of reasoning after which its end is forced; None for no limit."""
    if answer.reasoning is None or not text.can_end_reasoning or not request.HasField("chat"):
        return None
    chat = request.chat
    budget = chat.thinking_token_budget if chat.HasField("thinking_token_budget") else default_budget
    return budget if budget is not None and budget >= 0 else None
