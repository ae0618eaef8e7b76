"""Agent frameworks, LiteLLM, instructor and programs of npm, unmodified, with tools: against a router that divides
scripted answers."""

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
from tests.clients.drive_tools import CLIENTS
from tests.clients.environments import python_of
from tests.integration.test_agents import folder_of
from tests.integration.test_gateway_tools import HERMES as THINKING_HERMES
from tests.integration.test_gateway_tools import gateway_of, spoken
from tests.unit.scripted_router import ScriptedRouter, asked
from tests.unit.test_tool_parser import BY_NAME, written

DRIVER = Path(__file__).parents[1] / "clients" / "drive_tools.py"
CALLS = [("get_weather", '{"city": "Ulm"}'), ("get_time", "{}")]
ANSWER = "It is sunny at noon."
EXPECTED = {"called": [["get_time", {}], ["get_weather", {"city": "Ulm"}]], "answer": ANSWER}
HERMES = BY_NAME["hermes"]
AGENTS = [name for name in CLIENTS if name not in ("instructor", "smolagents", "dspy")]
NPM_PACKAGES = ("openai@7.59.0", "ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118")
OF_NPM = ("openai", "openai-responses", "ai-openai-compatible", "ai-openai", "ai-openai-stored", "ai-openai-chat")
WITHOUT_NETWORK = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "AI_SDK_LOG_WARNINGS": "false",
}


def texts(request: inference_pb2.GenerateRequest) -> str:
    """The texts of all messages."""
    return "\n".join(part.text for message in request.chat.messages for part in message.content)


def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
    """Calls both tools, and answers when it has the results; to instructor it calls the only tool."""
    names = [function.name for function in request.chat.functions]
    if names == ["Weather"]:
        text = written(HERMES, [("Weather", '{"city": "Ulm"}')])
    elif any(message.role == "tool" for message in request.chat.messages):
        text = ANSWER
    else:
        text = "I look it up.\n" + written(HERMES, CALLS)
    return thought(text)


def thought(text: str) -> Iterator[inference_pb2.StreamEvent]:
    """The events of an answer after a thought."""
    return spoken(THINKING_HERMES, f"<think>\nHm.</think>\n\n{text}")


async def driven(client: str, url: str, home: Path, environment: str = "frameworks") -> dict[str, Any]:
    """What a client's program prints."""
    return await printed([python_of(environment), str(DRIVER), client, url], home)


async def printed(command: list[str], home: Path) -> dict[str, Any]:
    """The result that a program prints in a folder."""
    variables = {**os.environ, **WITHOUT_NETWORK, "HOME": str(home)}
    variables.pop("PYTHONPATH", None)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=variables, cwd=home)
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-3000:]
    (line,) = (line for line in out.decode().splitlines() if line.startswith('{"called"'))
    result: dict[str, Any] = json.loads(line)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("client", AGENTS)
async def test_agent_calls_two_tools_and_answers_with_their_results(client: str, tmp_path: Path) -> None:
    router = ScriptedRouter(script)
    async with gateway_of(router) as gateway:
        result = await driven(client, f"{gateway.url}/v1", tmp_path)
    assert result == EXPECTED
    assert_two_rounds(router, streamed=client != "litellm")


@pytest.mark.slow
@pytest.mark.parametrize("client", OF_NPM)
async def test_program_of_npm_calls_two_tools_and_answers_with_their_results(
    client: str, tmp_path: Path, redis_url: str
) -> None:
    folder = folder_of(*NPM_PACKAGES)
    router = ScriptedRouter(script)
    settings = {"store_url": redis_url} if client == "ai-openai-stored" else {}
    async with gateway_of(router, **settings) as gateway:
        driver = str(DRIVER.with_suffix(".mjs"))
        result = await printed(["node", driver, client, f"{gateway.url}/v1", str(folder)], tmp_path)
    assert result == EXPECTED
    assert_two_rounds(router, streamed=True)


def assert_two_rounds(router: ScriptedRouter, *, streamed: bool) -> None:
    """Asserts that a router was asked with both tools, and then with the calls and their results."""
    first, second = asked(router)
    assert [request.want_queue_events for request in (first, second)] == [streamed, streamed]
    assert [function.name for function in first.chat.functions] == ["get_weather", "get_time"]
    *_, turn, weather, time = second.chat.messages
    assert [(call.id, call.name) for call in turn.tool_calls] == [("call0", "get_weather"), ("call1", "get_time")]
    assert (weather.tool_call_id, weather.content[0].text) == ("call0", "result of get_weather")
    assert (time.tool_call_id, time.content[0].text) == ("call1", "result of get_time")


@pytest.mark.slow
async def test_smolagents_calls_two_tools_and_then_the_one_that_answers(tmp_path: Path) -> None:
    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        answering = ("final_answer", json.dumps({"answer": ANSWER}))
        return thought(written(HERMES, [answering] if "result of get_time" in texts(request) else CALLS))

    router = ScriptedRouter(script)
    async with gateway_of(router) as gateway:
        result = await driven("smolagents", f"{gateway.url}/v1", tmp_path)
    assert result == EXPECTED
    first, second = asked(router)
    assert [function.name for function in first.chat.functions] == ["get_weather", "get_time", "final_answer"]
    assert (first.want_queue_events, first.tool_choice.mode) == (True, inference_pb2.ToolChoice.MODE_REQUIRED)
    assert all(f"result of {name}" in texts(second) for name, _ in CALLS)


@pytest.mark.slow
async def test_instructor_makes_an_object_by_a_call(tmp_path: Path) -> None:
    router = ScriptedRouter(script)
    async with gateway_of(router) as gateway:
        result = await driven("instructor", f"{gateway.url}/v1", tmp_path, "instructor")
    assert result["answer"] == {"city": "Ulm"}
    (request,) = asked(router)
    assert list(request.tool_choice.names) == ["Weather"]


@pytest.mark.slow
async def test_dspy_calls_two_tools_by_texts(tmp_path: Path) -> None:
    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        """Writes the fields of the next step of DSPy's loop, or of the answer after it."""
        asking = texts(request)
        name, arguments = [*CALLS, ("finish", "{}")][sum(f"result of {name}" in asking for name, _ in CALLS)]
        step = {"next_thought": "Hm.", "next_tool_name": name, "next_tool_args": arguments}
        written = step if "next_tool_name" in asking else {"reasoning": "Hm.", "answer": ANSWER}
        return spoken(
            AnswerFormat(None), "\n\n".join(f"[[ ## {field} ## ]]\n{value}" for field, value in written.items())
        )

    router = ScriptedRouter(script)
    async with gateway_of(router) as gateway:
        result = await driven("dspy", f"{gateway.url}/v1", tmp_path)
    assert result == EXPECTED
    assert len(asked(router)) == 4
