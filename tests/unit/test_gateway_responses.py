"""`/v1/responses`, the pure parts: conversion of bodies to chats, refusals, and chunks of a chat as events."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.events import (
    Choice,
    ContentPart,
    Finished,
    FinishReason,
    Part,
    ReasoningPart,
    ToolCallPart,
    Usage,
)
from inflight.gateway.answers import Chunks, FinishedChoice, whole_answer
from inflight.gateway.bodies import parse_chat
from inflight.gateway.conversion import ApiRequest, Defaults, convert_chat
from inflight.gateway.errors import ApiError
from inflight.gateway.event_ids import AnswerId
from inflight.gateway.responses.bodies import (
    REFUSED,
    UNSUPPORTED,
    FieldNames,
    ResponsesBody,
    chat_body,
    parse_responses,
)
from inflight.gateway.responses.form import ResponseForm
from inflight.gateway.responses.tools import InputText, set_inputs
from inflight.v1 import inference_pb2

ANSWER = AnswerId("chatcmpl-12ab", 1700000000)
F = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
USAGE = Usage(prompt_tokens=5, output_tokens=3, cached_tokens=4, reasoning_tokens=0)


def parsed(**fields: Any) -> ResponsesBody:
    return parse_responses(json.dumps({"model": "m", "input": "hi", **fields}).encode())


def asked(**fields: Any) -> tuple[ApiRequest, FieldNames]:
    body, names = chat_body(parsed(**fields))
    return convert_chat(body, Defaults(max_choices=4), ""), names


def messages_of(**fields: Any) -> list[tuple[str, str]]:
    (request,) = asked(**fields)[0].requests
    return [(one.role, "".join(part.text for part in one.content)) for one in request.chat.messages]


def test_text_and_instructions_are_messages_of_a_chat() -> None:
    assert messages_of() == [("user", "hi")]
    assert messages_of(instructions="Be brief.") == [("system", "Be brief."), ("user", "hi")]


def test_items_are_messages_of_a_chat() -> None:
    said = {"type": "output_text", "text": "A", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"},
                                                        {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [said]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]  # fmt: skip
    assert messages_of(input=items) == [("system", "D"), ("user", "a\nb"), ("assistant", "A"), ("assistant", "no")]


def test_calls_belong_to_the_message_before_them() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "id": f"fc_{name}", "call_id": name, "name": name, "arguments": "{}"}

    items = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "A"},
        call("f"),
        call("g"),
        {"type": "function_call_output", "call_id": "f", "output": "1"},
        {"type": "function_call_output", "call_id": "g", "output": [{"type": "input_text", "text": "2"}]},
        call("h"),
    ]
    api_request, names = asked(input=items)
    _, first, one, two, second = api_request.requests[0].chat.messages
    assert [each.name for each in first.tool_calls] == ["f", "g"]
    assert [(each.tool_call_id, each.content[0].text) for each in (one, two)] == [("f", "1"), ("g", "2")]
    assert [each.name for each in second.tool_calls] == ["h"]
    assert names.of_messages == ("input[0]", "input[1]", "input[4]", "input[5]", "input[6]")
    assert names.of_calls == ((), ("input[2]", "input[3]"), (), (), ("input[6]",))
    assert names.have_no_role == {2, 3, 4}


def test_parameters_are_those_of_a_chat() -> None:
    schema = {"type": "object"}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    (request,) = asked(
        temperature=0.5, top_p=0.9, max_output_tokens=7, text=text, metadata={"a": "b"}, user="u", seed=3,
        include=["message.output_text.logprobs"], top_logprobs=2, service_tier="flex", prompt_cache_key="s",
    )[0].requests  # fmt: skip
    chat = {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5, "top_p": 0.9,
        "max_completion_tokens": 7, "metadata": {"a": "b"}, "user": "u", "seed": 3, "logprobs": True,
        "top_logprobs": 2, "service_tier": "flex", "prompt_cache_key": "s",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }  # fmt: skip
    assert convert_chat(parse_chat(json.dumps(chat).encode()), Defaults(max_choices=4), "").requests == (request,)


def test_what_has_no_effect_is_taken() -> None:
    for name, neutral in UNSUPPORTED.items():
        for value in (None, *neutral):
            parsed(**{name: value})
    for name, (neutral, _) in REFUSED.items():
        for value in (None, *neutral):
            parsed(**{name: value})
    parsed(include=["reasoning.encrypted_content"], stream=True, stream_options={"include_obfuscation": False})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "grammar", "syntax": "lark"}}]},
         "tools[0].format.definition"),
        ({"tools": [{"type": "custom", "name": "f", "format": {"type": "text", "definition": "x"}}]},
         "tools[0].format.definition"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}},
         "tool_choice.tools"),
        ({"client_metadata_": {}}, "client_metadata_"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f"}]}, "input[0].input"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [F], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.name"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input[0].call_id"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning": {"summary": "all"}}, "reasoning.summary"),
        ({"include": [5]}, "include[0]"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": ["x"]}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "x", "foo": 1}]}, "input[0].foo"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, "input[0].arguments"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [F], "tool_choice": {"type": "custom"}}, "tool_choice.name"),
        ({"tools": [F], "tool_choice": 5}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"temperature": "warm"}, "temperature"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
         "structured_outputs.regex"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.text.startswith(param.partition("_options")[0].partition("[")[0])


def test_errors_about_a_chat_name_the_parameters_of_this_api() -> None:
    names = FieldNames(("instructions", "input[0]", "input[3]"), ((), (), ("input[4]", "input[5]")), frozenset({0}))

    def restored(param: str) -> tuple[str | None, str]:
        error = names.restored(ApiError(400, f"{param}: is wrong", param=param))
        return error.param, error.text

    assert restored("messages[2].role") == ("input[3].role", "input[3].role: is wrong")
    assert restored("messages") == ("input", "input: is wrong")
    several = ApiError(400, "messages: have 9 messages; messages[0].role: is wrong", param="messages")
    assert names.restored(several).text == "input: have 9 messages; instructions: is wrong"
    assert restored("messages[2].tool_calls[1].function.name") == ("input[5].name", "input[5].name: is wrong")
    assert restored("max_completion_tokens")[0] == "max_output_tokens"
    assert restored("response_format.json_schema.schema")[0] == "text.format.schema"
    assert restored("reasoning_effort")[0] == "reasoning.effort"
    assert restored("tools[3].function.parameters") == ("tools[3].parameters", "tools[3].parameters: is wrong")
    tools = replace(names, of_tools=("tools[1]", "tools[2].tools[0]"))
    wrong = tools.restored(ApiError(400, "tools[1].function.input_grammar: is wrong", param="tools[0].function.name"))
    assert wrong.text == "tools[2].tools[0].format.definition: is wrong"
    assert wrong.param == "tools[1].name"
    assert restored("messages[2].tool_call_id")[0] == "input[3].call_id"
    assert restored("temperature")[0] == "temperature"


def events_of(sent: bytes) -> list[dict[str, Any]]:
    events = []
    for event in sent.decode().split("\n\n")[:-1]:
        kind, content = event.split("\n")
        events.append(json.loads(content.removeprefix("data: ")))
        assert kind == f"event: {events[-1]['type']}"
    return events


def streamed(parts: list[Part], reason: FinishReason, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream with these parts."""
    (api_request, _), form = asked(stream=True, **fields), ResponseForm(parsed(stream=True, **fields), FieldNames(()))
    chunks = Chunks(api_request, ANSWER)
    opening = chunks.opening(0)
    assert opening is not None
    num_calls = len({part.index for part in parts if isinstance(part, ToolCallPart)})
    finished = chunks.finished(0, Finished(0, reason, num_tool_calls=num_calls))
    made = [opening, *(chunks.parts(0, [part]) for part in parts), finished, chunks.usage([USAGE])]
    return events_of(b"".join(form.event(chunk, "id") for chunk in made) + form.end())


