"""Requests through real gRPC, real Redis and the real scheduler; only the device is a hash."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import grpc.aio
import pytest

from inflight.executor.scheduler.scheduler import Batching
from inflight.executor.scheduler.sequence import Sampling, Sequence, Stopping
from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2, types_pb2
from tests.support.device.fake_device import solo_output
from tests.support.stack.cluster import (
    CONTEXT_LENGTH,
    ExecutorShape,
    RunningRouter,
    run_cluster,
    run_router,
    start_executor,
    token_request,
    until_ready,
)

DEFAULT_SALT = b"default\0"


def expected_ids(prompt_ids: list[int], max_tokens: int, salt: bytes = DEFAULT_SALT) -> list[int]:
    """What the fake device produces for a request on its own."""
    stopping = Stopping(max_tokens, 0, frozenset())
    sequence = Sequence(
        "", 1, list(prompt_ids), len(prompt_ids), Sampling(0.0, 0, 1.0, 0), stopping, 0, cache_salt=salt
    )
    return solo_output(sequence, CONTEXT_LENGTH)[0]


async def collect(
    router: RunningRouter, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
) -> list[inference_pb2.StreamEvent]:
    """All events of a request."""
    return [response.event async for response in router.stub.Generate(request, timeout=timeout_s)]


async def rest(call: Any) -> list[inference_pb2.StreamEvent]:
    """The events of a call that was read before; gRPC does not mix `read` and iteration."""
    events = []
    while (response := await call.read()) is not grpc.aio.EOF:
        events.append(response.event)
    return events


def ids_of(events: list[inference_pb2.StreamEvent]) -> list[int]:
    """The output, after checking that offsets leave no gap."""
    ids: list[int] = []
    for event in events:
        if event.HasField("delta"):
            assert event.delta.offset == len(ids)
            ids.extend(event.delta.token_ids)
    return ids


def random_requests(num_requests: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts and max_tokens; half of the prompts share a beginning."""
    rng = random.Random(seed)
    shared = [rng.randrange(5) for _ in range(9)]
    requests = []
    for _ in range(num_requests):
        prompt = [rng.randrange(5) for _ in range(rng.randint(1, 20))]
        requests.append((shared + prompt if rng.random() < 0.5 else prompt, rng.randint(1, 30)))
    return requests


