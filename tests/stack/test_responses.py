"""OpenAI's client, unmodified, with the default model: `client.responses` whole, streamed and parsed."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Field

from inflight.local.stack import LocalStack
from tests.support.stack.gateways import run_gateway

MODEL = "SmolLM2-135M-Instruct"
GREEDY: dict[str, Any] = {
    "model": MODEL, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 32,
}  # fmt: skip

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "get_time": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema, "strict": True} for name, schema in SCHEMAS.items()
]


class City(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    is_capital: bool


async def test_openais_client_gets_a_response_whole_and_streamed(stack: LocalStack) -> None:
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        whole = await client.responses.create(instructions="Answer in one sentence.", **GREEDY)
        assert "Paris" in whole.output_text
        assert (whole.status, whole.instructions) == ("completed", "Answer in one sentence.")
        async with client.responses.stream(instructions="Answer in one sentence.", **GREEDY) as stream:
            snapshots = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert final.output_text == whole.output_text == snapshots[-1]
        # A conversation goes on with the items of the answer.
        items: list[Any] = [{"role": "user", "content": GREEDY["input"]}, *whole.output]
        items.append({"role": "user", "content": "And of Italy?"})
        second = await client.responses.create(**{**GREEDY, "input": items})
        assert "Rome" in second.output_text


async def test_openais_client_parses_responses_whole_and_streamed(stack: LocalStack) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Describe Paris as JSON.", "temperature": 0}
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        parsed = await client.responses.parse(text_format=City, max_output_tokens=100, **asked)
        assert isinstance(parsed.output_parsed, City)
        async with client.responses.stream(text_format=City, max_output_tokens=100, **asked) as stream:
            final = await stream.get_final_response()
        assert final.output_parsed == parsed.output_parsed
        schema: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}
        with pytest.raises(openai.BadRequestError, match="keyword `not`") as refused:
            await client.responses.create(text=schema, **asked)
        assert refused.value.param == "text.format.schema"


async def test_openais_client_gets_calls_whole_and_streamed_and_returns_their_results(stack: LocalStack) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "tools": TOOLS, "temperature": 0, "max_output_tokens": 100, "parallel_tool_calls": False,
    }  # fmt: skip
    items: list[Any] = [{"role": "user", "content": "What is the weather in Ulm?"}]
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        whole = await client.responses.create(input=items, tool_choice="required", **asked)
        (call,) = whole.output
        assert call.type == "function_call"
        Draft202012Validator(SCHEMAS[call.name]).validate(json.loads(call.arguments))
        async with client.responses.stream(input=items, tool_choice="required", **asked) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert "response.function_call_arguments.done" in kinds
        (streamed,) = final.output
        assert streamed.type == "function_call"
        assert (streamed.name, json.loads(streamed.arguments)) == (call.name, json.loads(call.arguments))
        # The result goes back with the call.
        items += [*whole.output, {"type": "function_call_output", "call_id": call.call_id, "output": "It is sunny."}]
        answer = await client.responses.create(input=items, tool_choice="none", **asked)
        assert answer.output_text
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(input=items[2:], tool_choice="none", **asked)
        assert refused.value.param == "input[0].call_id"


async def test_input_of_a_custom_tool_satisfies_its_grammar_or_expression(stack: LocalStack) -> None:
    lark = 'start: "*** Add " NAME LF ("+" /[a-z \\"]{1,9}/ LF){2} "*** End"\nNAME: /[a-z]{3}/\n%import common.LF'
    forms = {
        "lark": (lark, r'\*\*\* Add [a-z]{3}\n(?:\+[a-z "]{1,9}\n){2}\*\*\* End'),
        "regex": (r'"\d{3}"\n', r'"\d{3}"\n'),
    }
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        for syntax, (definition, pattern) in forms.items():
            form = {"type": "grammar", "syntax": syntax, "definition": definition}
            tool: Any = {"type": "custom", "name": "edit", "format": form}
            choice: Any = {"type": "custom", "name": "edit"}
            asked = {**GREEDY, "max_output_tokens": 120, "tools": [tool], "tool_choice": choice}
            (call,) = (await client.responses.create(**asked)).output
            assert call.type == "custom_tool_call"
            assert re.fullmatch(pattern, call.input), call.input
        bad: Any = {**tool, "format": {**form, "syntax": "lark", "definition": "start: absent"}}
        with pytest.raises(
            openai.BadRequestError, match="edit: the grammar of its input has the rule start, which refers"
        ):
            await client.responses.create(**asked | {"tools": [bad]})
