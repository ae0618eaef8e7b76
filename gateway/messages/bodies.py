"""Bodies of `/v1/messages`, Anthropic's API, as pydantic models, and their conversion to the body of a chat. Pure.

A message is a chat completion in another form. What changes the output is honoured or refused by name. Hints, such as
marks for a prompt cache, which is automatic here, have no effect; `unused` names those of a body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from inflight.gateway.bodies import Body, ChatBody, Integer, Number, Parameters, Tokens, read_fields, validated
from inflight.gateway.errors import ApiError, refused, unsupported

# The beginning of a system block that coding agents change with each request, which would defeat prefix caches.
BILLING = "x-anthropic-billing-header"
# Parameters of a body without effect here.
HINTS = frozenset(
    {
        *("cache_control", "container", "context_management", "inference_geo", "metadata", "service_tier", "speed"),
        *("diagnostics", "mcp_servers", "compaction", "fallbacks", "fallback_credit_token", "billing_policy"),
        *("user_profile_id", "workspace_id"),
    }
)
# Parameters of this system that a body may have besides, with the names and meaning that they have in chats.
SAME_IN_CHATS = frozenset(
    {
        *("min_p", "seed", "min_tokens", "ignore_eos", "stop_token_ids", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "logit_bias", "bad_words", "priority", "stream_interval", "chat_template_kwargs"),
        "resume_ttl_s",
    }
)


class _Block(Body):
    """A block of content. Fields that say nothing about it are left out."""

    hints: ClassVar[frozenset[str]] = frozenset({"cache_control", "citations", "caller", "toolset_name"})

    @model_validator(mode="before")
    @classmethod
    def _leave_out_hints(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: one for name, one in value.items() if name not in cls.hints}


class TextBlock(_Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(_Block):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(_Block):
    """Reasoning of an earlier answer that only its own server can read."""

    type: Literal["redacted_thinking"]
    encrypted: str = Field(alias="data")


class ToolUseBlock(_Block):
    """A call of a tool in an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """The text of the result. Templates have no place for an error, so its text says that it is one."""
        text = self.content if isinstance(self.content, str) else _joined(self.content or ())
        return f"Error: {text}" if self.is_error and "error" not in text[:64].lower() else text


class UnknownBlock(Body):
    """A block that is refused for its type."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]


_KINDS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _tag(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return f"[{kind}]" if kind in _KINDS else "[unknown]"


# The brackets tell the alternatives from the names of parameters in the place of an error.
Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")]
    | Annotated[UnknownBlock, Tag("[unknown]")],
    Discriminator(_tag),
]


class MessageParam(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]

    @property
    def blocks(self) -> list[Any]:
        """Its content as blocks."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class ToolParam(_Block):
    """A tool that the caller runs. Those that Anthropic's servers run, or whose schema only its models know, have
    another type."""

    hints: ClassVar[frozenset[str]] = frozenset(
        {"cache_control", "input_examples", "defer_loading", "eager_input_streaming", "allowed_callers"}
    )

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Parameters
    strict: bool | None = None

    def of_chat(self) -> dict[str, Any]:
        """Returns it as a tool of a chat."""
        function = {"name": self.name, "parameters": self.input_schema}
        more = {"description": self.description, "strict": self.strict}
        return {"type": "function", "function": function | {name: one for name, one in more.items() if one is not None}}


class ToolChoiceParam(Body):
    """The choice among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoiceParam:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError(f"name: is {'required' if self.type == 'tool' else 'allowed only'} with the type tool")
        return self

    def of_chat(self) -> str | dict[str, Any]:
        """Returns it as that of a chat."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingParam(Body):
    """Whether the model reasons before it answers, with how many tokens at most, and whether the answer shows that."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Tokens | None = None
    display: Literal["summarized", "full", "omitted"] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> ThinkingParam:
        if self.budget_tokens is not None and self.type != "enabled":
            raise ValueError("budget_tokens: is allowed only with the type enabled")
        return self


class OutputFormat(Body):
    """The form of the answer, which is always enforced."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Anthropic's `output_config`."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    format: OutputFormat | None = None


