"""Requests without max_tokens, which reserve a part of the context at a time: real gRPC, real Redis, real scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2
from tests.integration.test_requests import collect, expected_ids, ids_of
from tests.support.stack.cluster import (
    CONTEXT_LENGTH,
    Cluster,
    ExecutorShape,
    RunningRouter,
    run_cluster,
    token_request,
)

STEP = 8
SETTINGS = RouterSettings(no_executor_grace_s=30.0, default_reservation_tokens=STEP)
# One context, of 64 tokens in blocks of 4.
SHAPE = ExecutorShape(num_blocks=CONTEXT_LENGTH // 4, max_num_sequences=4)


def open_request(prompt_ids: list[int], **fields: object) -> inference_pb2.GenerateRequest:
    """A request without max_tokens that ends at the end of the context."""
    request = token_request(prompt_ids, 1, **fields)  # type: ignore[arg-type]
    request.stopping.ClearField("max_tokens")
    return request


def sample(router: RunningRouter, name: str, **labels: str) -> float:
    return router.registry.get_sample_value(name, labels) or 0.0


async def answers(router: RunningRouter, prompts: Sequence[list[int]]) -> list[list[inference_pb2.StreamEvent]]:
    return list(await asyncio.gather(*(collect(router, open_request(prompt)) for prompt in prompts)))


def check_whole(events: list[inference_pb2.StreamEvent], prompt: list[int]) -> None:
    """All tokens of the context, as alone; and nothing tells of the parts."""
    assert ids_of(events) == expected_ids(prompt, CONTEXT_LENGTH - len(prompt))
    assert events[0].accepted.max_tokens == CONTEXT_LENGTH - len(prompt)
    assert [event.WhichOneof("event") for event in events if not event.HasField("delta")] == [
        "accepted",
        "started",
        "finished",
        "done",
    ]


async def test_pool_of_one_context_runs_several_requests_at_once(redis_url: str, pool: str) -> None:
    prompts = [[number, 1] for number in range(4)]
    async with run_cluster(redis_url, pool, shape=SHAPE, settings=SETTINGS) as cluster:
        router, executor = cluster.routers[0], cluster.executors[0]
        # Given a device that stands still
        executor.brake.hold()
        asking = asyncio.create_task(answers(router, prompts))
        # Then all of them have their place beside each other, and nothing ends before
        while (await router.pools.by_name[pool].dispatcher.snapshot()).executors[0].reserved_sequences < 4:
            await asyncio.sleep(0.01)
        assert not asking.done()
        executor.brake.release()
        for prompt, events in zip(prompts, await asking, strict=True):
            assert ids_of(events) == expected_ids(prompt, CONTEXT_LENGTH - 2)
        executor.scheduler.check_when_idle()


async def test_request_gets_all_its_tokens_and_its_client_sees_one_stream(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=SHAPE, settings=SETTINGS) as cluster:
        router = cluster.routers[0]
        events = await collect(router, open_request([1, 2, 3]))
        check_whole(events, [1, 2, 3])
        # The parts end at 12 tokens, prompt and output, at 20, 28, 36, 44, 52, 60 and 64.
        assert sample(router, "inflight_reservation_extensions_total", model=pool) == 7
        assert sample(router, "inflight_migrations_total", model=pool, reason="preempted") == 0


@pytest.mark.parametrize("num_executors", [1, 2])
async def test_crowd_gets_exactly_its_tokens(num_executors: int, redis_url: str, pool: str) -> None:
    prompts = [[number % 5] * (1 + number % 7) for number in range(24)]
    async with run_cluster(redis_url, pool, executors=num_executors, shape=SHAPE, settings=SETTINGS) as cluster:
        for prompt, events in zip(prompts, await answers(cluster.routers[0], prompts), strict=True):
            assert ids_of(events) == expected_ids(prompt, CONTEXT_LENGTH - len(prompt))
            assert not any(event.notice.text == "gave up its seat and waits for another" for event in events)
        for executor in cluster.executors:
            executor.scheduler.check_when_idle()


async def test_lost_executor_costs_no_token(redis_url: str, pool: str) -> None:
    prompts = [[number, 2] for number in range(4)]
    async with run_cluster(redis_url, pool, executors=2, shape=SHAPE, settings=SETTINGS) as cluster:
        asking = asyncio.create_task(answers(cluster.routers[0], prompts))
        await _stop_one_that_runs(cluster)
        for prompt, events in zip(prompts, await asking, strict=True):
            assert ids_of(events) == expected_ids(prompt, CONTEXT_LENGTH - len(prompt))


async def _stop_one_that_runs(cluster: Cluster) -> None:
    """One that runs a request which was extended."""
    (pool,) = cluster.routers[0].pools.by_name.values()
    while not (extended := [one for one in pool.dispatcher.streams if len(one.output_ids) > 2 * STEP]):
        await asyncio.sleep(0)
    await cluster.executors[int(extended[0].life.executor_id[-1])].stop()
