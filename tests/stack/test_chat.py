"""First steps of a user: ask a question, read the answer as it comes, list models, tokenize."""

from __future__ import annotations

import asyncio

from inflight import AsyncClient, sync
from inflight.events import FinishReason
from inflight.local.stack import LocalStack
from tests.support.stack.pseudo_terminal import CTRL_C, CTRL_D, at_terminal

QUESTION = "What is the capital of France?"


async def test_chat_answers_and_ends_at_the_models_end_of_sequence(stack: LocalStack) -> None:
    async with AsyncClient(stack.address) as client:
        stream = client.generate(chat=QUESTION, temperature=0, max_tokens=32)
        texts = [delta.text async for delta in stream]
        assert "Paris" in "".join(texts)
        assert stream.finish_reason is FinishReason.STOP_TOKEN
        assert stream.usage is not None
        assert stream.usage.prompt_tokens > 10


async def test_synchronous_client_reads_the_same_answer(stack: LocalStack) -> None:
    async with AsyncClient(stack.address) as client:
        expected = await client.complete(chat=QUESTION, temperature=0, max_tokens=32)

    def ask() -> str:
        with sync.Client(stack.address) as client:
            return "".join(delta.text for delta in client.generate(chat=QUESTION, temperature=0, max_tokens=32))

    assert await asyncio.to_thread(ask) == expected.text


async def test_stop_string_ends_the_text_before_it(stack: LocalStack) -> None:
    async with AsyncClient(stack.address) as client:
        whole = await client.complete(chat=QUESTION, temperature=0, max_tokens=32)
        cut = await client.complete(chat=QUESTION, temperature=0, max_tokens=32, stop=["of Fr"])
    assert cut.text == whole.text[: whole.text.index("of Fr")]
    assert cut.finish_reason is FinishReason.STOP_STRING


async def test_repeated_prompt_is_served_from_the_prefix_cache(stack: LocalStack) -> None:
    prompt = "A sentence that is repeated until it fills several blocks of the cache. " * 6
    async with AsyncClient(stack.address) as client:
        usages = [(await client.complete(prompt, temperature=0, max_tokens=2)).usage for _ in range(3)]
    # Two executors: by the third time one of them has seen it before.
    assert usages[2] is not None
    assert usages[2].cached_tokens >= 64


async def test_models_and_token_ids_are_told(stack: LocalStack) -> None:
    async with AsyncClient(stack.address) as client:
        (model,) = await client.list_models()
        assert model.name == "SmolLM2-135M-Instruct"
        assert model.context_length == 8192
        assert model.num_executors == 2
        text = "naïve café 👩‍🚀 你好"
        assert await client.detokenize(await client.tokenize(text)) == text


async def test_ctrl_c_in_a_chat_frees_the_seat_long_before_the_answer_would_have_ended(stack: LocalStack) -> None:
    async with AsyncClient(stack.address) as client:
        before = sum(executor.computed_tokens for executor in (await client.capacity()).executors)

        def chat() -> None:
            with at_terminal(
                "chat", "--no-history", "--temperature", "0", "--max-tokens", "500", "--address", stack.address
            ) as terminal:
                terminal.expect("> ")
                terminal.enter("Write a very long story about a whale.")
                terminal.expect("whale.")
                terminal.expect(" ")
                terminal.type(CTRL_C)
                terminal.expect("cancelled")
                terminal.expect("> ")
                terminal.type(CTRL_D)
                assert terminal.wait() == 0

        await asyncio.to_thread(chat)
        async with asyncio.timeout(60):
            while any(e.seats_used + e.blocks_reserved for e in (await client.capacity()).executors):
                await asyncio.sleep(0.05)
        computed = sum(executor.computed_tokens for executor in (await client.capacity()).executors) - before
        assert 0 < computed < 500
