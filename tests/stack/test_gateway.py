"""OpenAI's client, unmodified, with the default model; and a stream that outlives its router and its gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from inflight.local.options import StackOptions
from inflight.local.process import ChildProcess
from inflight.local.stack import LocalStack
from tests.support.stack.braked import ProcessBrake
from tests.support.stack.gateways import ServerSentEvent, events_of, run_gateway, text_of

MODEL = "SmolLM2-135M-Instruct"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_completion_tokens": 32}
FOUR_SEATS = ("--dtype", "float32", "--max-num-sequences", "4", "--num-threads", "1")


async def test_openais_client_chats_whole_in_pieces_and_synchronously(stack: LocalStack) -> None:
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai(max_retries=2) as client:
        whole = await client.chat.completions.create(**GREEDY)
        text = whole.choices[0].message.content
        assert text is not None
        assert "Paris" in text
        assert whole.choices[0].finish_reason == "stop"
        # The same in pieces
        texts, reasons = [], []
        async for chunk in await client.chat.completions.create(stream=True, **GREEDY):
            texts.append(chunk.choices[0].delta.content or "")
            reasons.append(chunk.choices[0].finish_reason)
        assert "".join(texts) == text
        assert (reasons[-1], set(reasons[:-1])) == ("stop", {None})

        # and without an event loop
        def ask() -> str | None:
            with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as synchronous:
                answer: str | None = synchronous.chat.completions.create(**GREEDY).choices[0].message.content
                return answer

        assert await asyncio.to_thread(ask) == text


async def test_log_probabilities_of_a_chat_are_those_of_its_text(stack: LocalStack) -> None:
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        asked: dict[str, Any] = {**GREEDY, "logprobs": True, "top_logprobs": 2}
        whole = (await client.chat.completions.create(**asked)).choices[0]
        assert whole.logprobs is not None
        content = whole.logprobs.content or []
        *said, end = content
        assert b"".join(bytes(one.bytes or ()) for one in said).decode() == whole.message.content
        assert end.token == "<|im_end|>"
        # Greedy: the token produced is the likeliest.
        assert [one.top_logprobs[0].token for one in content] == [one.token for one in content]
        assert all(one.logprob <= 0 and len(one.top_logprobs) == 2 for one in content)
        streamed: list[Any] = []
        async for chunk in await client.chat.completions.create(stream=True, **asked):
            told = chunk.choices[0].logprobs
            streamed += [] if told is None else told.content or []
        assert [one.token for one in streamed] == [one.token for one in content]
        assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in content], abs=0.1)


async def test_parts_of_a_character_come_with_their_bytes(stack: LocalStack) -> None:
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        told = await client.completions.create(
            model=MODEL,
            prompt="🎉🎉🎉🎉🎉🎉🎉🎉",
            max_tokens=9,
            temperature=0,
            logprobs=2,
            extra_body={"ignore_eos": True},
        )
        text, logprobs = told.choices[0].text, told.choices[0].logprobs
        assert logprobs is not None
        tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
        parts = [i for i, token in enumerate(tokens) if token.startswith("bytes:")]
        assert parts, "a character takes several tokens"
        for i, (token, offset) in enumerate(zip(tokens, offsets, strict=True)):
            is_part = i in parts
            assert is_part or text[offset:].startswith(token)
            assert not is_part or text[offset] in "🎉\ufffd"
        assert all(token in (top or {}) for token, top in zip(tokens, logprobs.top_logprobs or (), strict=True))


async def test_stop_seed_and_n_do_what_openai_says(stack: LocalStack) -> None:
    async with run_gateway(*stack.router_addresses) as gateway, gateway.openai() as client:
        stopped = await client.chat.completions.create(**GREEDY, stop=["of Fr"])
        text = stopped.choices[0].message.content
        assert text is not None
        assert text.endswith("capital ")
        assert stopped.choices[0].finish_reason == "stop"
        sampled = {**GREEDY, "temperature": 1.5, "max_completion_tokens": 12}
        first, second = [await client.chat.completions.create(**sampled, seed=7, n=2) for _ in range(2)]
        said = [choice.message.content for choice in first.choices]
        assert said == [choice.message.content for choice in second.choices]
        assert said[0] != said[1]
        assert first.usage is not None
        assert first.usage.completion_tokens > 12


async def read_into(seen: list[ServerSentEvent], url: str, body: dict[str, Any], begun: asyncio.Event) -> None:
    """Reads until the end, or until the gateway is gone."""
    headers = {"Last-Event-ID": seen[-1].name} if seen else None
    try:
        async with events_of(url, body, headers) as events:
            async for event in events:
                if event.name:
                    seen.append(event)
                if text_of(seen):
                    begun.set()
    except httpx2.TransportError:
        return


async def end(child: ChildProcess) -> None:
    child.kill()
    await child.wait()


async def test_streams_outlive_a_router_unseen_and_their_gateway_by_the_last_events_id(
    tmp_path: Path, tiny_model: Path
) -> None:
    brake = ProcessBrake(tmp_path / "brake")
    options = StackOptions(
        model=str(tiny_model), routers=2, gateways=2, tls=True, executor_args=FOUR_SEATS, run_dir=tmp_path,
        program=brake.program(10),
    )  # fmt: skip
    async with LocalStack(options) as stack:
        first, second = (f"http://{address}/v1/completions" for address in stack.gateway_addresses)
        bodies: list[dict[str, Any]] = [
            {
                "model": "tiny", "prompt": f"{number}", "max_tokens": 100, "temperature": 0, "ignore_eos": True,
                "resume_ttl_s": 60, "stream_options": {"include_usage": True},
            }
            for number in range(4)
        ]  # fmt: skip
        # Given streams of one gateway, which spreads them over both routers; steps are made only until each has begun
        brake.hold()
        seen: list[list[ServerSentEvent]] = [[] for _ in bodies]
        begun = [asyncio.Event() for _ in bodies]
        readers = [
            asyncio.create_task(read_into(into, first, body, event))
            for into, body, event in zip(seen, bodies, begun, strict=True)
        ]
        async with asyncio.timeout(60):
            while not all(event.is_set() for event in begun):
                brake.permit_next()
                await asyncio.sleep(0.05)
        # When a router dies, and then the gateway
        await end(stack.routers[0])
        await end(stack.gateways[0])
        brake.release()
        await asyncio.gather(*readers)
        assert not any("usage" in event.value and event.value["usage"] for events in seen for event in events)
        # Then all go on behind what has been seen, at the other gateway
        await asyncio.gather(
            *(read_into(into, second, body, asyncio.Event()) for into, body in zip(seen, bodies, strict=True))
        )
        # and everything has come once
        async with openai.AsyncOpenAI(base_url=second.removesuffix("/completions"), api_key="none") as client:
            for body, events in zip(bodies, seen, strict=True):
                asked: dict[str, Any] = {name: body[name] for name in ("model", "prompt", "max_tokens", "temperature")}
                whole = await client.completions.create(**asked, extra_body={"ignore_eos": True})
                assert text_of(events) == whole.choices[0].text
                assert events[-1].value["usage"]["completion_tokens"] == 100
