"""A request that kills or stops every executor that runs it: tried twice, then refused, without harm to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import grpc
import grpc.aio
import pytest

from inflight.bench.fleet.proxy import Proxy, Weather
from inflight.executor.engine.runner import PendingStep
from inflight.executor.scheduler.sequence import StepPlan
from inflight.local.ports import free_ports
from inflight.router.settings import RouterSettings
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import inference_pb2
from tests.integration.test_hostile_clients import until
from tests.integration.test_requests import collect, expected_ids, ids_of
from tests.support.stack.cluster import (
    Cluster,
    ExecutorShape,
    RunningExecutor,
    RunningRouter,
    run_cluster,
    run_router,
    start_executor,
    token_request,
    until_ready,
)

POISON = [4, 4, 4, 4, 4]
# Shorter than any test waits, longer than a busy machine delays a step.
WATCHDOG_S = 3.0


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


async def test_poison_request_kills_two_executors_and_no_other_request(redis_url: str, pool: str) -> None:
    deaths: list[RunningExecutor] = []
    shape = ExecutorShape(max_num_sequences=8, num_blocks=64)
    settings = RouterSettings(no_executor_grace_s=60.0)
    prompts = [[i % 4, (i // 4) % 4, 1] for i in range(12)]
    async with run_cluster(redis_url, pool, executors=3, shape=shape, settings=settings) as cluster:
        for executor in cluster.executors:
            poison(executor, deaths)
            executor.brake.hold()
        router = cluster.routers[0]
        others = [asyncio.create_task(collect(router, token_request(prompt, 20))) for prompt in prompts]
        # Given that each of them has begun: a request without a token may be taken for the poison, too
        dispatcher = router.pools.by_name[pool].dispatcher
        await until(lambda: len(dispatcher.streams) == len(prompts) and all_have_tokens(cluster, dispatcher.streams))
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


def all_have_tokens(cluster: Cluster, streams: Sequence[RequestStream]) -> bool:
    """Whether every request has a token. An executor of one that has none makes a step."""
    waiting = {stream.life.executor_id for stream in streams if not stream.output_ids}
    for number, executor in enumerate(cluster.executors):
        if f"executor-{number}" in waiting and executor.brake.is_waited_for.is_set():
            executor.brake.permit(1)
    return all(stream.output_ids for stream in streams)


def paralyse(executor: RunningExecutor, hangs: list[RunningExecutor]) -> None:
    """Lets the device stop in the step that has the prompt, while the process goes on reporting."""
    device = executor.device
    launch: Callable[[StepPlan], PendingStep] = device.launch

    def launch_and_stop(plan: StepPlan) -> PendingStep:
        if any(sequence.token_ids[: len(POISON)] == POISON for sequence in plan.sequences):
            hangs.append(executor)
            executor.brake.hold()
        return launch(plan)

    device.launch = launch_and_stop  # type: ignore[method-assign]


async def test_prompt_under_which_two_engines_stand_still_is_refused(redis_url: str, pool: str) -> None:
    hangs: list[RunningExecutor] = []
    settings = RouterSettings(no_executor_grace_s=60.0)
    async with AsyncExitStack() as stack:
        executors = []
        for i in range(3):
            executor = await start_executor(f"executor-{i}", pool, ExecutorShape(), watchdog_s=WATCHDOG_S)
            stack.push_async_callback(executor.stop)
            paralyse(executor, hangs)
            executors.append(executor)
        addresses = [executor.address for executor in executors]
        router = await stack.enter_async_context(run_router(f"{pool}-router", pool, redis_url, addresses, settings))
        await until_ready(router, len(executors))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(router, token_request(POISON, 20))
        assert ids_of(await collect(router, token_request([1], 20))) == expected_ids([1], 20)
    assert error.value.code() is grpc.StatusCode.INTERNAL
    assert "2 engines have stalled under the request" in (error.value.details() or "")
    assert len({executor.address for executor in hangs}) == 2


async def test_request_whose_link_breaks_again_and_again_goes_on(redis_url: str, pool: str) -> None:
    settings = RouterSettings(no_executor_grace_s=60.0)
    async with AsyncExitStack() as stack:
        executor = await start_executor("executor", pool, ExecutorShape())
        stack.push_async_callback(executor.stop)
        proxy = Proxy("network", f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}", executor.address)
        await proxy.start()
        stack.push_async_callback(proxy.stop)
        router = await stack.enter_async_context(
            run_router(f"{pool}-router", pool, redis_url, [proxy.address], settings)
        )
        await until_ready(router, 1)
        # Given a prompt that takes long
        executor.brake.hold()
        asked = asyncio.create_task(collect(router, token_request([1], 20)))
        for attempt in range(1, 5):
            await until_placed(router, pool, attempt)
            # When its link breaks before the first token
            proxy.set_weather(Weather.CUT)
            await until_placed(router, pool, None)
            proxy.set_weather(Weather.FAIR)
        executor.brake.release()
        assert ids_of(await asked) == expected_ids([1], 20)


async def until_placed(router: RunningRouter, pool: str, attempt: int | None) -> None:
    """Waits until the router's only request is where its executor has been told of this attempt, or nowhere."""
    async with asyncio.timeout(60):
        while True:
            found = [stream.life.placement for stream in router.pools.find(pool).dispatcher.streams]
            if [one and one.attempt for one in found] == [attempt]:
                return
            await asyncio.sleep(0.01)
