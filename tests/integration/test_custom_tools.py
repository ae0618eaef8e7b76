"""Custom tools and hints of `/v1/responses` by OpenAI's client, unmodified, from a router with written answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseCustomToolCall

from inflight.common.errors import FieldViolation, invalid
from inflight.gateway.responses.codex import codex_model
from inflight.v1 import inference_pb2
from tests.integration.test_gateway_tools import HERMES, gateway_of, scripted
from tests.unit.scripted_router import ScriptedRouter
from tests.unit.test_tool_parser import BY_NAME, written

PATCH = '*** Begin Patch\n+"ü" \\ 😀\n*** End Patch'
GRAMMAR = 'start: "*** Begin Patch\\n" ("+" /.*/ "\\n")+ "*** End Patch"'
TOOLS: list[Any] = [
    {"type": "web_search"},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR},
    },
]
SAID = "I edit.\n" + written(BY_NAME["hermes"], [("apply_patch", json.dumps({"input": PATCH}))])


async def test_custom_tool_is_called_with_its_text_whole_and_streamed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "inflight.gateway.service")
    router = scripted(HERMES, f"<think>\nHm.</think>\n\n{SAID}")
    async with gateway_of(router) as gateway, gateway.openai() as client:
        asked: dict[str, Any] = {"model": "smol", "input": "edit", "tools": TOOLS, "reasoning": {"summary": "auto"}}
        raw = await client.responses.with_raw_response.create(**asked)
        assert raw.headers["x-inflight-unused"] == "reasoning.summary, tools[0]"
        whole = raw.parse().output[-1]
        assert isinstance(whole, ResponseCustomToolCall)
        assert (whole.name, whole.input) == ("apply_patch", PATCH)
        async with client.responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = (await stream.get_final_response()).output[-1]
        assert isinstance(final, ResponseCustomToolCall)
        assert (final.input, final.call_id) == (PATCH, whole.call_id)
        pieces = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert len(pieces) > 1
        assert "".join(pieces) == PATCH
        (done,) = [event for event in events if event.type == "response.custom_tool_call_input.done"]
        assert done.input == PATCH
        result = {"type": "custom_tool_call_output", "call_id": whole.call_id, "output": "done"}
        await client.responses.create(**asked | {"input": [{"role": "user", "content": "edit"}, whole, result]})
    first, _, last = (router.requests.get_nowait() for _ in range(3))
    assert [(one.name, one.input_grammar) for one in first.chat.functions] == [("apply_patch", GRAMMAR)]
    user, call, answer = last.chat.messages
    assert json.loads(call.tool_calls[0].arguments) == {"input": PATCH}
    assert (user.role, answer.role, answer.content[0].text) == ("user", "tool", "done")
    # Once for each, although it was sent three times.
    assert [record.message for record in caplog.records if "has no effect" in record.message] == [
        "/v1/responses: reasoning.summary has no effect",
        "/v1/responses: tools has no effect",
    ]


async def test_models_are_listed_for_codex_besides() -> None:
    router = scripted(HERMES, "")
    router.models.append(inference_pb2.Model(name="new"))
    async with gateway_of(router) as gateway, gateway.openai() as client:
        plain: Any = await client.get("/models", cast_to=object)
        listed: Any = await client.get("/models?client_version=0.171.0", cast_to=object)
        assert [model.id async for model in client.models.list(extra_query={"client_version": "1"})] == ["smol", "new"]
    assert listed.pop("models") == [codex_model(entry) for entry in plain["data"]]
    assert listed == plain
    known, new = (codex_model(entry) for entry in plain["data"])
    assert (known["slug"], known["context_window"], new["context_window"]) == ("smol", 2048, None)


async def test_errors_name_messages_as_they_were_sent() -> None:
    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        assert [one.role for one in request.chat.messages] == ["system", "assistant"]
        yield from ()
        raise invalid(FieldViolation("chat.messages[1].role", "is 'assistant'; must be user"))

    messages: list[Any] = [{"role": role, "content": "x"} for role in ("system", "developer", "assistant")]
    async with gateway_of(ScriptedRouter(script)) as gateway, gateway.openai() as client:
        with pytest.raises(openai.BadRequestError, match=r"messages\[2\]\.role: is 'assistant'"):
            await client.chat.completions.create(model="smol", messages=messages)
