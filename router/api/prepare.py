"""Preparation of a request, from its message to what the ledger, the executor and the relay are told."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.trace import Tracer

from inflight.common.errors import RequestError
from inflight.common.grammar import grammar_hash
from inflight.common.protocol import MAX_FRAME_INTERVAL
from inflight.common.time_of_day import unix_ms
from inflight.router.api.attached import MAX_GRPC_DEADLINE_S, checked_context
from inflight.router.api.constraining import Constraining
from inflight.router.api.tokenizing import Tokenizing, check_rates, most_tokens
from inflight.router.api.validation import fit_tokens, validate_generate
from inflight.router.auth.resume_token import ResumeTokens
from inflight.router.config.tenants import TenantConfig, TenantConfigFile
from inflight.router.constraint.answer_grammar import AnswerRules
from inflight.router.constraint.json_text import read_json
from inflight.router.constraint.source import TOOLS, ConstraintSource
from inflight.router.dispatch.pools import ModelBackend
from inflight.router.lifecycle.events import End
from inflight.router.request.errors import shut_out, unknown_tenant
from inflight.router.request.ids import (
    call_id,
    choice_ids,
    choice_of,
    client_id,
    digest_of,
    keyed_request_id,
    keyed_seed,
    ledger_id,
    prefix_hashes,
)
from inflight.router.request.spec import (
    ChatPrompt,
    ChoiceCounts,
    Deadlines,
    Delivery,
    FittedRequest,
    GenerateSpec,
    ModelLimits,
)
from inflight.router.settings import RouterSettings
from inflight.router.store.types import DEFAULT_TENANT, NO_LIMITS, Demand, TenantLimits
from inflight.router.stream.request_stream import RequestStream
from inflight.router.telemetry.events import RequestFacts, class_name
from inflight.router.text.output import OutputText
from inflight.router.text.stop_scope import StopScope
from inflight.router.text.tokenizer import TextModel
from inflight.router.tools.formats import AnswerFormat, answer_format
from inflight.router.tools.parser import AnswerParser
from inflight.v1 import executor_pb2, inference_pb2, resume_pb2, types_pb2

NUM_SEEDS = 2**64
# As most models write JSON in calls: a space behind a colon or a comma.
MAX_WHITESPACE_IN_ARGUMENTS = 1
# In place of the content hash of an adapter whose name is absent. No executor serves it, so the ledger refuses a
# request that it does not know already.
ABSENT_ADAPTER = "0" * 64


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready for the dispatcher and the relay, with a stream for each choice. `has_ended`: the output that
    its client brought already ends it."""

    spec: GenerateSpec
    streams: tuple[RequestStream, ...]
    has_ended: bool


@dataclass(frozen=True, slots=True)
class Names:
    """The tenant, the client's request id, and the digest of a request that may be repeated. An empty digest: it may
    not be repeated."""

    tenant: str
    request_id: str
    digest: bytes = b""


def choose_seed() -> int:
    """Returns a seed for a request that brings none. Every executor gets the same seed, so it can repeat the
    numbers."""
    return secrets.randbits(64)


def model_limits(pool: ModelBackend, settings: RouterSettings) -> ModelLimits:
    """Returns what a model allows. Raises `RequestError` while it has no executor."""
    description = pool.describe()
    return ModelLimits(
        context_length=description.context_length,
        vocabulary_size=description.vocabulary_size,
        eos_token_ids=frozenset(description.eos_token_ids),
        default_sampling=description.default_sampling,
        has_chat_template=pool.text.has_chat_template,
        max_prompt_bytes=settings.max_prompt_bytes,
    )


