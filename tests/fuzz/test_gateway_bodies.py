"""Arbitrary HTTP requests to the gateway: each is answered with a result or refused, never with a 500."""

from __future__ import annotations

import functools
import json
from typing import Any, cast

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.executor.logits.grammar import CompiledGrammar, GrammarCompiler
from inflight.gateway.bodies import MAX_VALUES
from tests.fuzz.served import check_unharmed
from tests.integration.test_open_webui_calls import chatting_tokenizer
from tests.support.stack.cluster import run_cluster, start_executor
from tests.support.stack.gateways import run_gateway

SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 70) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
)  # fmt: skip
# Of more values than a body may have.
FLOODS = st.sampled_from([{}, "", 0, [1]]).map(lambda value: [value] * (MAX_VALUES + 1))
JSON = (
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner))
    | FLOODS
)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=20) | st.lists(st.integers(0, 6), max_size=5) | st.lists(st.text(max_size=5)) | JSON,
    "max_tokens": st.integers(0, 70) | JSON,
    "n": st.integers(0, 3) | JSON,
    "temperature": st.floats(-1, 3) | JSON,
    "top_p": st.floats(-1, 2) | JSON,
    "top_k": st.integers(-2, 9) | JSON,
    "seed": st.integers() | JSON,
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3) | JSON,
    "stop_token_ids": st.lists(st.integers(-1, 9), max_size=3) | JSON,
    "logit_bias": st.dictionaries(st.integers(0, 9).map(str), st.floats(-100, 100), max_size=2) | JSON,
    "presence_penalty": st.floats(-3, 3) | JSON,
    "frequency_penalty": st.floats(-3, 3) | JSON,
    "repetition_penalty": st.floats(-1, 3) | JSON,
    "min_p": st.floats(-1, 2) | JSON,
    "no_repeat_ngram_size": st.integers(-1, 4) | JSON,
    "bad_words": st.lists(st.text(max_size=4), max_size=3) | JSON,
    "allowed_token_ids": st.lists(st.integers(-1, 6), max_size=6) | JSON,
    "logprobs": st.integers(-1, 7) | JSON,
    "min_tokens": st.integers(0, 20) | JSON,
    "stream": st.booleans() | JSON,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | JSON,
    "priority": st.sampled_from(["interactive", "batch"]) | st.integers() | JSON,
    "metadata": st.dictionaries(st.text(max_size=70), st.text(max_size=9), max_size=3) | JSON,
    "resume_ttl_s": st.floats(0, 1) | JSON,
    "truncate_prompt_tokens": st.integers(0, 9) | JSON,
}
PROMPT = FIELDS.pop("prompt")
BODIES = st.fixed_dictionaries({"prompt": PROMPT}, optional=FIELDS)
# Bodies of chats and responses: each is sound, or wrong in a few values within its messages and tools, or one of its
# fields is any JSON.
TEXTS = st.text(max_size=12) | st.sampled_from(["t1 t2", "\0", "<tool_call>", "</think>"])
NAMES = st.sampled_from(["f", "f", "f", "g", 'f"\n', "", "x" * 129])
SCHEMAS = st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+$"}}},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
        {"type": "object", "uniqueItems": True, "not": {}},
        {"type": "string"},
        {"type": 3},
    ]
)
ARGUMENTS = st.sampled_from(["{}", '{"a": 1}', "", "[", '{"a": "\\ud800"}', "[" * 4000])
FUNCTION = st.fixed_dictionaries(
    {"name": NAMES}, optional={"parameters": SCHEMAS, "description": TEXTS, "strict": st.booleans()}
)
FLAT_TOOLS = st.lists(FUNCTION.map(lambda one: {"type": "function", **one}), max_size=3)
TOOLS = st.lists(FUNCTION.map(lambda one: {"type": "function", "function": one}), max_size=3)
CHOICES = st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
SAID = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "developer"]), "content": TEXTS})
CALL = st.fixed_dictionaries(
    {
        "id": NAMES,
        "type": st.just("function"),
        "function": st.fixed_dictionaries({"name": NAMES, "arguments": ARGUMENTS}),
    }
)
CALLED = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXTS | st.none()},
    optional={"tool_calls": st.lists(CALL, min_size=1, max_size=2), "reasoning_content": TEXTS},
)
RESULT = st.fixed_dictionaries({"role": st.just("tool"), "content": TEXTS, "tool_call_id": NAMES})
MESSAGES = st.tuples(SAID).map(list) | st.lists(SAID | CALLED | RESULT, min_size=1, max_size=4)
ITEMS = st.one_of(
    SAID,
    st.fixed_dictionaries({"type": st.just("function_call"), "call_id": NAMES, "name": NAMES, "arguments": ARGUMENTS}),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": NAMES, "output": TEXTS}),
    st.fixed_dictionaries({"type": st.just("reasoning"), "summary": st.just([])}),
)
SHARED: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "seed": st.integers(0, 9),
    "stream": st.booleans(),
    "stop": st.text(min_size=1, max_size=3),
    "parallel_tool_calls": st.booleans(),
    "thinking_token_budget": st.integers(-1, 9),
}
CHAT_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **SHARED,
    "tools": TOOLS,
    "tool_choice": CHOICES,
    "max_completion_tokens": st.integers(1, 20),
    "reasoning_effort": st.sampled_from(["none", "low"]),
    "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
    "n": st.integers(1, 3),
}
RESPONSE_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    **SHARED,
    "tools": FLAT_TOOLS,
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "name": "f"}]),
    "instructions": TEXTS,
    "max_output_tokens": st.integers(1, 20),
    "reasoning": st.sampled_from([{}, {"effort": "none"}, {"effort": "low"}]),
    "text": st.sampled_from([{"format": {"type": "text"}}, {"format": {"type": "json_object"}}]),
    "store": st.just(value=False),
    "include": st.sampled_from([[], ["message.output_text.logprobs"]]),
    "top_logprobs": st.integers(0, 20),
}
WRONG = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner))


