"""Consistency of figures about one moment: an idle executor, a full one, and one with a request on standby."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from inflight.v1 import inference_pb2, types_pb2
from tests.integration.test_requests import collect
from tests.support.stack.cluster import ExecutorShape, RunningExecutor, RunningRouter, run_cluster, token_request

TIMEOUT_S = 60
SHAPE = ExecutorShape(max_num_sequences=2, num_standby_sequences=1, num_blocks=64)

Capacity = inference_pb2.GetCapacityResponse


async def capacity_with(
    router: RunningRouter, condition: Callable[[Capacity], bool], held: RunningExecutor | None = None
) -> Capacity:
    """The first answer that meets the condition; an executor that is held takes in what it is told."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            capacity: Capacity = await router.stub.GetCapacity(inference_pb2.GetCapacityRequest())
            if condition(capacity):
                return capacity
            if held is not None:
                held.permit_for_commands()
            await asyncio.sleep(0.02)


async def standing_of(router: RunningRouter, request_id: str) -> inference_pb2.GetRequestResponse:
    answer: inference_pb2.GetRequestResponse = await router.stub.GetRequest(
        inference_pb2.GetRequestRequest(request_id=request_id)
    )
    return answer


def num_queued(capacity: Capacity) -> int:
    return sum(queue.num_requests for queue in capacity.queues)


async def test_figures_of_an_executor_that_is_idle_then_full_then_idle(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2, shape=SHAPE) as cluster:
        router, held = cluster.routers[0], cluster.executors[0]

        # Given nothing to do
        idle = await capacity_with(router, lambda one: one.executors[0].HasField("steps_per_s"))
        (executor,) = idle.executors
        assert executor.constraint == types_pb2.STEP_CONSTRAINT_NO_WORK
        assert (executor.seats_used, executor.num_waiting, num_queued(idle)) == (0, 0, 0)
        assert (executor.steps_per_s, executor.output_tokens_per_s) == (0, 0)

        # When two run, one stands by and one is in the queue
        held.brake.hold()
        calls: list[asyncio.Task[Any]] = []
        for number in range(4):
            request = token_request([number], 60, request_id=f"r{number}")
            calls.append(asyncio.create_task(collect(router, request)))
        full = await capacity_with(
            router,
            lambda one: (one.executors[0].seats_used, one.executors[0].num_waiting, num_queued(one)) == (2, 1, 1),
            held,
        )

        # Then seats bound the executor, and each request is where the figures say, whichever router is asked
        assert full.executors[0].constraint == types_pb2.STEP_CONSTRAINT_SEATS
        for asked in cluster.routers:
            standings = [await standing_of(asked, f"r{number}") for number in range(4)]
            found = sorted((one.state, one.executor_id, one.waiting_for) for one in standings)
            waiting, placed = inference_pb2.REQUEST_STATE_WAITING, inference_pb2.REQUEST_STATE_PLACED
            assert found == [
                (waiting, "", "waits for a seat: all seats that it could use are taken"),
                (waiting, "executor-0", "waits on executor-0 for a seat (standby)"),
                (placed, "executor-0", ""),
                (placed, "executor-0", ""),
            ]

        # And once all have ended nothing waits, and the rates of steps and tokens are of the same time
        held.brake.release()
        await asyncio.gather(*calls)
        done = await capacity_with(router, lambda one: not one.executors[0].seats_used and not num_queued(one))
        (executor,) = done.executors
        assert executor.constraint == types_pb2.STEP_CONSTRAINT_NO_WORK
        assert 1 <= executor.output_tokens_per_s / executor.steps_per_s <= 2