def deadlines_of(spec: GenerateSpec, arrived: float, grpc_remaining_s: float | None) -> Deadlines:
    """Returns absolute deadlines. The gRPC deadline counts as one for the whole request, unless the request may outlive
    its call."""
    outlives_call = spec.detach or bool(spec.resume_ttl_s)
    totals = [spec.total_deadline_s, None if outlives_call else grpc_remaining_s]
    total = min((s for s in totals if s is not None and s < MAX_GRPC_DEADLINE_S), default=None)
    first_token = spec.first_token_deadline_s
    return Deadlines(
        first_token=None if first_token is None else arrived + first_token,
        total=None if total is None else arrived + total,
    )


def names_of(request: inference_pb2.GenerateRequest) -> Names:
    """Returns the request's own id, the id derived from its idempotency key, or a new one."""
    tenant = request.tenant or DEFAULT_TENANT
    if request.idempotency_key:
        request_id = keyed_request_id(tenant, request.idempotency_key)
        return Names(tenant, request_id, digest_of(request, tenant))
    return Names(tenant, request.request_id or secrets.token_hex(16))


def seed_chooser(request: inference_pb2.GenerateRequest) -> Callable[[], int]:
    """Returns the function that chooses a seed for a request that names none."""
    if not request.idempotency_key:
        return choose_seed
    return functools.partial(keyed_seed, request.tenant or DEFAULT_TENANT, request.idempotency_key)


def tenant_limits(tenant: str, config: TenantConfig) -> TenantLimits:
    """Returns the limits of a tenant. Raises `RequestError` for a tenant that is not served."""
    limits = config.limits_of(tenant)
    if limits is None:
        raise unknown_tenant(tenant)
    if limits.max_running == 0:
        raise shut_out(tenant)
    return limits


@dataclass(frozen=True, slots=True)
class Terms:
    """The parameters of a stream: what its executor is told, and what only its router knows. `arrived` and the
    deadlines are on the clock of `time.monotonic`; `prefix_hashes` are those of the prompt; `prior_ids` are output that
    the client brought."""

    submit: executor_pb2.Submit
    context: resume_pb2.RouterContext
    limits: TenantLimits
    deadlines: Deadlines
    arrived: float
    prefix_hashes: tuple[str, ...] = ()
    prior_ids: tuple[int, ...] = ()


