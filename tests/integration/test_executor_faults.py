"""Stalled engines and draining executors: what they report, and where their requests continue."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from tests.integration.test_requests import expected_ids
from tests.support.stack.cluster import ExecutorShape, RunningExecutor, start_executor
from tests.support.stack.router_stream import make_submit, router_stream

LENGTH = 40
SHAPE = ExecutorShape(max_num_sequences=1, num_standby_sequences=2)
# Shorter than any test waits, longer than a busy machine delays a step.
WATCHDOG_S = 3.0

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def until_health_is(executor: RunningExecutor, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
    """Watches as Kubernetes' or a load balancer's probe would."""
    async with asyncio.timeout(60), grpc.aio.insecure_channel(executor.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        async for response in stub.Watch(health_pb2.HealthCheckRequest()):
            if response.status == status:
                return


async def drain(executor: RunningExecutor, timeout_s: int) -> int:
    async with grpc.aio.insecure_channel(executor.address) as channel:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        return int((await stub.Drain(executor_pb2.DrainRequest(timeout_s=timeout_s))).num_held)


async def test_engine_that_stands_still_hands_everything_back_and_comes_back_with_its_next_step() -> None:
    executor = await start_executor("executor", "model", SHAPE, watchdog_s=WATCHDOG_S)
    try:
        async with router_stream(executor.address) as router:
            # Given one that has a seat and one that waits for it, when the device stops
            executor.brake.hold()
            router.send(submits=[make_submit("a", [1], LENGTH), make_submit("b", [2], LENGTH)])
            executor.brake.permit(5)
            await router.until(lambda: router.of("a") and router.of("a")[0].is_started)
            # Then both are handed back, and no request is accepted
            await router.until(lambda: router.of("a")[0].end and router.of("b")[0].end)
            await until_health_is(executor, NOT_SERVING)
            await router.until(lambda: router.reports[-1].draining and not router.reports[-1].held)
            router.send(submits=[make_submit("c", [3], LENGTH)])
            await router.until(lambda: router.rejected)
            # And when it goes on, it takes the next as if nothing had been
            executor.brake.release()
            await router.until(lambda: not router.reports[-1].draining)
            await until_health_is(executor, SERVING)
            router.send(submits=[make_submit("a", [1], LENGTH, attempt=2)])
            await router.until(lambda: router.of("a", 2) and router.of("a", 2)[0].end)
    finally:
        await executor.stop()
    a, b = router.of("a")[0], router.of("b")[0]
    assert a.end is not None
    assert b.end is not None
    assert (a.end.reason, a.end.error) == (types_pb2.FINISH_REASON_PREEMPTED, "the engine made no step")
    assert (b.end.reason, b.end.error) == (types_pb2.FINISH_REASON_PREEMPTED, "")
    assert a.token_ids == expected_ids([1], LENGTH)[: len(a.tokens)]
    assert router.rejected[0].reason == executor_pb2.REJECT_REASON_DRAINING
    assert router.of("a", 2)[0].token_ids == expected_ids([1], LENGTH)
    executor.scheduler.check_when_idle()


async def test_drain_hands_back_who_had_no_seat_at_once_and_the_rest_when_its_time_is_over() -> None:
    executor = await start_executor("executor", "model", SHAPE)
    try:
        async with router_stream(executor.address) as router, router_stream(executor.address) as other:
            executor.brake.hold()
            router.send(submits=[make_submit("a", [1], LENGTH), make_submit("b", [2], LENGTH)])
            executor.brake.permit(3)
            await router.until(lambda: router.of("a") and len(router.of("a")[0].tokens) >= 2)
            draining = asyncio.create_task(drain(executor, 600))
            await router.until(lambda: router.reports[-1].draining)
            executor.brake.permit(3)
            await router.until(lambda: router.of("b")[0].end)
            assert router.of("a")[0].end is None
            router.send(submits=[make_submit("c", [3], LENGTH)])
            await router.until(lambda: router.rejected)
            # Who runs can still be read by another.
            other.attach("a", 1, 1)
            await other.until(lambda: other.of("a"))
            # When its time is over, which a second drain cuts short
            assert await drain(executor, 1) == 0
            assert await draining == 0
            await other.until(lambda: other.of("a")[0].end)
    finally:
        await executor.stop()
    b_end, a_end = router.of("b")[0].end, other.of("a")[0].end
    assert b_end is not None
    assert a_end is not None
    assert b_end.reason == a_end.reason == types_pb2.FINISH_REASON_PREEMPTED
    assert router.rejected[0].reason == executor_pb2.REJECT_REASON_DRAINING


async def test_stream_of_an_executor_that_closes_ends_behind_its_last_frame() -> None:
    executor = await start_executor("executor", "model", SHAPE)
    try:
        async with router_stream(executor.address) as router:
            executor.brake.hold()
            router.send(submits=[make_submit("a", [1], LENGTH)])
            await router.until(lambda: router.of("a"))
            executor.service.hand_back()
            await executor.service.close(20)
            await router.until(lambda: router.is_over)
        end = router.of("a")[0].end
        assert end is not None
        assert end.reason == types_pb2.FINISH_REASON_PREEMPTED
    finally:
        await executor.stop()
