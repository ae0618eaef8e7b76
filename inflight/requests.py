"""Request messages built from plain Python values. Shared by both clients; sends nothing.

`GenerateOptions` lists the keywords of `generate` and `complete`. A keyword that is omitted is not set in the request,
so the default of the server applies. The server checks the values and names invalid fields. This module refuses only a
value that does not fit the type of its field.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from google.protobuf.message import Message

from inflight.common.parameters import PARAMETERS
from inflight.functions.wire import Tool, ToolChoice, function_of, set_tool_choice
from inflight.v1 import inference_pb2, types_pb2

# One message of a conversation: `{"role": "user", "content": "…"}`. `content` may be a list of text parts. A message of
# the assistant may have `tool_calls` and `reasoning_content`, a message of a tool `tool_call_id`.
ChatMessage = Mapping[str, Any]
_OPTIONAL_MEMBERS = "optionally name, tool_calls, tool_call_id and reasoning_content"
_MESSAGE_MEMBERS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})
Chat = str | Sequence[ChatMessage]
Priority = Literal["interactive", "standard", "batch"]


class SchemaModel(Protocol):
    """A class with a JSON schema, such as a pydantic model."""

    def model_json_schema(self) -> dict[str, Any]:
        """Returns the schema."""


# A JSON schema: as a mapping, as text, as the path of a file, or as a class that has a schema.
JsonSchema = Mapping[str, Any] | str | os.PathLike[str] | SchemaModel


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate` and `complete`; see the fields of the same meaning in `inference.proto`."""

    model: str
    request_id: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: str | Sequence[str]
    bad_word_ids: Sequence[Sequence[int]]
    no_repeat_ngram_size: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    ignore_eos: bool
    json_schema: JsonSchema
    json_object: bool
    regex: str
    grammar: str
    choice: Sequence[str]
    max_whitespace: int
    tools: Sequence[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    reasoning_effort: str
    thinking_token_budget: int
    want_parts: bool
    n: int
    best_of: int
    want_text: bool
    want_token_ids: bool
    want_logprobs: bool
    top_logprobs: int
    want_prompt_logprobs: bool
    top_prompt_logprobs: int
    want_queue_events: bool
    stream_interval: int
    echo: bool
    want_resources: bool
    adapter_id: str
    priority: Priority
    inter_token_target_ms: int
    max_drafts: int
    exact_resume: bool
    tenant: str
    first_token_deadline_s: float
    deadline_s: float
    session_id: str
    cache_salt: str
    cache_bypass: bool
    idempotency_key: str
    detach: bool
    resume_ttl_s: float
    truncate_prompt_tokens: int
    prior_output_ids: Sequence[int]
    prior_text_bytes: int
    metadata: Mapping[str, str]


class BeamOptions(TypedDict, total=False):
    """Keywords of `beam_search` that are passed to each of its requests, as in `GenerateOptions`."""

    model: str
    adapter_id: str
    priority: Priority
    tenant: str
    session_id: str
    cache_salt: str
    metadata: Mapping[str, str]


# Keywords that need a chat.
OF_CHATS = ("tools", "reasoning_effort", "thinking_token_budget")

# A request has at most one of these.
CONSTRAINTS = ("json_schema", "json_object", "regex", "grammar", "choice")

PRIORITIES: dict[Priority, types_pb2.PriorityClass] = {
    "interactive": types_pb2.PRIORITY_CLASS_INTERACTIVE,
    "standard": types_pb2.PRIORITY_CLASS_STANDARD,
    "batch": types_pb2.PRIORITY_CLASS_BATCH,
}


def generate_request(
    prompt: str | bytes | None,
    *,
    chat: Chat | None,
    token_ids: Sequence[int] | None,
    options: Mapping[str, Any],
) -> inference_pb2.GenerateRequest:
    """Returns the request for one prompt, given as text, as chat or as token ids.

    Raises:
        TypeError: not exactly one prompt, more than one constraint, an unknown keyword, or a keyword that needs a chat.
        ValueError: a value does not fit its field. The text names the keyword.
    """
    if sum(given is not None for given in (prompt, chat, token_ids)) != 1:
        raise TypeError("give exactly one of prompt, chat and token_ids")
    constraints = [keyword for keyword in CONSTRAINTS if not _is_left_out(keyword, options.get(keyword))]
    if len(constraints) > 1:
        raise TypeError(f"give one of {' and '.join(constraints)}")
    request = inference_pb2.GenerateRequest()
    if isinstance(prompt, bytes):
        request.text_bytes = prompt
    elif prompt is not None:
        _assign(request, "text", prompt, keyword="prompt")
    elif chat is not None:
        request.chat.CopyFrom(chat_prompt(chat))
    elif token_ids is not None:
        request.token_ids.SetInParent()
        _assign(request.token_ids, "ids", token_ids, keyword="token_ids")
    for keyword, value in options.items():
        if chat is None and value is not None and keyword in OF_CHATS:
            raise TypeError(f"{keyword} needs a chat")
        _set_option(request, keyword, value)
    return request


def chat_prompt(chat: Chat) -> inference_pb2.Chat:
    """Returns the message for a conversation. A string is one message of the user."""
    turns: Sequence[ChatMessage] = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
    result = inference_pb2.Chat()
    for turn in turns:
        if set(turn) - _MESSAGE_MEMBERS or "role" not in turn:
            raise ValueError(f"chat: a message has role, content and {_OPTIONAL_MEMBERS}, not {sorted(turn)}")
        message = result.messages.add()
        for call in turn.get("tool_calls") or ():
            _add_call(message, call)
        _assign(message, "tool_call_id", turn.get("tool_call_id") or "", keyword="chat")
        _assign(message, "reasoning", turn.get("reasoning_content") or "", keyword="chat")
        _assign(message, "role", turn["role"], keyword="chat")
        _assign(message, "name", turn.get("name", ""), keyword="chat")
        content = turn.get("content") or ""
        for text in (content,) if isinstance(content, str) else content:
            _assign(message.content.add(), "text", text, keyword="chat")
    return result


def _add_call(message: inference_pb2.ChatMessage, call: Any) -> None:
    """Adds a tool call to a message of the assistant. `call` is a `ToolCall`, or a mapping in OpenAI's form."""
    if isinstance(call, Mapping):
        function = call.get("function", call)
        call_id, name, arguments = call.get("id", ""), function.get("name"), function.get("arguments", "")
    else:
        call_id, name, arguments = call.id, call.name, call.arguments
    made = message.tool_calls.add()
    for field, value in (("id", call_id), ("name", name), ("arguments", arguments)):
        _assign(made, field, value, keyword="chat")


def tokenize_request(text: str | None, *, chat: Chat | None, model: str | None) -> inference_pb2.TokenizeRequest:
    """Returns the request for the token ids of a text or of a conversation."""
    if (text is None) == (chat is None):
        raise TypeError("give exactly one of text and chat")
    request = inference_pb2.TokenizeRequest(model=model or "")
    if chat is not None:
        request.chat.CopyFrom(chat_prompt(chat))
    else:
        _assign(request, "text", text, keyword="text")
    return request


def detokenize_request(
    token_ids: Sequence[int], *, model: str | None, skip_special_tokens: bool
) -> inference_pb2.DetokenizeRequest:
    """Returns the request for the text of token ids."""
    request = inference_pb2.DetokenizeRequest(model=model or "", skip_special_tokens=skip_special_tokens)
    _assign(request, "token_ids", token_ids, keyword="token_ids")
    return request


def resume_request(
    request_id: str, resume_token: str, *, offset: int | Sequence[int], text_bytes: int | Sequence[int] | None
) -> inference_pb2.ResumeRequest:
    """Returns the request for the rest of a stream after `offset` tokens and `text_bytes` bytes of text. Each is a
    number, or a sequence with a number for each choice."""
    request = inference_pb2.ResumeRequest()
    _assign(request, "request_id", request_id, keyword="request_id")
    _assign(request, "resume_token", resume_token, keyword="resume_token")
    _assign(request, "offsets", offset if isinstance(offset, Sequence) else (offset,), keyword="offset")
    if text_bytes is not None:
        counts = text_bytes if isinstance(text_bytes, Sequence) else (text_bytes,)
        _assign(request, "text_bytes", counts, keyword="text_bytes")
    return request


def _set_option(request: inference_pb2.GenerateRequest, keyword: str, value: Any) -> None:
    parameter = PARAMETERS.get(keyword)
    if parameter is None:
        raise TypeError(f"unknown keyword {keyword!r}")
    if _is_left_out(keyword, value):
        return
    if keyword in ("tools", "tool_choice"):
        _set_tools(request, keyword, value)
        return
    if keyword == "thinking_token_budget":
        request.output.parts = True
    elif keyword == "choice":
        # Also without any text, which the server refuses.
        request.constraint.choice.SetInParent()
    *parents, field = parameter.field.split(".")
    owner: Message = request
    for parent in parents:
        owner = getattr(owner, parent)
    _assign(owner, field, _CONVERSIONS.get(keyword, _unchanged)(value), keyword=keyword)


def _set_tools(request: inference_pb2.GenerateRequest, keyword: str, value: Any) -> None:
    try:
        if keyword == "tool_choice":
            set_tool_choice(request.tool_choice, value)
        else:
            request.chat.functions.extend(map(function_of, value))
            request.output.parts = True
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{keyword}: {error}") from None


def _is_left_out(keyword: str, value: Any) -> bool:
    return value is None or (keyword == "json_object" and value is False)


def _schema_text(schema: JsonSchema) -> str:
    """Returns the text of a JSON schema. Raises `ValueError`, or `OSError` for a file that cannot be read."""
    if isinstance(schema, str):
        return schema
    if isinstance(schema, os.PathLike):
        return Path(schema).read_text(encoding="utf-8")
    described = schema if isinstance(schema, Mapping) else _schema_of(schema)
    try:
        return json.dumps(described, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema: is not JSON: {error}") from None


def _schema_of(model: SchemaModel) -> Mapping[str, Any]:
    if not hasattr(model, "model_json_schema"):
        raise ValueError(f"json_schema: {model!r:.80} is no mapping, text, path or class with model_json_schema")
    return model.model_json_schema()


def _priority(name: Any) -> types_pb2.PriorityClass:
    if name not in PRIORITIES:
        raise ValueError(f"priority: {name!r} is not one of {', '.join(PRIORITIES)}")
    return PRIORITIES[name]


def _several(texts: Any) -> Any:
    return (texts,) if isinstance(texts, str) else texts


def _choices(texts: Any) -> Any:
    if isinstance(texts, str):
        raise ValueError("choice: must be several texts, not one text")
    return texts


def _unchanged(value: Any) -> Any:
    return value


# Keyword → what its field has for a value. The others are assigned as they are.
_CONVERSIONS: Mapping[str, Callable[[Any], Any]] = {
    "priority": _priority,
    "json_schema": _schema_text,
    "stop": _several,
    "bad_words": _several,
    "choice": _choices,
}


def _assign(owner: Message, field: str, value: Any, *, keyword: str) -> None:
    """Sets a field of any type. Raises `ValueError`, which names the keyword."""
    try:
        if keyword.endswith("_s"):
            getattr(owner, field).FromNanoseconds(round(value * 1e9))
        elif isinstance(value, Mapping):
            getattr(owner, field).update(value)
        elif isinstance(value, str) or not isinstance(value, Sequence):
            setattr(owner, field, value)
        elif keyword == "bad_word_ids":
            getattr(owner, field).extend(types_pb2.TokenSequence(ids=ids) for ids in value)
        else:
            getattr(owner, field).extend(value)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ValueError(f"{keyword}: {value!r:.80} is not allowed: {error}") from None
