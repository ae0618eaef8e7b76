"""Admission from the client's side, through real gRPC and the real ledger: limits, order, deadlines, explanations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2, types_pb2
from tests.integration.test_requests import collect, expected_ids, ids_of
from tests.support.stack.cluster import Cluster, ExecutorShape, RunningRouter, run_cluster, token_request

ONE_SEAT = ExecutorShape(max_num_sequences=1)


@asynccontextmanager
async def busy_cluster(
    redis_url: str, pool: str, settings: RouterSettings | None = None, routers: int = 1
) -> AsyncIterator[Cluster]:
    """A cluster whose only seat is taken until its brake is released."""
    async with run_cluster(redis_url, pool, routers=routers, shape=ONE_SEAT, settings=settings) as cluster:
        cluster.executors[0].brake.hold()
        running = cluster.routers[0].stub.Generate(token_request([0], 20, request_id="running"))
        await running.read()
        try:
            yield cluster
        finally:
            cluster.executors[0].brake.release()
            running.cancel()


async def queued(router: RunningRouter, request_id: str, **fields: Any) -> Any:
    """A call whose request waits."""
    request = token_request([1], 4, request_id=request_id, want_queue_events=True, **fields)
    call = router.stub.Generate(request)
    assert (await call.read()).event.HasField("queued")
    return call


async def explain(router: RunningRouter, request_id: str, tenant: str = "") -> inference_pb2.GetRequestResponse:
    response = await router.stub.GetRequest(inference_pb2.GetRequestRequest(request_id=request_id, tenant=tenant))
    assert isinstance(response, inference_pb2.GetRequestResponse)
    return response


async def refusal_of(router: RunningRouter, request: inference_pb2.GenerateRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(router, request, timeout_s=60)
    return caught.value


def limit_of(error: grpc.aio.AioRpcError) -> str:
    """The limit that the refusal names; it also says when to try again."""
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    quota, retry = error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert any(detail.Unpack(quota) for detail in status.details)
    return str(quota.violations[0].subject)


def settings_with(path: Path, text: str, **fields: Any) -> RouterSettings:
    """Settings with this admission file."""
    path.write_text(text)
    return RouterSettings(admission_file=path, no_executor_grace_s=60.0, **fields)


# --- explanations


async def test_waiting_request_is_explained_on_every_router(redis_url: str, pool: str) -> None:
    async with busy_cluster(redis_url, pool, routers=2) as cluster:
        first = await queued(cluster.routers[0], "first")
        second = await queued(cluster.routers[0], "second")
        for router in cluster.routers:
            standing = await explain(router, "second")
            assert standing.state == inference_pb2.REQUEST_STATE_WAITING
            assert standing.position == 1
            assert standing.wait_reason == inference_pb2.WAIT_REASON_ORDER
            assert standing.waiting_for.startswith("waits behind requests of its tenant")
            standing = await explain(router, "first")
            assert standing.position == 0
            assert standing.wait_reason == inference_pb2.WAIT_REASON_SEAT
        placed = await explain(cluster.routers[1], "running")
        assert (placed.state, placed.executor_id) == (inference_pb2.REQUEST_STATE_PLACED, "executor-0")
        for call in (first, second):
            call.cancel()


async def test_request_too_large_for_what_is_free_waits_for_blocks(redis_url: str, pool: str) -> None:
    shape = ExecutorShape(num_blocks=16, max_num_sequences=4)
    async with run_cluster(redis_url, pool, shape=shape) as cluster:
        router = cluster.routers[0]
        cluster.executors[0].brake.hold()
        running = router.stub.Generate(token_request([0], 39))  # 10 of 16 blocks
        await running.read()
        large = router.stub.Generate(token_request([1], 39, request_id="large", want_queue_events=True))
        await large.read()
        standing = await explain(router, "large")
        assert standing.wait_reason == inference_pb2.WAIT_REASON_BLOCKS
        assert (standing.needed_blocks, standing.available_blocks) == (10, 6)
        assert standing.waiting_for == "waits for KV blocks: needs 10, at most 6 can be reserved now"
        cluster.executors[0].brake.release()
        running.cancel()
        large.cancel()


async def test_unknown_request_is_not_found(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await explain(cluster.routers[0], "unknown")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_who_asked_is_told_when_it_moves_up(redis_url: str, pool: str) -> None:
    settings = RouterSettings(queue_event_interval_s=0.1)
    async with busy_cluster(redis_url, pool, settings) as cluster:
        router = cluster.routers[0]
        first = await queued(router, "first")
        second = router.stub.Generate(token_request([1], 4, request_id="second", want_queue_events=True))
        assert (await second.read()).event.queued.position == 1
        first.cancel()
        async with asyncio.timeout(60):
            while (await second.read()).event.queued.position != 0:
                pass
        cluster.executors[0].brake.release()
        async with asyncio.timeout(60):
            while not (await second.read()).event.HasField("accepted"):
                pass
        second.cancel()


# --- limits


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        ("max_queue_requests = 1", "tenant max_queue_requests"),
        ("max_queue_tokens = 9", "tenant max_queue_tokens"),
        ("requests_per_s = 0.001", "tenant requests_per_s"),
        ("tokens_per_s = 0.001", "tenant tokens_per_s"),
    ],
)
async def test_tenant_at_its_limit_is_refused_and_others_are_not(
    redis_url: str, pool: str, tmp_path: Path, limits: str, limit: str
) -> None:
    settings = settings_with(tmp_path / "admission.toml", f"[tenants.acme]\n{limits}\n")
    async with busy_cluster(redis_url, pool, settings, routers=2) as cluster:
        first = await queued(cluster.routers[0], "first", tenant="acme")
        error = await refusal_of(cluster.routers[1], token_request([1], 4, tenant="acme"))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert limit_of(error) == limit
        other = await queued(cluster.routers[1], "other", tenant="other")
        for call in (first, other):
            call.cancel()


async def test_pool_refuses_by_tokens_and_bytes(redis_url: str, pool: str) -> None:
    for name, settings in (
        ("max_queue_tokens", RouterSettings(max_queue_tokens=9)),
        ("max_queue_bytes", RouterSettings(max_queue_bytes=150)),
    ):
        async with busy_cluster(redis_url, f"{pool}-{name}", settings) as cluster:
            first = await queued(cluster.routers[0], "first")
            error = await refusal_of(cluster.routers[0], token_request([1], 8))
            assert limit_of(error) == name
            first.cancel()


async def test_tenant_runs_no_more_than_it_may(redis_url: str, pool: str, tmp_path: Path) -> None:
    settings = settings_with(tmp_path / "admission.toml", "[tenants.acme]\nmax_running = 1\n")
    async with run_cluster(redis_url, pool, settings=settings) as cluster:
        cluster.executors[0].brake.hold()
        running = cluster.routers[0].stub.Generate(token_request([0], 20, tenant="acme"))
        await running.read()
        second = await queued(cluster.routers[0], "second", tenant="acme")
        standing = await explain(cluster.routers[0], "second", tenant="acme")
        assert standing.wait_reason == inference_pb2.WAIT_REASON_TENANT_LIMIT
        assert "'acme'" in standing.waiting_for
        other = cluster.routers[0].stub.Generate(token_request([0], 20, tenant="other"))
        first = asyncio.ensure_future(other.read())
        async with asyncio.timeout(60):
            while not first.done():  # it is accepted between two steps
                cluster.executors[0].permit_for_commands()
                await asyncio.sleep(0.01)
        assert (await first).event.HasField("accepted")
        cluster.executors[0].brake.release()
        for call in (running, second, other):
            call.cancel()


async def test_unknown_tenant_is_refused_and_known_after_the_file_says_so(
    redis_url: str, pool: str, tmp_path: Path
) -> None:
    path = tmp_path / "admission.toml"
    settings = settings_with(path, 'unknown_tenants = "refuse"\n[tenants.acme]\n')
    async with run_cluster(redis_url, pool, settings=settings) as cluster:
        router = cluster.routers[0]
        error = await refusal_of(router, token_request([1], 4, tenant="unknown"))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert ids_of(await collect(router, token_request([1], 4, tenant="acme"))) == expected_of("acme")


def expected_of(tenant: str) -> list[int]:
    """The tokens of `token_request([1], 4)`; what the fake device makes of a prompt depends on its tenant's salt."""
    return expected_ids([1], 4, salt=f"{tenant}\0".encode())


