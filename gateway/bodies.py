"""Request bodies as pydantic models: every known parameter and its allowed values.

An unlisted parameter is refused by name, never ignored. Of OpenAI's parameters that this system does not implement,
only the value that has no effect is accepted. This module does not depend on the router.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, from_json

from inflight.common.parameters import MAX_STREAM_INTERVAL
from inflight.common.protocol import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_DRAFTS,
    MAX_INTER_TOKEN_TARGET_MS,
    MAX_TOP_LOGPROBS,
)
from inflight.common.rpc.json_counts import has_more_values, nests_deeper
from inflight.gateway.errors import ApiError, refused, unsupported

MAX_UINT32 = 2**32 - 1
MAX_UINT32_DIGITS = len(str(MAX_UINT32))
MAX_INT32 = 2**31 - 1

# Of all lists and objects of a body together, without lists of token ids that have limits of their own: parsing a body
# blocks all streams.
MAX_VALUES = 2**14
# Levels of objects and lists in a body: those of a schema and of what holds it. The parser stops at 201.
MAX_BODY_NESTING = 200
ID_LISTS = frozenset({"prompt", "tokens", "allowed_token_ids"})
# Of all lists of a prompt together; more than any model's context.
MAX_PROMPT_VALUES = 2**20


def _whole(value: Any) -> Any:
    """Returns an integer for a number such as 4.0, as some JSON encoders write 4."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_ids(values: Any) -> Any:
    """Returns a list with its numbers such as 4.0 as integers. Most lists have none, and they can be long."""
    return list(map(_whole, values)) if isinstance(values, list) and float in set(map(type, values)) else values


Integer = Annotated[int, BeforeValidator(_whole)]
Tokens = Annotated[Integer, Field(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, le=MAX_UINT32)]], BeforeValidator(_whole_ids)]
PriorityNumber = Annotated[Integer, Field(ge=-(2**31), le=MAX_INT32)]
Number = Annotated[float, Field(ge=-1e30, le=1e30)]


def _finite(value: Any) -> Any:
    """Returns a value with the largest double in place of infinity, as which a larger number is parsed."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    if isinstance(value, float) and math.isinf(value):
        return math.copysign(sys.float_info.max, value)
    return value


# The JSON schema of a function's arguments.
Parameters = Annotated[dict[str, Any], AfterValidator(_finite)]
Text = Annotated[str, Field(max_length=1024)]


class Body(BaseModel):
    """An object of a body. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


# What clients add to an answer for themselves: values that they parsed, and the place of a call in a stream.
ADDED_BY_CLIENTS = frozenset({"parsed", "parsed_arguments", "index", "provider_specific_fields"})


