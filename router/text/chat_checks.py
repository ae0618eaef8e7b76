"""Checks of a conversation. Pure.

Its entries are counted before its content is looked at. The counts stop at the limits of
`inflight.router.text.count_limits`, so they cost little for a conversation of any size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from google.protobuf import struct_pb2

from inflight.common.errors import FieldViolation
from inflight.common.rpc.json_counts import has_more_values
from inflight.router.constraint.json_text import JsonTextError, parse_json
from inflight.router.text.count_limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS, MAX_VALUES
from inflight.v1 import inference_pb2

_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
# Of a regular expression or a grammar of a function's input.
MAX_INPUT_BYTES = 32 * 1024
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
    if too_much := tuple(_count_violations(chat, field)):
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
    yield from _function_violations(chat, field)
    if chat.thinking_token_budget < -1:
        text = f"is {chat.thinking_token_budget}; must be a number of tokens, or -1 for no limit"
        yield FieldViolation(f"{field}.thinking_token_budget", text)
    yield from _struct_violations(chat.template_kwargs, f"{field}.template_kwargs")
    for name in sorted(RESERVED_VARIABLES & set(chat.template_kwargs.fields)):
        yield FieldViolation(f"{field}.template_kwargs.{name}", "is reserved; the router sets it by itself")


def _count_violations(chat: inference_pb2.Chat, field: str) -> Iterator[FieldViolation]:
    """Yields the fields of a conversation that have too many entries; `field` is its path in the request."""
    num_messages, num_tools = len(chat.messages), len(chat.tools)
    if num_messages > MAX_MESSAGES:
        yield FieldViolation(f"{field}.messages", f"has {num_messages} messages; at most {MAX_MESSAGES} are allowed")
    else:
        yield from _message_count_violations(chat, f"{field}.messages")
    if num_tools > MAX_TOOLS:
        yield FieldViolation(f"{field}.tools", f"has {num_tools} tools; at most {MAX_TOOLS} are allowed")
    elif _have_more_values(chat.tools):
        yield FieldViolation(f"{field}.tools", f"have more than {MAX_VALUES} values, which is the limit")
    if len(chat.functions) > MAX_TOOLS:
        text = f"has {len(chat.functions)} functions; at most {MAX_TOOLS} are allowed"
        yield FieldViolation(f"{field}.functions", text)
    elif has_more_values(b",".join(one.parameters.encode() for one in chat.functions), MAX_VALUES):
        text = f"have more than {MAX_VALUES} values in their parameters, which is the limit"
        yield FieldViolation(f"{field}.functions", text)
    if _have_more_values([chat.template_kwargs]):
        yield FieldViolation(f"{field}.template_kwargs", f"has more than {MAX_VALUES} values, which is the limit")


def _message_count_violations(chat: inference_pb2.Chat, field: str) -> Iterator[FieldViolation]:
    num_parts = sum(len(message.content) for message in chat.messages)
    if num_parts > MAX_CONTENT_PARTS:
        text = f"have {num_parts} content parts; at most {MAX_CONTENT_PARTS} are allowed"
        yield FieldViolation(field, text)
    num_calls = sum(len(message.tool_calls) for message in chat.messages)
    if num_calls > MAX_TOOL_CALLS:
        yield FieldViolation(field, f"have {num_calls} tool calls; at most {MAX_TOOL_CALLS} are allowed")
        return
    arguments = b",".join(call.arguments.encode() for message in chat.messages for call in message.tool_calls)
    if has_more_values(arguments, MAX_VALUES):
        yield FieldViolation(field, f"have tool calls with more than {MAX_VALUES} values in their arguments")


def _have_more_values(structs: Iterable[struct_pb2.Struct]) -> bool:
    unread: list[struct_pb2.Struct | struct_pb2.ListValue] = list(structs)
    num_values = 0
    while unread:
        one = unread.pop()
        values = one.fields.values() if isinstance(one, struct_pb2.Struct) else one.values
        num_values += len(values)
        if num_values > MAX_VALUES:
            return True
        for value in values:
            match value.WhichOneof("kind"):
                case "struct_value":
                    unread.append(value.struct_value)
                case "list_value":
                    unread.append(value.list_value)
    return False


def _message_violations(message: inference_pb2.ChatMessage, field: str) -> Iterator[FieldViolation]:
    if not message.role:
        yield FieldViolation(f"{field}.role", 'is empty; must be the role of the author, such as "user"')
    for i, part in enumerate(message.content):
        if part.WhichOneof("part") is None:
            yield FieldViolation(f"{field}.content[{i}]", "is empty; exactly one kind of part must be set")
    for i, call in enumerate(message.tool_calls):
        if not call.name:
            yield FieldViolation(f"{field}.tool_calls[{i}].name", "is empty; must be the function's name")


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


def _function_violations(chat: inference_pb2.Chat, field: str) -> Iterator[FieldViolation]:
    if chat.functions and chat.tools:
        yield FieldViolation(f"{field}.tools", f"is given together with {field}.functions; give one of them")
    names: set[str] = set()
    for i, function in enumerate(chat.functions):
        path = f"{field}.functions[{i}]"
        if not _FUNCTION_NAME.fullmatch(function.name):
            yield FieldViolation(f"{path}.name", "must be 1 to 128 characters of [A-Za-z0-9_.-]")
        elif function.name in names:
            yield FieldViolation(f"{path}.name", f"is {function.name}, the name of an earlier one")
        names.add(function.name)
        if function.parameters:
            yield from _parameter_violations(function.parameters, f"{path}.parameters")
        if kind := function.WhichOneof("input"):
            yield from _input_violations(function, kind, path)


def _parameter_violations(parameters: str, field: str) -> Iterator[FieldViolation]:
    try:
        schema = parse_json(parameters)
    except JsonTextError as error:
        yield FieldViolation(field, str(error))
        return
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        yield FieldViolation(field, "must be the JSON schema of an object")


def _input_violations(function: inference_pb2.Function, kind: str, path: str) -> Iterator[FieldViolation]:
    """Yields what is wrong with the form of a function's input."""
    form = getattr(function, kind)
    if not form:
        yield FieldViolation(f"{path}.{kind}", "is empty; must be the form of a text")
        return
    if (num_bytes := len(form.encode())) > MAX_INPUT_BYTES:
        yield FieldViolation(f"{path}.{kind}", f"has {num_bytes} bytes; at most {MAX_INPUT_BYTES} are allowed")
        return
    try:
        schema = parse_json(function.parameters) if function.parameters else {}
    except JsonTextError:
        return  # reported with the parameters
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or list(properties) != ["input"] or schema.get("required") != ["input"]:
        text = "must have the text input, which is required, and nothing else, because the function has a form of it"
        yield FieldViolation(f"{path}.parameters", text)
