"""Validation of what a client asks for.

Pure: takes a request of the protocol and a model's limits, and raises a `RequestError` that names every wrong field
together with what is allowed. Validation has two steps, because some limits count tokens: `validate_generate` before
the prompt is tokenized, `fit_tokens` after. No field that a request sets is ignored: it is read, or refused by
`refuse_unsupported`. The checks of sampling and stopping parameters hold for the defaults that an executor reports, and
for requests that it returns, too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from google.protobuf.duration_pb2 import Duration

from inflight.common.errors import FieldViolation, Reason, RequestError, invalid, not_implemented
from inflight.common.parameters import (
    MAX_DEADLINE_S,
    MAX_STREAM_INTERVAL,
    PARAMETERS,
    SAMPLING_NUMBERS,
)
from inflight.common.protocol import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_DRAFTS,
    MAX_INTER_TOKEN_TARGET_MS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from inflight.router.constraint.source import (
    MAX_CHOICE_TEXTS,
    MAX_CONSTRAINT_BYTES,
    MAX_REGEX_BYTES,
    MAX_WHITESPACE,
)
from inflight.router.request.submit import ModelLimits
from inflight.router.text.chat_checks import chat_violations
from inflight.router.text.count_limits import MAX_TOKEN_IDS, MAX_VIOLATIONS
from inflight.v1 import executor_pb2, inference_pb2, types_pb2

# Fields of the protocol whose functions were never built, and the functions.
UNBUILT = {
    "sampling.typical_p": "locally typical sampling is",
    "output.coalesce_ms": "holding tokens back to send fewer events is",
}
MAX_BAD_WORD_CHARACTERS = 1024
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_METADATA_PAIRS = 64
MAX_METADATA_KEY_CHARACTERS = 64
MAX_METADATA_VALUE_CHARACTERS = 1024
MAX_NAME_CHARACTERS = 256
MAX_IDEMPOTENCY_KEY_CHARACTERS = 128
# Ids of a Detokenize request, for models whose context is shorter.
MAX_DETOKENIZED_IDS = 2**16
CONSTRAINT_KINDS = ("json_schema", "json_object", "regex", "grammar", "choice")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Violations = Iterator[FieldViolation]


def validate_generate(request: inference_pb2.GenerateRequest, limits: ModelLimits) -> None:
    """Raises `RequestError` unless the request is sound in itself."""
    violations = _first(
        _name_violations(request),
        _prompt_violations(request, limits),
        _prior_output_violations(request, limits),
        sampling_violations(request.sampling, limits.vocabulary_size),
        stopping_violations(request.stopping, limits.vocabulary_size),
        _output_violations(request.output),
        _constraint_violations(request),
        _tool_violations(request),
        _choice_violations(request),
        _service_violations(request),
        _resuming_violations(request),
        _metadata_violations(request),
    )
    if violations:
        raise invalid(*violations)
    refuse_unsupported(request)


def _first(*violations: Violations) -> tuple[FieldViolation, ...]:
    """Returns as many violations as an error names. The search stops there."""
    return tuple(itertools.islice(itertools.chain(*violations), MAX_VIOLATIONS))


def fit_tokens(
    submit: executor_pb2.Submit,
    prompt_ids: Sequence[int],
    request: inference_pb2.GenerateRequest,
    limits: ModelLimits,
) -> None:
    """Checks the limits that depend on the number of tokens. Adds the prompt, truncated if the request asks for that,
    and `max_tokens`."""
    field = request.WhichOneof("prompt") or "prompt"
    if not prompt_ids:
        raise invalid(FieldViolation("prompt", f"is empty: `{field}` has no tokens"))
    outside = first_outside(prompt_ids, limits.vocabulary_size)
    if outside is not None:
        # A tokenizer may know ids that its model does not.
        place = f"token_ids.ids[{outside}]" if field == "token_ids" else field
        raise invalid(outside_violation(place, prompt_ids[outside], limits.vocabulary_size))
    submit.prompt_ids.extend(prompt_ids[-request.truncate_prompt_tokens :])  # all of them for 0
    stopping, num_kept = submit.stopping, len(submit.prompt_ids)
    num_left = limits.context_length - num_kept
    if num_left < 1:
        raise invalid(
            FieldViolation(
                field,
                f"has {num_kept} tokens, but the model's context is {limits.context_length} tokens and the output "
                "needs at least one; shorten it or set truncate_prompt_tokens",
            )
        )
    if not stopping.HasField("max_tokens"):
        stopping.max_tokens = num_left
    if stopping.max_tokens > num_left:
        raise invalid(
            FieldViolation(
                "stopping.max_tokens",
                f"is {stopping.max_tokens}, and the prompt has {num_kept} tokens: together "
                f"{stopping.max_tokens + num_kept}, more than the model's context of {limits.context_length} tokens; "
                f"must be at most {num_left} for this prompt",
            )
        )
    if stopping.min_tokens > stopping.max_tokens:
        raise invalid(min_tokens_violation(stopping.min_tokens, stopping.max_tokens))
    num_prior = len(request.prior_output.output_ids)
    if num_prior > stopping.max_tokens:
        text = f"has {num_prior} ids; must be at most max_tokens, which is {stopping.max_tokens}"
        raise invalid(FieldViolation("prior_output.output_ids", text))


def validate_tokenize(request: inference_pb2.TokenizeRequest, limits: ModelLimits) -> None:
    """Raises `RequestError` unless there is a text or a conversation to tokenize. Empty text is allowed."""
    match request.WhichOneof("input"):
        case "text":
            violations = _first(_size_violations("text", len(request.text.encode()), limits))
        case "chat":
            violations = _first(_chat_prompt_violations(request.chat, limits))
        case _:
            violations = (FieldViolation("input", "is not set; exactly one of text, chat is needed"),)
    if violations:
        raise invalid(*violations)


def validate_detokenize(request: inference_pb2.DetokenizeRequest, limits: ModelLimits) -> tuple[int, ...]:
    """Returns the ids to turn into text."""
    most = min(limits.max_prompt_bytes, max(limits.context_length, MAX_DETOKENIZED_IDS))
    if len(request.token_ids) > most:
        raise invalid(FieldViolation("token_ids", f"has {len(request.token_ids)} ids; at most {most} are allowed"))
    ids = tuple(request.token_ids)
    outside = first_outside(ids, limits.vocabulary_size)
    if outside is not None:
        raise invalid(outside_violation(f"token_ids[{outside}]", ids[outside], limits.vocabulary_size))
    return ids


def _name_violations(request: inference_pb2.GenerateRequest) -> Violations:
    if request.request_id and not REQUEST_ID.fullmatch(request.request_id):
        yield FieldViolation("request_id", "must be 1 to 128 characters of [A-Za-z0-9._:-]")
    names = (
        ("model", request.model),
        ("adapter_id", request.adapter_id),
        ("tenant", request.tenant),
        ("session_id", request.session_id),
        ("cache.salt", request.cache.salt),
    )
    for field, value in names:
        if len(value) > MAX_NAME_CHARACTERS:
            yield FieldViolation(field, f"has {len(value)} characters; at most {MAX_NAME_CHARACTERS} are allowed")
    # The tenant becomes part of keys, where a control character could pass for the end of it.
    if not request.tenant.isprintable():
        yield FieldViolation("tenant", "must be printable characters")


def _prompt_violations(request: inference_pb2.GenerateRequest, limits: ModelLimits) -> Violations:
    match request.WhichOneof("prompt"):
        case "text":
            yield from _empty_violations("text", not request.text)
            yield from _size_violations("text", len(request.text.encode()), limits)
        case "text_bytes":
            yield from _empty_violations("text_bytes", not request.text_bytes)
            yield from _size_violations("text_bytes", len(request.text_bytes), limits)
            yield from _utf8_violations(request.text_bytes)
        case "token_ids":
            yield from _empty_violations("token_ids.ids", not request.token_ids.ids)
            yield from _count_violations("token_ids.ids", len(request.token_ids.ids), limits)
        case "chat":
            yield from _chat_prompt_violations(request.chat, limits)
        case _:
            yield FieldViolation("prompt", "is empty; exactly one of text, text_bytes, token_ids, chat is needed")


def _chat_prompt_violations(chat: inference_pb2.Chat, limits: ModelLimits) -> Violations:
    if not limits.has_chat_template:
        yield FieldViolation("chat", "the model has no chat template; send text or token_ids")
    too_large = tuple(_size_violations("chat", chat.ByteSize(), limits))
    yield from too_large or chat_violations(chat, "chat")


def _empty_violations(field: str, is_empty: bool) -> Violations:
    if is_empty:
        yield FieldViolation(field, "the prompt is empty; it needs at least one token")


def _size_violations(field: str, num_bytes: int, limits: ModelLimits) -> Violations:
    if num_bytes > limits.max_prompt_bytes:
        yield FieldViolation(field, f"has {num_bytes} bytes; at most {limits.max_prompt_bytes} are allowed")


def _count_violations(field: str, num_ids: int, limits: ModelLimits) -> Violations:
    """Returns a violation for more ids than the allowed text has bytes: no text has more tokens than bytes."""
    most = min(limits.max_prompt_bytes, MAX_TOKEN_IDS)
    if num_ids > most:
        yield FieldViolation(field, f"has {num_ids} ids; at most {most} are allowed")


def _utf8_violations(text: bytes) -> Violations:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        yield FieldViolation("text_bytes", f"is not UTF-8: {error.reason} at byte {error.start}")


def _prior_output_violations(request: inference_pb2.GenerateRequest, limits: ModelLimits) -> Violations:
    prior_ids = request.prior_output.output_ids
    if too_many := tuple(_count_violations("prior_output.output_ids", len(prior_ids), limits)):
        yield from too_many
        return
    outside = first_outside(prior_ids, limits.vocabulary_size)
    if outside is not None:
        field = f"prior_output.output_ids[{outside}]"
        yield outside_violation(field, prior_ids[outside], limits.vocabulary_size)


def sampling_violations(sampling: types_pb2.SamplingParams, vocabulary_size: int) -> Violations:
    """Yields what is wrong with the parameters of a request, or with a model's defaults."""
    for parameter in SAMPLING_NUMBERS:
        value = getattr(sampling, parameter.name)
        if sampling.HasField(parameter.name) and not parameter.allows(value):
            shown = f"{value:g}" if isinstance(value, float) else f"{value}"
            yield FieldViolation(parameter.field, f"is {shown}; must be {parameter.rule}")
    yield from _bias_violations(sampling, vocabulary_size)
    yield from _allowed_id_violations(sampling, vocabulary_size)
    yield from _bad_word_violations(sampling)
    yield from _bad_word_id_violations(sampling, vocabulary_size)


