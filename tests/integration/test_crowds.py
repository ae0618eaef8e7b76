"""The same keyed request from several calls within milliseconds: one call gets everything, the others end at once."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest

from tests.cluster import run_cluster
from tests.crowds import SHAPE, Call, Group, Output, drawn, expected_of, pace, problems_of, send
from tests.integration.test_requests import rest

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
