"""Tool calls and reasoning through the gateway, from a router that divides scripted answers: every format, streamed and
whole, by OpenAI's client, unmodified, and after broken connections."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import openai
import pytest
from pydantic import BaseModel

from inflight import AsyncClient, Completion, ToolCall
from inflight.router.stream.parts import wire_parts
from inflight.router.tools.formats import FORMATS, THINK, AnswerFormat
from inflight.router.tools.parser import AnswerParser
from inflight.v1 import inference_pb2, types_pb2
from tests.support.stack.gateways import RunningGateway, events_of, run_gateway
from tests.unit.scripted_router import ScriptedRouter, accepted, asked, delta, ending, serving
from tests.unit.test_tool_parser import BY_NAME, random_answers, read, written

CHAT: dict[str, Any] = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [("f", '{"a": "ü\\n", "b": [1, {"c": "}"}]}'), ("g", "{}")]
TEXT = "<think>\nI need f.</think>\n\nLet me see.\n" + written(BY_NAME["hermes"], CALLS)
HERMES = AnswerFormat(BY_NAME["hermes"], THINK)
PIECE = 5


def spoken(answer: AnswerFormat, text: str, offset: int = 0, num_bytes: int = 0) -> Iterator[inference_pb2.StreamEvent]:
    """The events of an answer after a client's place, a token for some characters each."""
    parser = AnswerParser(answer)
    parser.feed(text.encode()[:num_bytes].decode())
    first = accepted()
    first.accepted.has_parts = True
    yield first
    rest = text.encode()[num_bytes:].decode()
    pieces = [rest[start : start + PIECE] for start in range(0, len(rest), PIECE)]
    for number, piece in enumerate(pieces):
        event = delta(piece, offset + number)
        event.delta.parts.extend(wire_parts(parser.feed(piece), "call{}".format))
        yield event
    finished, done = ending(offset + len(pieces))
    finished.finished.parts.extend(wire_parts(parser.finish(), "call{}".format))
    finished.finished.num_tool_calls = parser.num_calls
    done.done.usage.reasoning_tokens = 3
    yield finished
    yield done


def scripted(answer: AnswerFormat, text: str, breaks_at: int | None = None) -> ScriptedRouter:
    """A router that says a text; its first connection breaks after so many events."""

    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        for number, event in enumerate(spoken(answer, text)):
            if number == breaks_at:
                context.abort(grpc.StatusCode.UNAVAILABLE, "broken")
            yield event

    def resume(request: inference_pb2.ResumeRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        yield from spoken(answer, text, request.offsets[0], request.text_bytes[0])

    return ScriptedRouter(script, resume)


@asynccontextmanager
async def gateway_of(router: ScriptedRouter, **settings: Any) -> AsyncIterator[RunningGateway]:
    with serving(router) as address:
        async with run_gateway(address, **settings) as gateway:
            yield gateway


async def test_scripted_answers_of_every_format_come_as_calls() -> None:
    for answer, text, reasoning, content, calls in random_answers(len(FORMATS), seed=5):
        async with gateway_of(scripted(answer, text)) as gateway, gateway.openai() as client:
            expected = read(answer, [text])[2]
            whole = (await client.chat.completions.create(**CHAT)).choices[0]
            called = [(one.function.name, one.function.arguments) for one in whole.message.tool_calls or []]
            assert called == expected
            assert [name for name, _ in called] == [name for name, _ in calls]
            assert (whole.message.content or "") == content
            assert getattr(whole.message, "reasoning_content", "") == reasoning
            assert whole.finish_reason == ("tool_calls" if calls else "stop")
            async with client.chat.completions.stream(**CHAT) as stream:
                final = (await stream.get_final_completion()).choices[0]
            streamed = [(one.function.name, one.function.arguments) for one in final.message.tool_calls or []]
            assert streamed == expected
            assert (final.message.content or "") == content
            assert final.finish_reason == whole.finish_reason


async def test_call_that_a_stop_text_cuts_is_reported_as_incomplete() -> None:
    text = TEXT[: TEXT.index(CALLS[0][1]) + 9]

    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        for event in spoken(HERMES, text):
            if event.HasField("finished"):
                event.finished.reason = types_pb2.FINISH_REASON_STOP_STRING
                event.finished.stop, event.finished.constraint_unfinished = "STOP", True
            yield event

    async with gateway_of(ScriptedRouter(script)) as gateway, gateway.openai() as client:
        whole = (await client.chat.completions.create(**CHAT)).choices[0]
        assert [call.function.name for call in whole.message.tool_calls or []] == ["f"]
        assert whole.finish_reason == "length"
        chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **CHAT)]
        assert chunks[-1].choices[0].finish_reason == "length"
        completion = await client.completions.create(model="smol", prompt="hi")
        assert completion.choices[0].finish_reason == "length"
        asked: dict[str, Any] = {"model": "smol", "input": "hi"}
        response = await client.responses.create(**asked)
        assert (response.status, response.output[-1].status) == ("incomplete", "incomplete")
        events = [event async for event in await client.responses.create(stream=True, **asked)]
        assert events[-1].type == "response.incomplete"


