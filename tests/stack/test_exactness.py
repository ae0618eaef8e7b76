"""The whole stack gives what `transformers` gives, token by token, whatever the company."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from transformers import PreTrainedModel

from inflight import AsyncClient
from inflight.local.stack import LocalStack
from tests.stack.reference import load_reference
from tests.support.device.greedy import assert_greedy, assert_same, generate_alone

SHARED_TEXT = (
    "The city bus stops at every corner. At each stop some passengers get off and others board, and the driver never "
    "waits for the slowest of them. "
)
TOPICS = ("rivers", "the moon", "bread", "a lighthouse", "chess", "rain in the desert", "old maps", "the number seven")


def make_prompts(num_prompts: int) -> list[str]:
    """Prompts of very different lengths, a third of them with a common beginning of several blocks."""
    rng = random.Random(5)
    prompts = []
    for i in range(num_prompts):
        topic = TOPICS[i % len(TOPICS)]
        beginning = SHARED_TEXT * rng.randint(1, 3) if i % 3 == 0 else ""
        prompts.append(f"{beginning}Here is text number {i} about {topic}: " + "so it begins, " * rng.randint(0, 12))
    return prompts


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return load_reference()


async def ids_of(client: AsyncClient, prompt_ids: tuple[int, ...], max_tokens: int, **options: object) -> list[int]:
    given: dict[str, Any] = {"ignore_eos": True} | options
    stream = client.generate(token_ids=prompt_ids, max_tokens=max_tokens, want_token_ids=True, **given)
    ids: list[int] = []
    async for delta in stream:
        assert delta.offset == len(ids)
        ids.extend(delta.token_ids)
    return ids


async def cancel_half_way(client: AsyncClient, prompt_ids: tuple[int, ...], max_tokens: int) -> list[int]:
    ids: list[int] = []
    async for delta in client.generate(
        token_ids=prompt_ids, max_tokens=max_tokens, ignore_eos=True, temperature=0, want_token_ids=True
    ):
        ids.extend(delta.token_ids)
        if len(ids) >= max_tokens // 2:
            break
    return ids


@pytest.mark.timeout(600)
async def test_mixed_company_gets_the_tokens_that_are_likeliest_in_transformers(
    stack: LocalStack, reference: PreTrainedModel
) -> None:
    rng = random.Random(6)
    # More than there are seats in both executors, several times
    prompts = make_prompts(14)
    lengths = [rng.choice((4, 8, 16, 24, 48)) for _ in prompts]
    async with AsyncClient(*stack.router_addresses[:1]) as first, AsyncClient(*stack.router_addresses[1:]) as second:
        ids = [await first.tokenize(prompt) for prompt in prompts]
        clients = [first if i % 2 else second for i in range(len(prompts))]
        answers = await asyncio.gather(
            *(
                cancel_half_way(client, prompt_ids, length)
                if i % 8 == 7
                else ids_of(client, prompt_ids, length, temperature=0)
                for i, (client, prompt_ids, length) in enumerate(zip(clients, ids, lengths, strict=True))
            )
        )
        capacity = await first.capacity()
    assert all(executor.num_steps > 0 for executor in capacity.executors), "both executors got work"
    for i, (prompt_ids, length, answer) in enumerate(zip(ids, lengths, answers, strict=True)):
        assert length // 2 <= len(answer) <= length if i % 8 == 7 else len(answer) == length
        assert_greedy(reference, list(prompt_ids), answer)


@pytest.mark.timeout(600)
async def test_penalties_and_bans_give_the_tokens_of_transformers_generate(
    stack: LocalStack, reference: PreTrainedModel
) -> None:
    eos, num_tokens = 2, 20
    async with AsyncClient(stack.address) as client:
        prompts = [await client.tokenize(prompt) for prompt in make_prompts(6)]
        # Given bad words of the tokens that the model prefers: they begin in the output, not in the prompt
        plain = await asyncio.gather(*(ids_of(client, ids, num_tokens, temperature=0) for ids in prompts))
        asked: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for prompt_ids, ids in zip(prompts, plain, strict=True):
            words = [word for word in ([ids[0]], ids[5:7], ids[9:12]) if word[0] != prompt_ids[-1]]
            bias = {ids[1]: -2.5, ids[3]: 1.5, eos: 3.0}
            asked.append(
                (
                    {
                        "repetition_penalty": 1.2,
                        "bad_word_ids": words,
                        "no_repeat_ngram_size": 2,
                        "min_tokens": 8,
                        "logit_bias": bias,
                        "ignore_eos": False,
                    },
                    {
                        "repetition_penalty": 1.2,
                        "bad_words_ids": words,
                        "no_repeat_ngram_size": 2,
                        "min_new_tokens": 8,
                        "sequence_bias": {(token_id,): value for token_id, value in bias.items()},
                        "eos_token_id": eos,
                    },
                )
            )
        answers = await asyncio.gather(
            *(
                ids_of(client, prompt_ids, num_tokens, temperature=0, **ours)
                for prompt_ids, (ours, _) in zip(prompts, asked, strict=True)
            )
        )
    for prompt_ids, (_, theirs), answer in zip(prompts, asked, answers, strict=True):
        expected = await asyncio.to_thread(generate_alone, reference, list(prompt_ids), num_tokens, **theirs)
        assert_same(answer, expected)
    assert answers != list(plain)


async def test_seeded_sampling_gives_the_same_tokens_alone_and_in_company(stack: LocalStack) -> None:
    async with AsyncClient(stack.address) as client:
        prompts = [await client.tokenize(prompt) for prompt in make_prompts(8)]

        async def sampled(i: int) -> list[int]:
            return await ids_of(client, prompts[i], 16, temperature=0.9, top_k=40, top_p=0.95, seed=100 + i)

        together = await asyncio.gather(*(sampled(i) for i in range(len(prompts))))
        alone = [await sampled(i) for i in range(3)]
        other_seed = await ids_of(client, prompts[0], 16, temperature=0.9, top_k=40, top_p=0.95, seed=7)
    assert together[:3] == alone
    assert other_seed != alone[0]
