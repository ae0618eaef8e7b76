"""The requests that Open WebUI 0.12.4 sends to an OpenAI-compatible server, replayed as it makes them.

They are those of a chat in the browser, of a chat whose model has advanced parameters, of the tasks after it (title,
tags, follow-ups), of a chat with tools and native function calling, and of a connection with the API type "Responses".
"""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from transformers import PreTrainedTokenizerFast

from tests.integration.test_tools_of_frameworks import ANSWER, CALLS, script
from tests.support.stack.cluster import tiny_tokenizer
from tests.support.stack.gateways import RunningGateway, run_gateway
from tests.unit.scripted_router import ScriptedRouter, serving

HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}
MESSAGES = [{"role": "system", "content": "t3"}, {"role": "user", "content": "t1 t2"}]
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": MESSAGES},
    {"messages": MESSAGES, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "t1 t2"}]}], "stream_options": None},
    {
        "messages": MESSAGES,
        "temperature": 0.8,
        "top_p": 0.9,
        "min_p": 0.05,
        "top_k": 40,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "seed": 7,
        "stop": ["t4t4"],
        "logit_bias": {"1": 5},
    },
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Returns the weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {
        "type": "function",
        "function": {"name": "get_time", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
TASKS = (
    'Generate a concise title. JSON format: { "title": "your concise title here" }',
    'Generate 1-3 broad tags. JSON format: { "tags": ["tag1", "tag2"] }',
    'Suggest 3-5 follow-up questions. JSON format: { "follow_ups": ["Question 1?"] }',
)
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t1 t2"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t3"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "t1"}]},
]


def chatting_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    return tokenizer


def read_events(answer: httpx2.Response) -> list[dict[str, Any]]:
    """The events as Open WebUI reads them: lines that begin with `data:`, up to `[DONE]`."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data:").strip() for line in answer.text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.fixture
def _chatting_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", chatting_tokenizer)


def taken_calls(chunks: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The content, and the calls as Open WebUI adds them up: the first delta of each, to which it appends."""
    content = ""
    calls: list[dict[str, Any]] = []
    for delta in [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]:
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", ()):
            known = next((one for one in calls if one["index"] == call["index"]), None)
            if known is None:
                calls.append(call)
            else:
                known["function"]["name"] += call["function"].get("name", "")
                known["function"]["arguments"] += call["function"].get("arguments", "")
    return content, calls


async def test_calls_of_tools_come_back_to_the_model_with_their_results() -> None:
    router = ScriptedRouter(script)
    with serving(router) as address:
        async with (
            run_gateway(address) as gateway,
            httpx2.AsyncClient(base_url=f"{gateway.url}/v1", headers=HEADERS, timeout=100) as http,
        ):
            body: dict[str, Any] = {"stream": True, "model": "smol", "messages": MESSAGES, "tools": TOOLS}
            content, calls = taken_calls(read_events(await http.post("/chat/completions", json=body)))
            assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == CALLS
            # Open WebUI sends the calls as it holds them, each with its place in the stream.
            turn = {"role": "assistant", "content": content, "tool_calls": calls}
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "noon"} for call in calls]
            body["messages"] = [*MESSAGES, turn, *results]
            assert taken_calls(read_events(await http.post("/chat/completions", json=body))) == (ANSWER, [])


@pytest.mark.usefixtures("_chatting_cluster")
async def test_calls_of_a_chat_are_answered_in_the_form_that_open_webui_reads(
    gateway: RunningGateway, pool: str
) -> None:
    async with httpx2.AsyncClient(base_url=f"{gateway.url}/v1", headers=HEADERS, timeout=100) as http:
        models = (await http.get("/models")).json()
        assert [model["id"] for model in models["data"]] == [pool]

        for chat in CHATS:
            body = {"stream": True, "model": pool, "max_tokens": 8, **chat}
            chunks = read_events(await http.post("/chat/completions", json=body))
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])
            assert text
            reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
            assert reasons[-1] in ("stop", "length")
            usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
            assert len(usages) == (1 if chat.get("stream_options") else 0)

        for task in TASKS:
            body = {"model": pool, "messages": [{"role": "user", "content": task}], "stream": False}
            answer = (await http.post("/chat/completions", json=body)).json()
            assert answer["choices"][0]["message"]["content"]

        body = {"stream": True, "model": pool, "max_output_tokens": 8, "instructions": "t3", "input": ITEMS}
        events = read_events(await http.post("/responses", json=body))
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        assert "".join(deltas) == events[-1]["response"]["output"][0]["content"][0]["text"]
