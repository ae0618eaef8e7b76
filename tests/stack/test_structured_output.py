"""Structured output of the default model, by our client, the command line and OpenAI's client, unmodified."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from inflight import AsyncClient, FinishReason, InflightError
from inflight.cli.main import main
from inflight.local.stack import LocalStack
from tests.support.stack.gateways import run_gateway

MODEL = "SmolLM2-135M-Instruct"
QUESTION: list[Any] = [{"role": "user", "content": "Describe Paris as JSON."}]


class City(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    is_capital: bool


async def test_every_kind_of_constraint_holds_and_a_cut_output_says_so(stack: LocalStack) -> None:
    async with AsyncClient(*stack.router_addresses) as client:

        async def answer(**options: Any) -> Any:
            return await client.complete(
                chat="Describe Paris.", temperature=1.5, seed=1, **{"max_tokens": 50, **options}
            )

        whole, cut, chosen, matched, parsed = await asyncio.gather(
            answer(json_schema=City, max_tokens=100),
            answer(json_schema=City, max_tokens=3),
            answer(choice=["yes", "no"]),
            answer(regex="[0-9]{3}-[0-9]{4}"),
            answer(grammar='start: "The answer is " ("red" | "blue")'),
        )
    assert City.model_validate_json(whole.text)
    assert (whole.finish_reason, whole.constraint_unfinished) == (FinishReason.STOP_TOKEN, False)
    assert (cut.finish_reason, cut.constraint_unfinished) == (FinishReason.LENGTH, True)
    assert chosen.text in ("yes", "no")
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", matched.text)
    assert parsed.text in ("The answer is red", "The answer is blue")


async def test_unsupported_schema_is_refused_and_named(stack: LocalStack) -> None:
    async with AsyncClient(*stack.router_addresses) as client:
        with pytest.raises(InflightError, match="keyword `uniqueItems` at the root") as refused:
            await client.complete("Hello", json_schema={"uniqueItems": True})
    assert [field.field for field in refused.value.fields] == ["constraint.json_schema"]


async def test_openais_client_parses_answers_whole_and_streamed(stack: LocalStack) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": City.model_json_schema(), "strict": True},
    }
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        whole = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, response_format=form, max_tokens=100
        )
        assert City.model_validate_json(whole.choices[0].message.content or "")
        parsed = await client.chat.completions.parse(
            model=MODEL, messages=QUESTION, response_format=City, max_tokens=100, temperature=0
        )
        assert isinstance(parsed.choices[0].message.parsed, City)
        async with client.chat.completions.stream(
            model=MODEL, messages=QUESTION, response_format=City, max_tokens=100, temperature=0
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == parsed.choices[0].message.parsed
        any_object = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=50, extra_body={"guided_choice": ["{}", "[]"]}
        )
        assert any_object.choices[0].message.content in ("{}", "[]")
        form["json_schema"]["schema"] = {"not": {}}
        with pytest.raises(openai.BadRequestError, match="keyword `not`") as refused:
            await client.chat.completions.create(model=MODEL, messages=QUESTION, response_format=form)
        assert refused.value.param == "response_format.json_schema.schema"


async def test_command_line_takes_a_schema(stack: LocalStack, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--json-schema", json.dumps(City.model_json_schema()), "--address", stack.address, "--max-tokens", "100"]
    assert await asyncio.to_thread(main, ["generate", "Describe Paris as JSON.", *flags]) == 0
    assert City.model_validate_json(capsys.readouterr().out)
