"""The same keyed request from several calls within milliseconds: one call gets everything, the others end at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from typing import Any

import grpc
import openai
import pytest

from tests.integration.test_requests import rest
from tests.support.stack.cluster import run_cluster
from tests.support.stack.crowds import SHAPE, Call, Group, Output, drawn, expected_of, pace, problems_of, send
from tests.support.stack.gateways import run_gateway

NUM_GROUPS = 40


@pytest.mark.parametrize("num_routers", [1, 2])
async def test_calls_that_begin_together_get_the_whole_answer_once(
    redis_url: str, pool: str, caplog: pytest.LogCaptureFixture, num_routers: int
) -> None:
    rng = random.Random(7)
    groups = [drawn(rng, f"{pool}-{number}", num_routers, (2, 3, 4, 8)) for number in range(NUM_GROUPS)]
    # A crowd, in which a router loses the request and gets it back again and again.
    groups += [
        Group(f"{pool}-crowd-{n}", n, 0, 20, tuple((i % num_routers, i / 4000) for i in range(60))) for n in (1, 3)
    ]
    known: dict[tuple[int, int, int], Output] = {}
    problems: list[str] = []
    async with run_cluster(redis_url, pool, routers=num_routers, shape=SHAPE) as cluster:
        pacing = asyncio.create_task(pace(cluster.executors[0].brake, 0.002))
        for group in groups:
            if group.kind not in known:
                known[group.kind] = await expected_of(cluster, group)
            problems += problems_of(group, await send(cluster, group), known[group.kind])
        pacing.cancel()
        links_lost = "is lost" in caplog.text
        metric = "inflight_incomplete_streams_total"
        incomplete = [router.registry.get_sample_value(metric, {"model": pool}) for router in cluster.routers]
    assert problems == []
    assert not links_lost
    assert set(incomplete) == {0.0}


@pytest.mark.parametrize("num_routers", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
async def test_displaced_calls_end_before_the_request_does(redis_url: str, pool: str, num_routers: int, n: int) -> None:
    """The device stands still, so no call can get the answer while the others are told."""
    group = Group("k", n, 0, 20, tuple((i % num_routers, i * 0.002) for i in range(8)))
    async with run_cluster(redis_url, pool, routers=num_routers, shape=SHAPE) as cluster:
        expected = await expected_of(cluster, group)
        brake = cluster.executors[0].brake
        brake.hold()
        calls = [cluster.routers[router].stub.Generate(group.request) for router, _ in group.calls]
        ends = {asyncio.ensure_future(read(call)) for call in calls}
        while len(ends) > 1:
            told, ends = await asyncio.wait(ends, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert told, f"{len(ends)} calls wait"
            assert {end.result().code for end in told} == {grpc.StatusCode.ABORTED}
            brake.permit(1)  # the executor hears of takeovers between steps
        brake.release()
        (last,) = ends
        assert ((await last).code, (await last).ids) == (grpc.StatusCode.OK, expected)


async def read(stream: Any) -> Call:
    call = Call(0, 0.0)
    try:
        for event in await rest(stream):
            call.take(event)
        call.code = grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        call.code = error.code()
    return call


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_calls_with_one_key_at_the_gateways_get_the_whole_answer_or_are_told(
    redis_url: str, pool: str, is_streamed: bool
) -> None:
    rng = random.Random(5)
    async with run_cluster(redis_url, pool, routers=2, shape=SHAPE) as cluster, contextlib.AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(run_gateway(router.address)) for router in cluster.routers]
        clients = [await stack.enter_async_context(gateway.openai()) for gateway in gateways]
        pacing = asyncio.create_task(pace(cluster.executors[0].brake, 0.002))
        for number in range(12):
            n, best_of = rng.choice(((1, None), (2, None), (3, None), (1, 2)))
            body = {"model": pool, "prompt": [1, 2, 3], "max_tokens": 20, "n": n, "best_of": best_of, "seed": 3}
            if is_streamed and best_of is not None:
                continue  # OpenAI has no stream of the best
            alone = await complete(clients[0], 0.0, body, is_streamed=False, key=None)
            key = f"{pool}-{is_streamed}-{number}"
            calls = [
                complete(rng.choice(clients), rng.uniform(0, 0.025), body, is_streamed=is_streamed, key=key)
                for _ in range(rng.choice((2, 4, 8)))
            ]
            answers = await asyncio.gather(*calls)
            assert set(answers) <= {alone, None}
            assert alone in answers
        pacing.cancel()


async def complete(
    client: openai.AsyncOpenAI, pause_s: float, body: Mapping[str, Any], *, is_streamed: bool, key: str | None
) -> tuple[str, ...] | None:
    """Returns the text of each choice; None: another call reads the request."""
    await asyncio.sleep(pause_s)
    given = {**body, "extra_headers": {} if key is None else {"Idempotency-Key": key}}
    try:
        if not is_streamed:
            answer = await client.completions.create(**given)
            return tuple(choice.text for choice in answer.choices)
        texts = [""] * body["n"]
        ends = 0
        async for chunk in await client.completions.create(**given, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends += choice.finish_reason is not None
    except openai.APIError as error:
        if error.code != "taken_over":
            raise
        return None
    assert ends == body["n"]
    return tuple(texts)
