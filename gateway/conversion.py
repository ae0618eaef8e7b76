"""Conversion of a client's body to requests to the router: one `GenerateRequest` for each prompt. Pure.

Choice `prompt * n + k` is the k-th of a prompt, as in OpenAI's numbering.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from inflight.common.parameters import SAMPLING_NUMBERS
from inflight.common.rpc.json_counts import nests_deeper
from inflight.functions.wire import function_of, set_tool_choice
from inflight.gateway.bodies import ChatBody, Common, CompletionBody, Message
from inflight.gateway.errors import refused
from inflight.gateway.settings import GatewaySettings
from inflight.requests import PRIORITIES, Priority
from inflight.v1 import inference_pb2, types_pb2

# Tokens per event of an answer that is sent as a whole: fewer events cost gateway and router less.
UNSTREAMED_INTERVAL = 16
# OpenAI's default for completions. A chat without a limit may use the rest of the model's context.
DEFAULT_COMPLETION_TOKENS = 16
UINT64 = 2**64
# Levels of objects and lists in template variables. Protobuf reads messages of 100 levels, and an object takes three.
MAX_VARIABLES_NESTING = 30
MAX_KEY_CHARACTERS = 100

ReasoningField = Literal["reasoning_content", "reasoning"]
# DeepSeek's name; the other one is that of newer versions of vLLM.
DEFAULT_REASONING_FIELDS: tuple[ReasoningField, ...] = ("reasoning_content",)

_TIERS: Mapping[str | None, Priority] = {"priority": "interactive", "flex": "batch"}


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values for parameters that a body lacks, and the most choices that it may request."""

    max_choices: int
    priority: Priority | None = None
    resume_ttl_s: float = 0.0
    reasoning_fields: tuple[ReasoningField, ...] = DEFAULT_REASONING_FIELDS


def defaults_of(settings: GatewaySettings) -> Defaults:
    """Returns the defaults that the operator has set."""
    return Defaults(
        settings.max_choices, settings.default_priority, settings.default_resume_ttl_s, settings.reasoning_fields
    )


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """One request to this API: its requests to the router, of `n` choices each, and the form of the answer. `renamed`
    maps fields of the router to parameters of this API, for errors.

    `num_top` is the number of likeliest tokens per position; None: no log probabilities. `num_prompt_top` is the same
    for vLLM's `prompt_logprobs`. With `echoes` the answer begins with the prompt. With `drops_output` it has only the
    prompt: the one token that the router generates at least is dropped. `reasoning_fields` are the fields of messages
    with reasoning. `num_joined` messages after the first one are part of it. With `includes_resources` the usage says
    what the request used of executors.
    """

    kind: Literal["chat", "completion"]
    model: str
    requests: tuple[inference_pb2.GenerateRequest, ...]
    n: int
    is_stream: bool
    include_usage: bool
    num_top: int | None = None
    includes_running_usage: bool = False
    renamed: dict[str, str] = field(default_factory=dict)
    num_prompt_top: int | None = None
    echoes: bool = False
    drops_output: bool = False
    reasoning_fields: tuple[ReasoningField, ...] = DEFAULT_REASONING_FIELDS
    num_joined: int = 0
    includes_resources: bool = False

    @property
    def scores_prompts(self) -> bool:
        """Whether the answer has log probabilities of prompts."""
        return self.num_prompt_top is not None or (self.echoes and self.num_top is not None)

    @property
    def num_choices(self) -> int:
        """The choices of the answer."""
        return len(self.requests) * self.n

    @property
    def prompt_param(self) -> str:
        """The parameter with the prompt."""
        return "messages" if self.kind == "chat" else "prompt"