def test_chunks_become_the_events_of_a_response() -> None:
    events = streamed([ContentPart("Hel"), ContentPart("lo")], FinishReason.STOP_TOKEN)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert {event["response"]["id"] for event in events if "response" in event} == {"resp_12ab"}
    assert {event["item_id"] for event in events if "item_id" in event} == {"msg_12ab_0"}
    assert events[6]["text"] == "Hello"
    done = events[-1]["response"]
    assert (done["status"], done["store"], done["incomplete_details"]) == ("completed", False, None)
    assert done["output"][0]["content"][0]["text"] == "Hello"
    assert done["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert (done["usage"]["input_tokens"], done["usage"]["output_tokens"], done["usage"]["total_tokens"]) == (5, 3, 8)


def test_response_that_is_cut_off_is_incomplete() -> None:
    events = streamed([ContentPart("Hel")], FinishReason.LENGTH, max_output_tokens=1)
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")


def test_error_in_the_middle_of_a_stream_is_a_failed_response() -> None:
    (api_request, _), form = asked(stream=True), ResponseForm(parsed(stream=True), FieldNames(()))
    chunks = Chunks(api_request, ANSWER)
    opening = chunks.opening(0)
    assert opening is not None
    sent = form.event(opening, "") + form.event(chunks.text(0, "Hel"), "")
    sent += form.failure(ApiError(503, "the router failed", "server_error"))
    last = events_of(sent)[-1]
    assert (last["type"], last["sequence_number"]) == ("response.failed", 5)
    assert last["response"]["error"] == {"code": "server_error", "message": "the router failed"}
    assert last["response"]["output"][0]["content"][0]["text"] == "Hel"


def test_reasoning_text_and_calls_are_items_of_their_own() -> None:
    parts: list[Part] = [
        ReasoningPart("h"), ReasoningPart("m"), ContentPart("I look."), ToolCallPart(0, "call_1", "f", ""),
        ToolCallPart(0, "", "", '{"a'), ToolCallPart(0, "", "", '":1}'), ToolCallPart(1, "call_2", "g", "{}"),
    ]  # fmt: skip
    events = streamed(parts, FinishReason.STOP_TOKEN, tools=[F, {**F, "name": "g"}])
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    reasoning, message, first, second = events[-1]["response"]["output"]
    assert reasoning == {
        "id": "rs_12ab_0", "type": "reasoning", "status": "completed", "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }  # fmt: skip
    assert message["content"][0]["text"] == "I look."
    assert first == {
        "id": "fc_12ab_2", "type": "function_call", "status": "completed", "call_id": "call_1", "name": "f",
        "arguments": '{"a":1}',
    }  # fmt: skip
    assert (second["call_id"], second["name"], second["arguments"]) == ("call_2", "g", "{}")
    assert events[-1]["response"]["tools"][0] == F


LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
PATCH = {"type": "custom", "name": "patch", "description": "Edits.", "format": LARK}
SPACE = {"type": "namespace", "name": "mcp__db", "description": "A database.", "tools": [F, {**PATCH, "name": "p"}]}
BOX = {"type": "namespace", "name": "box__", "tools": [{**F, "name": "g", "defer_loading": True}]}
REGEX = {"type": "custom", "name": "r", "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}}


def test_custom_tools_and_namespaces_are_functions_of_a_chat() -> None:
    tools = [{"type": "web_search", "external_web_access": True}, PATCH, SPACE, BOX, REGEX]
    body = parsed(tools=[*tools, {"type": "custom", "name": "free"}])
    chat, names = chat_body(body)
    functions = convert_chat(chat, Defaults(max_choices=1), "").requests[0].chat.functions
    set_inputs(functions, body.offered)
    assert [one.name for one in functions] == ["patch", "mcp__db__f", "mcp__db__p", "box__g", "r", "free"]
    assert names.of_tools[1:4] == ("tools[2].tools[0]", "tools[2].tools[1]", "tools[3].tools[0]")
    assert functions[0].description == f"Edits.\n\nThe input is a text of this Lark grammar:\n{LARK['definition']}"
    assert functions[1].description == "A database.\n\nd"
    forms = [(one.input_grammar, one.input_regex) for one in functions]
    assert forms == [(LARK["definition"], ""), ("", ""), (LARK["definition"], ""), ("", ""), ("", "[0-9]+"), ("", "")]
    assert all(json.loads(functions[place].parameters)["required"] == ["input"] for place in (0, 2, 4, 5))
    assert body.unused == ["tools[0]", "tools[3].tools[0].defer_loading"]


def test_choice_may_name_custom_tools_and_those_of_namespaces() -> None:
    allowed = [{"type": "custom", "name": "patch"}, {"type": "web_search"}, {"type": "function", "name": "f"}]
    for choice, chosen in (
        ({"type": "custom", "name": "patch"}, ["patch"]),
        ({"type": "function", "name": "f", "namespace": "mcp__db"}, ["mcp__db__f"]),
        ({"type": "allowed_tools", "mode": "required", "tools": allowed}, ["patch", "f"]),
    ):
        (request,) = asked(tools=[PATCH, F, SPACE], tool_choice=choice)[0].requests
        assert request.tool_choice.names == chosen
        assert request.tool_choice.mode == inference_pb2.ToolChoice.MODE_REQUIRED


def test_hints_are_taken_and_named() -> None:
    body = parsed(
        client_metadata={"x": "y"},
        prompt_cache_retention="24h",
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        reasoning={"summary": "auto", "effort": "low"},
        text={"verbosity": "low"},
        service_tier="priority",
        prompt_cache_key="k",
        input=[
            {"role": "user", "content": "hi"},
            {"type": "web_search_call", "id": "ws", "action": {"type": "search"}},
        ],
    )
    chat_body(body)
    hints = ["client_metadata", "prompt_cache_retention", "include[0]", "reasoning.summary", "text.verbosity"]
    assert body.unused == [*hints, "input[1]"]
    neutral = parsed(reasoning={"summary": "none"}, text={"verbosity": "medium"}, store=False)
    assert neutral.unused == []


def test_calls_of_every_kind_go_back_with_their_results() -> None:
    texts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    action = {"type": "exec", "command": ["ls"]}
    items = [
        {
            "type": "custom_tool_call",
            "id": "ctc",
            "status": "completed",
            "call_id": "1",
            "name": "patch",
            "input": 'a"\n',
        },
        {"type": "custom_tool_call_output", "call_id": "1", "output": texts},
        {"type": "function_call", "call_id": "2", "name": "f", "namespace": "mcp__db", "arguments": "{}"},
        {"type": "local_shell_call", "id": "3", "call_id": None, "status": "completed", "action": action},
        {"type": "function_call_output", "call_id": "2", "output": "x"},
        {"type": "local_shell_call_output", "id": "3", "output": "y"},
        {"type": "additional_tools", "role": "developer", "tools": [PATCH]},
        {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "hm"}], "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "z"}], "end_turn": True},
    ]
    (request,) = asked(input=items)[0].requests
    assert [one.name for one in request.chat.functions] == ["patch"]
    said = [(one.role, one.tool_call_id, "".join(part.text for part in one.content)) for one in request.chat.messages]
    assert said == [
        ("assistant", "", ""), ("tool", "1", "a\nb"), ("assistant", "", ""), ("tool", "2", "x"), ("tool", "3", "y"),
        ("assistant", "", "z"),
    ]  # fmt: skip
    calls = [(call.id, call.name, call.arguments) for one in request.chat.messages for call in one.tool_calls]
    assert calls == [
        ("1", "patch", '{"input": "a\\"\\n"}'), ("2", "mcp__db__f", "{}"), ("3", "local_shell", json.dumps(action)),
    ]  # fmt: skip
    assert request.chat.messages[-1].reasoning == "hm"


def test_leading_messages_of_the_system_are_one() -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "B"}]}
    user = {"role": "user", "content": "hi"}
    assert messages_of(instructions="A", input=[developer, developer, user, developer]) == [
        ("system", "A\n\nB\n\nB"), ("user", "hi"), ("system", "B"),
    ]  # fmt: skip