def _bias_violations(sampling: types_pb2.SamplingParams, vocabulary_size: int) -> Violations:
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        yield _too_many("sampling.logit_bias", len(sampling.logit_bias), "ids", MAX_LOGIT_BIASES)
        return
    for token_id, bias in sorted(sampling.logit_bias.items()):
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocabulary_size:
            yield outside_violation(field, token_id, vocabulary_size)
        elif not abs(bias) <= MAX_LOGIT_BIAS:
            rule = f"at least -{MAX_LOGIT_BIAS:g} and at most {MAX_LOGIT_BIAS:g}"
            yield FieldViolation(field, f"is {bias:g}; must be {rule}")


def _allowed_id_violations(sampling: types_pb2.SamplingParams, vocabulary_size: int) -> Violations:
    ids = sampling.allowed_token_ids
    if len(ids) > MAX_ALLOWED_TOKEN_IDS:
        yield _too_many("sampling.allowed_token_ids", len(ids), "ids", MAX_ALLOWED_TOKEN_IDS)
        return
    outside = first_outside(ids, vocabulary_size)
    if outside is not None:
        yield outside_violation(f"sampling.allowed_token_ids[{outside}]", ids[outside], vocabulary_size)


def _bad_word_violations(sampling: types_pb2.SamplingParams) -> Violations:
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        yield _too_many("sampling.bad_words", len(sampling.bad_words), "texts", MAX_BAD_WORDS)
        return
    for i, word in enumerate(sampling.bad_words):
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            text = f"has {len(word)} characters; must have 1 to {MAX_BAD_WORD_CHARACTERS}"
            yield FieldViolation(f"sampling.bad_words[{i}]", text)


