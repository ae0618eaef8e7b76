"""Problem 12: requests have no deadline on the server, and abandoned requests are computed to their end."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from inflight.executor.scheduler.scheduler import Scheduler
from inflight.router.ledger.types import Demand, Dropped, DropReason
from inflight.router.request.delivery import Delivery
from inflight.v1 import inference_pb2, types_pb2
from tests.integration.test_requests import collect, expected_ids, ids_of, rest
from tests.scheduling_problems.test_07_long_prompts import LIMITS, long_sequence
from tests.support.device.modelled_device import Ride
from tests.support.ledger.store_pool import StorePool
from tests.support.stack.cluster import Cluster, ExecutorShape, RunningRouter, run_cluster, token_request

ONE_SEAT = ExecutorShape(max_num_sequences=1)


async def until_idle(scheduler: Scheduler) -> None:
    """Waits until the executor holds no sequence."""
    async with asyncio.timeout(60):
        while not scheduler.is_idle:
            await asyncio.sleep(0.01)


async def until_reserved(router: RunningRouter, num_blocks: int) -> None:
    """Waits until the ledger has promised so many blocks."""
    async with asyncio.timeout(60):
        while True:
            response = await router.stub.GetCapacity(inference_pb2.GetCapacityRequest())
            if sum(executor.blocks_reserved for executor in response.executors) == num_blocks:
                return
            await asyncio.sleep(0.01)


def with_deadline(request: inference_pb2.GenerateRequest, milliseconds: int) -> inference_pb2.GenerateRequest:
    """The request, with a deadline for its end."""
    request.deadlines.total.FromMilliseconds(milliseconds)
    return request


async def until_free(cluster: Cluster) -> None:
    """Waits until the seat and its blocks are free."""
    cluster.executors[0].brake.release()
    await until_idle(cluster.executors[0].scheduler)
    await until_reserved(cluster.routers[0], 0)


async def test_queued_request_ends_at_its_deadline(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=ONE_SEAT) as cluster:
        router, executor = cluster.routers[0], cluster.executors[0]
        executor.brake.hold()
        running = router.stub.Generate(token_request([0], 20))
        await running.read()
        events = await collect(router, with_deadline(token_request([1], 4, request_id="queued"), 100))
        executor.brake.release()
        running.cancel()

        assert events[-2].finished.reason == types_pb2.FINISH_REASON_DEADLINE
        assert "queued" not in executor.device.boarded


async def test_prefilling_request_ends_at_its_deadline(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=ONE_SEAT) as cluster:
        cluster.executors[0].brake.hold()
        cluster.executors[0].brake.permit(1)  # one step of three
        events = await collect(cluster.routers[0], with_deadline(token_request([1, 2, 3, 4] * 10, 20), 200))
        await until_free(cluster)

    assert events[-2].finished.reason == types_pb2.FINISH_REASON_DEADLINE
    assert ids_of(events) == []


async def test_decoding_request_ends_at_its_deadline_with_the_output_that_it_has(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_cluster(redis_url, pool, shape=ONE_SEAT) as cluster:
        router, brake = cluster.routers[0], cluster.executors[0].brake
        brake.hold()
        brake.permit(5)
        reading = asyncio.create_task(collect(router, with_deadline(token_request([1, 2], 20), 600_000)))
        dispatcher = router.pools.by_name[pool].dispatcher
        async with asyncio.timeout(60):
            while not any(len(stream.output_ids) >= 4 for stream in dispatcher.streams):
                await asyncio.sleep(0.01)
        # Its deadline passes, which the relay sees at the next news
        monkeypatch.setattr(Delivery, "next_deadline", lambda self, has_first_token: 0.0)
        dispatcher.streams[0].wake()
        events = await reading
        await until_free(cluster)

    assert events[-2].finished.reason == types_pb2.FINISH_REASON_DEADLINE
    assert 4 <= len(ids_of(events)) <= 5
    assert ids_of(events) == expected_ids([1, 2], 20)[: len(ids_of(events))]


async def test_deadline_of_the_call_is_known_to_the_executor(redis_url: str, pool: str) -> None:
    """The seat comes free even if the client is not there to leave."""
    async with run_cluster(redis_url, pool, shape=ONE_SEAT) as cluster:
        router, executor = cluster.routers[0], cluster.executors[0]
        executor.brake.hold()
        call = router.stub.Generate(token_request([1, 2], 40), timeout=600)
        assert (await call.read()).event.HasField("accepted")
        assert [sequence.deadline_ms is not None for sequence in executor.scheduler.held()] == [True]
        call.cancel()
        await until_free(cluster)


async def test_deadline_of_the_call_is_one_on_the_server(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=ONE_SEAT) as cluster:
        router, executor = cluster.routers[0], cluster.executors[0]
        executor.brake.hold()
        call = router.stub.Generate(token_request([1, 2], 40), timeout=0.5)
        (outcome,) = await asyncio.gather(rest(call), return_exceptions=True)
        if isinstance(outcome, grpc.aio.AioRpcError):  # the client's clock may be the first
            assert outcome.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        else:
            assert isinstance(outcome, list)
            assert outcome[-2].finished.reason == types_pb2.FINISH_REASON_DEADLINE
        await until_free(cluster)


def test_executor_computes_no_more_of_a_prompt_whose_deadline_passes() -> None:
    """On the executor alone, with time that is modelled: no router needs to say anything."""
    ride = Ride(LIMITS)
    scheduler, late = ride.engine._scheduler, long_sequence("late", 8000, 4)
    ride.engine.submit(late, 500)
    ride.engine.step()
    while not scheduler.is_idle:
        ride.engine.step()

    assert late.num_output_tokens == 0
    assert late.block_table == []
    assert 512 < scheduler.num_computed_tokens < 4000


@pytest.mark.parametrize("deadline_ms", [1, 500])
async def test_dead_request_is_never_placed(store_pool: StorePool, deadline_ms: int) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(accepting=False))
    await a.queue(Demand("late", 2, blocks=1, deadline_ms=deadline_ms))

    await store_pool.wait(deadline_ms + 1)
    await a.store.report(store_pool.next_report())
    assert await a.told() == [Dropped("late", DropReason.EXPIRED)]