def convert_chat(body: ChatBody, defaults: Defaults, key: str) -> ApiRequest:
    """Converts a chat. `key` is the idempotency key, or empty. Raises `ApiError`."""
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise refused("max_completion_tokens", "differs from max_tokens, its older name; give one of them")
    max_tokens = both[0] if both[1] is None else both[1]
    request = _request(body, defaults, max_tokens)
    if body.logprobs:
        _set_logprobs(request, body.top_logprobs or 0)
    num_leading = _num_leading(body.messages)
    request.chat.messages.extend(_joined([_message(message) for message in body.messages], num_leading))
    _set_tools(request, body)
    if body.chat_template_kwargs:
        _set_template_variables(request, body.chat_template_kwargs)
    request.session_id = body.prompt_cache_key or ""
    if body.priority is None and (tier := _TIERS.get(body.service_tier)):
        request.priority = PRIORITIES[tier]
    if body.safety_identifier:
        request.metadata["user"] = body.safety_identifier
    renamed = {} if body.max_completion_tokens is None else {"max_tokens": "max_completion_tokens"}
    api_request = _api_request("chat", body, [request], defaults, key, renamed)
    num_joined = max(num_leading - 1, 0)
    return replace(api_request, reasoning_fields=defaults.reasoning_fields, num_joined=num_joined)


def convert_completion(body: CompletionBody, defaults: Defaults, key: str) -> ApiRequest:
    """Converts a completion. `key` is the idempotency key, or empty. Raises `ApiError`."""
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    drops_output = bool(body.echo) and max_tokens == 0
    if drops_output:
        max_tokens = 1
    prompts = _prompts(body.prompt)
    n, best_of = body.n or 1, body.best_of or 0
    if best_of and best_of < n:
        raise refused("best_of", f"is {best_of}; must be at least n, which is {n}")
    if best_of > n and body.stream:
        raise refused("best_of", "is allowed only without stream, unless it equals n")
    # Checked before each prompt becomes a request.
    _check_count(len(prompts) * max(n, best_of), defaults)
    requests = []
    for prompt in prompts:
        request = _request(body, defaults, max_tokens)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        if body.logprobs is not None:
            _set_logprobs(request, body.logprobs)
        if best_of > n:
            request.best_of = best_of
        if body.echo:
            request.output.echo = True
            _score(request, body.logprobs)
        requests.append(request)
    api_request = _api_request("completion", body, requests, defaults, key, {})
    return replace(api_request, echoes=bool(body.echo), drops_output=drops_output)


def _api_request(
    kind: Literal["chat", "completion"],
    body: Common,
    requests: list[inference_pb2.GenerateRequest],
    defaults: Defaults,
    key: str,
    renamed: dict[str, str],
) -> ApiRequest:
    n = body.n or 1
    _check_count(len(requests) * n, defaults)
    if len(key) > MAX_KEY_CHARACTERS:
        raise refused("Idempotency-Key", f"has {len(key)} characters; at most {MAX_KEY_CHARACTERS} are allowed")
    for number, request in enumerate(requests):
        if n > 1:
            request.n = n
        if key:
            request.idempotency_key = f"{key}:{number}" if number else key
    options = body.stream_options
    include_usage = options is not None and options.include_usage
    is_running = options is not None and options.continuous_usage_stats
    output = requests[0].output
    num_top = output.top_logprobs if output.logprobs else None
    renamed |= _constraint_names(body)
    form = (n, bool(body.stream), include_usage, num_top, is_running, renamed, body.prompt_logprobs)
    return ApiRequest(kind, body.model, tuple(requests), *form, includes_resources=bool(body.include_resources))


def _check_count(num_choices: int, defaults: Defaults) -> None:
    if num_choices > defaults.max_choices:
        text = f"prompts times n are {num_choices} choices; at most {defaults.max_choices} are allowed"
        raise refused("n", text)


