"""`GetStats`: statistics of seats, steps, queues and latencies, who may see them, and the calls that they need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.auth.caller import Caller
from inflight.router.settings import RouterSettings
from inflight.v1 import executor_pb2, executor_pb2_grpc, inference_pb2, stats_pb2, types_pb2
from tests.support.stack.cluster import (
    Cluster,
    ExecutorShape,
    RunningExecutor,
    RunningRouter,
    run_cluster,
    token_request,
)
from tests.support.stack.credentials import key_entry

TIMEOUT_S = 60
INTERVAL_MS = 50

Stats = inference_pb2.GetStatsResponse
Metadata = tuple[tuple[str, str], ...]


def api_key(name: str) -> str:
    return f"inflight-{name:x<43}"


def shown(name: str) -> Metadata:
    return (("authorization", f"Bearer {api_key(name)}"),)


@asynccontextmanager
async def watching(router: RunningRouter, metadata: Metadata = (), **wants: Any) -> AsyncIterator[AsyncIterator[Stats]]:
    """The messages of a stream."""
    request = inference_pb2.GetStatsRequest(**{"interval_ms": INTERVAL_MS, **wants})
    call = router.stub.GetStats(request, metadata=metadata)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield aiter(call)
    finally:
        call.cancel()


async def first_with(
    messages: AsyncIterator[Stats], has: Callable[[Stats], bool], held: RunningExecutor | None = None
) -> Stats:
    """The first message that has what is looked for. An executor that is held takes in what it is told."""
    async for message in messages:
        if has(message):
            return message
        if held is not None:
            held.permit_for_commands()
    raise AssertionError("the stream has ended")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.005)


def generate(
    router: RunningRouter, *args: Any, metadata: Metadata = (), **fields: Any
) -> asyncio.Task[list[inference_pb2.GenerateResponse]]:
    async def read() -> list[inference_pb2.GenerateResponse]:
        call = router.stub.Generate(token_request(*args, **fields), metadata=metadata)
        return [response async for response in call]

    return asyncio.create_task(read())


def sequences(message: Stats) -> list[stats_pb2.SequenceStats]:
    return [sequence for executor in message.executors for sequence in executor.sequences]


def seats(message: Stats) -> list[int | None]:
    return [one.seat if one.HasField("seat") else None for one in sequences(message)]


async def test_seats_fill_and_empty_and_who_waits_shows_by_tenant(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=ExecutorShape(max_num_sequences=2)) as cluster:
        router, executor = cluster.routers[0], cluster.executors[0]
        executor.brake.hold()
        running = [generate(router, [1, 2, 3], 40, request_id=f"r{i}", tenant="ann") for i in range(2)]
        async with watching(router, want_sequences=True) as messages:
            seated = await first_with(messages, lambda one: seats(one) == [0, 1], executor)
            assert {(one.request_id, one.tenant) for one in sequences(seated)} == {("r0", "ann"), ("r1", "ann")}
            assert {one.phase for one in sequences(seated)} <= {
                stats_pb2.SEQUENCE_PHASE_PREFILL,
                stats_pb2.SEQUENCE_PHASE_DECODE,
            }
            assert [one.prompt_tokens for one in sequences(seated)] == [3, 3]

            waiting = generate(router, [1, 2, 3], 4, tenant="bob", priority=types_pb2.PRIORITY_CLASS_BATCH)
            queued = await first_with(messages, lambda one: bool(one.queues))
            (queue,) = queued.queues
            assert (queue.model, queue.tenant, queue.priority) == (pool, "bob", types_pb2.PRIORITY_CLASS_BATCH)
            assert (queue.num_requests, queue.num_tokens) == (1, 7)

            executor.brake.release()
            await asyncio.gather(*running, waiting)
            empty = await first_with(messages, lambda one: not sequences(one) and not one.queues)
            assert empty.router_id == cluster.routers[0].pools._router_id
            assert empty.timestamp_ms > 0
            (latency,) = empty.latencies
            assert (latency.model, latency.num_ended, latency.num_refused) == (pool, 3, 0)
            assert latency.ttft_p50_ms > 0


async def test_every_step_comes_once_and_in_order_to_every_watcher(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        router, executor = cluster.routers[0], cluster.executors[0]
        async with (
            watching(router, want_iterations=True) as often,
            watching(router, want_iterations=True, interval_ms=150) as seldom,
            watching(router) as without,
        ):
            for messages in (often, seldom, without):
                await anext(messages)
            for _ in range(3):
                await generate(router, [1, 2, 3], 20)
            num_steps = executor.engine.num_steps
            for messages in (often, seldom):
                seen: list[stats_pb2.IterationStats] = []
                while not seen or seen[-1].iter < num_steps:
                    message = await anext(messages)
                    seen.extend(step for one in message.executors for step in one.iterations)
                assert [one.iter for one in seen] == list(range(1, num_steps + 1))
                check_steps(seen)
            assert not (await anext(without)).executors[0].iterations


def check_steps(steps: list[stats_pb2.IterationStats]) -> None:
    """That they add up to three requests of 3 and 20 tokens, of whose last token nothing is computed."""
    batches = [step.inflight_batching_stats for step in steps]
    assert sum(one.num_gen_tokens for one in batches) == 60
    assert sum(one.num_ctx_tokens + one.num_gen_requests for one in batches) == 3 * 22
    assert sum(one.num_boarded_requests for one in batches) == sum(one.num_completed_requests for one in batches) == 3
    for step in steps:
        blocks = step.kv_cache_stats
        num_blocks = blocks.free_num_blocks + blocks.used_num_blocks + blocks.evictable_num_blocks
        assert num_blocks == blocks.max_num_blocks == 32
        assert {part.name for part in step.parts} == {"inbox", "plan", "launch", "wait", "retire", "publish"}
        assert step.constraint == types_pb2.STEP_CONSTRAINT_NO_WORK
    assert steps[-1].kv_cache_stats.prefix_query_tokens == 9
    assert abs(steps[-1].timestamp_ms - steps[0].timestamp_ms) < TIMEOUT_S * 1000


async def test_executors_are_asked_only_while_a_client_watches_and_once_for_all(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        router, steps = cluster.routers[0], cluster.executors[0].service.steps
        async with watching(router) as messages:
            await anext(messages)
            assert steps.num_watchers == 0
            async with watching(router, want_iterations=True) as one, watching(router, want_sequences=True) as other:
                await anext(one)
                await anext(other)
                await until(lambda: steps.num_watchers == 1)
            await until(lambda: steps.num_watchers == 0)
        await until(lambda: router.stats.num_watchers == 0)


async def test_the_ledger_is_asked_only_while_a_client_watches_and_once_for_all(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        router = cluster.routers[0]
        dispatcher, num_asked = router.pools.by_name[pool].dispatcher, 0
        snapshot = dispatcher._ledger.snapshot

        async def counted(max_tenant_queues: int = 0) -> Any:
            nonlocal num_asked
            num_asked += 1
            return await snapshot(max_tenant_queues)

        dispatcher._ledger.snapshot = counted  # type: ignore[method-assign]
        async with AsyncExitStack() as stack:
            for _ in range(5):
                await anext(await stack.enter_async_context(watching(router, interval_ms=60_000)))
            assert num_asked == 1
            await anext(await stack.enter_async_context(watching(router)))
            await until(lambda: num_asked > 2)
        await until(lambda: router.stats.num_watchers == 0)
        num_asked_then = num_asked
        await router.stub.ListModels(inference_pb2.ListModelsRequest())
        assert num_asked == num_asked_then


async def test_an_executor_of_an_older_version_brings_no_steps_and_holds_nothing_up(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, executors=2) as cluster:
        router = cluster.routers[0]
        old = next(link for link in router.pools.by_name[pool].links if link.executor_id == "executor-0")
        assert old.stub is not None
        old.stub.WatchSteps = lambda request: _unserved_channel(cluster).WatchSteps(request)
        async with watching(router, want_iterations=True, want_sequences=True) as messages:
            await anext(messages)
            await asyncio.gather(*(generate(router, [1, 2, 3], 4) for _ in range(8)))
            message = await first_with(messages, lambda one: bool(one.executors[1].iterations))
        assert [one.capacity.executor_id for one in message.executors] == ["executor-0", "executor-1"]
        assert not message.executors[0].iterations


def _unserved_channel(cluster: Cluster) -> executor_pb2_grpc.ExecutorServiceStub:
    """The router itself, which has no such method, either."""
    return executor_pb2_grpc.ExecutorServiceStub(grpc.aio.insecure_channel(cluster.routers[0].address))


async def test_steps_go_on_after_the_link_was_broken(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        router, executor = cluster.routers[0], cluster.executors[0]
        async with watching(router, want_iterations=True) as messages:
            await anext(messages)
            await generate(router, [1, 2, 3], 4)
            await first_with(messages, lambda one: any(e.iterations for e in one.executors))
            await executor.service.close(1.0)
            await first_with(messages, lambda one: not one.executors)


@pytest.mark.parametrize("interval_ms", [0, 49, 60_001])
async def test_an_interval_out_of_range_is_refused(redis_url: str, pool: str, interval_ms: int) -> None:
    async with run_cluster(redis_url, pool, executors=0) as cluster:
        call = cluster.routers[0].stub.GetStats(inference_pb2.GetStatsRequest(interval_ms=interval_ms))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "interval_ms: must be from 50 to 60000" in str(caught.value.details())


async def test_a_drain_does_not_wait_for_watchers_and_ends_their_streams(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        router = cluster.routers[0]
        async with watching(router, interval_ms=60_000, want_iterations=True) as messages:
            await anext(messages)
            await asyncio.wait_for(router.service.drain(TIMEOUT_S), TIMEOUT_S / 2)
            assert [message async for message in messages] == []
        assert router.stats.num_watchers == 0


async def test_an_executor_tells_a_watcher_of_its_own_interval_too_short(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        async with grpc.aio.insecure_channel(cluster.executors[0].address) as channel:
            stub = executor_pb2_grpc.ExecutorServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(stub.WatchSteps(executor_pb2.WatchStepsRequest(interval_ms=10))))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_whose_requests_run_and_wait_only_their_tenant_and_operators_see(
    redis_url: str, pool: str, tmp_path: Path
) -> None:
    entries = [key_entry(api_key(name), name, id=f'"{name}"') for name in ("ann", "bob")]
    entries.append(key_entry(api_key("operator"), "ops", id='"operator"', operator="true"))
    (tmp_path / "keys").write_text("".join(entries))
    settings = RouterSettings(api_keys_file=tmp_path / "keys", no_executor_grace_s=60.0)
    shape = ExecutorShape(max_num_sequences=1)
    async with run_cluster(redis_url, pool, shape=shape, settings=settings, metadata=shown("operator")) as cluster:
        router, executor = cluster.routers[0], cluster.executors[0]
        executor.brake.hold()
        seated = generate(router, [1, 2, 3], 40, request_id="r0", metadata=shown("ann"))
        async with AsyncExitStack() as stack:
            messages = {
                who: await stack.enter_async_context(watching(router, want_sequences=True, metadata=shown(who)))
                for who in ("ann", "bob", "operator")
            }
            await first_with(messages["ann"], lambda one: seats(one) == [0], executor)
            waiting = generate(router, [1, 2, 3], 4, metadata=shown("bob"))
            sees = {}
            for who, stream in messages.items():
                message = await first_with(stream, lambda one: bool(one.queues and seats(one) == [0]), executor)
                (sequence,), (queue,) = sequences(message), message.queues
                sees[who] = (sequence.request_id, sequence.tenant, queue.tenant, queue.num_requests, queue.num_tokens)
            executor.brake.release()
            await asyncio.gather(seated, waiting)
    assert sees == {
        "ann": ("r0", "ann", "", 1, 7),
        "bob": ("", "", "bob", 1, 7),
        "operator": ("r0", "ann", "bob", 1, 7),
    }


async def test_who_is_let_in_no_longer_is_told_nothing_more(
    redis_url: str, pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text(key_entry(api_key("ann"), "ann"))
    settings = RouterSettings(api_keys_file=tmp_path / "keys", no_executor_grace_s=60.0)
    async with run_cluster(redis_url, pool, executors=0, settings=settings, metadata=shown("ann")) as cluster:
        router = cluster.routers[0]
        async with watching(router, metadata=shown("ann")) as messages:
            await anext(messages)

            def shut(metadata: object) -> Caller:
                raise RequestError(Reason.UNAUTHENTICATED, "the key is not known")

            monkeypatch.setattr(router.service._authenticator, "identify", shut)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await first_with(messages, lambda one: False)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
