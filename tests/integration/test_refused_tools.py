"""Tools, results and reasoning that are wrong or too much, through the gateway: refused by name, and nothing else
suffers."""

from __future__ import annotations

import functools
import json
from typing import Any, cast

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from executor.logits.grammar import GrammarCompiler
from tests.cluster import run_cluster, start_executor
from tests.fuzz.served import check_unharmed
from tests.fuzz.test_gateway_bodies import KnownGrammars
from tests.gateways import run_gateway
from tests.integration.test_open_webui_calls import chatting_tokenizer

ASKED = {"role": "user", "content": "t1 t2"}
# Takes seconds of processor time in the compiler.
COSTLY = {"type": "integer", "multipleOf": 1_000_003}


def function(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"name": name, **more}


def an_object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = an_object(a=schema)
    return schema


# Functions that are refused, and the field that the error names, without what the API puts around it.
REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    ([function('f"')], "[0].name"),
    ([function("f\n")], "[0].name"),
    ([function("")], "[0].name"),
    ([function("ü")], "[0].name"),
    ([function("f" * 129)], "[0].name"),
    ([function(), function("g"), function("f")], "[2].name"),
    ([function(f"f{number}") for number in range(1000)], ""),
    ([function(parameters={"type": "string"})], "[0].parameters"),
    ([function(parameters=an_object(a={"not": {}}), strict=True)], ""),
    ([function(parameters=an_object(a={"$ref": "https://example.com/a"}), strict=True)], ""),
    ([function(parameters=an_object(a={"type": "string", "pattern": "("}), strict=True)], ""),
    ([function(parameters=an_object(a=COSTLY), strict=True)], ""),
    ([function(parameters=an_object(a={"enum": ["x" * 90 + str(i) for i in range(9000)]}), strict=True)], ""),
]
# Calls and results of a chat that are refused, with the field.
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "t1"}
REFUSED_TURNS: list[tuple[list[dict[str, Any]], str]] = [
    ([ASKED, RESULT], "messages[1].tool_call_id"),
    ([ASKED, {"role": "assistant", "tool_calls": [CALL]}, {**RESULT, "tool_call_id": "d"}], "messages[2].tool_call_id"),
    (
        [ASKED, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "{"}}]}],
        "messages[1].tool_calls[0].function.arguments",
    ),
]


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """One whose template shows the names of tools."""
    tokenizer = chatting_tokenizer()
    names = "{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% endfor %}{# <tool_call> #}"
    tokenizer.chat_template = names + str(tokenizer.chat_template)
    return tokenizer


async def test_what_is_wrong_with_tools_is_named_and_harms_nothing(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cluster.tiny_tokenizer", tool_tokenizer)
    grammars = cast("GrammarCompiler", cast("Any", KnownGrammars()))
    monkeypatch.setattr("tests.cluster.start_executor", functools.partial(start_executor, grammars=grammars))
    async with (
        run_cluster(redis_url, pool) as cluster,
        run_gateway(cluster.routers[0].address) as gateway,
        httpx2.AsyncClient(base_url=f"{gateway.url}/v1", timeout=100) as http,
    ):

        async def refusal(route: str, **body: Any) -> tuple[int, str | None]:
            answer = await http.post(f"/{route}", json={"model": pool, **body})
            return answer.status_code, (answer.json().get("error") or {}).get("param")

        for functions, field in REFUSED:
            flat = [{"type": "function", **one} for one in functions]
            tools = [{"type": "function", "function": one} for one in functions]
            chat_field = field.replace("].", "].function.")
            named = json.dumps(functions)[:80]
            assert await refusal("chat/completions", messages=[ASKED], tools=tools) == (400, f"tools{chat_field}"), (
                named
            )
            assert await refusal("responses", input="t1", tools=flat) == (400, f"tools{field}"), named
        deep = [{"type": "function", "function": function(parameters=nested(100))}]
        assert await refusal("chat/completions", messages=[ASKED], tools=deep) == (400, None)
        for turns, field in REFUSED_TURNS:
            assert await refusal("chat/completions", messages=turns) == (400, field)
        result = {"type": "function_call_output", "call_id": "c", "output": "t1"}
        assert await refusal("responses", input=[ASKED, result]) == (400, "input[1].call_id")
        assert await refusal("chat/completions", messages=[ASKED], thinking_token_budget=-2) == (
            400,
            "thinking_token_budget",
        )
        assert await refusal("responses", input="t1", thinking_token_budget=5) == (400, "thinking_token_budget")
        # Parameters that cost too much or are not supported are any object to a tool that is not strict.
        schemas: list[dict[str, Any]] = [COSTLY, {"not": {}}, {"$ref": "#"}]
        for schema in schemas:
            tool = {"type": "function", "function": function(parameters=an_object(a=schema))}
            body = {"messages": [ASKED], "tools": [tool], "max_tokens": 3}
            assert await refusal("chat/completions", **body) == (200, None)
        await check_unharmed(cluster)
