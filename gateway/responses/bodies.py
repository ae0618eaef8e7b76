"""Bodies of `/v1/responses` as pydantic models, and their conversion to the body of a chat. Pure.

A response is a chat completion in another form. What both have in common is checked as a parameter of the chat. Errors
name the parameter of this API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator

from inflight.common.parameters import SAMPLING_NUMBERS
from inflight.common.protocol import MAX_TOP_LOGPROBS
from inflight.gateway.bodies import (
    Body,
    ChatBody,
    EarlierBody,
    Integer,
    Text,
    Tokens,
    ToolChoiceMode,
    read_fields,
    validated,
)
from inflight.gateway.errors import ApiError, refused, unsupported
from inflight.gateway.responses.tools import (
    Offered,
    Tool,
    ToolChoice,
    ToolChoiceAllowed,
    ToolChoiceNamed,
    name_in_chat,
    offered,
    unused_tools,
)

LOGPROBS = "message.output_text.logprobs"

# Parameters with the same name and meaning as in a chat, extensions included.
SAME_IN_CHATS = frozenset(
    {
        *(parameter.name for parameter in SAMPLING_NUMBERS),
        *("metadata", "user", "safety_identifier", "service_tier", "prompt_cache_key", "seed", "stop"),
        *("stop_token_ids", "min_tokens", "ignore_eos", "include_stop_str_in_output", "logit_bias"),
        *("bad_words", "allowed_token_ids", "truncate_prompt_tokens", "stream_interval", "priority"),
        *("structured_outputs", "chat_template_kwargs", "parallel_tool_calls"),
        *("thinking_token_budget", "max_drafts", "exact_resume", "include_resources"),
    }
)
# Parameters of a body without effect here.
HINTS = frozenset({"client_metadata", "context_management", "prompt_cache_options", "prompt_cache_retention"})
# OpenAI's parameters that this system does not implement, each with the values that have no effect.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background_options": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "truncation": ("disabled",),
}
# Parameters of a gateway without a store, each with the values that have no effect, and what the caller can do instead.
_NOT_STORED = "is not supported: responses are not stored"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), f"{_NOT_STORED}; a response is returned by its request"),
    "conversation": ((), f"{_NOT_STORED}; send the earlier items in input"),
    "previous_response_id": ((), f"{_NOT_STORED}; send the earlier items in input"),
    "store": ((False,), f"{_NOT_STORED}; leave it out or send false"),
}
# The same of one with a store.
REFUSED_WITH_STORE: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "conversation": ((), "is not supported; continue a response by previous_response_id"),
}
# Records of calls that OpenAI's servers ran, which no chat template has a place for.
ITEMS_WITHOUT_EFFECT = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "computer_call"),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("tool_search_call", "tool_search_output", "configuration_update"),
    }
)
ItemType = Literal[
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "reasoning",
    "additional_tools",
]
# Fields of items that say nothing to the model.
ITEM_HINTS = frozenset({"created_by", "end_turn", "internal_chat_message_metadata_passthrough", "metadata"})
_ENCRYPTED = "which only the server that made it can read; send the items that it stands for"
ITEM_TYPES: tuple[str, ...] = get_args(ItemType)


class InputText(EarlierBody):
    """A text in a message; `output_text` and `refusal` are those of an earlier response."""

    type: Literal["input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @model_validator(mode="after")
    def _check_text(self) -> InputText:
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise ValueError(f"{name}: is required with the type {self.type}")
        return self

    @property
    def said(self) -> str:
        """The text."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


class _Item(EarlierBody):
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_hints(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if name not in ITEM_HINTS}


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    phase: str | None = None


class FunctionCallItem(_Item):
    """A call that an earlier response made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None

    def of_chat(self) -> dict[str, Any]:
        """Returns it as a call of a chat's message."""
        return _call(self.call_id, name_in_chat(self.name, self.namespace), self.arguments)