class CountTokensBody(Body):
    """`POST /v1/messages/count_tokens`: what a prompt consists of. `model_extra` are hints and parameters of chats."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[MessageParam], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    @property
    def schema(self) -> dict[str, Any] | None:  # type: ignore[override]  # pydantic's own is deprecated
        """The JSON schema of the answer, if there is one."""
        asked = self.output_format or (self.output_config and self.output_config.format) or None
        return None if asked is None else asked.schema_

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer has the text of its reasoning."""
        return self.thinking is None or self.thinking.display != "omitted"


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    max_tokens: Tokens
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[Number, Field(ge=0, le=1)] | None = None
    top_p: Number | None = None
    top_k: Annotated[Integer, Field(ge=0)] | None = None


_Kind = TypeVar("_Kind", bound=CountTokensBody)


@dataclass(frozen=True, slots=True)
class Converted:
    """A chat that a body says. `messages` has the name of each message here, `unused` the hints of the body."""

    chat: ChatBody
    messages: tuple[str, ...]
    unused: tuple[str, ...]

    def restored(self, error: ApiError) -> ApiError:
        """Returns an error of the chat with the names of this API."""
        return replace(error, text=_own_names(error.text, self.messages))


@dataclass(slots=True)
class _Conversation:
    """Messages of a chat, each with its name here."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def add(self, message: dict[str, Any], name: str) -> None:
        """Adds a message. Many templates take no two messages of the user in a row, and system messages only at the
        beginning, where those of a chat are joined: a later one is text of the user."""
        last = self.messages[-1]["role"] if self.messages else "system"
        if message["role"] == "system" and last != "system":
            message = {**message, "role": "user"}
        if self.messages and message["role"] == last == "user":
            self.messages[-1]["content"] += "\n\n" + message["content"]
        else:
            self.messages.append(message)
            self.names.append(name)


def parse_messages(raw: bytes) -> MessagesBody:
    """Parses the body of a message. Raises `ApiError`."""
    return _checked(validated(MessagesBody, read_fields(raw, {})))


def parse_count_tokens(raw: bytes) -> CountTokensBody:
    """Parses the body of a count. Raises `ApiError`."""
    return _checked(validated(CountTokensBody, read_fields(raw, {})))


def _checked(body: _Kind) -> _Kind:
    for name in body.model_extra or {}:
        if name not in HINTS | SAME_IN_CHATS:
            raise refused(name[:64], "is not a known parameter", "unknown_parameter")
    if body.messages[-1].role == "assistant":
        raise unsupported(
            f"messages[{len(body.messages) - 1}]", "is of the assistant: an answer cannot be continued; end with user"
        )
    return body


def chat_of(body: CountTokensBody) -> Converted:
    """Returns the chat that a body says. Raises `ApiError`."""
    talk = _conversation(body)
    extra = body.model_extra or {}
    unused = [name for name in extra if name in HINTS]
    tools = list(_tools(body, unused))
    chat: dict[str, Any] = {
        **{name: value for name, value in extra.items() if name in SAME_IN_CHATS},
        "model": body.model,
        "messages": talk.messages,
        "tools": tools or None,
        **_reasoning(body),
    }
    if (choice := body.tool_choice) is not None:
        chat["tool_choice"] = choice.of_chat()
        if tools and choice.disable_parallel_tool_use is not None:
            chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if body.schema is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": body.schema}}
    if isinstance(body, MessagesBody):
        chat |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "stream_options": {"include_usage": True} if body.stream else None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    names = tuple(talk.names)
    try:
        return Converted(validated(ChatBody, chat), names, tuple(unused))
    except ApiError as error:
        raise replace(error, text=_own_names(error.text, names)) from None


def _tools(body: CountTokensBody, unused: list[str]) -> Iterator[dict[str, Any]]:
    """Yields the tools as those of a chat. Adds those of Anthropic's servers to `unused`."""
    for number, tool in enumerate(body.tools or ()):
        if tool.get("type") not in (None, "custom"):
            unused.append(f"tools[{number}]")
            continue
        try:
            yield validated(ToolParam, tool).of_chat()
        except ApiError as error:
            raise replace(error, text=f"tools[{number}].{error.text}", param=f"tools[{number}].{error.param}") from None