def bodies(
    needed: dict[str, st.SearchStrategy[Any]], fields: dict[str, st.SearchStrategy[Any]]
) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies of which one field may be any JSON, and which have a few of the others."""
    chosen = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
    some = chosen.flatmap(lambda names: st.fixed_dictionaries({**needed, **{name: fields[name] for name in names}}))
    wrong = st.dictionaries(st.sampled_from([*needed, *sorted(fields), "previous_response_id"]), WRONG, max_size=1)
    return st.tuples(some, st.just({}) | wrong).map(lambda parts: {**parts[0], **parts[1]})


CHATS = bodies({"messages": MESSAGES}, CHAT_FIELDS)
RESPONSES = bodies(
    {"input": st.text(min_size=1, max_size=9) | st.lists(ITEMS, min_size=1, max_size=4)}, RESPONSE_FIELDS
)
ROUTES = {"completions": BODIES, "chat/completions": CHATS, "responses": RESPONSES}
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "Last-Event-ID": st.sampled_from(["1~cmpl-1~5~r,t,0,0,", "1~cmpl-1~5~r,t,0,0,f", "", "x"]),
        "Idempotency-Key": st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=120),
        "Authorization": st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(str.strip),
        "traceparent": st.sampled_from(["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "nothing"]),
    },
)


def drawn(
    strategy: st.SearchStrategy[dict[str, Any]], num_examples: int
) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Bodies with headers. Drawn before anything runs: Hypothesis wants to be alone with the random numbers."""
    examples: list[tuple[dict[str, Any], dict[str, str]]] = []

    @settings(max_examples=num_examples)
    @given(strategy, HEADERS)
    def draw(body: dict[str, Any], headers: dict[str, str]) -> None:
        examples.append((body, headers))

    draw()
    return examples


class KnownGrammars:
    """Has every grammar. The fake device ignores them."""

    def find(self, key: bytes) -> CompiledGrammar:
        return cast("CompiledGrammar", object())

    def close(self) -> None:
        """See `GrammarCompiler`."""


@pytest.mark.parametrize("route", ROUTES)
async def test_no_body_is_answered_with_a_500(
    redis_url: str, pool: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = drawn(ROUTES[route], 60)
    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", chatting_tokenizer)
    grammars = cast("GrammarCompiler", cast("Any", KnownGrammars()))
    monkeypatch.setattr(
        "tests.support.stack.cluster.start_executor", functools.partial(start_executor, grammars=grammars)
    )
    async with (
        run_cluster(redis_url, pool) as cluster,
        run_gateway(cluster.routers[0].address) as gateway,
        httpx2.AsyncClient(timeout=60) as http,
    ):
        for body, headers in examples:
            raw = json.dumps({"model": pool, **body}).encode()
            answer = await http.post(f"{gateway.url}/v1/{route}", content=raw, headers=headers)
            assert answer.status_code < 500, (body, headers, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
        await check_unharmed(cluster)