class FunctionCallOutputItem(_Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


class CustomToolCallItem(_Item):
    """A call of a custom tool that an earlier response made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None

    def of_chat(self) -> dict[str, Any]:
        """Returns it as a call of a chat's message."""
        arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        return _call(self.call_id, name_in_chat(self.name, self.namespace), arguments)


class CustomToolCallOutputItem(_Item):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    name: str | None = None
    output: str | list[InputText]


class LocalShellCallItem(_Item):
    """A command that an earlier response called; `action` is its arguments."""

    type: Literal["local_shell_call"]
    call_id: str | None = None
    action: dict[str, Any]

    def of_chat(self) -> dict[str, Any]:
        """Returns it as a call of a chat's message."""
        arguments = json.dumps(self.action, ensure_ascii=False)
        return _call(self.call_id or self.id or "", "local_shell", arguments)


class LocalShellCallOutputItem(_Item):
    """The result of a command."""

    type: Literal["local_shell_call_output"]
    call_id: str | None = None
    output: str | list[InputText]


class AdditionalToolsItem(_Item):
    """Tools that the model may call from here on. They stand with the others in the prompt."""

    type: Literal["additional_tools"]
    role: str | None = None
    tools: list[Tool]


class OtherItem(Body):
    """An item without effect."""

    model_config = ConfigDict(extra="ignore")

    type: str


class ReasoningText(EarlierBody):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(_Item):
    """Reasoning of an earlier response, for chat templates that show it."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


CallItem = FunctionCallItem | CustomToolCallItem | LocalShellCallItem
CallOutputItem = FunctionCallOutputItem | CustomToolCallOutputItem | LocalShellCallOutputItem


class UnknownItem(Body):
    """An item that is refused for its type."""

    model_config = ConfigDict(extra="ignore")

    type: ItemType

    @model_validator(mode="before")
    @classmethod
    def _name_type(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str):
            reason = _ENCRYPTED if "compaction" in kind else "which is not a supported item"
            raise ValueError(f"type: is {kind[:64]!r}, {reason}")
        return value


def _tag(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind is None:
        return "[message]"
    if kind in ITEM_TYPES:
        return f"[{kind}]"
    return "[other]" if isinstance(kind, str) and kind in ITEMS_WITHOUT_EFFECT else "[unknown]"


# The brackets tell the alternatives from the names of parameters in the place of an error.
Item = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[FunctionCallOutputItem, Tag("[function_call_output]")]
    | Annotated[CustomToolCallItem, Tag("[custom_tool_call]")]
    | Annotated[CustomToolCallOutputItem, Tag("[custom_tool_call_output]")]
    | Annotated[LocalShellCallItem, Tag("[local_shell_call]")]
    | Annotated[LocalShellCallOutputItem, Tag("[local_shell_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[AdditionalToolsItem, Tag("[additional_tools]")]
    | Annotated[OtherItem, Tag("[other]")]
    | Annotated[UnknownItem, Tag("[unknown]")],
    Discriminator(_tag),
]


class ReasoningOptions(Body):
    """OpenAI's `reasoning`. Summaries are hints: the reasoning itself is returned."""

    effort: Text | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Body):
    """The form of the output. A schema is always enforced, as if `strict` were true."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> TextFormat:
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if self.type == "json_schema" and value is None:
                raise ValueError(f"{name}: is required with the type json_schema")
        if self.type != "json_schema" and self.schema_ is not None:
            raise ValueError("schema: is allowed only with the type json_schema")
        return self


class TextConfig(Body):
    """OpenAI's `text`. The verbosity is a hint."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class EarlierItems(Body):
    """Items of earlier responses."""

    items: list[Item]