async def test_stream_begins_with_accepted_and_ends_with_done(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        events = await collect(cluster.routers[0], token_request([1, 2, 3], 5, request_id="r"))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[:2] == ["accepted", "started"]
    assert kinds[-2:] == ["finished", "done"]
    assert events[0].accepted.request_id == "r"
    assert events[0].accepted.prompt_tokens == 3
    assert ids_of(events) == expected_ids([1, 2, 3], 5)
    assert events[-2].finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert events[-1].done.usage.output_tokens == 5
    assert [event.seq for event in events] == list(range(len(events)))


@pytest.mark.parametrize("overlap", [True, False])
async def test_many_requests_at_once_get_the_tokens_that_each_gets_alone(
    redis_url: str, pool: str, overlap: bool
) -> None:
    shape = ExecutorShape(num_blocks=24, max_num_sequences=3, num_standby_sequences=1, overlap=overlap)
    requests = random_requests(60, seed=1)
    async with run_cluster(redis_url, pool, executors=2, routers=2, shape=shape) as cluster:
        answers = await asyncio.gather(
            *(
                collect(cluster.routers[i % 2], token_request(prompt, max_tokens))
                for i, (prompt, max_tokens) in enumerate(requests)
            )
        )
        assert [ids_of(events) for events in answers] == [expected_ids(*request) for request in requests]
        steps = [executor.engine.num_steps for executor in cluster.executors]
        assert all(steps), f"both executors work: {steps}"
        for executor in cluster.executors:
            executor.scheduler.check_when_idle()


@pytest.mark.parametrize("overlap", [True, False])
async def test_static_batching_gives_the_same_tokens(redis_url: str, pool: str, overlap: bool) -> None:
    shape = ExecutorShape(
        num_blocks=64, max_num_sequences=3, num_standby_sequences=3, batching=Batching.STATIC, overlap=overlap
    )
    requests = random_requests(20, seed=2)
    async with run_cluster(redis_url, pool, shape=shape) as cluster:
        answers = await asyncio.gather(*(collect(cluster.routers[0], token_request(*request)) for request in requests))
    assert [ids_of(events) for events in answers] == [expected_ids(*request) for request in requests]


@pytest.mark.parametrize("overlap", [True, False])
async def test_disconnected_client_gives_its_seat_to_the_next(redis_url: str, pool: str, overlap: bool) -> None:
    shape = ExecutorShape(max_num_sequences=1, overlap=overlap)
    async with run_cluster(redis_url, pool, shape=shape) as cluster:
        brake, router = cluster.executors[0].brake, cluster.routers[0]
        brake.hold()
        first = router.stub.Generate(token_request([1], 50))
        accepted = await first.read()
        assert accepted.event.HasField("accepted")
        second = asyncio.create_task(collect(router, token_request([2], 3)))
        brake.permit(2)
        first.cancel()
        brake.release()
        assert ids_of(await second) == expected_ids([2], 3)


async def test_disconnect_while_queued_takes_the_request_out_of_the_queue(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=ExecutorShape(max_num_sequences=1)) as cluster:
        brake, router = cluster.executors[0].brake, cluster.routers[0]
        brake.hold()
        running = router.stub.Generate(token_request([1], 5))
        await running.read()
        waiting = router.stub.Generate(token_request([2], 5, want_queue_events=True))
        queued = await waiting.read()
        assert queued.event.HasField("queued")
        waiting.cancel()
        async with asyncio.timeout(60):
            while (await router.stub.GetCapacity(inference_pb2.GetCapacityRequest())).queues:
                await asyncio.sleep(0)
        brake.release()
        assert (await running.read()).event.HasField("started")
        running.cancel()


@pytest.mark.parametrize("same_router", [True, False])
async def test_cancel_on_any_router_ends_a_running_request(redis_url: str, pool: str, same_router: bool) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        cluster.executors[0].brake.hold()
        call = cluster.routers[0].stub.Generate(token_request([1], 50, request_id="victim"))
        assert (await call.read()).event.HasField("accepted")
        canceller = cluster.routers[0 if same_router else 1]
        response = await canceller.stub.Cancel(inference_pb2.CancelRequest(request_id="victim"))
        assert response.state == inference_pb2.REQUEST_STATE_PLACED
        async with asyncio.timeout(60):  # steps are so fast that all fifty would be over before the cancel is there
            while cluster.executors[0].engine._inbox.empty():
                await asyncio.sleep(0)
        cluster.executors[0].brake.release()
        events = await rest(call)
        assert events[-2].finished.reason == types_pb2.FINISH_REASON_CANCELLED


async def test_cancel_of_an_unknown_request_is_not_found(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await cluster.routers[0].stub.Cancel(inference_pb2.CancelRequest(request_id="unknown"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    assert "request_id" in (error.value.details() or "")


async def test_request_larger_than_any_executor_is_refused(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=ExecutorShape(num_blocks=4)) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(cluster.routers[0], token_request([1] * 10, 10))
    assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_full_queue_refuses_with_a_retry_hint(redis_url: str, pool: str) -> None:
    settings = RouterSettings(max_queue_requests=1)
    async with run_cluster(redis_url, pool, shape=ExecutorShape(max_num_sequences=1), settings=settings) as cluster:
        cluster.executors[0].brake.hold()
        router = cluster.routers[0]
        running = router.stub.Generate(token_request([1], 5))
        await running.read()
        waiting = router.stub.Generate(token_request([2], 5, want_queue_events=True))
        await waiting.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(router, token_request([3], 5))
        cluster.executors[0].brake.release()
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.value.trailing_metadata().get("grpc-status-details-bin") is not None


async def test_without_executor_requests_are_unavailable(redis_url: str, pool: str) -> None:
    settings = RouterSettings(no_executor_grace_s=0.1)
    async with run_cluster(redis_url, pool, executors=0, settings=settings) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(cluster.routers[0], token_request([1], 5))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("engine_first", [False, True], ids=["killed", "drained too long"])
async def test_lost_executor_hands_its_requests_to_another_from_the_next_offset(
    redis_url: str, pool: str, engine_first: bool
) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        router, dying = cluster.routers[0], cluster.executors[0]
        dying.brake.hold()
        call = router.stub.Generate(token_request([1, 2], 12))
        dying.brake.permit(3)
        events: list[inference_pb2.StreamEvent] = []
        while not events or sum(event.delta.num_tokens for event in events) < 2:
            events.append((await call.read()).event)
        if engine_first:  # and then the server
            ending = asyncio.create_task(asyncio.to_thread(dying.engine.stop))
            while not ending.done():
                dying.brake.permit(1)
                await asyncio.sleep(0.001)
        port = int(dying.address.rpartition(":")[2])
        await dying.stop()
        successor = await start_executor("executor-0", pool, ExecutorShape(), generation=2, port=port)
        events += await rest(call)
        await successor.stop()
    assert ids_of(events) == expected_ids([1, 2], 12)
    assert events[-2].finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert events[-1].done.timing.migrations == 1
    assert events[-1].done.usage.output_tokens == 12


async def test_requests_end_with_a_status_when_no_executor_comes_back(redis_url: str, pool: str) -> None:
    settings = RouterSettings(no_executor_grace_s=0.1)
    async with run_cluster(redis_url, pool, settings=settings) as cluster:
        cluster.executors[0].brake.hold()
        call = cluster.routers[0].stub.Generate(token_request([1], 12))
        await call.read()
        await cluster.executors[0].stop()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rest(call)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_deadline_before_the_first_token_ends_the_request(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        cluster.executors[0].brake.hold()
        request = token_request([1], 12)
        request.deadlines.first_token.FromMilliseconds(50)
        events = await collect(cluster.routers[0], request)
        cluster.executors[0].brake.release()
    assert events[-2].finished.reason == types_pb2.FINISH_REASON_DEADLINE


async def test_stop_string_across_tokens_ends_the_text_before_the_match(redis_url: str, pool: str) -> None:
    tokens = expected_ids([1, 2, 3], 20)
    text = "".join(f"t{token}" for token in tokens)
    stop = text[3:8]
    request = token_request([1, 2, 3], 20)
    request.stopping.stop.append(stop)
    async with run_cluster(redis_url, pool) as cluster:
        events = await collect(cluster.routers[0], request)
    assert "".join(event.delta.text for event in events) == text[: text.index(stop)]
    assert events[-2].finished.stop == stop


async def test_repeated_request_id_is_refused_while_the_first_runs(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        cluster.executors[0].brake.hold()
        first = cluster.routers[0].stub.Generate(token_request([1], 5, request_id="twin"))
        await first.read()
        for router in cluster.routers:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await collect(router, token_request([1], 5, request_id="twin"))
            assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
        cluster.executors[0].brake.release()


async def test_executor_that_comes_later_is_used(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, executors=1) as cluster:
        port = int(cluster.executors[0].address.rpartition(":")[2])
        await cluster.executors[0].stop()
        restarted = await start_executor("executor-0", pool, ExecutorShape(), generation=2, port=port)
        await until_ready(cluster.routers[0], 1)
        assert ids_of(await collect(cluster.routers[0], token_request([4], 6))) == expected_ids([4], 6)
        await restarted.stop()


async def test_placement_on_an_executor_without_a_link_costs_no_attempt(redis_url: str, pool: str) -> None:
    # Given a router that knows one of two executors, whose only seat is taken
    shape = ExecutorShape(max_num_sequences=1)
    async with run_cluster(redis_url, pool, executors=2, shape=shape) as cluster:
        first, second = cluster.executors
        settings = RouterSettings(max_attempts=2)
        async with run_router(f"{pool}-partial", pool, redis_url, [first.address], settings) as partial:
            await until_ready(partial, 1)
            first.brake.hold()
            second.brake.hold()
            taking = [cluster.routers[0].stub.Generate(token_request([i], 5)) for i in range(2)]
            for call in taking:
                await call.read()
            waiting = partial.stub.Generate(token_request([3], 6, want_queue_events=True))
            assert (await waiting.read()).event.HasField("queued")
            # When the other executor's seat is free, the ledger places the request there again and again
            second.brake.release()
            async with asyncio.timeout(60):
                while max(stream.life.attempt for stream in partial.pools.by_name[pool].dispatcher.streams) < 4:
                    await asyncio.sleep(0.01)
            # Then it still waits for the executor that its router reaches
            first.brake.release()
            assert ids_of(await rest(waiting)) == expected_ids([3], 6)
            for call in taking:
                call.cancel()


async def test_repeated_id_whose_client_leaves_at_once_does_not_end_the_first(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        cluster.executors[0].brake.hold()
        first = cluster.routers[0].stub.Generate(token_request([1, 4], 9, request_id="twin"))
        await first.read()
        for num_yields in range(30):
            second = cluster.routers[1].stub.Generate(token_request([1], 5, request_id="twin"))
            for _ in range(num_yields * 5):
                await asyncio.sleep(0)
            second.cancel()
        cluster.executors[0].brake.release()
        assert ids_of(await rest(first)) == expected_ids([1, 4], 9)


async def test_links_to_executors_pass_by_the_proxy_of_the_environment(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with run_cluster(redis_url, pool) as cluster, asyncio.timeout(60):
        assert ids_of(await collect(cluster.routers[0], token_request([1, 2], 5))) == expected_ids([1, 2], 5)
