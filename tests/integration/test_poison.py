"""A request that kills whatever runs it: tried twice, then refused, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from inflight.v1 import inference_pb2

from executor.launch import PendingStep
from executor.sequence import StepPlan
from router.settings import RouterSettings
from tests.cluster import ExecutorShape, RunningExecutor, run_cluster, token_request
from tests.integration.test_requests import collect, expected_ids, ids_of

POISON = [4, 4, 4, 4, 4]


def poison(executor: RunningExecutor, deaths: list[RunningExecutor]) -> None:
    """Lets the executor die, as a crash looks to routers, in the step that has the prompt."""
    loop, device, is_dead = asyncio.get_running_loop(), executor.device, threading.Event()
    launch: Callable[[StepPlan], PendingStep] = device.launch

    async def die() -> None:
        deaths.append(executor)
        await executor.server.grpc.stop(None)
        is_dead.set()

    def launch_or_die(plan: StepPlan) -> PendingStep:
        if not is_dead.is_set() and any(sequence.token_ids[: len(POISON)] == POISON for sequence in plan.sequences):
            asyncio.run_coroutine_threadsafe(die(), loop)
            is_dead.wait()
        return launch(plan)

    device.launch = launch_or_die  # type: ignore[method-assign]


async def test_poison_request_kills_two_executors_and_nobody_elses_request(redis_url: str, pool: str) -> None:
    deaths: list[RunningExecutor] = []
    shape = ExecutorShape(max_num_sequences=8, num_blocks=64)
    settings = RouterSettings(no_executor_grace_s=30.0)
    prompts = [[i % 4, (i // 4) % 4, 1] for i in range(12)]
    async with run_cluster(redis_url, pool, executors=3, shape=shape, settings=settings) as cluster:
        for executor in cluster.executors:
            poison(executor, deaths)
            executor.brake.hold()
        router = cluster.routers[0]
        others = [asyncio.create_task(collect(router, token_request(prompt, 20))) for prompt in prompts]
        for executor in cluster.executors:
            executor.brake.permit(4)
        poisoned = asyncio.create_task(collect(router, token_request(POISON, 20)))
        for executor in cluster.executors:
            executor.brake.release()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await poisoned
        answers: list[list[inference_pb2.StreamEvent]] = await asyncio.gather(*others)
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert "2 executors died under the request" in (error.value.details() or "")
    assert len(deaths) == 2
    assert [ids_of(events) for events in answers] == [expected_ids(prompt, 20) for prompt in prompts]