class ResponsesBody(Body):
    """`POST /v1/responses`. `model_extra` are parameters of chats, and hints."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    text: TextConfig | None = None
    include: list[Text] | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceMode | ToolChoice | None = None
    reasoning: ReasoningOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    # Items of the responses that it continues, which come before its own. They are its `input` then, with these.
    _num_earlier: int = PrivateAttr(0)
    _own_is_text: bool = PrivateAttr(False)

    @property
    def stores(self) -> bool:
        """Whether the response is to be stored."""
        return bool(self.store or self.background)

    def after(self, items: list[dict[str, Any]]) -> ResponsesBody:
        """Returns the body with the items of earlier responses before its own. Raises `ApiError`."""
        own = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        earlier = validated(EarlierItems, {"items": items}).items
        body = self.model_copy(update={"input": [*earlier, *own]})
        body._num_earlier, body._own_is_text = len(earlier), isinstance(self.input, str)
        return body

    def item_name(self, number: int) -> str:
        """Returns the parameter that an item of the input came with."""
        if number < self._num_earlier:
            return "previous_response_id"
        return "input" if self._own_is_text else f"input[{number - self._num_earlier}]"

    @property
    def shared(self) -> dict[str, Any]:
        """The parameters that are those of a chat."""
        return {name: value for name, value in (self.model_extra or {}).items() if name in SAME_IN_CHATS}

    @cached_property
    def offered(self) -> list[Offered]:
        """The tools that the model may call, in the order of the chat's functions."""
        tools = list(offered(self.tools))
        for number, item in enumerate(() if isinstance(self.input, str) else self.input):
            if isinstance(item, AdditionalToolsItem):
                tools += offered(item.tools, f"{self.item_name(number)}.tools")
        return tools

    @property
    def unused(self) -> list[str]:
        """The hints, which have no effect."""
        names = [name for name in self.model_extra or {} if name in HINTS]
        names += [f"include[{number}]" for number, one in enumerate(self.include or ()) if one != LOGPROBS]
        if self.reasoning is not None:
            hints = ("summary", "generate_summary")
            names += [f"reasoning.{name}" for name in hints if getattr(self.reasoning, name) not in (None, "none")]
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            names.append("text.verbosity")
        names += unused_tools(self.tools)
        for number, item in enumerate(() if isinstance(self.input, str) else self.input):
            if number < self._num_earlier:
                continue
            if isinstance(item, OtherItem):
                names.append(self.item_name(number))
            elif isinstance(item, AdditionalToolsItem):
                names += unused_tools(item.tools, f"{self.item_name(number)}.tools")
        return names

    @property
    def text_format(self) -> TextFormat | None:
        """The form of the output, if one is requested."""
        return None if self.text is None else self.text.format

    @property
    def must_call(self) -> bool:
        """Whether the output is calls only."""
        choice = self.tool_choice
        is_all = choice == "required" or (isinstance(choice, ToolChoiceAllowed) and choice.mode == "required")
        return bool(self.offered) and (is_all or isinstance(choice, ToolChoiceNamed))

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log probabilities of the output's tokens are requested."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What this API calls the parameters of a chat. `of_messages` has a name for each message, `of_calls` one for each
    call of a message, `of_tools` one for each tool. What `have_no_role` is no message here, or only its text."""

    of_messages: tuple[str, ...]
    of_calls: tuple[tuple[str, ...], ...] = ()
    have_no_role: frozenset[int] = frozenset()
    of_tools: tuple[str, ...] = ()

    def restored(self, error: ApiError) -> ApiError:
        """Returns the error with the names of this API."""
        return replace(
            error,
            text=_CHAT_NAMES.sub(self._own_name, error.text),
            param=None if error.param is None else _CHAT_NAMES.sub(self._own_name, error.param),
        )

    def _own_name(self, found: re.Match[str]) -> str:
        if found["message"] and int(found["message"]) < len(self.of_messages):
            number = int(found["message"])
            if found["call"]:
                return self.of_calls[number][int(found["call"])]
            role = found["role"] or ""
            return self.of_messages[number] + ("" if number in self.have_no_role else role)
        if found["tool"]:
            number = int(found["tool"])
            own = self.of_tools[number] if number < len(self.of_tools) else f"tools[{number}]"
            return f"{own}.format.definition" if found["input"] else own
        return _OWN_NAMES["messages" if found[0].startswith("messages") else found[0]]


_OWN_NAMES = {
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    ".tool_call_id": ".call_id",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
# The word "messages" is a parameter only where the text about one begins.
_CHAT_NAMES = re.compile(
    r"(?:^|(?<=; ))messages(?:\[(?P<message>\d{1,9})\]"
    r"(?:\.tool_calls\[(?P<call>\d{1,9})\](?:\.function)?|(?P<role>\.role))?)?"
    r"|\b(?:max_completion_tokens|response_format(?:\.json_schema(?:\.schema)?)?|reasoning_effort)"
    r"|(?<=\])\.tool_call_id|\btools\[(?P<tool>\d{1,9})\]\.function(?P<input>\.input_(?:grammar|regex)\b)?"
)


def parse_responses(raw: bytes, *, has_store: bool = False) -> ResponsesBody:
    """Parses a body. Raises `ApiError`."""
    body = read_fields(raw, UNSUPPORTED)
    for name, (neutral, text) in (REFUSED_WITH_STORE if has_store else REFUSED).items():
        value = body.pop(name, None)
        if value is not None and value not in neutral:
            raise unsupported(name, text)
    parsed = validated(ResponsesBody, body)
    if parsed.background and parsed.store is False:
        raise refused("store", "must be true with background")
    for name in parsed.model_extra or {}:
        if name not in SAME_IN_CHATS | HINTS:
            raise refused(name[:64], "is not a known parameter", "unknown_parameter")
    return parsed


def chat_body(body: ResponsesBody) -> tuple[ChatBody, FieldNames]:
    """Returns the chat that a response is. Raises `ApiError`."""
    messages, names = _messages(body)
    names = replace(names, of_tools=tuple(tool.path for tool in body.offered))
    choice = body.tool_choice
    chat: dict[str, Any] = {
        **body.shared,
        "model": body.model,
        "messages": messages,
        "max_completion_tokens": body.max_output_tokens,
        # The form is that of a message. An output of calls only has none.
        "response_format": None if body.must_call else _response_format(body.text_format),
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs,
        "stream": body.stream,
        "stream_options": {"include_usage": True} if body.stream else None,
        "resume_ttl_s": 0.0,
        "tools": [tool.of_chat() for tool in body.offered] or None,
        "tool_choice": choice.of_chat() if isinstance(choice, ToolChoiceNamed | ToolChoiceAllowed) else choice,
        "reasoning_effort": body.reasoning and body.reasoning.effort,
    }
    try:
        return validated(ChatBody, chat), names
    except ApiError as error:
        raise names.restored(error) from None


def _response_format(asked: TextFormat | None) -> dict[str, Any] | None:
    if asked is None or asked.type != "json_schema":
        return None if asked is None else {"type": asked.type}
    schema = {"name": asked.name, "schema": asked.schema_, "strict": asked.strict, "description": asked.description}
    return {"type": "json_schema", "json_schema": schema}


def _messages(body: ResponsesBody) -> tuple[list[dict[str, Any]], FieldNames]:
    """Returns the messages of the chat and their names."""
    messages: list[dict[str, Any]] = []
    names: list[str] = []
    calls: list[tuple[str, ...]] = []
    have_no_role: set[int] = set()

    def add(message: dict[str, Any], name: str, *, has_role: bool) -> None:
        if not has_role:
            have_no_role.add(len(messages))
        messages.append(message)
        names.append(name)
        calls.append((name,) if message.get("tool_calls") else ())

    if body.instructions is not None:
        add({"role": "system", "content": body.instructions}, "instructions", has_role=False)
    if isinstance(body.input, str):
        add({"role": "user", "content": body.input}, "input", has_role=False)
        return messages, FieldNames(tuple(names), tuple(calls), frozenset(have_no_role))
    reasoning: dict[str, str] = {}
    for number, item in enumerate(body.input):
        if isinstance(item, ReasoningItem):
            reasoning = {"reasoning_content": "".join(part.text for part in item.content or ())}
            continue
        if isinstance(item, AdditionalToolsItem | OtherItem):
            continue
        message = _message(item)
        if message["role"] == "assistant":
            message |= reasoning
        reasoning = {}
        # Text and calls of one answer are one message.
        if isinstance(item, CallItem) and messages and messages[-1]["role"] == "assistant":
            of_answer = [*messages[-1].get("tool_calls", ()), *message["tool_calls"]]
            messages[-1] = message | messages[-1] | {"tool_calls": of_answer}
            calls[-1] = (*calls[-1], body.item_name(number))
            continue
        has_role = isinstance(item, MessageItem) and body.item_name(number).endswith("]")
        add(message, body.item_name(number), has_role=has_role)
    return messages, FieldNames(tuple(names), tuple(calls), frozenset(have_no_role))


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


def _message(item: MessageItem | CallItem | CallOutputItem | UnknownItem) -> dict[str, Any]:
    match item:
        case MessageItem():
            return {"role": item.role, "content": _content(item.content)}
        case FunctionCallItem() | CustomToolCallItem() | LocalShellCallItem():
            return {"role": "assistant", "tool_calls": [item.of_chat()]}
        case FunctionCallOutputItem() | CustomToolCallOutputItem() | LocalShellCallOutputItem():
            return {"role": "tool", "tool_call_id": item.call_id or item.id or "", "content": _content(item.output)}
    raise AssertionError("an item of another type is refused")


def _content(content: str | list[InputText]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.said} for part in content]