def _request(body: Common, defaults: Defaults, max_tokens: int | None) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(model=body.model, want_queue_events=bool(body.stream))
    _set_sampling(request.sampling, body)
    _set_stopping(request.stopping, body, max_tokens)
    _set_constraint(request, body)
    priority = priority_class(body.priority) or defaults.priority
    if priority is not None:
        request.priority = PRIORITIES[priority]
    if body.inter_token_target_ms is not None:
        request.inter_token_target_ms = body.inter_token_target_ms
    if body.max_drafts is not None:
        request.max_drafts = body.max_drafts
    request.exact_resume = bool(body.exact_resume)
    request.truncate_prompt_tokens = body.truncate_prompt_tokens or 0
    ttl_s = defaults.resume_ttl_s if body.resume_ttl_s is None else body.resume_ttl_s
    if body.stream and ttl_s:
        request.resume_ttl.FromNanoseconds(round(ttl_s * 1e9))
    elif body.resume_ttl_s:
        raise refused("resume_ttl_s", "is allowed only with stream")
    if body.stream_interval is not None or not body.stream:
        request.output.stream_interval = body.stream_interval or UNSTREAMED_INTERVAL
    request.output.resources = bool(body.include_resources)
    request.metadata.update(body.metadata or {})
    if body.user:
        request.metadata["user"] = body.user
    _score(request, body.prompt_logprobs)
    return request


def _set_sampling(sampling: types_pb2.SamplingParams, body: Common) -> None:
    for parameter in SAMPLING_NUMBERS:
        value = getattr(body, parameter.name)
        if value is not None:
            setattr(sampling, parameter.name, value)
    if body.top_k == -1:  # vLLM's value for all tokens
        sampling.top_k = 0
    if body.top_p == 0:  # as OpenAI defines it: the likeliest token alone
        sampling.ClearField("top_p")
        sampling.top_k = 1
    if body.seed is not None:
        sampling.seed = body.seed % UINT64
    for token_id, bias in (body.logit_bias or {}).items():
        sampling.logit_bias[int(token_id)] = bias
    sampling.bad_words.extend(body.bad_words or [])
    sampling.allowed_token_ids.extend(body.allowed_token_ids or [])


def _set_stopping(stopping: types_pb2.StoppingParams, body: Common, max_tokens: int | None) -> None:
    if max_tokens is not None:
        stopping.max_tokens = max_tokens
    if body.min_tokens is not None:
        stopping.min_tokens = body.min_tokens
    stopping.stop.extend([body.stop] if isinstance(body.stop, str) else body.stop or [])
    stopping.stop_token_ids.extend(body.stop_token_ids or [])
    stopping.ignore_eos = bool(body.ignore_eos)
    stopping.include_stop = bool(body.include_stop_str_in_output)


@dataclass(frozen=True, slots=True)
class _Form:
    """A form that the output must have: the parameter that names it, the protocol's field, and its value."""

    param: str
    field: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    value: Any


def _forms(body: Common) -> Iterator[_Form]:
    """Yields every form that a body requests."""
    if body.response_format is not None and body.response_format.json_schema is not None:
        yield _Form("response_format.json_schema.schema", "json_schema", body.response_format.json_schema.schema_)
    elif body.response_format is not None and body.response_format.type == "json_object":
        yield _Form("response_format", "json_object", True)
    asked = body.structured_outputs
    forms = (
        _Form("structured_outputs.json", "json_schema", asked and asked.json_),
        _Form("structured_outputs.json_object", "json_object", (asked and asked.json_object) or None),
        _Form("structured_outputs.regex", "regex", asked and asked.regex),
        _Form("structured_outputs.choice", "choice", asked and asked.choice),
        _Form("structured_outputs.grammar", "grammar", asked and asked.grammar),
        _Form("guided_json", "json_schema", body.guided_json),
        _Form("guided_regex", "regex", body.guided_regex),
        _Form("guided_choice", "choice", body.guided_choice),
        _Form("guided_grammar", "grammar", body.guided_grammar),
    )
    yield from (form for form in forms if form.value is not None)


def _set_constraint(request: inference_pb2.GenerateRequest, body: Common) -> None:
    forms = list(_forms(body))
    if not forms:
        return
    if len(forms) > 1:
        raise refused(forms[1].param, f"is given together with {forms[0].param}; give one of them")
    form, constraint = forms[0], request.constraint
    if form.field == "choice":
        constraint.choice.choices.extend(form.value)
        constraint.choice.SetInParent()
    elif form.field == "json_schema" and not isinstance(form.value, str):
        constraint.json_schema = json.dumps(form.value)
    else:
        setattr(constraint, form.field, form.value)
    if form.field.startswith("json_") and body.structured_outputs and body.structured_outputs.disable_any_whitespace:
        constraint.max_whitespace = 0


