"""LangChain, LiteLLM and instructor, unmodified, with tools: against a router that divides scripted answers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inflight.router.tools.formats import AnswerFormat
from inflight.v1 import inference_pb2
from tests.clients.environments import python_of
from tests.integration.test_gateway_tools import spoken
from tests.support.stack.gateways import run_gateway
from tests.unit.scripted_router import ScriptedRouter, asked, serving
from tests.unit.test_tool_parser import BY_NAME, written

DRIVER = Path(__file__).parents[1] / "clients" / "drive_tools.py"
CALLS = [("get_weather", '{"city": "Ulm"}'), ("get_time", "{}")]
ANSWER = "It is sunny at noon."
HERMES = BY_NAME["hermes"]


def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
    """Calls both tools, and answers when it has the results; to instructor it calls the only tool."""
    names = [function.name for function in request.chat.functions]
    if names == ["Weather"]:
        text = written(HERMES, [("Weather", '{"city": "Ulm"}')])
    elif any(message.role == "tool" for message in request.chat.messages):
        text = ANSWER
    else:
        text = "I look it up.\n" + written(HERMES, CALLS)
    return spoken(AnswerFormat(HERMES), text)


async def driven(client: str, url: str, environment: str) -> dict[str, Any]:
    """What a client's program prints."""
    variables = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    variables.pop("PYTHONPATH", None)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        python_of(environment), str(DRIVER), client, url, stdout=pipe, stderr=pipe, env=variables
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    result: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("client", ["langchain", "litellm"])
async def test_agent_calls_two_tools_and_answers_with_their_results(client: str) -> None:
    router = ScriptedRouter(script)
    with serving(router) as address:
        async with run_gateway(address) as gateway:
            result = await driven(client, f"{gateway.url}/v1", "frameworks")
    assert result == {"called": [[name, json.loads(arguments)] for name, arguments in CALLS], "answer": ANSWER}
    first, second = asked(router)
    assert [function.name for function in first.chat.functions] == ["get_weather", "get_time"]
    *_, turn, weather, time = second.chat.messages
    assert [(call.id, call.name) for call in turn.tool_calls] == [("call0", "get_weather"), ("call1", "get_time")]
    assert (weather.tool_call_id, weather.content[0].text) == ("call0", "result of get_weather")
    assert (time.tool_call_id, time.content[0].text) == ("call1", "result of get_time")


@pytest.mark.slow
async def test_instructor_makes_an_object_by_a_call() -> None:
    router = ScriptedRouter(script)
    with serving(router) as address:
        async with run_gateway(address) as gateway:
            result = await driven("instructor", f"{gateway.url}/v1", "instructor")
    assert result["called"] == [["Weather", {"city": "Ulm"}]]
    (request,) = asked(router)
    assert list(request.tool_choice.names) == ["Weather"]