class EarlierBody(Body):
    """An object of an earlier answer, which clients send back as they hold it: unknown fields that are null, and what
    clients add, are ignored."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_added(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        left_out = {name for name, one in value.items() if one is None or name in ADDED_BY_CLIENTS}
        return {name: one for name, one in value.items() if name in cls.model_fields or name not in left_out}


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool = False


class JsonSchemaFormat(Body):
    """OpenAI's form of a JSON schema. It is always enforced, as if `strict` were true."""

    name: Text
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema: is required with the type json_schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError("json_schema: is allowed only with the type json_schema")
        return self


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`."""

    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None  # there is no other backend to fall back to
    whitespace_pattern: Any = None

    @model_validator(mode="after")
    def _check_kinds(self) -> StructuredOutputs:
        if self.whitespace_pattern is not None:
            raise ValueError(
                "whitespace_pattern: is not supported; whitespace is at most 8 characters, or none with "
                "disable_any_whitespace"
            )
        kinds = (self.json_, self.regex, self.choice, self.grammar, self.json_object or None)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError("needs exactly one of json, regex, choice, grammar, json_object")
        return self


class Common(Body):
    """Parameters of both kinds of request. Extensions of this project and of vLLM are at the end."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_INT32)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    seed: Annotated[Integer, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: str | list[str] | None = None
    max_tokens: Tokens | None = None
    user: Text | None = None
    metadata: Annotated[dict[str, Text], Field(max_length=16)] | None = None
    top_k: Annotated[Integer, Field(ge=-1, le=MAX_INT32)] | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    no_repeat_ngram_size: Tokens | None = None
    bad_words: list[Text] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    min_tokens: Tokens | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[Integer, Field(ge=1, le=MAX_INT32)] | None = None
    prompt_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream_interval: Annotated[Integer, Field(ge=1, le=MAX_STREAM_INTERVAL)] | None = None
    priority: Literal["interactive", "standard", "batch"] | PriorityNumber | None = None
    inter_token_target_ms: Annotated[Integer, Field(ge=1, le=MAX_INTER_TOKEN_TARGET_MS)] | None = None
    max_drafts: Annotated[Integer, Field(ge=0, le=MAX_DRAFTS)] | None = None
    exact_resume: bool | None = None
    resume_ttl_s: Annotated[float, Field(ge=0, le=3600)] | None = None
    include_resources: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Common:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is allowed only with stream")
        options = self.stream_options
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise ValueError("stream_options.continuous_usage_stats: is allowed only with include_usage")
        if self.include_resources and self.stream and (options is None or not options.include_usage):
            raise ValueError("include_resources: is allowed with stream only with stream_options.include_usage")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: is allowed only without stream")
        if self.stream_interval is not None and not self.stream:
            raise ValueError("stream_interval: is allowed only with stream")
        return self

    @field_validator("logit_bias")
    @classmethod
    def _check_token_ids(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for token_id in biases or ():
            is_number = token_id.isascii() and token_id.isdigit() and len(token_id) <= MAX_UINT32_DIGITS
            if not (is_number and int(token_id) <= MAX_UINT32):
                raise ValueError(f"{token_id[:20]!r} is not a token id")
        return biases


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(EarlierBody):
    """The function and arguments of a tool call."""

    name: str
    arguments: str


class MessageToolCall(EarlierBody):
    """A tool call in an earlier message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionTool(Body):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Body):
    """OpenAI's form of a tool."""

    type: Literal["function"]
    function: FunctionTool


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """A function in `tool_choice`."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """Functions in `tool_choice`, of which the model may or must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


class AllowedToolChoice(Body):
    """OpenAI's choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class UnknownChoice(Body):
    """A choice that is refused for its type, or because it is no object."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function", "allowed_tools"]


def choice_tag(choice: Any) -> str:
    """Returns the tag of the alternative that the type of `tool_choice` names. The brackets tell it from the names of
    parameters in the place of an error."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    return f"[{kind}]" if kind in ("function", "allowed_tools") else "[unknown]"


ToolChoiceMode = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[NamedTool, Tag("[function]")]
    | Annotated[AllowedToolChoice, Tag("[allowed_tools]")]
    | Annotated[UnknownChoice, Tag("[unknown]")],
    Discriminator(choice_tag),
]


class Message(EarlierBody):
    """One message. Other fields of openai-python's answers are accepted if they are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatBody(Common):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    max_completion_tokens: Tokens | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceMode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Text | None = None
    thinking_token_budget: Annotated[Integer, Field(ge=-1, le=MAX_INT32)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: is allowed only with logprobs")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> ChatBody:
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ValueError("tool_choice: is allowed only with tools")
        called: set[str] = set()
        for number, message in enumerate(self.messages):
            called.update(call.id for call in message.tool_calls or ())
            if message.role == "tool" and message.tool_call_id not in called:
                raise ValueError(f"messages[{number}].tool_call_id: is not the id of a call in an earlier message")
        return self


class CompletionBody(Common):
    """`POST /v1/completions`. The prompt is text, texts, token ids, or lists of token ids."""

    prompt: str | list[Any]
    logprobs: Annotated[Integer, Field(ge=0, le=5)] | None = None
    best_of: Annotated[Integer, Field(ge=1, le=MAX_INT32)] | None = None
    echo: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> str | list[Any]:
        if isinstance(prompt, list):
            _check_num_prompt_values(prompt)
            ids: list[Any] = _whole_ids(prompt)
            if ids and (_are(ids, str) or _are_token_ids(ids)):
                return ids
            ids = list(map(_whole_ids, prompt))
            if ids and all(isinstance(one, list) and one and _are_token_ids(one) for one in ids):
                return ids
        if isinstance(prompt, str):
            return prompt
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists; none empty")


def _check_num_prompt_values(prompt: list[Any]) -> None:
    num_values = len(prompt) + sum(len(one) for one in prompt[:MAX_VALUES] if isinstance(one, list))
    if num_values > MAX_PROMPT_VALUES:
        raise ValueError(f"has {num_values} values; at most {MAX_PROMPT_VALUES} are allowed")


# Parameters that this system does not implement, each with the values that have no effect, as null has none: vLLM's,
# then OpenAI's.
UNSUPPORTED_OF_VLLM: Mapping[str, tuple[Any, ...]] = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
UNSUPPORTED_IN_CHAT: Mapping[str, tuple[Any, ...]] = {
    **UNSUPPORTED_OF_VLLM,
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "store": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
UNSUPPORTED_IN_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    **UNSUPPORTED_OF_VLLM,
    "suffix": ("",),
}

Kind = TypeVar("Kind", bound=Body)


def parse_chat(raw: bytes) -> ChatBody:
    """Parses the body of a chat request. Raises `ApiError`."""
    return validated(ChatBody, read_fields(raw, UNSUPPORTED_IN_CHAT))


def parse_completion(raw: bytes) -> CompletionBody:
    """Parses the body of a completion request. Raises `ApiError`."""
    return validated(CompletionBody, read_fields(raw, UNSUPPORTED_IN_COMPLETIONS))


def read_fields(
    raw: bytes, unsupported_params: Mapping[str, tuple[Any, ...]], id_lists: Collection[str] = ID_LISTS
) -> dict[str, Any]:
    """Parses a body and removes parameters that are not implemented, if their value has no effect. Raises `ApiError`.
    Values of `id_lists` have limits of their own."""
    if not raw.strip():
        raise ApiError(400, "the body is empty; it must be a JSON object", code="invalid_json")
    # The time to parse depends on the number of values.
    if has_more_values(raw, MAX_VALUES, id_list_is_one=True):
        raise _too_many_values()
    if nests_deeper(raw, MAX_BODY_NESTING):
        raise ApiError(400, f"the body is nested more than {MAX_BODY_NESTING} levels deep", code="invalid_json")
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, _not_json(raw, error), code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    _check_num_values({name: value for name, value in body.items() if name not in id_lists})
    for name, neutral in unsupported_params.items():
        value = body.pop(name, None)
        if value is not None and value not in neutral:
            raise unsupported(name)
    return body


# Escapes in JSON, and byte order marks: of UTF-8, and of UTF-16 and UTF-32.
_ESCAPE = re.compile(r"\\(?:u(?P<code>[0-9a-fA-F]{4})|.)", re.DOTALL)
_UTF8_MARK = b"\xef\xbb\xbf"
_OTHER_MARKS = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


def _not_json(raw: bytes, error: ValueError) -> str:
    """Returns why a body is not JSON. The parser's own error does not name what clients do wrong with characters."""
    if raw.startswith(_UTF8_MARK):
        return "the body begins with a byte order mark; send it without"
    if raw.startswith(_OTHER_MARKS):
        return "the body begins with a byte order mark of UTF-16 or UTF-32; it must be UTF-8 without a mark"
    try:
        surrogate = _unpaired_surrogate(raw.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError as wrong:
        return f"the body is not UTF-8: byte {wrong.start} is 0x{raw[wrong.start]:02x}"
    if surrogate:
        return f"the body has the unpaired surrogate {surrogate}, which is half a character; send the whole character"
    return f"the body is not JSON: {error}"


def _unpaired_surrogate(text: str) -> str:
    """Returns the first unpaired surrogate of a text, also one in an escape, as an escape; empty if there is none."""
    high: re.Match[str] | None = None
    for found in _ESCAPE.finditer(text):
        code = int(found["code"] or "0", 16)
        is_pair = high is not None and high.end() == found.start() and 0xDC00 <= code < 0xE000
        if high is not None and not is_pair:
            return high[0]
        high = found if 0xD800 <= code < 0xDC00 else None
        if 0xDC00 <= code < 0xE000 and not is_pair:
            return found[0]
    raw = re.search(r"[\ud800-\udfff]", text)
    return high[0] if high is not None else "" if raw is None else f"\\u{ord(raw[0]):04x}"


def validated(kind: type[Kind], body: dict[str, Any]) -> Kind:
    """Checks a parsed body. Raises `ApiError`."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _explained(error, body) from None


def _check_num_values(body: dict[str, Any]) -> None:
    num_values = 0
    unread: list[Any] = [body]
    while unread:
        value = unread.pop()
        if isinstance(value, dict | list):
            num_values += len(value)
            if num_values > MAX_VALUES:
                raise _too_many_values()
            unread.extend(value.values() if isinstance(value, dict) else value)


def _too_many_values() -> ApiError:
    return ApiError(400, f"the body has more than {MAX_VALUES} values", code="request_too_large")


# Of values of another type than expected: what is expected.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "string_type": "a string",
}
_ELEMENTS = {"any": "", "int": " of integers", "str": " of strings"}
# The beginning of the text of a validator of a whole object: the parameter within it.
_PARAM = re.compile(r"(?P<param>[a-z_]+\d?(?:\[\d+\]|\.[a-z_]+)*): (?P<text>.*)", re.DOTALL)


def _explained(error: ValidationError, body: dict[str, Any]) -> ApiError:
    details = error.errors(include_url=False, include_input=False)
    places = [_place(detail, body) for detail in details]
    # Of the alternatives of one parameter, the one that matched furthest is reported.
    place = max(places, key=len)
    alternatives = [detail for detail, of_detail in zip(details, places, strict=True) if of_detail == place]
    # One that has the right type says more than those of other types.
    detail = next((one for one in alternatives if _expected(one) is None), alternatives[0])
    param = _path(place)
    match detail["type"]:
        case "extra_forbidden":
            return refused(param, "is not a known parameter", "unknown_parameter")
        case "missing":
            return refused(param, "is required", "missing_required_parameter")
        case "none_required":
            return unsupported(param)
        case "value_error":
            text = str(detail["ctx"]["error"])
            if (found := _PARAM.fullmatch(text)) is not None:
                param, text = f"{param}.{found['param']}" if param else found["param"], found["text"]
            return refused(param, text)
        case "literal_error" if param.endswith("].type"):
            return unsupported(param, f"must be {_expected(detail)}; others are not supported")
        case _ if _expected(detail) is not None:
            forms = dict.fromkeys(filter(None, map(_expected, alternatives)))
            return refused(param, f"must be {_one_of(list(forms))}")
        case _:
            # The names of Python's types mean nothing to a client.
            text = detail["msg"].replace("Input should be ", "must be ")
            text = re.sub(r" after validation|, not more$", "", text)
            return refused(param, re.sub(r"^(?:String|List|Dictionary) should", "must", text))


def _expected(detail: ErrorDetails) -> str | None:
    """Returns what a value of another type, or that is none of the allowed ones, must be; None for other errors."""
    kind, name = detail["type"], detail["loc"][-1] if detail["loc"] else ""
    if kind == "literal_error":
        return str(detail["ctx"]["expected"])
    # Pydantic's name of an alternative has the type of its elements.
    if kind == "list_type" and isinstance(name, str) and (found := re.fullmatch(r"list\[(.*)\]", name)):
        return "a list" + _ELEMENTS.get(found[1], " of objects")
    return _EXPECTED.get(kind)


def _one_of(forms: list[str]) -> str:
    """Returns the forms as a list in words."""
    if len(forms) == 1:
        return forms[0]
    comma = "," if any(" or " in form for form in forms) else ""
    return f"{', '.join(forms[:-1])}{comma} or {forms[-1]}"


def _place(detail: ErrorDetails, body: dict[str, Any]) -> tuple[str | int, ...]:
    """Returns where in the body an error is, without the names that pydantic gives alternatives."""
    place: list[str | int] = []
    value: Any = body
    for number, part in enumerate(detail["loc"]):
        is_last = number == len(detail["loc"]) - 1
        if isinstance(part, int):
            place.append(part)
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif isinstance(value, dict) and (part in value or (is_last and detail["type"] == "missing")):
            place.append(part)
            value = value.get(part)
    return tuple(place)


def _path(place: tuple[str | int, ...]) -> str:
    """Returns a path like `messages[0].content`."""
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part[:64]}" if path else part[:64]
    return path


def _are(values: list[Any], kind: type) -> bool:
    return all(type(value) is kind for value in values)


def _are_token_ids(values: list[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_UINT32
