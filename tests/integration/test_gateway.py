"""The gateway in front of a cluster whose device says what must come: answers, refusals, clients that leave, drains.

OpenAI's own client asks wherever it can.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from inflight.local.certificates import make_certificates
from inflight.router.lifecycle.events import LifecycleState
from inflight.router.settings import RouterSettings
from tests.fuzz.served import until_empty
from tests.integration.test_authorization import api_key, locked_cluster
from tests.integration.test_hostile_clients import dispatcher_of, until
from tests.integration.test_requests import expected_ids
from tests.support.stack.cluster import Cluster, ExecutorShape, run_cluster
from tests.support.stack.gateways import RunningGateway, ServerSentEvent, events_of, run_gateway, text_of

GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
WAIT_S = 60.0


def words(prompt_ids: list[int], max_tokens: int) -> str:
    """What the device says behind a prompt."""
    return "".join(f"t{token_id}" for token_id in expected_ids(prompt_ids, max_tokens))


def held_body(model: str, max_tokens: int = 40, **fields: Any) -> dict[str, Any]:
    return {
        "model": model, "prompt": [1, 2], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **fields,
    }  # fmt: skip


def address_of(cluster: Cluster, number: int = 0) -> str:
    return cluster.routers[number].address


async def to_end(chunks: AsyncIterator[Any]) -> None:
    async for _ in chunks:
        pass


async def metric(gateway: RunningGateway, name: str) -> float:
    async with httpx2.AsyncClient(timeout=60) as http:
        page = (await http.get(f"{gateway.url}/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


async def test_completions_are_what_the_router_says_whole_and_in_pieces(client: openai.AsyncOpenAI, pool: str) -> None:
    whole = await client.completions.create(model=pool, prompt=[1, 2], max_tokens=9, **GREEDY)
    assert whole.choices[0].text == words([1, 2], 9)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (2, 9, 11)
    stream = await client.completions.create(
        model=pool, prompt="t1 t2", max_tokens=9, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == words([1, 2], 9)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == "length"
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_second_time_the_prompt_comes_from_the_cache_and_usage_says_so(
    client: openai.AsyncOpenAI, pool: str
) -> None:
    cached = []
    for _ in range(2):
        answer = await client.completions.create(model=pool, prompt=[1, 2, 3, 4] * 3, max_tokens=2, **GREEDY)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] in (4, 8)


async def test_several_prompts_and_n_are_numbered_as_openai_numbers_them(client: openai.AsyncOpenAI, pool: str) -> None:
    answer = await client.completions.create(model=pool, prompt=[[1, 2], [3]], n=2, max_tokens=4, **GREEDY)
    told = [(choice.index, choice.text) for choice in answer.choices]
    first, second = words([1, 2], 4), words([3], 4)
    assert told == [(0, first), (1, first), (2, second), (3, second)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 16)
    texts = ["", "", "", ""]
    async for chunk in await client.completions.create(
        model=pool, prompt=["t1 t2", "t3"], n=2, max_tokens=4, stream=True, **GREEDY
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [first, first, second, second]


async def test_usage_so_far_is_in_each_chunk_where_it_is_asked_for(gateway: RunningGateway, pool: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = held_body(pool, 5, stream_options=options)
    async with events_of(f"{gateway.url}/v1/completions", body) as events:
        usages = [event.value["usage"] async for event in events if event.text.startswith("{")]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert {usage["prompt_tokens"] for usage in usages} == {2}


async def test_usage_says_what_executors_spent_where_it_is_asked_for(client: openai.AsyncOpenAI, pool: str) -> None:
    asked: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True, "include_resources": True}}
    plain = await client.completions.create(model=pool, prompt=[1, 2], max_tokens=9, **GREEDY)
    whole = await client.completions.create(model=pool, prompt=[[1, 2], [3]], n=2, max_tokens=9, **asked)
    stream = await client.completions.create(
        model=pool, prompt=[1, 2], max_tokens=9, stream=True, stream_options={"include_usage": True}, **asked
    )
    last = [chunk async for chunk in stream][-1]

    assert plain.usage is not None
    assert "resources" not in plain.usage.model_dump()
    stopped = await client.completions.create(
        model=pool, prompt=[1, 2], max_tokens=9, stop=words([1, 2], 9)[5:9], **asked
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.model_dump()["resources"]["computed_prompt_tokens"] in (0, 2)
    for usage, num_output in ((whole.usage, 36), (last.usage, 9)):
        assert usage is not None
        resources = usage.model_dump()["resources"]
        assert resources["output_tokens"] == usage.completion_tokens == num_output
        assert resources["seat_s"] > 0
    with pytest.raises(openai.BadRequestError, match="include_resources"):
        await client.completions.create(model=pool, prompt=[1, 2], max_tokens=9, stream=True, **asked)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_disconnect_cancels_the_request_and_its_blocks_are_free(
    cluster: Cluster, gateway: RunningGateway, pool: str, is_stream: bool
) -> None:
    executor = cluster.executors[0]
    executor.brake.hold()
    async with httpx2.AsyncClient(timeout=WAIT_S) as http:
        # Given a request in the middle of its output
        body = held_body(pool, stream=is_stream)
        asking = asyncio.create_task(http.post(f"{gateway.url}/v1/completions", json=body))
        executor.brake.permit(3)
        await until(lambda: executor.engine.num_steps == 3)
        assert executor.scheduler.pool.num_used > 0
        # The gateway sees the output a little later
        async with asyncio.timeout(WAIT_S):
            while await metric(gateway, "inflight_gateway_requests_running") != 1:
                pass
        assert await metric(gateway, "inflight_gateway_requests_waiting") == 0
        # When its client goes away
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: all(stream.life.is_abandoned for stream in dispatcher_of(cluster).streams))
    # Then its blocks are free two steps after the executor has heard of it
    await until(lambda: not executor.engine._inbox.empty())
    executor.brake.permit(2)
    await until(lambda: executor.scheduler.pool.num_used == 0)
    assert executor.engine.num_steps <= 5
    executor.brake.release()
    await until_empty(cluster)
    assert await metric(gateway, 'inflight_gateway_requests_total{route="/v1/completions",status=') == 1
    assert await metric(gateway, "inflight_gateway_streams") == 0
    assert await metric(gateway, "inflight_gateway_requests_running") == 0


async def test_disconnect_while_queued_leaves_the_line(redis_url: str, pool: str) -> None:
    shape = ExecutorShape(num_blocks=16)
    async with run_cluster(redis_url, pool, shape=shape) as cluster, run_gateway(address_of(cluster)) as gateway:
        executor = cluster.executors[0]
        executor.brake.hold()
        url = f"{gateway.url}/v1/completions"
        dispatcher = dispatcher_of(cluster)
        async with events_of(url, held_body(pool)):
            async with events_of(url, held_body(pool)) as waiting:
                assert (await anext(waiting)).text == ": queued, 0 ahead"
                assert len(dispatcher.streams) == 2
                assert await metric(gateway, "inflight_gateway_requests_waiting") == 2
            await until(lambda: len(dispatcher.streams) == 1)
        executor.brake.release()
        await until_empty(cluster)


async def test_a_silent_stream_gets_comments(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        run_gateway(address_of(cluster), heartbeat_s=0.01) as gateway,
    ):
        executor = cluster.executors[0]
        executor.brake.hold()
        async with events_of(f"{gateway.url}/v1/completions", held_body(pool, 3)) as events:
            assert (await anext(events)).text == ": waiting"
            executor.brake.release()
            assert text_of([event async for event in events]) == words([1, 2], 3)


async def test_openai_client_reads_comments_between_events_with_ids(redis_url: str, pool: str) -> None:
    # Given a stream that is silent after an event with an id
    async with (
        run_cluster(redis_url, pool) as cluster,
        run_gateway(address_of(cluster), heartbeat_s=0.01) as gateway,
        httpx2.AsyncClient(timeout=WAIT_S) as http,
    ):
        brake = cluster.executors[0].brake
        brake.hold()
        brake.permit(2)
        async with http.stream("POST", f"{gateway.url}/v1/completions", json=held_body(pool, 9, stream=True)) as raw:
            sent = b""
            async for piece in raw.aiter_bytes():
                sent += piece
                if b": waiting" in sent.partition(b"id: ")[2]:
                    brake.release()
    # When OpenAI's client reads it, then it finds only the events
    replay = httpx2.MockTransport(lambda request: httpx2.Response(200, content=sent))
    async with openai.AsyncOpenAI(
        base_url=gateway.url, api_key="none", http_client=httpx2.AsyncClient(transport=replay)
    ) as client:
        chunks = await client.completions.create(model=pool, prompt=[1, 2], max_tokens=9, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in chunks]) == words([1, 2], 9)


async def test_choices_are_resumed_each_where_it_was(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool, routers=2) as cluster,
        run_gateway(address_of(cluster, 0)) as first,
        run_gateway(address_of(cluster, 1)) as second,
    ):
        body = held_body(pool, 20, stream=True, n=3, temperature=1.0, seed=7, resume_ttl_s=30)
        texts = ["", "", ""]
        brake = cluster.executors[0].brake
        brake.hold()
        brake.permit(9)
        name = ""
        async with events_of(f"{first.url}/v1/completions", body) as events:
            async for event in events:
                if event.text.startswith("{"):
                    choice, name = event.value["choices"][0], event.name
                    texts[choice["index"]] += choice["text"]
                if len(texts[0]) >= 2 * 5:
                    break
        brake.release()
        async with events_of(f"{second.url}/v1/completions", body, {"Last-Event-ID": name}) as events:
            async for event in events:
                for choice in event.value["choices"] if event.text.startswith("{") else ():
                    texts[choice["index"]] += choice["text"]
        async with second.openai() as client:
            options: dict[str, Any] = {"temperature": 1.0, "extra_body": {"ignore_eos": True}, "max_tokens": 20}
            alone = [
                await client.completions.create(model=pool, prompt=[1, 2], seed=7 + k, **options) for k in range(3)
            ]
            best = await client.completions.create(model=pool, prompt=[1, 2], seed=7, best_of=3, **options)
    assert texts == [one.choices[0].text for one in alone]
    assert best.usage is not None
    assert (len(best.choices), best.usage.completion_tokens) == (1, 60)
    assert best.choices[0].text in texts


async def test_stream_is_resumed_by_the_last_events_id_at_any_gateway(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool, routers=2) as cluster,
        run_gateway(address_of(cluster, 0)) as first,
        run_gateway(address_of(cluster, 1)) as second,
    ):
        executor = cluster.executors[0]
        body = held_body(pool, resume_ttl_s=30, stream_options={"include_usage": True})
        # Given a client that has seen the beginning, and lost its connection
        executor.brake.hold()
        executor.brake.permit(5)
        seen: list[ServerSentEvent] = []
        async with events_of(f"{first.url}/v1/completions", body) as events:
            while len(text_of(seen)) < len("t0t0"):
                seen.append(await anext(events))
        seen = [event for event in seen if event.name]
        executor.brake.release()
        # When it asks another gateway, of another router, to go on
        headers = {"Last-Event-ID": seen[-1].name}
        async with events_of(f"{second.url}/v1/completions", body, headers) as events:
            rest = [event async for event in events]
        # Then all has come once, to the end
        assert text_of(seen) + text_of(rest) == words([1, 2], 40)
        assert rest[-1].text == "[DONE]"
        assert rest[-2].value["usage"]["completion_tokens"] == 40
        assert {event.value["id"] for event in (*seen, *rest[:-1])} == {seen[0].value["id"]}
        # and once more, from its end
        async with events_of(f"{first.url}/v1/completions", body, {"Last-Event-ID": rest[-2].name}) as events:
            again = [event async for event in events]
        assert [len(event.value["choices"]) for event in again[:-1]] == [0]
        await until_empty(cluster)


async def test_a_repeated_key_is_the_same_request_and_one_that_was_left_is_asked_for_anew(
    cluster: Cluster, client: openai.AsyncOpenAI, pool: str
) -> None:

    def ask(key: str, max_tokens: int = 9) -> Any:
        headers = {"Idempotency-Key": key}
        return client.completions.create(
            model=pool, prompt=[1, 2], max_tokens=max_tokens, extra_headers=headers, **GREEDY
        )  # fmt: skip

    # A repeat is answered without another step
    assert (await ask("a")).choices[0].text == words([1, 2], 9)
    cluster.executors[0].brake.hold()
    assert (await ask("a")).choices[0].text == words([1, 2], 9)
    with pytest.raises(openai.UnprocessableEntityError) as mismatch:
        await ask("a", max_tokens=8)
    assert mismatch.value.code == "idempotency_key_reused"
    # Given a request that was left, and is cancelled
    left = asyncio.create_task(ask("b"))
    await until(lambda: cluster.executors[0].scheduler.num_held)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    cluster.executors[0].brake.release()
    await until_empty(cluster)
    # When it is repeated, then it is answered
    assert (await ask("b")).choices[0].text == words([1, 2], 9)


async def test_what_is_wrong_is_told_as_openai_tells_it(client: openai.AsyncOpenAI, pool: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="gpt-5", prompt="t1")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.completions.create(model=pool, prompt="t1", max_tokens=1000)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "max_tokens")
    # In a stream, too, before it begins
    with pytest.raises(openai.BadRequestError) as negative:
        await client.completions.create(model=pool, prompt="t1", temperature=-1, stream=True)
    assert negative.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as unknown_id:
        await client.completions.create(model=pool, prompt="t1", logit_bias={"999": 1})
    assert (unknown_id.value.code, unknown_id.value.param) == (None, "logit_bias[999]")
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-5")
    assert [model.id for model in (await client.models.list()).data] == [pool]
    assert (await client.models.retrieve(pool)).id == pool


async def test_keys_are_passed_on_as_they_are(
    redis_url: str, pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inflight.gateway.service.READY_TIMEOUT_S", WAIT_S)
    async with locked_cluster(redis_url, pool, tmp_path) as cluster, run_gateway(address_of(cluster)) as gateway:
        async with gateway.openai(api_key("all")) as client:
            assert (await client.completions.create(model=pool, prompt=[1, 2], max_tokens=3)).usage is not None
        async with gateway.openai("wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model=pool, prompt="t1")
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        async with gateway.openai(api_key("standard")) as client:
            with pytest.raises(openai.PermissionDeniedError):
                await client.completions.create(model=pool, prompt="t1", extra_body={"priority": "interactive"})
        # A health check needs no key
        async with httpx2.AsyncClient(timeout=60) as http:
            assert (await http.get(f"{gateway.url}/ready")).status_code == 503
            await cluster.routers[0].server.set_serving(True)
            assert (await http.get(f"{gateway.url}/ready")).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/models",
        "/v1/models/x",
        "/tokenize",
        "/detokenize",
    ],
)
async def test_two_authorization_headers_are_refused(redis_url: str, pool: str, tmp_path: Path, path: str) -> None:
    async with (
        locked_cluster(redis_url, pool, tmp_path) as cluster,
        run_gateway(address_of(cluster)) as gateway,
        httpx2.AsyncClient(timeout=60) as http,
    ):
        for keys in ((api_key("all"), "wrong"), ("wrong", api_key("all")), (api_key("all"), api_key("all"))):
            headers = [("authorization", f"Bearer {key}") for key in keys]
            method, body = ("GET", None) if "models" in path else ("POST", b'{"model": "x", "prompt": "t1"}')
            answer = await http.request(method, f"{gateway.url}{path}", headers=headers, content=body)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "Authorization"
            assert answer.json()["error"]["code"] == "several_credentials"


async def test_a_full_queue_is_429_with_when_to_try_again(redis_url: str, pool: str) -> None:
    settings = RouterSettings(max_queue_requests=1)
    shape = ExecutorShape(num_blocks=16)
    async with (
        run_cluster(redis_url, pool, shape=shape, settings=settings) as cluster,
        run_gateway(address_of(cluster)) as gateway,
    ):
        cluster.executors[0].brake.hold()
        url = f"{gateway.url}/v1/completions"
        async with events_of(url, held_body(pool)), gateway.openai() as client:
            # The ledger places nothing on an executor whose reports are late
            await until(lambda: [one.life.state for one in dispatcher_of(cluster).streams] == [LifecycleState.PLACED])
            async with events_of(url, held_body(pool)):
                with pytest.raises(openai.RateLimitError) as full:
                    await client.completions.create(model=pool, prompt=[1, 2], max_tokens=40)
            assert full.value.code == "queue_full"
            assert int(full.value.response.headers["retry-after"]) >= 1
        cluster.executors[0].brake.release()


async def test_an_error_in_the_middle_of_a_stream_is_raised_by_openais_client(
    cluster: Cluster, client: openai.AsyncOpenAI, pool: str
) -> None:
    cluster.executors[0].brake.hold()
    cluster.executors[0].brake.permit(3)
    stream = await client.completions.create(model=pool, prompt=[1, 2], max_tokens=40, stream=True, **GREEDY)
    chunks = aiter(stream)
    await anext(chunks)
    # When an operator cancels the request
    dispatcher = dispatcher_of(cluster)
    for running in list(dispatcher.streams):
        await dispatcher.cancel(running.request_id)
    await until(lambda: not cluster.executors[0].engine._inbox.empty())
    cluster.executors[0].brake.release()
    with pytest.raises(openai.APIError, match="the request was cancelled"):
        await to_end(chunks)


async def test_drain_lets_streams_end_and_refuses_new_requests(
    cluster: Cluster, gateway: RunningGateway, pool: str
) -> None:
    cluster.executors[0].brake.hold()
    url = f"{gateway.url}/v1/completions"
    async with (
        events_of(url, held_body(pool, 9)) as events,
        gateway.openai() as client,
        httpx2.AsyncClient(timeout=60) as http,
    ):
        draining = asyncio.create_task(gateway.drain(WAIT_S))
        await asyncio.sleep(0)
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model=pool, prompt="t1")
        assert (refused.value.status_code, refused.value.code) == (503, "draining")
        assert (await http.get(f"{gateway.url}/ready")).status_code == 503
        assert (await http.get(f"{gateway.url}/health")).status_code == 200
        assert not draining.done()
        cluster.executors[0].brake.release()
        assert text_of([event async for event in events]) == words([1, 2], 9)
        await draining


async def test_without_a_router_it_is_alive_and_not_ready() -> None:
    async with run_gateway("127.0.0.1:1") as gateway, httpx2.AsyncClient(timeout=60) as http:
        assert (await http.get(f"{gateway.url}/health")).status_code == 200
        assert (await http.get(f"{gateway.url}/ready")).status_code == 503


async def test_bodies_have_limits_and_answers_an_id() -> None:
    async with run_gateway("127.0.0.1:1", max_body_bytes=1024) as gateway, httpx2.AsyncClient(timeout=60) as http:
        url = f"{gateway.url}/v1/completions"
        large = await http.post(url, content=b" " * 1025, headers={"x-request-id": "mine"})
        assert large.status_code == 413
        assert large.headers["x-request-id"] == "mine"
        broken = await http.post(url, content=b"{")
        assert broken.json()["error"]["code"] == "invalid_json"
        assert broken.headers["x-request-id"].startswith("req_")
        for content in (b"", b" \n"):
            empty = await http.post(url, content=content)
            assert empty.json()["error"]["message"] == "the body is empty; it must be a JSON object"
        packed = await http.post(url, content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
        assert (packed.status_code, packed.json()["error"]["code"]) == (415, "unsupported_encoding")
        assert "send the body uncompressed" in packed.json()["error"]["message"]
        options = await http.options(url, headers={"origin": "https://a.test", "access-control-request-method": "POST"})
        assert "access-control-allow-origin" not in options.headers
    async with (
        run_gateway("127.0.0.1:1", cors_origins=("https://a.test",)) as gateway,
        httpx2.AsyncClient(timeout=60) as http,
    ):
        headers = {"origin": "https://a.test", "access-control-request-method": "POST"}
        options = await http.options(f"{gateway.url}/v1/completions", headers=headers)
        assert options.headers["access-control-allow-origin"] == "https://a.test"
        exposed = "x-request-id, x-inflight-unused, retry-after, retry-after-ms, x-should-retry"
        for method, path, status in (
            ("GET", "/health", 200),
            ("POST", "/v1/completions", 400),
            ("GET", "/v1/completions", 405),
            ("GET", "/v2", 404),
            ("GET", "/v1/models", 503),
        ):
            answer = await http.request(method, f"{gateway.url}{path}", headers={"origin": "https://a.test"})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://a.test"
            assert answer.headers["access-control-expose-headers"] == exposed
            assert answer.headers["x-request-id"]
            other = await http.request(method, f"{gateway.url}{path}", headers={"origin": "https://b.test"})
            assert "access-control-allow-origin" not in other.headers


async def test_path_or_method_that_is_not_served_is_answered_with_what_is() -> None:
    async with run_gateway("127.0.0.1:1") as gateway, httpx2.AsyncClient(timeout=60) as http:

        async def refused(method: str, path: str) -> tuple[int, str | None, str]:
            answer = await http.request(method, f"{gateway.url}{path}")
            error = answer.json()["error"]
            assert error["code"] == "unknown_url"
            return answer.status_code, answer.headers.get("allow"), error["message"]

        text = "/v1/completions is served by POST, not by GET"
        assert await refused("GET", "/v1/completions") == (405, "POST", text)
        text = "/v1/models is served by GET, HEAD, not by DELETE"
        assert await refused("DELETE", "/v1/models") == (405, "GET, HEAD", text)
        meant = "did you mean /v1/completions? The base URL of clients ends with /v1"
        for path in ("/completions", "/v1/completions/", "/v1/v1/completions"):
            assert await refused("POST", path) == (404, None, f"there is no POST {path}; {meant}")
        assert await refused("POST", "/v1/tokenize") == (
            404, None, "there is no POST /v1/tokenize; did you mean /tokenize?",
        )  # fmt: skip
        assert await refused("GET", "/v2") == (404, None, "there is no GET /v2")


async def test_https_by_certificate_files(redis_url: str, pool: str, tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "certificates")
    files: dict[str, Any] = {"tls_cert_file": made.certificate("router"), "tls_key_file": made.key("router")}
    async with run_cluster(redis_url, pool) as cluster, run_gateway(address_of(cluster), **files) as gateway:
        trusting = ssl.create_default_context(cafile=str(made.ca_file))
        async with httpx2.AsyncClient(verify=trusting, timeout=60) as http:
            answer = await http.get(f"{gateway.url}/v1/models")
        assert answer.json()["data"][0]["id"] == pool


async def test_https_shows_a_new_certificate_to_new_connections_and_keeps_the_old_one_if_it_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, next_made = make_certificates(tmp_path / "1"), make_certificates(tmp_path / "2")
    files: dict[str, Any] = {"tls_cert_file": made.certificate("router"), "tls_key_file": made.key("router")}
    trusting_old = ssl.create_default_context(cafile=str(made.ca_file))
    trusting_new = ssl.create_default_context(cafile=str(next_made.ca_file))

    async def is_accepted(trusting: ssl.SSLContext) -> bool:
        try:
            async with httpx2.AsyncClient(verify=trusting, timeout=60) as http:
                return (await http.get(f"{gateway.url}/health")).status_code == 200
        except httpx2.ConnectError:
            return False

    async with (
        run_gateway("127.0.0.1:1", **files) as gateway,
        httpx2.AsyncClient(verify=trusting_old, timeout=60) as open_connection,
    ):
        assert gateway.certificates is not None
        assert (await open_connection.get(f"{gateway.url}/health")).status_code == 200
        assert not await is_accepted(trusting_new)
        # When only one of the files is replaced, then the old pair stays in use, with one warning
        with caplog.at_level("INFO", "inflight.common.rpc.tls"):
            next_made.certificate("router").replace(made.certificate("router"))
            gateway.certificates.look()
            gateway.certificates.look()
            assert await is_accepted(trusting_old)
            assert [record.levelname for record in caplog.records] == ["WARNING"]
            # When the other one follows, then new connections get the new certificate
            next_made.key("router").replace(made.key("router"))
            gateway.certificates.look()
        assert await is_accepted(trusting_new)
        assert not await is_accepted(trusting_old)
        # And an open connection goes on
        assert (await open_connection.get(f"{gateway.url}/health")).status_code == 200