# --- deadlines and preemption


async def test_total_deadline_reaches_the_executor(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        request = token_request([1], 4)
        request.deadlines.total.seconds = 60
        assert ids_of(await collect(cluster.routers[0], request)) == expected_ids([1], 4)


async def test_request_whose_deadline_the_wait_misses_is_refused_or_expires_and_is_never_served(
    redis_url: str, pool: str
) -> None:
    async with busy_cluster(redis_url, pool) as cluster:
        router = cluster.routers[0]
        waiting = [await queued(router, f"w{number}") for number in range(8)]
        request = token_request([1], 4)
        request.deadlines.first_token.FromMilliseconds(1)
        (outcome,) = await asyncio.gather(collect(router, request), return_exceptions=True)
        # Refused where there is an estimate already, else ended when its deadline passes
        if isinstance(outcome, grpc.aio.AioRpcError):
            assert outcome.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert limit_of(outcome)
        else:
            assert isinstance(outcome, list)
            assert outcome[0].finished.reason == types_pb2.FINISH_REASON_DEADLINE
        for call in waiting:
            call.cancel()


@pytest.mark.parametrize("num_standby", [0, 2])
async def test_interactive_request_does_not_wait_for_the_end_of_a_batch_request(
    redis_url: str, pool: str, num_standby: int
) -> None:
    """Requests of class batch have all seats and standby places, and more of them wait."""
    shape = ExecutorShape(num_blocks=128, max_num_sequences=2, num_standby_sequences=num_standby)
    async with run_cluster(redis_url, pool, shape=shape) as cluster:
        router, executor = cluster.routers[0], cluster.executors[0]
        executor.brake.hold()
        batch = [
            asyncio.create_task(
                collect(router, token_request([1, n % 5], 50, request_id=f"batch-{n}", priority="PRIORITY_CLASS_BATCH"))
            )
            for n in range(6)
        ]
        executor.brake.permit(3)
        dispatcher = router.pools.by_name[pool].dispatcher
        async with asyncio.timeout(60):
            while executor.scheduler.num_held < 2 + num_standby or executor.scheduler.num_running < 2:
                executor.permit_for_commands(2)
                await asyncio.sleep(0.02)
        request = token_request([3], 4, request_id="urgent", priority="PRIORITY_CLASS_INTERACTIVE")
        urgent = asyncio.create_task(collect(router, request))
        async with asyncio.timeout(60):
            while not ((stream := dispatcher.stream_of("urgent")) and stream.has_been_accepted):
                executor.permit_for_commands(2)
                await asyncio.sleep(0.02)
            executor.brake.permit(5)  # of the 50 of a batch request
            while not stream.output_ids:
                await asyncio.sleep(0.02)
        assert not any(one.done() for one in batch)
        executor.brake.release()
        assert ids_of(await urgent) == expected_ids([3], 4)
        for n, one in enumerate(batch):
            assert ids_of(await one) == expected_ids([1, n % 5], 50)


@pytest.mark.parametrize("num_standby", [0, 2])
async def test_waiting_request_of_a_higher_class_takes_the_seat_and_the_other_goes_on_later(
    redis_url: str, pool: str, num_standby: int
) -> None:
    settings = RouterSettings(preempt_for_priority=True)
    shape = ExecutorShape(max_num_sequences=1, num_standby_sequences=num_standby)
    async with run_cluster(redis_url, pool, shape=shape, settings=settings) as cluster:
        router, brake = cluster.routers[0], cluster.executors[0].brake
        brake.hold()
        batch = asyncio.create_task(
            collect(router, token_request([1, 2], 60, request_id="batch", priority="PRIORITY_CLASS_BATCH"))
        )
        brake.permit(3)
        dispatcher = router.pools.by_name[pool].dispatcher
        async with asyncio.timeout(60):
            while not ((stream := dispatcher.stream_of("batch")) and stream.output_ids):
                await asyncio.sleep(0.01)
        urgent = asyncio.create_task(collect(router, token_request([3], 4, priority="PRIORITY_CLASS_INTERACTIVE")))
        async with asyncio.timeout(60):
            while (await explain(router, "batch")).state == inference_pb2.REQUEST_STATE_PLACED:
                cluster.executors[0].permit_for_commands(2)  # what is preempted may be part of the next step, too
                await asyncio.sleep(0.02)
        brake.release()
        assert ids_of(await urgent) == expected_ids([3], 4)
        events = await batch
    assert ids_of(events) == expected_ids([1, 2], 60)
    assert [event.notice.kind for event in events if event.HasField("notice")].count(
        inference_pb2.Notice.KIND_PAUSED
    ) == 1