def _bad_word_id_violations(sampling: types_pb2.SamplingParams, vocabulary_size: int) -> Violations:
    field, sequences = "sampling.bad_word_ids", sampling.bad_word_ids
    if len(sequences) > MAX_BAD_WORD_SEQUENCES:
        yield _too_many(field, len(sequences), "sequences", MAX_BAD_WORD_SEQUENCES)
        return
    num_ids = sum(len(sequence.ids) for sequence in sequences)
    if num_ids > MAX_BAD_WORD_IDS:
        yield _too_many(field, num_ids, "ids", MAX_BAD_WORD_IDS)
        return
    for i, sequence in enumerate(sequences):
        outside = first_outside(sequence.ids, vocabulary_size)
        if not sequence.ids:
            yield FieldViolation(f"{field}[{i}].ids", "is empty; a sequence needs at least one id")
        elif outside is not None:
            yield outside_violation(f"{field}[{i}].ids[{outside}]", sequence.ids[outside], vocabulary_size)


def _too_many(field: str, count: int, what: str, most: int) -> FieldViolation:
    return FieldViolation(field, f"has {count} {what}; at most {most} are allowed")


def stopping_violations(stopping: types_pb2.StoppingParams, vocabulary_size: int) -> Violations:
    """Yields what is wrong with the stopping parameters of a request."""
    if stopping.HasField("max_tokens"):
        if stopping.max_tokens == 0:
            yield FieldViolation("stopping.max_tokens", "is 0; must be at least 1")
        elif stopping.min_tokens > stopping.max_tokens:
            yield min_tokens_violation(stopping.min_tokens, stopping.max_tokens)
    if len(stopping.stop) > MAX_STOPS:
        yield FieldViolation("stopping.stop", f"has {len(stopping.stop)} texts; at most {MAX_STOPS} are allowed")
    for i, stop in enumerate(stopping.stop[:MAX_STOPS]):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            yield FieldViolation(
                f"stopping.stop[{i}]", f"has {len(stop)} characters; must have 1 to {MAX_STOP_CHARACTERS}"
            )
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation(
            "stopping.stop_token_ids",
            f"has {len(stopping.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed",
        )
    for i, token_id in enumerate(stopping.stop_token_ids[:MAX_STOP_TOKEN_IDS]):
        if token_id >= vocabulary_size:
            yield outside_violation(f"stopping.stop_token_ids[{i}]", token_id, vocabulary_size)


