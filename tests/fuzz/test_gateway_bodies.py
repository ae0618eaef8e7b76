"""Arbitrary HTTP requests to the gateway: each is answered with a result or refused, never with a 500."""

from __future__ import annotations

import json
from typing import Any

import httpx2
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.bodies import MAX_VALUES
from tests.cluster import run_cluster
from tests.fuzz.served import check_unharmed
from tests.gateways import run_gateway

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
BODIES = st.fixed_dictionaries({"prompt": FIELDS.pop("prompt")}, optional=FIELDS)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "Last-Event-ID": st.sampled_from(["1~cmpl-1~5~r,t,0,0,", "1~cmpl-1~5~r,t,0,0,f", "", "x"]),
        "Idempotency-Key": st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=120),
        "Authorization": st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(str.strip),
        "traceparent": st.sampled_from(["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "nothing"]),
    },
)


def drawn(num_examples: int) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Bodies with headers. Drawn before anything runs: Hypothesis wants to be alone with the random numbers."""
    examples: list[tuple[dict[str, Any], dict[str, str]]] = []

    @settings(max_examples=num_examples)
    @given(BODIES, HEADERS)
    def draw(body: dict[str, Any], headers: dict[str, str]) -> None:
        examples.append((body, headers))

    draw()
    return examples


async def test_no_body_is_answered_with_a_500(redis_url: str, pool: str) -> None:
    examples = drawn(60)
    async with (
        run_cluster(redis_url, pool) as cluster,
        run_gateway(cluster.routers[0].address) as gateway,
        httpx2.AsyncClient(timeout=60) as http,
    ):
        for body, headers in examples:
            raw = json.dumps({"model": pool, **body}).encode()
            answer = await http.post(f"{gateway.url}/v1/completions", content=raw, headers=headers)
            assert answer.status_code < 500, (body, headers, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]
        await check_unharmed(cluster)