class RequestPreparation:
    """Every step between a request and the dispatcher: validation, rates, tokens, and the stream of its output."""

    def __init__(
        self,
        settings: RouterSettings,
        admission: TenantConfigFile,
        tokens: ResumeTokens,
        tokenizing: Tokenizing,
        constraining: Constraining,
        tracer: Tracer,
    ) -> None:
        self._settings = settings
        self._admission = admission
        self._tokens = tokens
        self._tracer = tracer
        self._tokenizing = tokenizing
        self._constraining = constraining

    async def prepare(
        self,
        request: inference_pb2.GenerateRequest,
        pool: ModelBackend,
        arrived: float,
        grpc_remaining_s: float | None,
    ) -> PreparedRequest:
        """Returns what the ledger, the executor and the relay are told of a request. Raises `RequestError`."""
        limits = model_limits(pool, self._settings)
        spec = validate_generate(request, limits, seed_chooser(request))
        names = names_of(request)
        allowed = tenant_limits(names.tenant, self._admission.config)
        adapter_hash = await self._adapter_hash(request.adapter_id, names, pool)
        await check_rates(pool, spec, allowed, names.tenant, ledger_id(names.tenant, names.request_id))
        with self._tracer.start_as_current_span("inflight.tokenize", record_exception=False):
            prompt_ids = await self._tokenizing.encode(pool.text, spec.prompt, most_tokens(spec, limits), names.tenant)
            sampling = await self._tokenizing.encode_bad_words(pool.text, spec.sampling, limits, names.tenant)
        spec = dataclasses.replace(spec, sampling=sampling)
        answer = answer_format_of(spec, pool.text, prompt_ids)
        found_ids = _found_stop_ids(spec, answer)
        if found_ids:
            spec = dataclasses.replace(spec, stopping=dataclasses.replace(spec.stopping, stop_token_ids=()))
        fitted = fit_tokens(prompt_ids, spec, limits)
        constraint = answer_constraint_of(spec, pool.text, answer, self._settings.default_thinking_token_budget)
        compiled = None if constraint is None else await self._constraining.compiled(constraint, names.tenant)
        context = _context(fitted, names, request.model, arrived)
        context.adapter_id = request.adapter_id
        context.stop_token_ids.extend(found_ids)
        for name, reason in () if compiled is None else compiled.unenforced.items():
            context.unenforced_functions.add(name=name, reason=reason)
        context.reservation_tokens = _reservation_tokens(fitted, self._settings)
        if spec.output.parts and (answer.tools or answer.reasoning):
            context.answer_format = answer.to_json()
        prior_ids, end = _prior_output(fitted)
        deadlines = deadlines_of(spec, arrived, grpc_remaining_s)
        submit = _submit(fitted, names, context, None if compiled is None else compiled.grammar)
        submit.adapter_hash = adapter_hash
        submits = _choices(submit, spec.choices.generated)
        hashes = _prefix_hashes(submits[0], pool)
        streams = tuple(
            open_stream(Terms(submit, context, allowed, deadlines, arrived, hashes, prior_ids), pool, self._tokens)
            for submit in submits
        )
        return PreparedRequest(spec, streams, has_ended=_ends(streams[0], prior_ids, end))

    async def _adapter_hash(self, adapter_id: str, names: Names, pool: ModelBackend) -> str:
        """Returns the content hash of an adapter that the tenant may use; empty for the base model.

        A request keeps the adapter of its admission. So its repeat is taken also while the name is absent.
        """
        if not adapter_id:
            return ""
        allowed = self._admission.config.adapters_of(names.tenant)
        try:
            return pool.adapter(adapter_id, allowed).hash
        except RequestError:
            may_repeat = bool(names.digest) and (allowed is None or adapter_id in allowed)
            if may_repeat and await pool.dispatcher.knows(ledger_id(names.tenant, names.request_id)):
                return ABSENT_ADAPTER
            raise

    def restore(self, pool: ModelBackend, attached: executor_pb2.SequenceAttached) -> RequestStream:
        """Rebuilds the stream of a request that another router admitted, from what its executor was told. Its deadline
        counts from now; that of its first token is dropped. Raises `FrameError` if the executor returns another
        request, or what no request can be."""
        submit, limits_of_model = attached.submit, model_limits(pool, self._settings)
        # An executor's own context may be longer than the one that new requests get.
        longest = max(link.description.context_length for link in pool.links)
        context = checked_context(attached, dataclasses.replace(limits_of_model, context_length=longest))
        now = time.monotonic()
        total = now + submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None
        arrived = now - max(0, unix_ms() - context.arrived_unix_ms) / 1000
        limits = self._admission.config.limits_of(context.tenant) or NO_LIMITS
        hashes = _prefix_hashes(submit, pool)
        return open_stream(Terms(submit, context, limits, Deadlines(None, total), arrived, hashes), pool, self._tokens)


