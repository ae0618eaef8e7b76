"""Log probabilities through the gateway, asked for by OpenAI's own client: whole, in pieces, and behind a break."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.integration.test_gateway import GREEDY, address_of, held_body
from tests.integration.test_requests import expected_ids
from tests.support.device.fake_device import token_logprobs
from tests.support.stack.cluster import run_cluster
from tests.support.stack.gateways import ServerSentEvent, events_of, run_gateway, text_of

PROMPT = [1, 2]
NUM_TOKENS = 12


def expected(max_tokens: int, num_top: int) -> dict[str, list[Any]]:
    return expected_of(PROMPT, max_tokens, num_top)


def expected_of(prompt: list[int], max_tokens: int, num_top: int) -> dict[str, list[Any]]:
    """What the device reports, in OpenAI's form of completions. The token produced is among the likeliest, or joins."""
    ids = expected_ids(prompt, max_tokens)
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


async def test_openais_client_gets_them_whole_and_in_pieces(client: openai.AsyncOpenAI, pool: str) -> None:
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


async def test_each_choice_has_its_own(client: openai.AsyncOpenAI, pool: str) -> None:
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


LONG = [(3 * i + i // 7) % 5 for i in range(30)]


@pytest.mark.parametrize("echo", [False, True])
async def test_stream_that_is_resumed_at_another_gateway_has_each_once(redis_url: str, pool: str, echo: bool) -> None:
    prompt, num_tokens = (LONG, 6) if echo else (PROMPT, 40)
    async with (
        run_cluster(redis_url, pool, routers=2) as cluster,
        run_gateway(address_of(cluster, 0)) as first,
        run_gateway(address_of(cluster, 1)) as second,
    ):
        executor = cluster.executors[0]
        body = held_body(pool, num_tokens, resume_ttl_s=30, logprobs=1, echo=echo) | {"prompt": prompt}
        # Given a client that has seen the beginning, of the prompt if that is echoed, and lost its connection
        executor.brake.hold()
        executor.brake.permit(1 if echo else 5)
        seen: list[ServerSentEvent] = []
        async with events_of(f"{first.url}/v1/completions", body) as events:
            while not logprobs_of(seen):
                seen.append(await anext(events))
        assert not echo or len(joined(logprobs_of(seen))["tokens"]) < len(LONG)
        executor.brake.release()
        # When it goes on elsewhere
        headers = {"Last-Event-ID": seen[-1].name}
        async with events_of(f"{second.url}/v1/completions", body, headers) as events:
            rest = [event async for event in events]
    # Then each token has come once, and begins where it does in the whole text
    whole = echoed(prompt, num_tokens, 1) if echo else expected(num_tokens, 1)
    assert joined([*logprobs_of(seen), *logprobs_of(rest)]) == whole
    assert text_of(seen) + text_of(rest) == "".join(whole["tokens"])


def scored(prompt: list[int], num_top: int) -> dict[str, list[Any]]:
    """What is told of a prompt: nothing about its first token."""
    told: dict[str, list[Any]] = {"tokens": [f"t{token_id}" for token_id in prompt]}
    told["token_logprobs"] = [None, *(-token_id / 8 for token_id in prompt[1:])]
    told["top_logprobs"] = [None]
    for token_id in prompt[1:]:
        top = [token_logprobs(token_id, num_top)]
        likeliest = {f"t{i}": value for one in top for i, value in zip(one.top_ids, one.top_logprobs, strict=True)}
        told["top_logprobs"].append({**likeliest, f"t{token_id}": -token_id / 8})
    told["text_offset"] = [2 * i for i in range(len(prompt))]
    return told


def echoed(prompt: list[int], max_tokens: int, num_top: int) -> dict[str, list[Any]]:
    output = expected_of(prompt, max_tokens, num_top)
    output["text_offset"] = [offset + 2 * len(prompt) for offset in output["text_offset"]]
    return joined([scored(prompt, num_top), output])


async def test_echoed_prompts_have_log_probabilities_as_lm_eval_reads_them(
    client: openai.AsyncOpenAI, pool: str
) -> None:
    prompts = [LONG, PROMPT, [4]]
    asked: dict[str, Any] = {"model": pool, "prompt": prompts, "echo": True, **GREEDY}
    answer = await client.completions.create(**asked, max_tokens=1, logprobs=1, seed=1234)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.logprobs is not None
        told = choice.logprobs.to_dict()
        assert told == echoed(prompt, 1, 1), "one entry behind those of the prompt"
        assert choice.text == "".join(told["tokens"])
        for values, token, value in zip(
            told["top_logprobs"][1:], told["tokens"][1:], told["token_logprobs"][1:], strict=True
        ):
            assert values[token] == value
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    only = await client.completions.create(**asked, max_tokens=0, logprobs=1)
    assert [choice.logprobs.to_dict() for choice in only.choices if choice.logprobs] == [
        scored(prompt, 1) for prompt in prompts
    ]
    assert [choice.text for choice in only.choices] == ["".join(f"t{i}" for i in prompt) for prompt in prompts]
    assert only.usage is not None
    assert only.usage.completion_tokens == 0
    plain = await client.completions.create(**asked, max_tokens=2)
    assert [choice.logprobs for choice in plain.choices] == [None] * 3
    assert plain.choices[1].text == "".join(f"t{i}" for i in [*PROMPT, *expected_ids(PROMPT, 2)])


@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_echoed_prompts_stream_with_their_log_probabilities(
    client: openai.AsyncOpenAI, pool: str, max_tokens: int
) -> None:
    asked: dict[str, Any] = {"model": pool, "prompt": LONG, "max_tokens": max_tokens, "logprobs": 2, **GREEDY}
    parts, text = [], ""
    async for chunk in await client.completions.create(**asked, echo=True, stream=True):
        text += chunk.choices[0].text
        parts += [] if chunk.choices[0].logprobs is None else [chunk.choices[0].logprobs.to_dict()]
    assert joined(parts) == (echoed(LONG, max_tokens, 2) if max_tokens else scored(LONG, 2))
    assert text == "".join(joined(parts)["tokens"])


async def test_prompt_log_probabilities_have_vllms_form(client: openai.AsyncOpenAI, pool: str) -> None:
    asked: dict[str, Any] = {"model": pool, "prompt": LONG, "max_tokens": 1, "temperature": 0}
    answer = await client.completions.create(**asked, logprobs=0, echo=True, extra_body={"prompt_logprobs": 2})
    none, *told = answer.choices[0].to_dict()["prompt_logprobs"]
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        await client.completions.create(**asked, stream=True, extra_body={"prompt_logprobs": 2})
    assert none is None
    for token_id, values in zip(LONG[1:], told, strict=True):
        second = (token_id + 1) % 5
        assert values == {
            str(token_id): {"logprob": -token_id / 8, "rank": 1, "decoded_token": f"t{token_id}"},
            str(second): {"logprob": -(token_id + 1) / 8, "rank": 2, "decoded_token": f"t{second}"},
        }
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.to_dict()["top_logprobs"][1] == {f"t{LONG[1]}": -LONG[1] / 8}


async def test_every_choice_has_the_scores_of_its_prompt(client: openai.AsyncOpenAI, pool: str) -> None:
    asked: dict[str, Any] = {"model": pool, "prompt": [LONG, PROMPT], "max_tokens": 2, "logprobs": 1, **GREEDY}
    answer = await client.completions.create(**asked, echo=True, n=2)
    told = [choice.logprobs.to_dict() for choice in answer.choices if choice.logprobs is not None]
    assert told == [echoed(LONG, 2, 1)] * 2 + [echoed(PROMPT, 2, 1)] * 2
