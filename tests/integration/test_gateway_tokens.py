"""`/tokenize`, `/detokenize` and `/version` of the gateway, in vLLM's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from inflight.common.version import installed_version
from tests.integration.test_authorization import api_key, locked_cluster
from tests.integration.test_chat_texts import speaking_tokenizer
from tests.support.stack.gateways import RunningGateway, run_gateway

HI = [{"role": "user", "content": "t1 t2"}]


@pytest.fixture(autouse=True)
def _speaking_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", speaking_tokenizer)


async def post(gateway: RunningGateway, path: str, body: dict[str, Any], key: str = "") -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx2.AsyncClient(timeout=60) as http:
        return await http.post(f"{gateway.url}{path}", json=body, headers=headers)


async def test_tokens_of_a_prompt_and_of_a_conversation_are_those_that_a_request_has(
    gateway: RunningGateway, client: openai.AsyncOpenAI, pool: str
) -> None:
    (model,) = (await client.models.list()).data
    told = (await post(gateway, "/tokenize", {"prompt": "t1 t2", "return_token_strs": True})).json()
    length = model.model_dump()["max_model_len"]
    assert told == {"count": 2, "max_model_len": length, "tokens": [1, 2], "token_strs": ["t1", "t2"]}
    body = {"model": pool, "messages": HI}
    told = (await post(gateway, "/tokenize", body)).json()
    assert (told["tokens"], told["token_strs"]) == ([1, 2, 4], None)
    messages: Any = HI
    answer = await client.chat.completions.create(model=pool, messages=messages, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == told["count"]
    text = (await post(gateway, "/detokenize", {"model": pool, "tokens": told["tokens"]})).json()
    assert text == {"prompt": "t1t2t4"}, "special tokens are part of the text"


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "t1", "messages": HI}, "prompt"),
    ("/tokenize", {"prompt": "t1", "add_generation_prompt": False}, "add_generation_prompt"),
    ("/tokenize", {"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ("/tokenize", {"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ("/tokenize", {"messages": HI, "chat_template": "x"}, "chat_template"),
    ("/tokenize", {"prompt": "t1", "tools": []}, "tools"),
    ("/tokenize", {"messages": HI, "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("/tokenize", {"messages": HI, "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {"prompt": ["t1"]}, "prompt"),
    ("/tokenize", {"prompt": "t1", "foo": 1}, "foo"),
    ("/tokenize", {"prompt": "t1", "model": "gpt-5"}, "model"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": [1, 10**6]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1] * 70_000}, "tokens"),
)


async def test_what_cannot_be_tokenized_is_refused_by_name(gateway: RunningGateway) -> None:
    for path, body, param in REFUSED:
        answer = await post(gateway, path, body)
        assert answer.status_code == (404 if param == "model" else 400), body
        assert answer.json()["error"]["param"] == param


async def test_tokenizing_needs_the_key_that_requests_need(redis_url: str, pool: str, tmp_path: Path) -> None:
    async with locked_cluster(redis_url, pool, tmp_path) as cluster, run_gateway(cluster.routers[0].address) as gateway:
        for path, body in (("/tokenize", {"prompt": "t1"}), ("/detokenize", {"tokens": [1]})):
            assert (await post(gateway, path, {"model": pool, **body})).status_code == 401
            assert (await post(gateway, path, {"model": pool, **body}, api_key("all"))).status_code == 200


async def test_version_is_that_of_the_distribution() -> None:
    async with run_gateway("127.0.0.1:1") as gateway, httpx2.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{gateway.url}/version")).json() == {"version": installed_version()}