def open_stream(terms: Terms, pool: ModelBackend, tokens: ResumeTokens) -> RequestStream:
    """Returns the stream of a request, from what its executor is told, whichever router admitted it."""
    submit, context, deadlines, arrived = terms.submit, terms.context, terms.deadlines, terms.arrived
    choices = ChoiceCounts(context.num_choices or 1, context.num_sent_choices or 1)
    demand = _demand(terms, choices.generated, pool.describe().block_size)
    deadline = deadlines.next(has_first_token=False)
    if deadline is not None:
        demand = dataclasses.replace(demand, deadline_ms=_rounded_ms(deadline - arrived))
    reading = Delivery(
        accepted=inference_pb2.Accepted(
            request_id=context.request_id,
            resume_token=tokens.make(context.tenant, pool.name, context.request_id, choices.generated),
            prompt_tokens=len(submit.prompt_ids),
            sampling=submit.sampling,
            max_tokens=submit.stopping.max_tokens,
            has_parts=bool(context.answer_format),
            unenforced_functions=context.unenforced_functions,
        ),
        new_text=functools.partial(_new_text, pool.text, context, submit.stopping.min_tokens),
        name_token=functools.partial(_name_token, pool.text),
        wants_text=context.wants_text,
        wants_token_ids=context.wants_token_ids,
        wants_logprobs=submit.HasField("num_top_logprobs") and not context.hides_logprobs,
        prompt_ids=submit.prompt_ids,
        wants_prompt_logprobs=submit.HasField("num_prompt_logprobs"),
        echoes=context.echo,
        is_constrained=submit.HasField("constraint"),
        deadlines=deadlines,
        unattended_s=None if context.detach else _ttl_s(context) or 0.0,
        kept_s=_ttl_s(context),
        digest=context.digest,
        choices=choices,
        stream_interval=context.stream_interval or 1,
        new_parser=_new_parser(context),
        call_id=functools.partial(call_id, submit.request_id),
    )
    facts = RequestFacts(
        model=pool.name,
        operation=context.operation or "text_completion",
        priority_class=class_name(submit.priority),
        arrived=arrived,
        prompt_tokens=len(submit.prompt_ids),
        prior_tokens=len(terms.prior_ids),
        request_id=client_id(submit.request_id),
        tenant=context.tenant,
    )
    return RequestStream(
        demand, submit, arrived, deadlines.total, terms.prior_ids, reading, pool.listeners.follow(facts)
    )


def _ends(stream: RequestStream, prior_ids: Sequence[int], end: End | None) -> bool:
    """Returns whether the output that its client brought ends the request. The stream is then finished."""
    assert stream.reading is not None
    has_ended = end is not None or stream.reading.new_text().feed(0, prior_ids).matched is not None
    if has_ended:
        stream.accept()
    if end is not None:
        stream.finish(end)
    return has_ended


def _context(fitted: FittedRequest, names: Names, model: str, arrived: float) -> resume_pb2.RouterContext:
    spec = fitted.spec
    context = resume_pb2.RouterContext(
        tenant=names.tenant,
        request_id=names.request_id,
        model=model,
        stop=spec.stopping.stops,
        include_stop=spec.stopping.include_stop,
        wants_text=spec.output.text,
        wants_token_ids=spec.output.token_ids,
        echo=spec.output.echo,
        stream_interval=spec.output.stream_interval,
        digest=names.digest,
        detach=spec.detach,
        arrived_unix_ms=unix_ms() - round((time.monotonic() - arrived) * 1000),
        operation="chat" if isinstance(spec.prompt, ChatPrompt) else "text_completion",
    )
    if spec.choices.generated > 1:
        context.num_choices, context.num_sent_choices = spec.choices.generated, spec.choices.sent
        context.hides_logprobs = spec.choices.picks_best and spec.output.num_top_logprobs is None
    if spec.resume_ttl_s is not None:
        context.resume_ttl.FromNanoseconds(round(spec.resume_ttl_s * 1e9))
    return context


def answer_format_of(spec: GenerateSpec, text: TextModel, prompt_ids: Sequence[int]) -> AnswerFormat:
    """Returns how the answer to a prompt is divided into reasoning, content and calls."""
    if spec.tools is None and not spec.output.parts:
        return AnswerFormat()
    tools = None if spec.tools is None else text.support.tools
    texts = {}
    if spec.tools is not None and tools is not None and tools.layout == "parameters":
        texts = {one.name: text_parameters(one.parameters) for one in spec.tools.functions}
    must_call = spec.tools is not None and spec.tools.must_call
    is_constrained = spec.constraint is not None
    return AnswerFormat(
        tools, text.support.reasoning, text.opens_reasoning(prompt_ids), texts, must_call, is_constrained
    )