def _output_violations(output: inference_pb2.OutputOptions) -> Violations:
    for field in ("top_logprobs", "top_prompt_logprobs"):
        if not PARAMETERS[field].allows(count := getattr(output, field)):
            yield FieldViolation(f"output.{field}", f"is {count}; at most {MAX_TOP_LOGPROBS} are allowed")
    if output.HasField("stream_interval") and not PARAMETERS["stream_interval"].allows(output.stream_interval):
        text = f"is {output.stream_interval}; must be 1 to {MAX_STREAM_INTERVAL}"
        yield FieldViolation("output.stream_interval", text)
    if output.echo and output.HasField("text") and not output.text:
        yield FieldViolation("output.echo", "begins the text with the prompt, but output.text is false")


def _constraint_violations(request: inference_pb2.GenerateRequest) -> Violations:
    """Yields what is wrong with a constraint, as far as its size and shape show."""
    constraint = request.constraint
    kind = constraint.WhichOneof("kind")
    if not request.HasField("constraint"):
        return
    if kind is None:
        yield FieldViolation("constraint", f"is empty; exactly one of {', '.join(CONSTRAINT_KINDS)} is needed")
        return
    if constraint.max_whitespace > MAX_WHITESPACE:
        text = f"is {constraint.max_whitespace}; at most {MAX_WHITESPACE} is allowed"
        yield FieldViolation("constraint.max_whitespace", text)
    if constraint.HasField("max_whitespace") and not kind.startswith("json_"):
        yield FieldViolation("constraint.max_whitespace", f"has no effect on {kind}; it belongs to JSON")
    if kind == "json_object":
        if not constraint.json_object:
            yield FieldViolation("constraint.json_object", "is false; must be true, or not set")
    elif kind == "choice":
        yield from _choice_text_violations(constraint.choice)
    else:
        yield from _text_violations(f"constraint.{kind}", getattr(constraint, kind), kind)


