"""`/v1/responses` of the gateway with OpenAI's own client, in front of a cluster whose device says what must come."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import openai
import pytest

from tests.fuzz.served import until_empty
from tests.integration.test_chat_texts import speaking_tokenizer
from tests.integration.test_gateway import metric
from tests.integration.test_hostile_clients import dispatcher_of, until
from tests.support.stack.cluster import Cluster
from tests.support.stack.gateways import RunningGateway

GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(autouse=True)
def _speaking_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", speaking_tokenizer)


async def test_response_is_the_chat_in_another_form_whole_and_streamed(client: openai.AsyncOpenAI, pool: str) -> None:
    chat = await client.chat.completions.create(
        model=pool, messages=[{"role": "user", "content": "t1 t2"}], max_tokens=9, **GREEDY
    )
    whole = await client.responses.create(model=pool, input="t1 t2", max_output_tokens=9, **GREEDY)
    assert whole.output_text == chat.choices[0].message.content
    assert (whole.status, whole.incomplete_details and whole.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert whole.usage is not None
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (chat.usage.prompt_tokens, 9)
    texts, kinds, numbers = [], [], []
    stream = await client.responses.create(
        model=pool, input="t1 t2", max_output_tokens=9, stream=True, metadata={"a": "b"}, **GREEDY
    )
    async for event in stream:
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            texts.append(event.delta)
        if event.type == "response.incomplete":
            assert event.response.output_text == whole.output_text
            assert event.response.metadata == {"a": "b"}
    assert "".join(texts) == whole.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
    assert numbers == list(range(len(kinds)))


@pytest.mark.parametrize("is_stream", [False, True])
async def test_usage_says_what_executors_spent_where_it_is_asked_for(
    client: openai.AsyncOpenAI, pool: str, *, is_stream: bool
) -> None:
    body: Any = {"ignore_eos": True, "include_resources": True}
    asked: Any = {"model": pool, "input": "t1 t2", "max_output_tokens": 9, "temperature": 0, "extra_body": body}
    response: Any = await client.responses.create(stream=is_stream, **asked)
    if is_stream:
        response = [event async for event in response][-1].response
    resources = response.usage.model_dump()["resources"]
    assert resources["output_tokens"] == response.usage.output_tokens == 9
    assert resources["seat_s"] > 0


async def test_items_of_a_response_are_input_of_the_next(client: openai.AsyncOpenAI, pool: str) -> None:
    first = await client.responses.create(model=pool, input="t1 t2", max_output_tokens=3, **GREEDY)
    items: list[Any] = [{"role": "user", "content": "t1 t2"}, *first.output, {"role": "user", "content": "t3"}]
    second = await client.responses.create(model=pool, input=items, max_output_tokens=3, **GREEDY)
    messages: list[Any] = [
        {"role": "user", "content": "t1 t2"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "t3"},
    ]
    chat = await client.chat.completions.create(model=pool, messages=messages, max_tokens=3, **GREEDY)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage is not None
    assert chat.usage is not None
    assert second.usage.input_tokens == chat.usage.prompt_tokens


async def test_log_probabilities_come_with_the_text(client: openai.AsyncOpenAI, pool: str) -> None:
    asked: dict[str, Any] = {"model": pool, "input": "t1 t2", "max_output_tokens": 4, "top_logprobs": 1, **GREEDY}
    whole = await client.responses.create(include=["message.output_text.logprobs"], **asked)
    (part,) = whole.output[0].content
    assert len(part.logprobs) == 4
    assert "".join(one.token for one in part.logprobs) == part.text
    streamed = [
        one.token
        async for event in await client.responses.create(stream=True, **asked)
        if event.type == "response.output_text.delta"
        for one in event.logprobs
    ]
    assert streamed == [one.token for one in part.logprobs]


async def test_errors_name_what_the_caller_sent(client: openai.AsyncOpenAI, pool: str) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"instructions": "t1"}, "instructions"),  # the template has no system role
        ({"max_output_tokens": 1000}, "max_output_tokens"),
        ({"input": [{"role": "user", "content": "t1"}, {"role": "system", "content": "t1"}]}, "input[1].role"),
        ({"input": []}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"stream": True, "temperature": -1}, "temperature"),
        ({"stream": True, "input": [{"role": "developer", "content": "t1"}]}, "input[0].role"),
    )
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**{"model": pool, "input": "t1", **fields})
        assert refused.value.param == param, fields
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.responses.create(model="gpt-5", input="t1")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError) as stored:
        await client.responses.retrieve("resp_1")
    assert stored.value.code == "unknown_url"
    with pytest.raises(openai.BadRequestError) as resumed:
        await client.responses.create(model=pool, input="t1", extra_headers={"Last-Event-ID": "1"})
    assert resumed.value.param == "Last-Event-ID"


async def test_cancelled_response_fails_in_its_stream(cluster: Cluster, client: openai.AsyncOpenAI, pool: str) -> None:
    cluster.executors[0].brake.hold()
    cluster.executors[0].brake.permit(3)
    stream = await client.responses.create(model=pool, input="t1", max_output_tokens=40, stream=True, **GREEDY)
    events = aiter(stream)
    await anext(events)
    dispatcher = dispatcher_of(cluster)
    for running in list(dispatcher.streams):
        await dispatcher.cancel(running.request_id)
    await until(lambda: not cluster.executors[0].engine._inbox.empty())
    cluster.executors[0].brake.release()
    *_, last = [event async for event in events]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.message == "the request was cancelled"


async def test_disconnect_cancels_a_response(cluster: Cluster, gateway: RunningGateway, pool: str) -> None:
    executor = cluster.executors[0]
    executor.brake.hold()
    async with httpx2.AsyncClient(timeout=100) as http:
        body = {"model": pool, "input": "t1", "max_output_tokens": 40, "ignore_eos": True}
        asking = asyncio.create_task(http.post(f"{gateway.url}/v1/responses", json=body))
        await until(lambda: executor.scheduler.num_held)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    executor.brake.release()
    await until_empty(cluster)
    assert await metric(gateway, 'inflight_gateway_requests_total{route="/v1/responses",status=') == 1


async def test_repeated_key_is_the_same_response(cluster: Cluster, client: openai.AsyncOpenAI, pool: str) -> None:
    asked: dict[str, Any] = {"model": pool, "input": "t1", "max_output_tokens": 5, **GREEDY}
    first = await client.responses.create(extra_headers={"Idempotency-Key": "a"}, **asked)
    cluster.executors[0].brake.hold()
    again = await client.responses.create(extra_headers={"Idempotency-Key": "a"}, **asked)
    cluster.executors[0].brake.release()
    assert again.output_text == first.output_text