def _found_stop_ids(spec: GenerateSpec, answer: AnswerFormat) -> tuple[int, ...]:
    """Returns the stop tokens that the router finds: executors do not know where the reasoning ends, to which stops do
    not apply."""
    return spec.stopping.stop_token_ids if spec.output.parts and answer.reasoning is not None else ()


def text_parameters(parameters: str) -> tuple[str, ...]:
    """Returns the parameters of a schema that are text."""
    properties = read_json(parameters).get("properties") if parameters else None
    if not isinstance(properties, dict):
        return ()
    return tuple(
        name for name, schema in properties.items() if isinstance(schema, dict) and schema.get("type") == "string"
    )


def answer_constraint_of(
    spec: GenerateSpec, text: TextModel, answer: AnswerFormat, default_budget: int | None = None
) -> ConstraintSource | None:
    """Returns what constrains the answer: the tools that it may call, or the request's constraint, which begins after
    the reasoning, or only the length of the reasoning. `default_budget` is that of requests without one."""
    rules = _answer_rules(spec, text, answer, _most_reasoning(spec, text, answer, default_budget))
    if spec.tools is not None or (spec.constraint is None and rules.most_reasoning is not None):
        return ConstraintSource(TOOLS, (rules.to_json(),), MAX_WHITESPACE_IN_ARGUMENTS)
    if spec.constraint is None or answer.reasoning is None:
        return spec.constraint
    return dataclasses.replace(spec.constraint, reasoning=rules.to_json())


def _most_reasoning(
    spec: GenerateSpec, text: TextModel, answer: AnswerFormat, default_budget: int | None
) -> int | None:
    """Returns the tokens of reasoning after which its end is forced; None for no limit."""
    if answer.reasoning is None or not text.can_end_reasoning or not isinstance(spec.prompt, ChatPrompt):
        return None
    chat = spec.prompt.chat
    budget = chat.thinking_token_budget if chat.HasField("thinking_token_budget") else default_budget
    return budget if budget is not None and budget >= 0 else None


def _answer_rules(spec: GenerateSpec, text: TextModel, answer: AnswerFormat, most_reasoning: int | None) -> AnswerRules:
    tools = spec.tools
    functions = () if tools is None else tools.functions
    must_call, may_repeat = (False, False) if tools is None else (tools.must_call, tools.may_repeat)
    # What only the parser needs would make equal grammars unequal.
    answer = dataclasses.replace(answer, texts={}, must_call=False, is_constrained=False)
    return AnswerRules(answer, functions, must_call, may_repeat, text.marker_ids, most_reasoning)


def _reservation_tokens(fitted: FittedRequest, settings: RouterSettings) -> int:
    """Returns the output tokens that one placement reserves; 0: all."""
    is_open = fitted.spec.stopping.max_tokens is None
    return settings.default_reservation_tokens if is_open else 0


def _ttl_s(context: resume_pb2.RouterContext) -> float | None:
    return context.resume_ttl.ToNanoseconds() / 1e9 if context.HasField("resume_ttl") else None


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


def _new_parser(context: resume_pb2.RouterContext) -> Callable[[], AnswerParser] | None:
    if not context.answer_format:
        return None
    return functools.partial(AnswerParser, answer_format(context.answer_format))


def _name_token(text: TextModel, token: types_pb2.TokenLogprob) -> None:
    token.text_bytes = text.token_bytes(token.token_id)
    token.is_special = token.token_id in text.special_token_ids


def _prior_output(fitted: FittedRequest) -> tuple[tuple[int, ...], End | None]:
    """Returns the output that the client brought, up to its end, and that end if it has one."""
    prior_ids = fitted.spec.prior_ids
    for index, token_id in enumerate(prior_ids):
        if token_id in fitted.ending_token_ids and index >= fitted.spec.stopping.min_tokens:
            return prior_ids[: index + 1], End(types_pb2.FINISH_REASON_STOP_TOKEN, token_id, False)
    is_full = len(prior_ids) == fitted.max_tokens
    return prior_ids, End(types_pb2.FINISH_REASON_LENGTH, None) if is_full else None


