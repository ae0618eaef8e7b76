"""Limits on the entries of a conversation, counted before its content is looked at. Pure.

The counts stop at the limits of `inflight.router.text.count_limits`, so they cost little for a conversation of any
size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf import struct_pb2

from inflight.common.errors import FieldViolation
from inflight.common.rpc.json_counts import has_more_values
from inflight.router.text.count_limits import MAX_CONTENT_PARTS, MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS, MAX_VALUES
from inflight.v1 import inference_pb2


def count_violations(chat: inference_pb2.Chat, field: str) -> Iterator[FieldViolation]:
    """Yields the fields of a conversation that have too many entries; `field` is its path in the request."""
    num_messages, num_tools = len(chat.messages), len(chat.tools)
    if num_messages > MAX_MESSAGES:
        yield FieldViolation(f"{field}.messages", f"has {num_messages} messages; at most {MAX_MESSAGES} are allowed")
    else:
        yield from _message_violations(chat, f"{field}.messages")
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


def _message_violations(chat: inference_pb2.Chat, field: str) -> Iterator[FieldViolation]:
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
