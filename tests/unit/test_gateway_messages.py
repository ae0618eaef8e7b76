"""Anthropic's API as a chat in another form: bodies, answers and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inflight.events import (
    ContentPart,
    Finished,
    FinishReason,
    ReasoningPart,
    ToolCallPart,
    Usage,
)
from inflight.gateway.answers import Chunks
from inflight.gateway.conversion import Defaults, convert_chat
from inflight.gateway.errors import ApiError
from inflight.gateway.event_ids import AnswerId
from inflight.gateway.messages.bodies import Converted, chat_of, parse_count_tokens, parse_messages
from inflight.gateway.messages.form import MessageForm, of_messages

ASKED: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "f", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {}}}}
CACHED = {"cache_control": {"type": "ephemeral"}}


def body(**fields: Any) -> bytes:
    return json.dumps({**ASKED, **fields}).encode()


def chat(**fields: Any) -> Converted:
    return chat_of(parse_messages(body(**fields)))


def said(**fields: Any) -> list[dict[str, Any]]:
    messages = chat(**fields).chat.messages
    return [message.model_dump(exclude_none=True, exclude={"reasoning"}) for message in messages]


def test_system_is_one_message_without_what_changes_with_each_request() -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
        {"type": "text", "text": "You help.", **CACHED},
        {"type": "text", "text": "Be brief."},
    ]
    turns = [{"role": "system", "content": "Now."}, *ASKED["messages"], {"role": "system", "content": "Later."}]
    converted = chat(system=system, messages=[*turns, *ASKED["messages"]])
    (request,) = convert_chat(converted.chat, Defaults(max_choices=1), "").requests
    assert [(one.role, one.content[0].text) for one in request.chat.messages] == [
        ("system", "You help.\nBe brief.\n\nNow."),
        ("user", "hi\n\nLater.\n\nhi"),
    ]
    assert converted.messages == ("system", "messages[0]", "messages[1]")


def test_blocks_become_messages_with_reasoning_calls_and_results() -> None:
    answer = [
        {"type": "thinking", "thinking": "I add.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Wait.", "citations": None},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}, **CACHED},
        {"type": "tool_use", "id": "t2", "name": "f", "input": {}},
    ]
    results = [
        {"type": "text", "text": "And?"},
        {"type": "tool_result", "tool_use_id": "t2", "content": "broken", "is_error": True},
        {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}], **CACHED},
    ]
    turns = [*ASKED["messages"], {"role": "assistant", "content": answer}, {"role": "user", "content": results}]
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}
        for name, arguments in (("t1", '{"a": 1}'), ("t2", "{}"))
    ]
    assert said(messages=turns)[1:] == [
        {"role": "assistant", "content": "Wait.", "tool_calls": calls, "reasoning_content": "I add."},
        {"role": "tool", "content": "Error: broken", "tool_call_id": "t2"},
        {"role": "tool", "content": "3", "tool_call_id": "t1"},
        {"role": "user", "content": "And?"},
    ]


def test_parameters_become_those_of_a_chat() -> None:
    asked = chat(
        stop_sequences=["x"],
        stream=True,
        temperature=0.5,
        top_k=3,
        seed=7,
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 5},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        metadata={"user_id": "u"},
        context_management={"edits": []},
    )
    assert asked.unused == ("metadata", "context_management", "tools[1]")
    request = convert_chat(asked.chat, Defaults(max_choices=1), "").requests[0]
    assert (request.stopping.max_tokens, list(request.stopping.stop)) == (9, ["x"])
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.seed) == (0.5, 3, 7)
    assert [function.name for function in request.chat.functions] == ["f"]
    assert request.tool_choice.HasField("parallel")
    assert not request.tool_choice.parallel
    assert (request.chat.reasoning_effort, request.chat.thinking_token_budget) == ("low", 5)
    assert request.constraint.json_schema == '{"type": "object"}'
    disabled = chat(thinking={"type": "disabled"}).chat
    assert (disabled.reasoning_effort, disabled.thinking_token_budget) == ("none", None)
    for choice, named in (({"type": "tool", "name": "f"}, "f"), ({"type": "none"}, None)):
        chosen = chat(tools=[TOOL], tool_choice=choice).chat.tool_choice
        assert chosen == "none" if named is None else chosen.function.name == named  # type: ignore[union-attr]


def test_count_needs_no_max_tokens() -> None:
    counted = parse_count_tokens(json.dumps({"model": "m", "messages": ASKED["messages"], "tools": [TOOL]}).encode())
    assert chat_of(counted).chat.max_completion_tokens is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": None}, "max_tokens: must be an integer"),
        ({"messages": []}, "messages: must have at least 1 item"),
        ({"beam_width": 3}, "beam_width: is not a known parameter"),
        ({"temperature": 1.5}, "temperature: must be less than or equal to 1"),
        ({"messages": [*ASKED["messages"], {"role": "assistant", "content": "a"}]}, "messages[1]: is of the assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: must be 'text', 'thinking', 'redacted_thinking', 'tool_use' or 'tool_result'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "messages[0].content[0].type: is 'tool_use', which no message of the user has",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
            "messages[0].content[0].tool_use_id: is not the id of a call in an earlier message",
        ),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: is required"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: is required with the type tool"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: is allowed only with tools"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 3}}, "thinking.budget_tokens: is allowed only with"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name_in_this_api(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    status, error = of_messages(caught.value)
    assert status == 400
    assert error["error"]["type"] == "invalid_request_error"
    assert text in error["error"]["message"]


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("messages[1].role: is wrong", "messages[0].role: is wrong"),
        ("tools[2].function.name: is wrong", "tools[2].name: is wrong"),
        ("tools[2].function.parameters: is wrong", "tools[2].input_schema: is wrong"),
        ("max_completion_tokens: is wrong", "max_tokens: is wrong"),
        ("thinking_token_budget: is wrong", "thinking.budget_tokens: is wrong"),
        ("response_format.json_schema.schema: is wrong", "output_config.format.schema: is wrong"),
        ("stop[0]: is wrong", "stop_sequences[0]: is wrong"),
    ],
)
def test_errors_of_the_router_have_the_names_of_this_api(text: str, own: str) -> None:
    assert chat(system="s").restored(ApiError(400, text)).text == own


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ApiError(401, "", code="invalid_api_key"), 401, "authentication_error"),
        (ApiError(404, "", code="model_not_found"), 404, "not_found_error"),
        (ApiError(429, "", code="rate_limit_exceeded"), 429, "rate_limit_error"),
        (ApiError(429, "", code="queue_full"), 529, "overloaded_error"),
        (ApiError(503, "", code="no_executor"), 529, "overloaded_error"),
        (ApiError(422, ""), 422, "invalid_request_error"),
        (ApiError(500, ""), 500, "api_error"),
    ],
)
def test_errors_have_anthropics_types(error: ApiError, status: int, kind: str) -> None:
    own = of_messages(error)
    assert (own[0], own[1]["type"], own[1]["error"]["type"]) == (status, "error", kind)


def events_of(parts: list[Any], finished: Finished, **fields: Any) -> list[dict[str, Any]]:
    parsed = parse_messages(body(stream=True, **fields))
    converted = chat_of(parsed)
    form = MessageForm(parsed, converted)
    chunks = Chunks(convert_chat(converted.chat, Defaults(max_choices=1), ""), AnswerId("chatcmpl-1", 1))
    opening = chunks.opening(0)
    assert opening is not None
    sent = form.event(opening, "") + form.waiting("queued") + form.started(10, 4)
    for part in parts:
        sent += form.event(chunks.parts(0, [part]), "")
    sent += form.event(chunks.finished(0, finished), "")
    sent += form.event(chunks.usage([Usage(10, 4, 7, 2)]), "") + form.end()
    events = [one.split("\n") for one in sent.decode().strip().split("\n\n")]
    assert all(name == f"event: {json.loads(data[6:])['type']}" for name, data in events)
    return [json.loads(data[6:]) for _, data in events]


PARTS = [
    ReasoningPart("I "),
    ReasoningPart("add."),
    ContentPart("Wait."),
    ToolCallPart(0, "t1", "f", ""),
    ToolCallPart(0, "", "", '{"a"'),
    ToolCallPart(0, "", "", ": 1}"),
    ToolCallPart(1, "t2", "f", "{}"),
]


def test_stream_is_blocks_one_after_the_other() -> None:
    events = events_of(PARTS, Finished(0, FinishReason.STOP_TOKEN, num_tool_calls=2))
    kinds = [(event["type"], event.get("index")) for event in events]
    delta, start, stop = "content_block_delta", "content_block_start", "content_block_stop"
    assert kinds == [
        *(("ping", None), ("message_start", None)),
        *((start, 0), (delta, 0), (delta, 0), (delta, 0), (stop, 0)),
        *((start, 1), (delta, 1), (stop, 1)),
        *((start, 2), (delta, 2), (delta, 2), (stop, 2)),
        *((start, 3), (delta, 3), (stop, 3)),
        *(("message_delta", None), ("message_stop", None)),
    ]
    counted = {"input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4}
    assert events[1]["message"]["usage"] == {**counted, "output_tokens": 0}
    assert events[-2]["usage"] == {**counted, "output_tokens": 7}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[5]["delta"]["type"] == "signature_delta"


def test_thinking_that_is_not_wanted_is_a_block_without_text() -> None:
    events = events_of(PARTS[:3], Finished(0, FinishReason.LENGTH), thinking={"type": "adaptive", "display": "omitted"})
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas == ["signature_delta", "text_delta"]
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"


def test_stop_sequence_is_named() -> None:
    events = events_of([ContentPart("a")], Finished(0, FinishReason.STOP_STRING, stop="x"))
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "x"}
