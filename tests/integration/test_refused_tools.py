"""Tools, results and reasoning that are wrong or too much, through the gateway: refused by name, and nothing else
suffers."""

from __future__ import annotations

import functools
import json
from typing import Any, cast

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from inflight.executor.logits.grammar import GrammarCompiler
from tests.fuzz.served import check_unharmed
from tests.fuzz.test_gateway_bodies import KnownGrammars
from tests.integration.test_open_webui_calls import chatting_tokenizer
from tests.support.stack.cluster import run_cluster, start_executor
from tests.support.stack.gateways import events_of, run_gateway

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
        [ASKED, {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "", "arguments": "{}"}}]}],
        "messages[1].tool_calls[0].function.name",
    ),
]


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """One whose template shows the names of tools."""
    tokenizer = chatting_tokenizer()
    names = "{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% endfor %}{# <tool_call> #}"
    tokenizer.chat_template = names + str(tokenizer.chat_template)
    return tokenizer


@pytest.fixture
def _with_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters have a model with tools, whose device ignores grammars."""
    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", tool_tokenizer)
    grammars = cast("GrammarCompiler", cast("Any", KnownGrammars()))
    monkeypatch.setattr(
        "tests.support.stack.cluster.start_executor", functools.partial(start_executor, grammars=grammars)
    )


# What a schema may have that does not matter, and what cannot be enforced.
HUGE: list[Any] = [2**53 + 1, -(2**70), 1e300, 10**400]
HARMLESS = {"default": HUGE, "examples": HUGE, "title": "t", "x-order": HUGE, "deprecated": True, "$comment": "c"}
IGNORED = ["`javaType`"]
LARGE_BOUND = {"type": "integer", "minimum": 2**64}


@pytest.mark.usefixtures("_with_tools")
async def test_tool_that_is_not_strict_is_never_refused_and_the_answer_names_it(redis_url: str, pool: str) -> None:
    functions = [
        function("sound", parameters=an_object(a={"type": "integer"})),
        function("annotated", parameters={**an_object(a={"type": "integer", **HARMLESS}), "javaType": "T", **HARMLESS}),
        function("bounded", parameters=an_object(a=LARGE_BOUND)),
        function("negated", parameters=an_object(a={"not": {}})),
    ]
    unenforced = {
        "bounded": f'the schema has the number "{2**64}" in `minimum` at "/properties/a"; numbers beyond ±2^53 are not '
        "supported",
        "negated": 'the schema has the keyword `not` at "/properties/a", which is not supported',
    }
    expected = [{"name": name, "reason": reason} for name, reason in unenforced.items()]
    flat = [{"type": "function", **one} for one in functions]
    tools = [{"type": "function", "function": one} for one in functions]
    async with run_cluster(redis_url, pool) as cluster, run_gateway(cluster.routers[0].address) as gateway:
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("chat/completions", {"messages": [ASKED], "tools": tools, "max_tokens": 3}),
            ("responses", {"input": "t1", "tools": flat, "max_output_tokens": 3}),
        ]
        async with httpx2.AsyncClient(base_url=f"{gateway.url}/v1", timeout=100) as http:
            for route, body in bodies:
                # Beyond any double, which a client's own JSON encoder may write.
                text = json.dumps({"model": pool, **body}).replace("1e+300", "1e999")
                answer = await http.post(f"/{route}", content=text)
                assert answer.status_code == 200, answer.text
                assert answer.json()["unenforced_tools"] == expected
                assert answer.json()["ignored_schema_words"] == IGNORED
                assert answer.headers["x-inflight-unused"] == ", ".join(IGNORED)
            sound = {**bodies[0][1], "tools": tools[:2]}
            answer = await http.post("/chat/completions", json={"model": pool, **sound})
            assert "unenforced_tools" not in answer.json()
        seen = []
        for route, body in bodies:
            async with events_of(f"{gateway.url}/v1/{route}", {"model": pool, **body}) as events:
                values = [event.value async for event in events if event.text.startswith("{")]
            first = values[0].get("response", values[0])
            assert first["ignored_schema_words"] == IGNORED
            seen.append([value.get("response", value).get("unenforced_tools") for value in values])
        chunks, events_seen = seen
        assert [chunks[0], *set(map(str, chunks[1:]))] == [expected, "None"]
        assert (events_seen[0], events_seen[-1]) == (expected, expected)


@pytest.mark.usefixtures("_with_tools")
async def test_what_is_wrong_with_tools_is_named_and_harms_nothing(redis_url: str, pool: str) -> None:
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
        calls = [{"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"} for name in ("f", "")]
        assert await refusal("responses", input=[ASKED, *calls]) == (400, "input[2].name")
        assert await refusal("chat/completions", messages=[ASKED], thinking_token_budget=-2) == (
            400,
            "thinking_token_budget",
        )
        # Parameters that cost too much or are not supported are any object to a tool that is not strict.
        schemas: list[dict[str, Any]] = [COSTLY, {"not": {}}, {"$ref": "#"}]
        for schema in schemas:
            tool = {"type": "function", "function": function(parameters=an_object(a=schema))}
            body = {"messages": [ASKED], "tools": [tool], "max_tokens": 3}
            assert await refusal("chat/completions", **body) == (200, None)
        # Earlier arguments that are no JSON object, such as those of an answer that was cut off, are an empty one.
        for arguments in ('{"a": "t', "[1]", "", '{"a": NaN}'):
            called = {**CALL, "function": {"name": "f", "arguments": arguments}}
            turns = [ASKED, {"role": "assistant", "tool_calls": [called]}, RESULT, ASKED]
            assert await refusal("chat/completions", messages=turns, max_tokens=3) == (200, None)
            items = [ASKED, {**calls[0], "arguments": arguments}, result, ASKED]
            assert await refusal("responses", input=items, max_output_tokens=3) == (200, None)
        await check_unharmed(cluster)