def _constraint_names(body: Common) -> dict[str, str]:
    """Returns what this API calls the fields of a constraint."""
    names: dict[str, str] = {}
    for form in _forms(body):
        names[f"constraint.{form.field}"] = form.param
        names["constraint"] = form.param
        if form.field == "choice":
            names["constraint.choice.choices"] = form.param
    return names


def _set_logprobs(request: inference_pb2.GenerateRequest, num_top: int) -> None:
    request.output.logprobs = True
    request.output.top_logprobs = num_top


def _score(request: inference_pb2.GenerateRequest, num_top: int | None) -> None:
    """Requests log probabilities of the prompt, with at least so many of the likeliest tokens; None requests none."""
    if num_top is not None:
        request.output.prompt_logprobs = True
        request.output.top_prompt_logprobs = max(request.output.top_prompt_logprobs, num_top)


def priority_class(asked: Literal["interactive", "standard", "batch"] | int | None) -> Priority | None:
    """Returns a class for a class or for vLLM's number, of which a lower one is served earlier and 0 is the default."""
    if not isinstance(asked, int):
        return asked
    return "interactive" if asked < 0 else "batch" if asked > 0 else None


def _num_leading(messages: list[Message]) -> int:
    """Returns the number of messages before the first one that is not of the system."""
    is_other = (one.role not in ("system", "developer") or bool(one.name) for one in messages)
    return next((number for number, other in enumerate(is_other) if other), len(messages))


def _joined(messages: list[inference_pb2.ChatMessage], num_leading: int) -> list[inference_pb2.ChatMessage]:
    """Returns the messages with the leading ones as one: many templates take only one message of the system."""
    if num_leading < 2:
        return messages
    text = "\n\n".join(part.text for one in messages[:num_leading] for part in one.content)
    first = inference_pb2.ChatMessage(role="system", content=[inference_pb2.ContentPart(text=text)])
    return [first, *messages[num_leading:]]


def _message(message: Message) -> inference_pb2.ChatMessage:
    # Chat templates do not know the role developer, OpenAI's replacement for system.
    role = "system" if message.role == "developer" else message.role
    text = message.content
    if not isinstance(text, str):
        # As vLLM joins the parts for chat templates that take a text.
        text = "\n".join(part.text for part in text or ())
    return inference_pb2.ChatMessage(
        role=role,
        content=[inference_pb2.ContentPart(text=text)] if message.content else (),
        name=message.name or "",
        tool_calls=[
            inference_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ],
        tool_call_id=message.tool_call_id or "",
        reasoning=message.reasoning_content or message.reasoning or "",
    )


def _set_tools(request: inference_pb2.GenerateRequest, body: ChatBody) -> None:
    """Sets the tools, the choice among them, and that the answer comes in parts."""
    request.output.parts = True
    request.chat.reasoning_effort = body.reasoning_effort or ""
    if body.thinking_token_budget is not None:
        request.chat.thinking_token_budget = body.thinking_token_budget
    for tool in body.tools or ():
        request.chat.functions.append(function_of(tool.model_dump()))
    if body.tools and body.tool_choice is not None:
        choice = body.tool_choice
        set_tool_choice(request.tool_choice, choice if isinstance(choice, str) else choice.model_dump())
    if body.tools and body.parallel_tool_calls is not None and not request.tool_choice.HasField("parallel"):
        request.tool_choice.parallel = body.parallel_tool_calls


def _set_template_variables(request: inference_pb2.GenerateRequest, variables: dict[str, Any]) -> None:
    if nests_deeper(json.dumps(variables).encode(), MAX_VARIABLES_NESTING):
        raise refused("chat_template_kwargs", f"is nested more than {MAX_VARIABLES_NESTING} levels deep")
    try:
        request.chat.template_kwargs.update(variables)
    except (ValueError, OverflowError, TypeError) as error:
        raise refused("chat_template_kwargs", f"cannot be passed on: {error}") from None


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
