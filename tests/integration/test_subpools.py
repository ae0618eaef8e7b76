"""Routers and executors of several sub-pools look like those of one pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from inflight.router.settings import RouterSettings
from inflight.router.subpools.assignment import home_of
from inflight.router.subpools.store import SubPoolStore
from inflight.v1 import inference_pb2, types_pb2
from tests.integration.test_requests import expected_ids, ids_of, rest
from tests.support.stack.cluster import PATIENCE_S, Cluster, ExecutorShape, RunningRouter, run_cluster, token_request

# The two executors are in different sub-pools; the others have none.
NUM_SUBPOOLS = 3


@pytest.fixture
async def cluster(redis_url: str, pool: str) -> AsyncIterator[Cluster]:
    """Two routers and two executors with one seat each, held."""
    assert home_of("executor-0", NUM_SUBPOOLS) != home_of("executor-1", NUM_SUBPOOLS)
    settings = RouterSettings(num_subpools=NUM_SUBPOOLS, no_executor_grace_s=PATIENCE_S)
    shape = ExecutorShape(max_num_sequences=1)
    async with run_cluster(redis_url, pool, executors=2, routers=2, shape=shape, settings=settings) as cluster:
        for executor in cluster.executors:
            executor.brake.hold()
        yield cluster


def store_of(router: RunningRouter) -> SubPoolStore:
    (backend,) = router.pools.by_name.values()
    store = backend.dispatcher._store
    assert isinstance(store, SubPoolStore)
    return store


def named(event: inference_pb2.StreamEvent) -> dict[str, str]:
    """The request's id and token."""
    told = event.queued if event.HasField("queued") else event.accepted
    return {"request_id": told.request_id, "resume_token": told.resume_token}


async def state_of(router: RunningRouter, event: inference_pb2.StreamEvent) -> Any:
    return (await router.stub.GetRequest(inference_pb2.GetRequestRequest(**named(event)))).state


async def cancel(router: RunningRouter, event: inference_pb2.StreamEvent) -> Any:
    return (await router.stub.Cancel(inference_pb2.CancelRequest(**named(event)))).state


async def until_boarded(cluster: Cluster, num_requests: int) -> None:
    """Waits until so many requests have seats. One that waits although a seat is free moves there."""
    async with asyncio.timeout(60):
        while sum(len(executor.device.boarded) for executor in cluster.executors) < num_requests:
            await asyncio.sleep(0.01)


async def begun(router: RunningRouter, prompt: list[int], **fields: Any) -> tuple[Any, inference_pb2.StreamEvent]:
    """A call of which the first event has come, and that event."""
    call = router.stub.Generate(token_request(prompt, 6, want_queue_events=True, **fields))
    return call, (await call.read()).event


async def test_requests_of_both_routers_run_in_both_subpools_and_a_waiting_one_moves(cluster: Cluster) -> None:
    first, second = cluster.routers
    capacity = await second.stub.GetCapacity(inference_pb2.GetCapacityRequest())
    assert sorted(one.executor_id for one in capacity.executors) == ["executor-0", "executor-1"]
    # Given requests that have both seats, and one that waits
    running = [await begun(first, [1, 2], idempotency_key="a"), await begun(second, [2, 3])]
    await until_boarded(cluster, 2)
    waiting, queued = await begun(first, [3, 4], idempotency_key="w")
    assert queued.HasField("queued")
    assert await state_of(second, queued) == inference_pb2.REQUEST_STATE_WAITING
    assert await state_of(second, running[0][1]) == inference_pb2.REQUEST_STATE_PLACED
    # When the executor of the other sub-pool goes on
    where = store_of(first).where(queued.queued.request_id)
    cluster.executors[1 if where == home_of("executor-0", NUM_SUBPOOLS) else 0].brake.release()
    async with asyncio.timeout(60):
        assert ids_of(await rest(waiting)) == expected_ids([3, 4], 6)
    # And another router, to which the client repeats it, reads the same
    again, _ = await begun(second, [3, 4], idempotency_key="w")
    assert ids_of(await rest(again)) == expected_ids([3, 4], 6)
    for executor in cluster.executors:
        executor.brake.release()
    for (call, _), prompt in zip(running, ([1, 2], [2, 3]), strict=True):
        assert ids_of(await rest(call)) == expected_ids(prompt, 6)
    assert sum(len(executor.device.boarded) for executor in cluster.executors) == 3


async def test_cancel_at_the_other_router_ends_waiting_and_running_requests(cluster: Cluster) -> None:
    first, second = cluster.routers
    running = [await begun(first, [number + 1]) for number in range(2)]
    await until_boarded(cluster, 2)
    waiting = [await begun(first, [number + 3]) for number in range(2)]
    assert [await cancel(second, event) for _, event in waiting] == [inference_pb2.REQUEST_STATE_WAITING] * 2
    assert [await cancel(second, event) for _, event in running] == [inference_pb2.REQUEST_STATE_PLACED] * 2
    for executor in cluster.executors:
        executor.brake.release()
    for call, _ in waiting:
        assert (await rest(call))[-2].finished.reason == types_pb2.FINISH_REASON_CANCELLED
    for call, _ in running:
        assert (await rest(call))[-2].HasField("finished")
