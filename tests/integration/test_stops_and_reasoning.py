"""Stops of answers with reasoning: a stop text or stop token within the reasoning does not end the answer."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from inflight.v1 import executor_pb2, inference_pb2, types_pb2
from tests.integration.test_requests import collect, expected_ids, rest
from tests.support.stack import cluster as clusters
from tests.support.stack.cluster import Cluster, run_cluster
from tests.support.stack.gateways import RunningGateway, run_gateway

WORDS = ("<think>", "</think>", "stop", "a", "b")
BEGIN, END, STOP, A, B = range(len(WORDS))
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}<think>{# </think> #}"
NUM_TOKENS = 30


def reasoning_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of five words, one of which ends the reasoning that the chat template opens."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


def messages() -> Iterator[tuple[list[dict[str, str]], list[int]]]:
    """Conversations, and what the device says after them."""
    for prompt in itertools.product((A, B), repeat=8):
        yield (
            [{"role": "user", "content": " ".join(WORDS[i] for i in prompt)}],
            expected_ids([*prompt, BEGIN], NUM_TOKENS),
        )


def conversation() -> tuple[list[dict[str, str]], list[int], int, int]:
    """A conversation, the output, where its reasoning ends, and where the stop after that is. There is another stop
    within the reasoning."""
    for conversation, ids in messages():
        end = ids.index(END) if END in ids else 0
        last = ids.index(STOP, end) if STOP in ids[end:] else 0
        if STOP in ids[:end] and last > end + 2 and not {BEGIN, END} & set(ids[end + 1 : last]):
            return conversation, ids, end, last
    raise AssertionError("the device says no such output")


def text_of(ids: list[int]) -> str:
    return "".join(WORDS[token_id] for token_id in ids)


@pytest.fixture
async def cluster(redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    """Two routers of a model that reasons."""
    monkeypatch.setattr(clusters, "tiny_tokenizer", reasoning_tokenizer)
    async with run_cluster(redis_url, pool, routers=2) as running:
        yield running


@pytest.fixture
async def gateway(cluster: Cluster) -> AsyncIterator[RunningGateway]:
    async with run_gateway(cluster.routers[0].address) as running:
        yield running


STOPS: list[dict[str, Any]] = [{"stop": ["stop"]}, {"stop_token_ids": [STOP]}]


@pytest.mark.parametrize("stops", STOPS, ids=["text", "token"])
async def test_chats_and_responses_go_on_after_a_stop_within_the_reasoning(
    gateway: RunningGateway, pool: str, stops: dict[str, Any]
) -> None:
    asked, ids, end, last = conversation()
    reasoning, content = text_of(ids[:end]), text_of(ids[end + 1 : last])
    options: dict[str, Any] = {"model": pool, "temperature": 0, "extra_body": stops}
    async with gateway.openai() as client:
        chat: dict[str, Any] = {"messages": asked, "max_tokens": NUM_TOKENS, **options}
        whole = (await client.chat.completions.create(**chat)).choices[0]
        assert (getattr(whole.message, "reasoning_content", ""), whole.message.content) == (reasoning, content)
        assert whole.finish_reason == "stop"
        chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(stream=True, **chat)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == content
        assert "".join(getattr(chunk.delta, "reasoning_content", None) or "" for chunk in chunks) == reasoning
        assert chunks[-1].finish_reason == "stop"
        answer: dict[str, Any] = {"input": asked, "max_output_tokens": NUM_TOKENS, **options}
        response = await client.responses.create(**answer)
        assert (response.output_text, response.status) == (content, "completed")
        assert response.usage is not None
        assert response.usage.output_tokens == last + 1
        assert response.usage.output_tokens_details.reasoning_tokens == end + 1


def request_of(asked: list[dict[str, str]], *, parts: bool = True, **stopping: Any) -> inference_pb2.GenerateRequest:
    messages = [
        inference_pb2.ChatMessage(role=one["role"], content=[inference_pb2.ContentPart(text=one["content"])])
        for one in asked
    ]
    return inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(messages=messages),
        sampling=types_pb2.SamplingParams(temperature=0),
        stopping=types_pb2.StoppingParams(max_tokens=NUM_TOKENS, **stopping),
        output=inference_pb2.OutputOptions(parts=parts, token_ids=True),
    )


@pytest.mark.parametrize("stops", STOPS, ids=["text", "token"])
async def test_stop_applies_to_the_whole_text_of_an_output_that_is_not_divided(
    cluster: Cluster, stops: dict[str, Any]
) -> None:
    asked, ids, _, _ = conversation()
    events = await collect(cluster.routers[0], request_of(asked, parts=False, **stops))
    assert "".join(event.delta.text for event in events) == text_of(ids[: ids.index(STOP)])


@pytest.mark.parametrize("stops", STOPS, ids=["text", "token"])
async def test_another_router_finds_the_same_stop(cluster: Cluster, stops: dict[str, Any]) -> None:
    asked, ids, end, last = conversation()
    brake, request = cluster.executors[0].brake, request_of(asked, **stops)
    request.resume_ttl.FromSeconds(60)
    # Given a stream that has reached its reasoning
    brake.hold()
    call = cluster.routers[0].stub.Generate(request)
    accepted = (await call.read()).event.accepted
    brake.permit(2)
    token_ids: list[int] = []
    while not token_ids:
        token_ids += (await call.read()).event.delta.token_ids
    # When it continues on another router
    named = {"request_id": accepted.request_id, "resume_token": accepted.resume_token}
    resumed = cluster.routers[1].stub.Resume(inference_pb2.ResumeRequest(**named, offsets=[0], text_bytes=[0]))
    events = [(await resumed.read()).event]
    brake.release()
    events += await rest(resumed)
    # Then it ends at the stop in the answer
    parts = [part for event in events for part in (*event.delta.parts, *event.finished.parts)]
    assert "".join(part.reasoning for part in parts) == text_of(ids[:end])
    assert "".join(part.content for part in parts) == text_of(ids[end + 1 : last])
    finished = events[-2].finished
    assert (finished.stop or finished.stop_token_id) == ("stop" if "stop" in stops else STOP)


async def test_stop_tokens_of_answers_without_reasoning_are_left_to_the_executor(
    cluster: Cluster, submits: list[executor_pb2.Submit]
) -> None:
    asked, _, _, _ = conversation()
    for parts in (True, False):
        await collect(cluster.routers[0], request_of(asked, parts=parts, stop_token_ids=[STOP]))
    assert [list(submit.stopping.stop_token_ids) for submit in submits] == [[], [STOP]]