def _choice_text_violations(choice: types_pb2.ChoiceList) -> Violations:
    if not 1 <= len(choice.choices) <= MAX_CHOICE_TEXTS:
        text = f"has {len(choice.choices)} texts; must have 1 to {MAX_CHOICE_TEXTS}"
        yield FieldViolation("constraint.choice.choices", text)
    elif sum(len(text.encode()) for text in choice.choices) > MAX_CONSTRAINT_BYTES:
        text = f"has more than {MAX_CONSTRAINT_BYTES} bytes in all its texts"
        yield FieldViolation("constraint.choice.choices", text)
    elif not all(choice.choices):
        yield FieldViolation("constraint.choice.choices", "has an empty text")


def _text_violations(field: str, text: str, kind: str) -> Violations:
    most, num_bytes = MAX_REGEX_BYTES if kind == "regex" else MAX_CONSTRAINT_BYTES, len(text.encode())
    if not 1 <= num_bytes <= most:
        yield FieldViolation(field, f"has {num_bytes} bytes; must have 1 to {most}")


def _tool_violations(request: inference_pb2.GenerateRequest) -> Violations:
    choice, functions = request.tool_choice, request.chat.functions
    if request.output.parts and request.WhichOneof("prompt") != "chat":
        yield FieldViolation("output.parts", "is allowed only with chat")
    if request.chat.HasField("thinking_token_budget") and not request.output.parts:
        yield FieldViolation("chat.thinking_token_budget", "is allowed only with output.parts")
    if request.output.parts and (request.output.echo or (request.output.HasField("text") and not request.output.text)):
        yield FieldViolation("output.parts", "needs output.text, and no output.echo")
    if choice.mode not in inference_pb2.ToolChoice.Mode.values():
        yield FieldViolation("tool_choice.mode", f"is {choice.mode}, which is not a mode")
    if choice.mode == inference_pb2.ToolChoice.MODE_REQUIRED and not functions:
        yield FieldViolation("tool_choice.mode", "is MODE_REQUIRED, but chat.functions is empty")
    if choice.names and choice.mode == inference_pb2.ToolChoice.MODE_NONE:
        yield FieldViolation("tool_choice.names", "has functions to call, but the mode is MODE_NONE")
    names = {function.name for function in functions}
    for i, name in enumerate(choice.names):
        if name not in names:
            text = f"is {name[:64]!r}, which is not among the names in chat.functions"
            yield FieldViolation(f"tool_choice.names[{i}]", text)
    may_call = functions and choice.mode != inference_pb2.ToolChoice.MODE_NONE
    if may_call and request.HasField("constraint"):
        text = "is given together with functions that the model may call; set tool_choice.mode to MODE_NONE"
        yield FieldViolation("constraint", text)


def _choice_violations(request: inference_pb2.GenerateRequest) -> Violations:
    num_sent = request.n or 1
    num_choices = request.best_of or num_sent
    for field, count in (("n", request.n), ("best_of", request.best_of)):
        if count > MAX_CHOICES:
            yield FieldViolation(field, f"is {count}; at most {MAX_CHOICES} are allowed")
    if num_choices < num_sent:
        yield FieldViolation("best_of", f"is {num_choices}; must be at least n, which is {num_sent}")
    elif num_choices > 1 and request.prior_output.output_ids:
        yield FieldViolation("prior_output", "continues a single choice; n and best_of must be 1 with it")