def _prefix_hashes(submit: executor_pb2.Submit, pool: ModelBackend) -> tuple[str, ...]:
    if submit.cache_bypass:
        return ()
    salt = submit.cache_salt
    if submit.adapter_hash:
        salt += b"\0" + submit.adapter_hash.encode()
    return prefix_hashes(submit.prompt_ids, pool.describe().block_size, salt)


def _demand(terms: Terms, num_choices: int, block_size: int) -> Demand:
    submit, context = terms.submit, terms.context
    num_prompt_tokens, max_tokens = len(submit.prompt_ids), submit.stopping.max_tokens
    return Demand(
        request_id=submit.request_id,
        priority_class=submit.priority,
        blocks=-(-(num_prompt_tokens + max_tokens) // block_size),
        tenant=context.tenant,
        limits=terms.limits,
        prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        block_size=block_size,
        reservation_tokens=context.reservation_tokens or None,
        num_bytes=submit.ByteSize(),
        prefix_hashes=terms.prefix_hashes,
        digest=context.digest.hex(),
        num_choices=0 if choice_of(submit.request_id) else num_choices,
        adapter=submit.adapter_hash,
    )


def _rounded_ms(seconds: float) -> int:
    """Returns milliseconds, coarse and rounded up.

    Equal timeouts of clients arrive some milliseconds apart. In the ledger's order by deadline they must be equal, so
    that arrival decides. The relay keeps the exact deadline and takes the request out of the queue when it passes.
    """
    nearest = float(f"{max(0.0, seconds) * 1000:.2g}")  # at most 5 % too few
    return int(nearest * 1.05) + 1


def _submit(
    fitted: FittedRequest, names: Names, context: resume_pb2.RouterContext, grammar: str | None
) -> executor_pb2.Submit:
    spec = fitted.spec
    finds_stops = bool(spec.stopping.stops or context.stop_token_ids)
    salt = f"{names.tenant}\0{spec.cache_salt}"
    return executor_pb2.Submit(
        request_id=ledger_id(names.tenant, names.request_id),
        prompt_ids=fitted.prompt_ids,
        sampling=spec.sampling.to_proto(),
        stopping=fitted.stopping_proto(),
        cache_salt=salt.encode(),
        cache_bypass=spec.cache_bypass,
        priority=types_pb2.PriorityClass.Name(spec.priority),
        inter_token_target_ms=spec.inter_token_target_ms,
        max_drafts=spec.max_drafts,
        num_choices=1,
        num_top_logprobs=0 if context.hides_logprobs else spec.output.num_top_logprobs,
        num_prompt_logprobs=spec.output.num_prompt_logprobs,
        router_context=context.SerializeToString(),
        constraint=None if grammar is None else _constraint(grammar),
        # Tokens that wait would be computed behind a stop that the router finds.
        stream_interval=1 if finds_stops else min(spec.output.stream_interval, MAX_FRAME_INTERVAL),
    )


def _choices(submit: executor_pb2.Submit, num_choices: int) -> list[executor_pb2.Submit]:
    """Returns what executors are told of each choice. Choice k is a request of its own with the seed + k. The prompt is
    scored once."""
    submits = [submit]
    for choice, name in enumerate(choice_ids(submit.request_id, num_choices)[1:], start=1):
        other = executor_pb2.Submit()
        other.CopyFrom(submit)
        other.request_id = name
        other.sampling.seed = (submit.sampling.seed + choice) % NUM_SEEDS
        other.ClearField("num_prompt_logprobs")
        submits.append(other)
    return submits


def _constraint(grammar: str) -> executor_pb2.GrammarConstraint:
    return executor_pb2.GrammarConstraint(grammar=grammar, hash=grammar_hash(grammar))
