"""Responses that a gateway stores, with OpenAI's own client: kept, continued, run in the background and taken over."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from redis.asyncio import Redis

from inflight.gateway.store.store import PREFIX
from inflight.v1 import inference_pb2
from tests.integration.test_authorization import api_key, locked_cluster
from tests.integration.test_chat_texts import speaking_tokenizer
from tests.integration.test_gateway_tools import CALLS, HERMES, spoken
from tests.integration.test_hostile_clients import until
from tests.support.stack.cluster import Cluster
from tests.support.stack.gateways import RunningGateway, run_gateway
from tests.unit.scripted_router import ScriptedRouter, serving
from tests.unit.test_tool_parser import BY_NAME, written

GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(autouse=True)
def _speaking_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", speaking_tokenizer)


@pytest.fixture
async def gateway(cluster: Cluster, redis_url: str) -> AsyncIterator[RunningGateway]:
    """The gateway, with a store."""
    async with run_gateway(cluster.routers[0].address, store_url=redis_url) as running:
        yield running


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    """The response, when it has ended."""
    return (await told(await client.responses.retrieve(response_id, stream=True)))[-1].response


async def told(stream: Any) -> list[Any]:
    """All events of a stream."""
    return [event async for event in stream]


def input_tokens(response: Any) -> int:
    """The tokens of a response's prompt, cached or not."""
    return int(response.usage.input_tokens)


async def test_response_is_stored_by_default_and_continued(client: openai.AsyncOpenAI, pool: str) -> None:
    asked: dict[str, Any] = {"model": pool, "max_output_tokens": 3, **GREEDY}
    first = await client.responses.create(input="t1 t2", **asked)
    assert first.store is True
    assert (await client.responses.retrieve(first.id)).model_dump() == first.model_dump()
    items: Any = await client.responses.input_items.list(first.id)
    assert [item.content[0].text for item in items.data] == ["t1 t2"]
    stream = await client.responses.create(input="t3", previous_response_id=first.id, stream=True, store=True, **asked)
    events = await told(stream)
    second = events[-1].response
    assert (second.store, second.previous_response_id) == (True, first.id)
    third = await client.responses.create(input="t4", previous_response_id=second.id, **asked)
    # When all are sent as items, the conversation is the same.
    messages: list[Any] = [
        *({"role": "user", "content": "t1 t2"}, *first.output),
        *({"role": "user", "content": "t3"}, *second.output),
        {"role": "user", "content": "t4"},
    ]
    whole = await client.responses.create(input=messages, store=False, **asked)
    assert (third.output_text, third.usage) == (whole.output_text, whole.usage)
    assert whole.store is False
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(whole.id)
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)
    for previous in (second.id, third.id):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(input="t5", previous_response_id=previous, **asked)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_items_of_stored_responses_are_referred_to_by_their_ids(client: openai.AsyncOpenAI, pool: str) -> None:
    asked: dict[str, Any] = {"model": pool, "max_output_tokens": 3, **GREEDY}
    first = await client.responses.create(input="t1 t2", **asked)
    (said,) = (await client.responses.input_items.list(first.id)).data
    references: Any = [{"type": "item_reference", "id": item.id} for item in (said, *first.output)]
    asks: Any = {"role": "user", "content": "t3"}
    second = await client.responses.create(input=[*references, asks], **asked)
    continued = await client.responses.create(input="t3", previous_response_id=first.id, **asked)
    assert (second.output_text, input_tokens(second)) == (continued.output_text, input_tokens(continued))
    # The body is stored with the items, so it does not need the response that they are from.
    await client.responses.delete(first.id)
    third = await client.responses.create(input="t4", previous_response_id=second.id, **asked)
    messages: list[Any] = [{"role": "user", "content": "t1 t2"}, *first.output, asks, *second.output]
    whole = await client.responses.create(input=[*messages, {"role": "user", "content": "t4"}], store=False, **asked)
    assert (third.output_text, input_tokens(third)) == (whole.output_text, input_tokens(whole))
    for item_id in (references[-1]["id"], "msg_1", "x", ""):
        unknown: Any = [asks, {"type": "item_reference", "id": item_id}]
        with pytest.raises(openai.NotFoundError) as missing:
            await client.responses.create(input=unknown, **asked)
        assert missing.value.param == "input[1].id"
    nameless: Any = [{"type": "item_reference"}]
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(input=[asks, *nameless], **asked)