def test_calls_of_custom_tools_and_namespaces_are_items_of_their_own() -> None:
    arguments = json.dumps({"input": 'é "\n😀\\'})
    parts: list[Part] = [ToolCallPart(0, "call_1", "patch", "")]
    parts += [ToolCallPart(0, "", "", one) for one in arguments]
    parts.append(ToolCallPart(1, "call_2", "mcp__db__f", "{}"))
    events = streamed(parts, FinishReason.STOP_TOKEN, tools=[PATCH, SPACE])
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == list('é "\n😀\\')
    assert kinds[2:3] + kinds[3 + len(deltas) :] == [
        "output_item.added", "custom_tool_call_input.done", "output_item.done", "output_item.added",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    custom, function = events[-1]["response"]["output"]
    assert custom == {
        "id": "ctc_12ab_0", "type": "custom_tool_call", "status": "completed", "call_id": "call_1", "name": "patch",
        "input": 'é "\n😀\\',
    }  # fmt: skip
    assert (function["name"], function["namespace"], function["arguments"]) == ("f", "mcp__db", "{}")


@pytest.mark.parametrize("text", ["\\ud800x", "\\ud800\\ud83d\\ude00", "\\udc00", "\\u00e9\\/"])
def test_escapes_in_the_input_of_a_custom_tool_are_decoded_wherever_it_is_cut(text: str) -> None:
    whole = json.loads(f'"{text}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for cut in range(len(text)):
        reader = InputText()
        assert "".join(map(reader.feed, ('{"in', f'put" : "{text[:cut]}', f'{text[cut:]}"}}'))) == whole


def test_tools_are_those_of_a_chat() -> None:
    def chosen(choice: Any) -> inference_pb2.GenerateRequest:
        return asked(tools=[F], tool_choice=choice, parallel_tool_calls=False, reasoning={"effort": "low"})[0].requests[
            0
        ]

    chat = {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "low",
        "tools": [{"type": "function", "function": {k: v for k, v in F.items() if k != "type"}}],
        "parallel_tool_calls": False,
    }  # fmt: skip
    named = {"type": "function", "name": "f"}
    in_chat = {"type": "function", "function": {"name": "f"}}
    choices: tuple[tuple[Any, Any], ...] = (
        (None, None), ("none", "none"), ("required", "required"), (named, in_chat),
        ({"type": "allowed_tools", "mode": "required", "tools": [named]},
         {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [in_chat]}}),
    )  # fmt: skip
    for own, of_chat in choices:
        body = parse_chat(json.dumps({**chat, "tool_choice": of_chat}).encode())
        assert convert_chat(body, Defaults(max_choices=4), "").requests == (chosen(own),)


def test_form_of_a_message_does_not_hold_for_calls() -> None:
    text = {"format": {"type": "json_object"}}
    for choice in ("required", {"type": "function", "name": "f"}):
        (request,) = asked(tools=[F], tool_choice=choice, text=text)[0].requests
        assert not request.HasField("constraint")
    for choice in ("none", "auto"):
        (request,) = asked(tools=[F], tool_choice=choice, text=text)[0].requests
        assert request.constraint.json_object


def test_reasoning_goes_with_the_message_behind_it() -> None:
    reasoning = {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    for items in ([reasoning, {"role": "assistant", "content": "A"}, call], [reasoning, call]):
        (message,) = asked(input=items)[0].requests[0].chat.messages
        assert (message.reasoning, message.tool_calls[0].name) == ("hm", "f")


def joined(pieces: list[list[str]]) -> list[Part]:
    """Reasoning, content and calls of these pieces."""
    reasoning, content, *calls = pieces
    parts: list[Part] = [*map(ReasoningPart, reasoning), *map(ContentPart, content)]
    for index, call in enumerate(calls):
        parts.append(ToolCallPart(index, f"call_{index}", "f", ""))
        parts += [ToolCallPart(index, "", "", piece) for piece in call]
    return parts


PIECES = st.lists(st.lists(st.text(min_size=1, max_size=3), max_size=3), min_size=2, max_size=4)


@given(PIECES, st.sampled_from([FinishReason.STOP_STRING, FinishReason.LENGTH]))
def test_whole_response_is_the_one_that_its_stream_ends_with(pieces: list[list[str]], reason: FinishReason) -> None:
    parts = joined(pieces)
    choice = Choice()
    choice.take_parts(tuple(parts))
    api_request, _ = asked(tools=[F])
    finished = FinishedChoice(choice.content, reason, reasoning=choice.reasoning, tool_calls=list(choice.tool_calls))
    whole = ResponseForm(parsed(tools=[F]), FieldNames(())).whole(
        whole_answer(api_request, ANSWER, [finished], [USAGE])
    )
    assert whole == streamed(parts, reason, tools=[F])[-1]["response"]


NAMES = st.sampled_from(
    ("model", "input", "instructions", "text", "format", "type", "role", "content", "stream", "include", "tools")
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["user", "message", "m"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(), inner, max_size=5),
    max_leaves=12,
)


def status_of(raw: bytes) -> int:
    """The status of a body; 200 for one that is a request that can be sent."""
    try:
        chat, _ = chat_body(parse_responses(raw))
        for request in convert_chat(chat, Defaults(max_choices=4), "").requests:
            assert inference_pb2.GenerateRequest.FromString(request.SerializeToString()) == request
    except ApiError as error:
        json.dumps(error.body())
        return error.status
    return 200


@given(st.dictionaries(NAMES, VALUES) | VALUES, st.lists(st.dictionaries(NAMES, VALUES), max_size=3))
def test_any_json_is_a_request_or_refused_in_words(body: Any, items: list[Any]) -> None:
    for sound in ({}, {"model": "m", "input": "hi"}, {"model": "m", "input": items}):
        raw = json.dumps({**body, **sound} if isinstance(body, dict) else body).encode()
        assert status_of(raw) in (200, 400)
