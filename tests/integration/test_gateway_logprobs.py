"""Log probabilities through the gateway, asked for by OpenAI's own client: whole, in pieces, and behind a break."""

from __future__ import annotations

from typing import Any

from tests.cluster import run_cluster
from tests.fake_device import token_logprobs
from tests.gateways import ServerSentEvent, events_of, run_gateway
from tests.integration.test_gateway import GREEDY, address_of, held_body
from tests.integration.test_requests import expected_ids

PROMPT = [1, 2]
NUM_TOKENS = 12


def expected(max_tokens: int, num_top: int) -> dict[str, list[Any]]:
    """What the device reports, in OpenAI's form of completions. The token produced is among the likeliest, or joins."""
    ids = expected_ids(PROMPT, max_tokens)
    tokens = [f"t{token_id}" for token_id in ids]
    told: dict[str, list[Any]] = {"tokens": tokens, "token_logprobs": [-token_id / 8 for token_id in ids]}
    reported = [token_logprobs(token_id, num_top) for token_id in ids]
    told["top_logprobs"] = [
        {
            **{f"t{top_id}": value for top_id, value in zip(one.top_ids, one.top_logprobs, strict=True)},
            token: one.logprob,
        }
        for token, one in zip(tokens, reported, strict=True)
    ]
    told["text_offset"] = [len("".join(tokens[:i])) for i in range(max_tokens)]
    return told


def joined(parts: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [one for part in parts for one in part[name]] for name in parts[0]}


def logprobs_of(events: list[ServerSentEvent]) -> list[dict[str, list[Any]]]:
    chunks = [event.value for event in events if event.text.startswith("{")]
    return [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]


async def test_openais_client_gets_them_whole_and_in_pieces(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        run_gateway(address_of(cluster)) as gateway,
        gateway.openai() as client,
    ):
        asked: dict[str, Any] = {"model": pool, "prompt": PROMPT, "max_tokens": NUM_TOKENS, **GREEDY}
        for num_top in (0, 3):
            whole = await client.completions.create(**asked, logprobs=num_top)
            assert whole.choices[0].logprobs is not None
            assert whole.choices[0].logprobs.to_dict() == expected(NUM_TOKENS, num_top)
        parts = []
        async for chunk in await client.completions.create(**asked, logprobs=3, stream=True):
            told = chunk.choices[0].logprobs
            assert (told is None) is (not chunk.choices[0].text), "they come with the text of their tokens"
            parts += [] if told is None else [told.to_dict()]
        assert joined(parts) == expected(NUM_TOKENS, 3)
        without = await client.completions.create(**asked)
        assert without.choices[0].logprobs is None


async def test_each_choice_has_its_own(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        run_gateway(address_of(cluster)) as gateway,
        gateway.openai() as client,
    ):
        asked: dict[str, Any] = {"model": pool, "prompt": [[3], PROMPT], "max_tokens": 4, "logprobs": 2, **GREEDY}
        whole = await client.completions.create(**asked)
        told = [choice.logprobs.to_dict() for choice in whole.choices if choice.logprobs is not None]
        assert told[1] == expected(4, 2)
        assert told[0]["tokens"] == [f"t{token_id}" for token_id in expected_ids([3], 4)]
        parts: list[list[dict[str, Any]]] = [[], []]
        async for chunk in await client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                parts[choice.index] += [] if choice.logprobs is None else [choice.logprobs.to_dict()]
        assert [joined(one) for one in parts] == told


async def test_stream_that_is_resumed_at_another_gateway_has_each_once(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool, routers=2) as cluster,
        run_gateway(address_of(cluster, 0)) as first,
        run_gateway(address_of(cluster, 1)) as second,
    ):
        executor = cluster.executors[0]
        body = held_body(pool, resume_ttl_s=30, logprobs=1)
        # Given a client that has seen the beginning, and lost its connection
        executor.brake.hold()
        executor.brake.permit(5)
        seen: list[ServerSentEvent] = []
        async with events_of(f"{first.url}/v1/completions", body) as events:
            while not logprobs_of(seen):
                seen.append(await anext(events))
        executor.brake.release()
        # When it goes on elsewhere
        headers = {"Last-Event-ID": seen[-1].name}
        async with events_of(f"{second.url}/v1/completions", body, headers) as events:
            rest = [event async for event in events]
        # Then each token has come once, and begins where it does in the whole text
        assert joined([*logprobs_of(seen), *logprobs_of(rest)]) == expected(40, 1)
