"""Tool calls of the default model, by OpenAI's client, unmodified, and by our own; and a call whose executor dies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator

from inflight import AsyncClient, FinishReason, InflightError, ToolCallPart
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from tests.stack.conftest import EXECUTOR_ARGS
from tests.support.stack.braked import ProcessBrake
from tests.support.stack.executor_death import kill_executor_of
from tests.support.stack.executors_linked import wait_for_executors
from tests.support.stack.gateways import run_gateway

MODEL = "SmolLM2-135M-Instruct"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time"}},
]
SCHEMAS = {"get_weather": WEATHER, "get_time": {"type": "object", "maxProperties": 0}}
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Ulm?"}]
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": QUESTION,
    "tools": TOOLS,
    "temperature": 0,
    "max_completion_tokens": 100,
    "parallel_tool_calls": False,
}


def check(name: str, arguments: str) -> None:
    Draft202012Validator(SCHEMAS[name]).validate(json.loads(arguments))


async def test_required_call_is_valid_whole_and_in_pieces(stack: LocalStack) -> None:
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        whole = await client.chat.completions.create(tool_choice="required", **ASKED)
        message = whole.choices[0].message
        assert whole.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        (call,) = message.tool_calls or []
        assert call.type == "function"
        check(call.function.name, call.function.arguments)
        async with client.chat.completions.stream(tool_choice="required", **ASKED) as stream:
            kinds = {event.type async for event in stream}
            final = (await stream.get_final_completion()).choices[0]
        assert "tool_calls.function.arguments.delta" in kinds
        assert final.finish_reason == "tool_calls"
        (streamed,) = final.message.tool_calls or []
        assert streamed.function.name == call.function.name
        assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)


async def test_named_allowed_and_forbidden_tools_are_what_is_called(stack: LocalStack) -> None:
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        named: Any = {"type": "function", "function": {"name": "get_time"}}
        allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
        for choice in (named, allowed):
            answer = await client.chat.completions.create(tool_choice=choice, **ASKED)
            (call,) = answer.choices[0].message.tool_calls or []
            assert (call.function.name, call.function.arguments) == ("get_time", "{}")
        none = await client.chat.completions.create(tool_choice="none", **{**ASKED, "max_completion_tokens": 8})
        assert none.choices[0].message.tool_calls is None
        assert none.choices[0].message.content


async def test_free_choice_is_text_or_valid_calls(stack: LocalStack) -> None:
    async with AsyncClient(*stack.router_addresses) as client:
        answers = await asyncio.gather(
            *(
                client.complete(chat=QUESTION, tools=TOOLS, temperature=1.2, seed=seed, max_tokens=60)
                for seed in range(6)
            )
        )
    for answer in answers:
        assert answer.content or answer.tool_calls
        calls = answer.tool_calls if answer.finish_reason is FinishReason.STOP_TOKEN else answer.tool_calls[:-1]
        for call in calls:
            check(call.name, call.arguments)


async def test_results_of_calls_go_back_to_the_model(stack: LocalStack) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    turns: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "It is noon."},
    ]
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        asked = {**ASKED, "messages": turns, "max_completion_tokens": 8}
        answer = await client.chat.completions.create(tool_choice="none", **asked)
        assert answer.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="not the id of a call"):
            await client.chat.completions.create(**{**asked, "messages": turns[2:]})


async def test_parts_of_a_resumed_stream_continue_within_the_arguments(stack: LocalStack) -> None:
    asked: dict[str, Any] = {
        "chat": QUESTION, "tools": TOOLS, "tool_choice": "get_weather", "temperature": 0, "max_tokens": 100,
    }  # fmt: skip
    async with AsyncClient(*stack.router_addresses) as client:
        (whole,) = (await client.complete(**asked)).tool_calls
        for cut in (2, 12, 20):
            stream = client.generate(resume_ttl_s=60, **asked)
            arguments, name, place, num_bytes = "", "", 0, 0
            async for delta in stream:
                for part in delta.parts:
                    assert isinstance(part, ToolCallPart)
                    name, arguments = name + part.name, arguments + part.arguments
                place, num_bytes = delta.offset + delta.num_tokens, num_bytes + len(delta.text.encode())
                if place >= cut:
                    break
            request_id, token = stream.request_id or "", stream.resume_token or ""
            stream.cancel()
            rest = client.resume(request_id, token, offset=place, text_bytes=num_bytes)
            async for event in rest.events():
                for part in getattr(event, "parts", ()):
                    assert isinstance(part, ToolCallPart)
                    name, arguments = name + part.name, arguments + part.arguments
            assert (name, arguments) == (whole.name, whole.arguments)


async def test_killed_executor_in_the_middle_of_arguments_changes_nothing(stack: LocalStack, tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "chat": QUESTION, "tools": TOOLS, "tool_choice": "get_weather", "temperature": 1, "seed": 3, "max_tokens": 100,
    }  # fmt: skip
    async with AsyncClient(*stack.router_addresses) as client:
        whole = await client.complete(**asked)
    brake = ProcessBrake(tmp_path / "brake")
    middle = brake.program(whole.usage.output_tokens - 5)
    options = StackOptions(executors=2, executor_args=EXECUTOR_ARGS, run_dir=tmp_path / "run", program=middle)
    async with LocalStack(options) as failing, AsyncClient(*failing.router_addresses) as client:
        await wait_for_executors(failing.address, options.executors)
        brake.hold()
        stream = client.generate(**asked)
        has_killed = False
        async for delta in stream:
            if not has_killed and any(isinstance(part, ToolCallPart) and part.arguments for part in delta.parts):
                kill_executor_of(failing, stream)
                brake.release()
                has_killed = True
        assert has_killed
        assert stream.timing is not None
        assert stream.timing.migrations == 1
        assert stream.transcript.result().text == whole.text
        (call,), (same,) = whole.tool_calls, stream.transcript.choices[0].tool_calls
        assert (same.name, same.arguments) == (call.name, call.arguments)
        check(call.name, call.arguments)


async def test_unusable_tools_are_refused_by_name(stack: LocalStack) -> None:
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:

        async def refused(param: str, **fields: Any) -> None:
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(**{**ASKED, **fields})
            assert error.value.param == param, error.value

        def tool(**function: Any) -> list[Any]:
            return [{"type": "function", "function": {"name": "f", **function}}]

        await refused("tools[0].function.name", tools=tool(name='f"\n'))
        await refused("tools[1].function.name", tools=[*tool(), *tool()])
        await refused("tools", tools=[tool(name=f"f{i}")[0] for i in range(1000)])
        await refused("tools[0].function.parameters", tools=tool(parameters={"type": "string"}))
        await refused("tools", tools=tool(parameters={"not": {}}, strict=True))
        await refused("tool_choice", tool_choice={"type": "function", "function": {"name": "absent"}})
        await refused("response_format", response_format={"type": "json_object"})


async def test_our_client_refuses_what_is_no_tool(stack: LocalStack) -> None:
    async with AsyncClient(*stack.router_addresses) as client:
        with pytest.raises(ValueError, match="tools: has colour"):
            await client.complete(chat=QUESTION, tools=[{"name": "f", "colour": 1}])
        with pytest.raises(TypeError, match="tools needs a chat"):
            await client.complete("hi", tools=TOOLS)
        with pytest.raises(InflightError, match=r"not among the names in chat\.functions"):
            await client.complete(chat=QUESTION, tools=TOOLS, tool_choice="absent")