async def test_background_response_is_followed_from_any_event(
    cluster: Cluster, client: openai.AsyncOpenAI, pool: str
) -> None:
    brake = cluster.executors[0].brake
    brake.hold()
    stream = await client.responses.create(
        model=pool, input="t1 t2", max_output_tokens=12, background=True, stream=True, **GREEDY
    )
    events: Any = aiter(stream)
    begun = [await anext(events), await anext(events)]
    assert [event.type for event in begun] == ["response.created", "response.queued"]
    response_id = begun[0].response.id
    assert (await client.responses.retrieve(response_id)).status in ("queued", "in_progress")
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=pool, input="t1", previous_response_id=response_id)
    assert refused.value.code == "response_not_ended"
    brake.permit(4)
    while not (event := await anext(events)).type.endswith("delta"):
        begun.append(event)
    begun.append(event)
    await stream.close()
    brake.release()
    resumed = await client.responses.retrieve(response_id, stream=True, starting_after=begun[-1].sequence_number)
    events_after = await told(resumed)
    numbers = [event.sequence_number for event in (*begun, *events_after)]
    assert numbers == list(range(len(numbers)))
    again = await told(await client.responses.retrieve(response_id, stream=True))
    assert [event.model_dump() for event in again] == [event.model_dump() for event in (*begun, *events_after)]
    direct = await client.responses.create(model=pool, input="t1 t2", max_output_tokens=12, store=False, **GREEDY)
    response = await client.responses.retrieve(response_id)
    assert response.output_text == direct.output_text
    assert (response.status, response.usage, response.background) == (direct.status, direct.usage, True)
    assert again[-1].response.model_dump() == response.model_dump()
    # One that has ended is not changed.
    assert (await client.responses.cancel(response_id)).status == response.status


