"""`/v1/messages` of the gateway with Anthropic's own client, in front of a cluster whose device says what must come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from tests.integration.test_chat_texts import speaking_tokenizer
from tests.integration.test_gateway import metric
from tests.integration.test_hostile_clients import dispatcher_of, until
from tests.support.stack.cluster import Cluster
from tests.support.stack.gateways import ANY_KEY, RunningGateway, ServerSentEvent, events_of

if TYPE_CHECKING:  # each worker would import it, which takes a tenth of the time of all imports
    import anthropic

ASKED: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "t1 t2"}]}
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0, "ignore_eos": True}}


@pytest.fixture(autouse=True)
def _speaking_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", speaking_tokenizer)


def anthropic_of(gateway: RunningGateway, **options: Any) -> anthropic.AsyncAnthropic:
    import anthropic

    return anthropic.AsyncAnthropic(base_url=gateway.url, **{"api_key": ANY_KEY, "max_retries": 0, **options})


def text_of(message: Any) -> str:
    (block,) = message.content
    assert block.type == "text"
    return str(block.text)


async def test_message_is_the_chat_in_another_form_whole_and_streamed(
    gateway: RunningGateway, client: openai.AsyncOpenAI, pool: str
) -> None:
    chat = await client.chat.completions.create(model=pool, **ASKED, **GREEDY)
    assert chat.usage is not None
    async with anthropic_of(gateway) as claude:
        whole = await claude.messages.create(model=pool, **ASKED, **GREEDY)
        assert text_of(whole) == chat.choices[0].message.content
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 9)
        async with claude.messages.stream(model=pool, **ASKED, **GREEDY) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert text_of(final) == text_of(whole)
        assert final.stop_reason == whole.stop_reason
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        counted = await claude.messages.count_tokens(model=pool, messages=ASKED["messages"])
        for usage in (whole.usage, final.usage):
            cached = usage.cache_read_input_tokens or 0
            assert usage.input_tokens + cached == counted.input_tokens == chat.usage.prompt_tokens


async def test_prefix_that_is_cached_is_counted_apart_from_the_first_event_on(
    gateway: RunningGateway, pool: str
) -> None:
    long = {**ASKED, "messages": [{"role": "user", "content": "t1 t2 " * 20}]}
    async with anthropic_of(gateway) as claude:
        await claude.messages.create(model=pool, **long, **GREEDY)
        stream = await claude.messages.create(model=pool, stream=True, **long, **GREEDY)
        (first,) = [event.message.usage async for event in stream if event.type == "message_start"]
        counted = await claude.messages.count_tokens(model=pool, messages=long["messages"])
    assert first.cache_read_input_tokens > 0
    assert first.input_tokens + first.cache_read_input_tokens == counted.input_tokens


async def test_stop_sequence_and_unused_hints_are_reported(gateway: RunningGateway, pool: str) -> None:
    async with anthropic_of(gateway) as claude:
        whole = await claude.messages.create(model=pool, **ASKED, **GREEDY)
        text = text_of(whole)
        raw = await claude.messages.with_raw_response.create(
            model=pool, **ASKED, **GREEDY, stop_sequences=[text[10:12]], metadata={"user_id": "u"}
        )
        assert raw.headers["x-inflight-unused"] == "metadata"
        stopped = await raw.parse()
        assert stopped._request_id == raw.headers["x-request-id"]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[10:12])
    assert text_of(stopped) == text[: text.index(text[10:12])]


async def test_message_that_was_left_continues_after_its_last_event(
    cluster: Cluster, gateway: RunningGateway, pool: str
) -> None:
    url = f"{gateway.url}/v1/messages"
    asked = {"model": pool, **ASKED, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "resume_ttl_s": 60}
    async with events_of(url, asked) as events:
        whole = [event.value async for event in events]
    brake, known = cluster.executors[0].brake, list[ServerSentEvent]()
    brake.hold()
    brake.permit(9)
    async with events_of(url, asked) as events:
        while not known or known[-1].value["type"] != "content_block_delta":
            known.append(await anext(events))
    brake.release()
    async with events_of(url, asked, {"Last-Event-ID": known[-1].name}) as events:
        rest = [event async for event in events]
    told = [event.value for event in (*known, *rest)]
    kinds = [event["type"] for event in told if event["type"] not in ("ping", "content_block_delta")]
    assert kinds == [event["type"] for event in whole if event["type"] not in ("ping", "content_block_delta")]

    def text(events: list[Any]) -> str:
        return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")

    assert text(told) == text(whole)


async def test_errors_are_anthropics(cluster: Cluster, gateway: RunningGateway, pool: str) -> None:
    import anthropic

    async with anthropic_of(gateway) as claude:
        with pytest.raises(anthropic.NotFoundError, match="no model 'claude'"):
            await claude.messages.create(model="claude", **ASKED)
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            await claude.messages.create(model=pool, **{**ASKED, "max_tokens": 9000})
        with pytest.raises(anthropic.BadRequestError, match="Last-Event-ID"):
            await claude.messages.create(model=pool, **ASKED, stream=True, extra_headers={"Last-Event-ID": "1"})
        cluster.executors[0].brake.hold()
        cluster.executors[0].brake.permit(3)
        stream = await claude.messages.create(model=pool, **{**ASKED, "max_tokens": 40}, stream=True, **GREEDY)
        events = aiter(stream)
        await anext(events)
        dispatcher = dispatcher_of(cluster)
        for running in list(dispatcher.streams):
            await dispatcher.cancel(running.request_id)
        await until(lambda: not cluster.executors[0].engine._inbox.empty())
        cluster.executors[0].brake.release()
        with pytest.raises(anthropic.APIStatusError, match="cancelled"):
            async for _ in events:
                pass


async def test_key_comes_in_either_header(gateway: RunningGateway, pool: str) -> None:
    body = {"model": pool, **ASKED}
    async with httpx2.AsyncClient(base_url=gateway.url, timeout=60) as http:
        assert (await http.head("/")).status_code == 200
        same = {"x-api-key": "k", "authorization": "Bearer k"}
        assert (await http.post("/v1/messages", json=body, headers=same)).status_code == 200
        other = await http.post("/v1/messages", json=body, headers={**same, "x-api-key": "l"})
        assert other.status_code == 400
        assert other.json()["error"]["type"] == "invalid_request_error"
        assert await metric(gateway, 'inflight_gateway_requests_total{route="/v1/messages",status="200"}') == 1