def _reasoning(body: CountTokensBody) -> dict[str, Any]:
    """Returns the parameters of a chat about reasoning."""
    effort = body.output_config and body.output_config.effort
    if body.thinking is not None and body.thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    budget = None if body.thinking is None else body.thinking.budget_tokens
    return {"reasoning_effort": effort, "thinking_token_budget": budget}


def _conversation(body: CountTokensBody) -> _Conversation:
    talk = _Conversation()
    if body.system is not None:
        blocks = [TextBlock(type="text", text=body.system)] if isinstance(body.system, str) else body.system
        if text := _joined([block for block in blocks if not block.text.startswith(BILLING)]):
            talk.add({"role": "system", "content": text}, "system")
    for number, message in enumerate(body.messages):
        name = f"messages[{number}]"
        if message.role == "assistant":
            talk.add(_answer(message, name), name)
            continue
        for place, block in enumerate(message.blocks):
            if isinstance(block, ToolResultBlock):
                result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
                talk.add(result, f"{name}.content[{place}]")
        texts = [block for block in message.blocks if not isinstance(block, ToolResultBlock)]
        _check_kinds(texts, (TextBlock,), name, message.role)
        if texts or not message.blocks:
            talk.add({"role": message.role, "content": _joined(texts)}, name)
    return talk


def _answer(message: MessageParam, name: str) -> dict[str, Any]:
    """Returns an earlier answer as a message of a chat."""
    _check_kinds(message.blocks, (TextBlock, ThinkingBlock, RedactedBlock, ToolUseBlock), name, message.role)
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in message.blocks
        if isinstance(block, ToolUseBlock)
    ]
    said = {
        "content": _joined([block for block in message.blocks if isinstance(block, TextBlock)]) or None,
        "tool_calls": calls or None,
        "reasoning_content": "".join(b.thinking for b in message.blocks if isinstance(b, ThinkingBlock)) or None,
    }
    return {"role": "assistant", **{name: value for name, value in said.items() if value is not None}}


def _check_kinds(blocks: list[Any], allowed: tuple[type, ...], name: str, role: str) -> None:
    for place, block in enumerate(blocks):
        if not isinstance(block, allowed):
            raise refused(f"{name}.content[{place}].type", f"is {block.type!r}, which no message of the {role} has")


def _joined(blocks: Any) -> str:
    """Returns the text of blocks, as vLLM joins the parts of a message."""
    return "\n".join(block.text for block in blocks)


# Parameters of a chat with another name here.
_OWN_NAMES = {
    "max_completion_tokens": "max_tokens",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    ".tool_call_id": ".tool_use_id",
}
_CHAT_NAMES = re.compile(
    r"(?:^|(?<=; ))messages\[(?P<message>\d{1,9})\]"
    r"|(?<=tools\[)(?P<tool>\d{1,9})\]\.function(?P<schema>\.parameters)?"
    r"|\b(?P<name>max_completion_tokens|response_format(?:\.json_schema\.schema)?|reasoning_effort|thinking_token_budget)\b"
    r"|^(?P<stop>stop)(?=[:\[])|(?<=\])(?P<call>\.tool_call_id)"
)


def _own_names(text: str, messages: tuple[str, ...]) -> str:
    """Returns a text about parameters of a chat with the names of this API."""

    def own(found: re.Match[str]) -> str:
        if found["message"]:
            number = int(found["message"])
            return messages[number] if number < len(messages) else found[0]
        if found["tool"]:
            return f"{found['tool']}]{'.input_schema' if found['schema'] else ''}"
        return _OWN_NAMES[found[0]]

    return _CHAT_NAMES.sub(own, text)