async def test_cancelled_and_deleted_responses_free_their_blocks(
    cluster: Cluster, client: openai.AsyncOpenAI, pool: str
) -> None:
    executor = cluster.executors[0]
    executor.brake.hold()
    asked: dict[str, Any] = {"model": pool, "input": "t1", "max_output_tokens": 40, "background": True, **GREEDY}
    one = await client.responses.create(**asked)
    stream = await client.responses.create(stream=True, **asked)
    events: Any = aiter(stream)
    other = (await anext(events)).response
    await until(lambda: executor.scheduler.num_held)
    cancelled = await client.responses.cancel(other.id)
    assert (cancelled.id, cancelled.status) == (other.id, "cancelled")
    last = (await told(stream))[-1]
    assert last.response.status == "cancelled"
    await client.responses.delete(one.id)
    executor.brake.release()
    await until(lambda: not executor.scheduler.num_held)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(one.id)
    assert (await client.responses.retrieve(other.id)).status == "cancelled"
    plain = await client.responses.create(model=pool, input="t1", max_output_tokens=1, **GREEDY)
    with pytest.raises(openai.BadRequestError):
        await client.responses.cancel(plain.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.retrieve(plain.id, stream=True)
    assert refused.value.param == "stream"


async def test_another_gateway_finishes_what_a_draining_one_gives_back(
    cluster: Cluster, client: openai.AsyncOpenAI, gateway: RunningGateway, redis_url: str, pool: str
) -> None:
    brake = cluster.executors[0].brake
    brake.hold()
    asked: dict[str, Any] = {"model": pool, "input": "t1 t2", "max_output_tokens": 20, **GREEDY}
    async with run_gateway(cluster.routers[0].address, store_url=redis_url) as first, first.openai() as its_client:
        stream = await its_client.responses.create(background=True, stream=True, **asked)
        events: Any = aiter(stream)
        begun = [await anext(events)]
        brake.permit(5)
        while not begun[-1].type.endswith("delta"):
            begun.append(await anext(events))
        await stream.close()
    brake.release()
    after = begun[-1].sequence_number
    resumed = await client.responses.retrieve(begun[0].response.id, stream=True, starting_after=after)
    rest = await told(resumed)
    numbers = [event.sequence_number for event in (*begun, *rest)]
    assert numbers == list(range(len(numbers)))
    direct = await client.responses.create(store=False, **asked)
    text = "".join(event.delta for event in (*begun, *rest) if event.type == "response.output_text.delta")
    assert text == direct.output_text == rest[-1].response.output_text
    assert rest[-1].response.usage == direct.usage


@pytest.mark.parametrize("first", [4, 9, 15, 24])
async def test_reasoning_and_calls_go_on_in_another_gateway(redis_url: str, first: int) -> None:
    """Wherever the first gateway was: in the reasoning, the text, or a call, one of a custom tool among them."""
    calls, tools = [("run", '{"input": "ü\\n\\"x\\" }"}'), CALLS[0]], [{"type": "custom", "name": "run"}]
    text = "<think>\nI need f.</think>\n\nLet me see.\n" + written(BY_NAME["hermes"], calls)
    goes_on, asked_for = threading.Event(), list[inference_pb2.GenerateRequest]()

    def script(request: inference_pb2.GenerateRequest, context: Any) -> Iterator[inference_pb2.StreamEvent]:
        asked_for.append(request)
        is_first, prior = len(asked_for) == 1, request.prior_output
        for number, event in enumerate(spoken(HERMES, text, len(prior.output_ids), prior.text_bytes)):
            if number == first and is_first:
                goes_on.wait()
            yield event

    asked: dict[str, Any] = {"model": "smol", "input": "hi", "tools": tools}
    with serving(ScriptedRouter(script)) as address:
        try:
            async with run_gateway(address, store_url=redis_url) as one, one.openai() as client:
                stream = await client.responses.create(background=True, stream=True, **asked)
                begun = [event async for event in until_event(stream, "response.reasoning_text.delta")]
        finally:
            goes_on.set()
        async with run_gateway(address, store_url=redis_url) as other, other.openai() as client:
            response = await ended(client, begun[0].response.id)
            direct = await client.responses.create(store=False, **asked)
            events = await told(await client.responses.retrieve(response.id, stream=True))
    assert {request.idempotency_key for request in asked_for[:2]} == {response.id}
    assert len({request.sampling.seed for request in asked_for[:2]}) == 1
    assert asked_for[1].prior_output.output_ids
    assert [shape(item) for item in response.output] == [shape(item) for item in direct.output]
    assert [item.type for item in response.output] == ["reasoning", "message", "custom_tool_call", "function_call"]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == response.output[2].input == 'ü\n"x" }'


async def until_event(stream: Any, kind: str) -> AsyncIterator[Any]:
    """The events up to the first of a kind. The stream is closed then."""
    async with stream:
        async for event in stream:
            yield event
            if event.type == kind:
                return


def shape(item: Any) -> dict[str, Any]:
    shown: dict[str, Any] = item.model_dump(exclude={"id", "call_id"})
    return shown


async def test_response_is_its_tenants_only(redis_url: str, pool: str, tmp_path: Path) -> None:
    async with (
        locked_cluster(redis_url, pool, tmp_path) as cluster,
        run_gateway(cluster.routers[0].address, store_url=redis_url, store_secret="s" * 32) as gateway,
        gateway.openai(api_key("all")) as owner,
        gateway.openai(api_key("standard")) as colleague,
        gateway.openai(api_key("umbrella")) as other,
        gateway.openai("wrong") as stranger,
    ):
        asked: dict[str, Any] = {"model": pool, "input": "t1", "max_output_tokens": 3, **GREEDY}
        response = await owner.responses.create(**asked)
        background = await owner.responses.create(background=True, stream=True, **asked)
        last = (await told(background))[-1].response
        for one in (response, last):
            assert (await colleague.responses.retrieve(one.id)).output_text == one.output_text
            for call in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(one.id)
            with pytest.raises(openai.NotFoundError):
                await other.responses.input_items.list(one.id)
            with pytest.raises(openai.BadRequestError) as refused:
                await other.responses.create(previous_response_id=one.id, **asked)
            assert refused.value.code == "previous_response_not_found"
            reference: Any = {"type": "item_reference", "id": one.output[0].id}
            with pytest.raises(openai.NotFoundError):
                await other.responses.create(**{**asked, "input": [reference]})
            with pytest.raises(openai.AuthenticationError):
                await stranger.responses.retrieve(one.id)
        # The key is in the store no longer than the response runs, and encrypted.
        redis = Redis.from_url(redis_url, decode_responses=True)
        cluster.executors[0].brake.hold()
        running = await owner.responses.create(background=True, **asked)
        (sealed,) = await redis.hmget(f"{PREFIX}of:{running.id}", ["authorization"])
        assert sealed
        assert api_key("all") not in sealed
        cluster.executors[0].brake.release()
        assert await redis.hmget(f"{PREFIX}of:{last.id}", ["authorization", "owner"]) == [None, None]
        await redis.aclose()


async def test_limits_of_a_tenant_delete_the_longest_unused_and_refuse_more_in_the_background(
    cluster: Cluster, redis_url: str, pool: str
) -> None:
    limits: dict[str, Any] = {"store_max_responses": 3, "store_max_running": 1}
    async with (
        run_gateway(cluster.routers[0].address, store_url=redis_url, **limits) as gateway,
        gateway.openai() as client,
    ):
        asked: dict[str, Any] = {"model": pool, "input": "t1", "max_output_tokens": 2, **GREEDY}
        cluster.executors[0].brake.hold()
        running = await client.responses.create(background=True, stream=True, **asked)
        with pytest.raises(openai.RateLimitError):
            await client.responses.create(background=True, **asked)
        cluster.executors[0].brake.release()
        first = (await told(running))[-1].response.id
        ids = [first, *[(await client.responses.create(**asked)).id for _ in range(3)]]
        # Continuing one is a use of it.
        follower = await client.responses.create(previous_response_id=ids[1], **asked)
        newest = await client.responses.create(**asked)
        kept = []
        for response_id in (*ids, follower.id, newest.id):
            try:
                kept.append((await client.responses.retrieve(response_id)).id)
            except openai.NotFoundError:
                continue
        assert kept == [ids[1], follower.id, newest.id]


async def test_refusals_of_background_responses_have_their_status(client: openai.AsyncOpenAI, pool: str) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"store": False}, "store"),
        ({"instructions": "t1"}, "instructions"),  # the template has no system role
        ({"max_output_tokens": 1000}, "max_output_tokens"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"extra_headers": {"Idempotency-Key": "k"}}, "Idempotency-Key"),
    )
    for fields, param in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**{"model": pool, "input": "t1", "background": True, **fields})
        assert refused.value.param == param, fields
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.responses.create(model="gpt-5", input="t1", background=True)
    assert unknown.value.code == "model_not_found"


@pytest.mark.parametrize("text", [rb"\ud800", b"\x00", b"\xff", rb'", "a": ' + b"[" * 100_000 + rb', "b": "'])
async def test_body_that_is_not_json_is_refused_whatever_it_refers_to(
    gateway: RunningGateway, pool: str, text: bytes
) -> None:
    items = b'[{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "%b"}]' % text
    body = b'{"model": "%b", "input": %b}' % (pool.encode(), items)
    async with httpx2.AsyncClient() as http:
        answer = await http.post(f"{gateway.url}/v1/responses", content=body)
    assert answer.status_code == 400, answer.text
