"""Sampling parameters on their way: all reach every executor that continues a request, and every router shows them."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from inflight.common.protocol import EXACT_RESUME_VERSION, LOGITS_VERSION
from inflight.v1 import executor_pb2, inference_pb2, types_pb2
from tests.integration.test_requests import collect, rest
from tests.integration.test_resuming import NUM_TOKENS, Client, request_of
from tests.support.stack.cluster import Cluster, run_cluster
from tests.support.text.validated import ALL_SAMPLING


def shown() -> types_pb2.SamplingParams:
    """The parameters with the token sequences of the words."""
    expected = types_pb2.SamplingParams()
    expected.CopyFrom(ALL_SAMPLING)
    expected.bad_word_ids.add(ids=[1, 2])
    expected.bad_word_ids.add(ids=[4])
    return expected


async def begun(cluster: Cluster, num_tokens: int) -> tuple[Client, Any]:
    """A request with all parameters that has brought so many tokens, and stands still."""
    client, request = Client(), request_of()
    request.sampling.CopyFrom(ALL_SAMPLING)
    for executor in cluster.executors:
        executor.brake.hold()
        executor.brake.permit(num_tokens + 1)
    call = cluster.routers[0].stub.Generate(request)
    await client.read_tokens(call, num_tokens)
    return client, call


async def test_executor_that_continues_a_request_gets_the_same_parameters(
    redis_url: str, pool: str, submits: list[executor_pb2.Submit]
) -> None:
    async with run_cluster(redis_url, pool, executors=2) as cluster:
        client, call = await begun(cluster, 5)
        (first,) = (executor for executor in cluster.executors if executor.device.boarded)
        (other,) = (executor for executor in cluster.executors if executor is not first)
        await first.stop()
        other.brake.release()
        await client.read_rest(call)
    assert len(client.ids) == NUM_TOKENS
    assert [submit.sampling for submit in submits] == [shown(), shown()]
    assert len(submits[1].prior_output_ids) >= 5
    assert client.events[0].accepted.sampling == shown()


async def test_router_that_takes_a_request_over_shows_the_same_parameters(
    redis_url: str, pool: str, submits: list[executor_pb2.Submit]
) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        client, call = await begun(cluster, 5)
        await cluster.routers[0].kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await rest(call)
        resumed = client.resume(cluster.routers[1])
        assert (await resumed.read()).event.accepted == client.events[0].accepted
        cluster.executors[0].brake.release()
        await client.read_rest(resumed)
    assert len(client.ids) == NUM_TOKENS
    assert [submit.sampling for submit in submits] == [shown()]


async def test_repeat_with_an_idempotency_key_needs_the_same_parameters(redis_url: str, pool: str) -> None:
    request = request_of(idempotency_key="k")
    request.sampling.CopyFrom(ALL_SAMPLING)
    other = inference_pb2.GenerateRequest()
    other.CopyFrom(request)
    other.sampling.logit_bias[1] = 1.0
    async with run_cluster(redis_url, pool) as cluster:
        first = await collect(cluster.routers[0], request)
        again = await collect(cluster.routers[0], request)
        with pytest.raises(grpc.aio.AioRpcError) as mismatch:
            await collect(cluster.routers[0], other)
    assert again[0].accepted == first[0].accepted
    assert mismatch.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_words_with_too_many_tokens_are_refused_by_name(redis_url: str, pool: str) -> None:
    request = request_of()
    request.sampling.bad_words.extend(f"t{i % 5} " * 100 for i in range(11))
    request.sampling.bad_word_ids.extend(types_pb2.TokenSequence(ids=[1, 2, i % 5] * 100) for i in range(3))
    async with run_cluster(redis_url, pool) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(cluster.routers[0], request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "sampling.bad_words: has 1400 token ids together with bad_word_ids" in (refused.value.details() or "")


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        ({"no_repeat_ngram_size": 3}, "sampling.no_repeat_ngram_size"),
        ({"bad_words": ["t1"]}, "sampling.bad_word_ids"),
    ],
)
async def test_executor_of_an_older_version_does_not_get_what_it_would_ignore(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, Any], field: str
) -> None:
    monkeypatch.setattr("tests.support.stack.cluster.PROTOCOL_VERSION", LOGITS_VERSION - 1)
    request = request_of()
    request.sampling.MergeFrom(types_pb2.SamplingParams(**sampling))
    async with run_cluster(redis_url, pool) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(cluster.routers[0], request)
        events = await collect(cluster.routers[0], request_of())
    assert f"executor executor-0 speaks protocol version 2; {field} needs 3" in (refused.value.details() or "")
    assert events[-1].HasField("done")


async def test_executor_that_does_not_know_exact_resume_gets_no_request_that_requires_it(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.stack.cluster.PROTOCOL_VERSION", EXACT_RESUME_VERSION - 1)
    exact = request_of()
    exact.exact_resume = True
    async with run_cluster(redis_url, pool) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(cluster.routers[0], exact)
        events = await collect(cluster.routers[0], request_of())
        assert not cluster.executors[0].service.num_held
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "speaks protocol version 4; exact_resume needs a later one" in (refused.value.details() or "")
    assert events[-1].HasField("done")
