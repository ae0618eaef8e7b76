"""Conversations of the protocol in the form that chat templates take, and their validation. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from google.protobuf import struct_pb2

from common.errors import FieldViolation
from inflight.v1 import inference_pb2
from router.text.chat_counts import count_violations

# Characters of a name in the path of a violation.
MAX_NAME_CHARACTERS = 100

# Parameters of `apply_chat_template` and of the functions that it calls. As template variables they would change how
# the template is run, or which one.
RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "compiled_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def chat_violations(chat: inference_pb2.Chat, field: str) -> Iterator[FieldViolation]:
    """Yields everything that is wrong with a conversation; `field` is its path in the request. If it has too many
    entries, only that is reported."""
    if too_much := tuple(count_violations(chat, field)):
        yield from too_much
        return
    if not chat.messages:
        yield FieldViolation(f"{field}.messages", "is empty; at least one message is needed")
    for i, message in enumerate(chat.messages):
        yield from _message_violations(message, f"{field}.messages[{i}]")
    for i, tool in enumerate(chat.tools):
        yield from _struct_violations(tool, f"{field}.tools[{i}]")
        if not tool.fields:
            yield FieldViolation(f"{field}.tools[{i}]", "is empty; must be a JSON schema of a function")
    yield from _struct_violations(chat.template_kwargs, f"{field}.template_kwargs")
    for name in sorted(RESERVED_VARIABLES & set(chat.template_kwargs.fields)):
        yield FieldViolation(f"{field}.template_kwargs.{name}", "is reserved; the router sets it by itself")


def template_messages(chat: inference_pb2.Chat) -> list[dict[str, Any]]:
    """Returns the messages in the form that chat templates take. The conversation must have no violations."""
    return [_template_message(message) for message in chat.messages]


def template_tools(chat: inference_pb2.Chat) -> list[Any] | None:
    """Returns the tools in the form that chat templates take, each a dict; None without tools, as templates expect."""
    return [plain_struct(tool) for tool in chat.tools] or None


def plain_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """Returns a Struct as plain Python values. Its numbers are doubles; whole ones become integers, as in JSON."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return plain_struct(value.struct_value)
        case "list_value":
            return [_plain(element) for element in value.list_value.values]
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None


def _message_violations(message: inference_pb2.ChatMessage, field: str) -> Iterator[FieldViolation]:
    if not message.role:
        yield FieldViolation(f"{field}.role", 'is empty; must be the role of the author, such as "user"')
    for i, part in enumerate(message.content):
        if part.WhichOneof("part") is None:
            yield FieldViolation(f"{field}.content[{i}]", "is empty; exactly one kind of part must be set")
    for i, call in enumerate(message.tool_calls):
        if not call.name:
            yield FieldViolation(f"{field}.tool_calls[{i}].name", "is empty; must be the function's name")
        if _arguments(call) is None:
            yield FieldViolation(f"{field}.tool_calls[{i}].arguments", "must be a JSON object as text")


def _struct_violations(struct: struct_pb2.Struct, field: str) -> Iterator[FieldViolation]:
    """Yields numbers that JSON does not have: NaN and infinities."""
    for name, value in struct.fields.items():
        yield from _value_violations(value, f"{field}.{name[:MAX_NAME_CHARACTERS]}")


def _value_violations(value: struct_pb2.Value, field: str) -> Iterator[FieldViolation]:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        yield from _struct_violations(value.struct_value, field)
    elif kind == "list_value":
        for i, element in enumerate(value.list_value.values):
            yield from _value_violations(element, f"{field}[{i}]")
    elif kind == "number_value" and not -float("inf") < value.number_value < float("inf"):
        yield FieldViolation(field, "must be a finite number")


def _template_message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": "".join(part.text for part in message.content)}
    if message.name:
        made["name"] = message.name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        made["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    return made


def _template_call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
    if call.id:
        made["id"] = call.id
    return made


def _arguments(call: inference_pb2.ToolCall) -> dict[str, Any] | None:
    """Returns the parsed arguments, as templates expect; None if they are not a JSON object. Empty text means no
    arguments."""
    try:
        arguments = json.loads(call.arguments or "{}")
        # JSON can escape half a surrogate pair, which UTF-8 text cannot hold.
        json.dumps(arguments, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None