async def test_first_delta_of_a_call_has_its_name_and_later_ones_only_arguments() -> None:
    async with gateway_of(scripted(HERMES, TEXT)) as gateway, gateway.openai() as client:
        chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **CHAT)]
        deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        for index, (name, arguments) in enumerate(CALLS):
            first, *more = [one for one in deltas if one.index == index]
            assert (first.id, first.type, first.function and first.function.name) == (f"call{index}", "function", name)
            assert all((one.id, one.type) == (None, None) for one in more)
            assert "".join(one.function.arguments or "" for one in (first, *more) if one.function) == arguments
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


async def test_reasoning_is_in_the_fields_that_the_setting_names() -> None:
    both = ("reasoning_content", "reasoning")
    for fields in (both[:1], both[1:], both):
        router = scripted(HERMES, TEXT)
        async with gateway_of(router, reasoning_fields=fields) as gateway, gateway.openai() as client:
            answer = await client.chat.completions.create(**CHAT)
            message = answer.choices[0].message.model_dump()
            assert {name: message[name] for name in both if name in message} == dict.fromkeys(fields, "I need f.")
            assert answer.usage is not None
            assert answer.usage.completion_tokens_details is not None
            assert answer.usage.completion_tokens_details.reasoning_tokens == 3
            told = [chunk async for chunk in await client.chat.completions.create(stream=True, **CHAT)]
            deltas = [chunk.choices[0].delta.model_dump() for chunk in told]
            for name in both:
                said = "".join(one.get(name) or "" for one in deltas)
                assert said == ("I need f." if name in fields else "")


async def test_stream_continues_after_any_event_on_another_gateway() -> None:
    def add_up(values: list[Any]) -> tuple[str, str, list[list[str]], list[str]]:
        reasoning, content, calls, reasons = "", "", [], []
        for value in values:
            choice = value["choices"][0]
            reasoning += choice["delta"].get("reasoning_content", "")
            content += choice["delta"].get("content", "")
            for call in choice["delta"].get("tool_calls", ()):
                if "id" in call:
                    calls.append([call["id"], call["function"]["name"], ""])
                calls[call["index"]][2] += call["function"]["arguments"]
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        return reasoning, content, calls, reasons

    expected = [[f"call{i}", *call] for i, call in enumerate(CALLS)]
    async with gateway_of(scripted(HERMES, TEXT)) as gateway:
        url = f"{gateway.url}/v1/chat/completions"
        async with events_of(url, CHAT) as events:
            whole = [event async for event in events]
        said = [event for event in whole if event.text != "[DONE]"]
        assert add_up([event.value for event in said]) == ("I need f.", "Let me see.\n", expected, ["tool_calls"])
        for number in range(0, len(said), 3):
            async with events_of(url, CHAT, {"Last-Event-ID": said[number].name}) as events:
                rest = [event.value async for event in events if event.text != "[DONE]"]
            known = [event.value for event in said[: number + 1]]
            assert add_up([*known, *rest]) == ("I need f.", "Let me see.\n", expected, ["tool_calls"])


