"""Log probabilities at the client: they arrive with their tokens, also after failures of routers and executors."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from inflight.v1 import inference_pb2, types_pb2
from tests.integration.test_requests import collect, expected_ids
from tests.integration.test_resuming import PROMPT, Client, begun
from tests.support.device.fake_device import token_logprobs
from tests.support.stack.cluster import run_cluster, token_request

NUM_TOKENS = 20


def output(num_top: int) -> inference_pb2.OutputOptions:
    return inference_pb2.OutputOptions(token_ids=True, logprobs=True, top_logprobs=num_top)


def request_of(num_top: int, **fields: Any) -> inference_pb2.GenerateRequest:
    request = token_request(PROMPT, NUM_TOKENS, **fields)
    request.output.CopyFrom(output(num_top))
    return request


def named(token_id: int, logprob: float, rank: int) -> types_pb2.TokenLogprob:
    return types_pb2.TokenLogprob(token_id=token_id, logprob=logprob, text_bytes=f"t{token_id}".encode(), rank=rank)


def expected(token_ids: list[int], num_top: int) -> list[types_pb2.PositionLogprobs]:
    values = [(token_id, token_logprobs(token_id, num_top)) for token_id in token_ids]
    return [
        types_pb2.PositionLogprobs(
            chosen=named(token_id, one.logprob, 1),
            top=[
                named(top_id, logprob, rank)
                for rank, (top_id, logprob) in enumerate(zip(one.top_ids, one.top_logprobs, strict=True), start=1)
            ],
        )
        for token_id, one in values
    ]


def logprobs_of(events: list[inference_pb2.StreamEvent]) -> list[types_pb2.PositionLogprobs]:
    return [values for event in events for values in event.delta.logprobs]


async def test_each_token_comes_with_its_own_log_probability_and_no_other(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        with_five = await collect(cluster.routers[0], request_of(5))
        with_none = await collect(cluster.routers[0], request_of(0))
        without = await collect(cluster.routers[0], token_request(PROMPT, NUM_TOKENS))
    token_ids = expected_ids(PROMPT, NUM_TOKENS)
    assert logprobs_of(with_five) == expected(token_ids, 5)
    assert logprobs_of(with_none) == expected(token_ids, 0)
    assert logprobs_of(without) == []


async def test_more_than_may_be_asked_for_is_refused(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster.routers[0], request_of(21))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "output.top_logprobs" in (caught.value.details() or "")


@pytest.mark.parametrize("has_ended", [False, True])
async def test_who_resumes_on_another_router_gets_them_all(redis_url: str, pool: str, has_ended: bool) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        if has_ended:
            whole = Client()
            for event in await collect(cluster.routers[0], request_of(2, resume_ttl={"seconds": 60})):
                whole.take(event)
            client = Client()
            client.request_id, client.token = whole.request_id, whole.token
        else:
            client, _ = await begun(cluster, 5, output=output(2))
            cluster.executors[0].brake.release()
        resumed = client.resume(cluster.routers[1])
        await client.read_rest(resumed)
    client.check_whole(PROMPT, NUM_TOKENS)
    assert logprobs_of(client.events) == expected(expected_ids(PROMPT, NUM_TOKENS), 2)


async def test_stream_that_moves_to_another_executor_has_them_all(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, executors=2) as cluster:
        for executor in cluster.executors:
            executor.brake.hold()
        client, call = Client(), cluster.routers[0].stub.Generate(request_of(1))
        for executor in cluster.executors:
            executor.brake.permit(6)
        await client.read_tokens(call, 5)
        running = next(executor for executor in cluster.executors if executor.scheduler.num_running)
        await running.stop()
        for executor in cluster.executors:
            executor.brake.release()
        await client.read_rest(call)
    client.check_whole(PROMPT, NUM_TOKENS)
    assert logprobs_of(client.events) == expected(expected_ids(PROMPT, NUM_TOKENS), 1)