def _service_violations(request: inference_pb2.GenerateRequest) -> Violations:
    if request.priority not in types_pb2.PriorityClass.values():
        allowed = ", ".join(types_pb2.PriorityClass.keys())
        yield FieldViolation("priority", f"is {request.priority}; must be one of {allowed}")
    target_ms = request.inter_token_target_ms
    if request.HasField("inter_token_target_ms") and not PARAMETERS["inter_token_target_ms"].allows(target_ms):
        yield FieldViolation("inter_token_target_ms", f"is {target_ms}; must be 1 to {MAX_INTER_TOKEN_TARGET_MS}")
    if not PARAMETERS["max_drafts"].allows(request.max_drafts):
        yield FieldViolation("max_drafts", f"is {request.max_drafts}; must be at most {MAX_DRAFTS}")
    for name in ("first_token", "total"):
        deadline_s = _deadline_s(request.deadlines, name)
        if deadline_s is not None and not PARAMETERS["deadline_s"].allows(deadline_s):
            yield FieldViolation(
                f"deadlines.{name}", f"is {deadline_s:g} s; must be above 0 and at most {MAX_DEADLINE_S} s"
            )


def _resuming_violations(request: inference_pb2.GenerateRequest) -> Violations:
    key = request.idempotency_key
    if len(key) > MAX_IDEMPOTENCY_KEY_CHARACTERS:
        allowed = f"at most {MAX_IDEMPOTENCY_KEY_CHARACTERS} are allowed"
        yield FieldViolation("idempotency_key", f"has {len(key)} characters; {allowed}")
    if key and request.request_id:
        yield FieldViolation("request_id", "must be empty with an idempotency_key, which the id follows from")
    if request.HasField("resume_ttl") and not PARAMETERS["resume_ttl_s"].allows(seconds_of(request.resume_ttl)):
        yield FieldViolation("resume_ttl", f"must be at least 0 and at most {MAX_DEADLINE_S} s")


def _metadata_violations(request: inference_pb2.GenerateRequest) -> Violations:
    if len(request.metadata) > MAX_METADATA_PAIRS:
        yield FieldViolation("metadata", f"has {len(request.metadata)} pairs; at most {MAX_METADATA_PAIRS} are allowed")
        return
    for key, value in sorted(request.metadata.items()):
        if not 1 <= len(key) <= MAX_METADATA_KEY_CHARACTERS:
            yield FieldViolation(
                "metadata", f"has a key of {len(key)} characters; must have 1 to {MAX_METADATA_KEY_CHARACTERS}"
            )
        elif len(value) > MAX_METADATA_VALUE_CHARACTERS:
            yield FieldViolation(
                f"metadata[{key}]",
                f"has {len(value)} characters; at most {MAX_METADATA_VALUE_CHARACTERS} are allowed",
            )


def refuse_unsupported(request: inference_pb2.GenerateRequest) -> None:
    """Raises `RequestError` naming every field that asks for an unsupported function."""
    asked = {
        "sampling.typical_p": request.sampling.HasField("typical_p") and request.sampling.typical_p != 1,
        "output.coalesce_ms": request.output.coalesce_ms > 0,
    }
    refusals = [not_implemented(path, UNBUILT[path]) for path, is_asked in asked.items() if is_asked]
    if refusals:
        text = "; ".join(refusal.description for refusal in refusals)
        violations = tuple(violation for refusal in refusals for violation in refusal.violations)
        raise RequestError(Reason.NOT_IMPLEMENTED, text, violations)


def _deadline_s(deadlines: inference_pb2.Deadlines, name: str) -> float | None:
    if not deadlines.HasField(name):
        return None
    return seconds_of(getattr(deadlines, name))


def seconds_of(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def min_tokens_violation(min_tokens: int, max_tokens: int) -> FieldViolation:
    """Makes the violation for more `min_tokens` than `max_tokens`."""
    return FieldViolation("stopping.min_tokens", f"is {min_tokens}; must be at most max_tokens, which is {max_tokens}")


def first_outside(ids: Sequence[int], vocabulary_size: int) -> int | None:
    """Returns the index of the first id that the model does not have."""
    if max(ids, default=0) < vocabulary_size:
        return None
    return next(i for i, token_id in enumerate(ids) if token_id >= vocabulary_size)


def outside_violation(field: str, token_id: int, vocabulary_size: int) -> FieldViolation:
    """Makes the violation for an id that the model does not have."""
    return FieldViolation(
        field,
        f"token id {token_id} is outside the model's vocabulary of {vocabulary_size} ids (0 to {vocabulary_size - 1})",
    )