@pytest.mark.parametrize(("pieces", "later", "display"), [(PIECE, 40, "full"), (200, 5, "omitted")])
async def test_message_continues_after_any_event(
    pieces: int, later: int, display: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def joined(events: list[Any]) -> list[Any]:
        """Joins the deltas of a kind in each block."""
        told: list[Any] = []
        texts: dict[tuple[int, str], str] = {}
        for event in events:
            if event["type"] == "content_block_delta":
                kind, text = list(event["delta"].values())
                texts[event["index"], kind] = texts.get((event["index"], kind), "") + text
            else:
                told.append(event | {"usage": None})  # which counts pieces
        return [texts, *told]

    async def streamed(last_id: str = "") -> list[Any]:
        headers = {"Last-Event-ID": last_id} if last_id else {}
        async with events_of(f"{gateway.url}/v1/messages", body, headers) as events:
            return [event async for event in events]

    thinking = {"type": "enabled", "budget_tokens": 100, "display": display}
    body = {**CHAT, "max_tokens": 100, "thinking": thinking, "tools": [{"name": "f", "input_schema": {}}]}
    async with gateway_of(scripted(HERMES, TEXT)) as gateway:
        monkeypatch.setattr("tests.integration.test_gateway_tools.PIECE", pieces)
        whole = await streamed()
        expected = joined([event.value for event in whole])
        starts = [event["content_block"]["type"] for event in expected[1:] if "content_block" in event]
        assert starts == ["thinking", "text", "tool_use", "tool_use"]
        assert expected[-2]["delta"]["stop_reason"] == "tool_use"
        monkeypatch.setattr("tests.integration.test_gateway_tools.PIECE", later)
        for number in range(0, len(whole) - 1, 3 if pieces == PIECE else 1):
            known, rest = whole[: number + 1], await streamed(whole[number].name)
            assert joined([event.value for event in (*known, *rest)]) == expected, whole[number].name
            middle = rest[: len(rest) // 2]
            if middle:
                again = [*known, *middle, *await streamed(middle[-1].name)]
                assert joined([event.value for event in again]) == expected, middle[-1].name


@pytest.mark.parametrize("breaks_at", [3, 9, 20, 30])
async def test_our_client_resumes_within_calls(breaks_at: int) -> None:
    with serving(scripted(HERMES, TEXT, breaks_at)) as address:
        async with AsyncClient(address) as client:
            stream = client.generate(chat="hi", tools=TOOLS)
            answer: Completion = await stream.result()
    assert stream.num_resumes == 1
    assert (answer.reasoning, answer.content) == ("I need f.", "Let me see.\n")
    assert answer.tool_calls == tuple(ToolCall(f"call{i}", *call) for i, call in enumerate(CALLS))
    assert answer.text == TEXT


async def test_tools_and_choices_become_fields_of_the_router() -> None:
    mode = inference_pb2.ToolChoice.Mode
    named = {"type": "function", "function": {"name": "f"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    cases: list[tuple[dict[str, Any], tuple[int, list[str], bool | None]]] = [
        ({}, (mode.MODE_UNSPECIFIED, [], None)),
        ({"tool_choice": "none"}, (mode.MODE_NONE, [], None)),
        ({"tool_choice": "required", "parallel_tool_calls": False}, (mode.MODE_REQUIRED, [], False)),
        ({"tool_choice": named, "parallel_tool_calls": True}, (mode.MODE_REQUIRED, ["f"], False)),
        ({"tool_choice": allowed, "parallel_tool_calls": True}, (mode.MODE_AUTO, ["f"], True)),
    ]
    router = scripted(HERMES, "hi")
    async with gateway_of(router) as gateway, gateway.openai() as client:
        for fields, expected in cases:
            await client.chat.completions.create(
                **CHAT, tools=TOOLS, reasoning_effort="low", extra_body={"thinking_token_budget": 7}, **fields
            )
            (request,) = asked(router)
            choice = request.tool_choice
            parallel = choice.parallel if choice.HasField("parallel") else None
            assert (choice.mode, list(choice.names), parallel) == expected
            assert json.loads(request.chat.functions[0].parameters) == TOOLS[0]["function"]["parameters"]
            assert request.output.parts
            assert request.chat.reasoning_effort == "low"
            assert request.chat.thinking_token_budget == 7


class Function(BaseModel):
    """The arguments of `f`."""

    a: str


async def test_messages_of_openais_client_go_back_as_it_holds_them() -> None:
    """With parsed arguments, places in the stream and fields that are null."""
    asked: dict[str, Any] = {**CHAT, "tools": [openai.pydantic_function_tool(Function, name="f")]}
    calls = [("f", '{"a": "x"}'), ("f", '{"a": "y"}')]
    text = "Hm.\n" + written(BY_NAME["hermes"], calls)
    async with gateway_of(scripted(HERMES, text)) as gateway, gateway.openai() as client:
        chats = client.chat.completions
        async with chats.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
        for answer in (await chats.create(**asked), await chats.parse(**asked), streamed):
            message = answer.choices[0].message
            results = [{"role": "tool", "tool_call_id": call.id, "content": "r"} for call in message.tool_calls or ()]
            assert len(results) == len(calls)
            for turn in (message, message.model_dump()):
                await chats.create(**{**asked, "messages": [*CHAT["messages"], turn, *results]})


async def test_items_of_openais_client_go_back_as_it_holds_them() -> None:
    tool = {"type": "function", "name": "f", "parameters": Function.model_json_schema(), "strict": True}
    asked: dict[str, Any] = {"model": "smol", "input": CHAT["messages"], "tools": [tool]}
    text = "<think>\nI need f.</think>\n\nHm.\n" + written(BY_NAME["hermes"], [("f", '{"a": "x"}')])
    async with gateway_of(scripted(HERMES, text)) as gateway, gateway.openai() as client:
        async with client.responses.stream(**asked) as stream:
            streamed = await stream.get_final_response()
        for answer in (await client.responses.create(**asked), await client.responses.parse(**asked), streamed):
            assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
            call: Any = answer.output[2]
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "r"}
            for items in (answer.output, [item.model_dump() for item in answer.output]):
                await client.responses.create(**{**asked, "input": [*CHAT["messages"], *items, result]})


async def test_reasoning_that_never_ends_is_reasoning_only() -> None:
    text = "<think>\n" + "I wonder. " * 2000
    async with gateway_of(scripted(HERMES, text)) as gateway, gateway.openai() as client:
        message = (await client.chat.completions.create(**CHAT)).choices[0].message
        assert (message.content, message.tool_calls) == (None, None)
        assert message.model_dump()["reasoning_content"] == text.removeprefix("<think>\n")
