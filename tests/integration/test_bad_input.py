"""Bad input: it gets its status and a text that names the field, and concurrent streams are unaffected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from inflight.v1 import executor_pb2, inference_pb2, types_pb2
from tests.integration.test_requests import collect, expected_ids, ids_of
from tests.support.stack.cluster import ExecutorShape, RunningRouter, run_cluster, tiny_tokenizer, token_request

Request = inference_pb2.GenerateRequest


def with_text(text: str) -> Request:
    request = token_request([], 4)
    request.text = text
    return request


def with_sampling(**fields: Any) -> Request:
    request = token_request([1], 4)
    request.sampling.MergeFrom(types_pb2.SamplingParams(**fields))
    return request


def with_fields(**fields: Any) -> Request:
    request = token_request([1], 4)
    request.MergeFrom(Request(**fields))
    return request


def with_bytes(prompt: bytes) -> Request:
    request = token_request([], 4)
    request.text_bytes = prompt
    return request


BAD_REQUESTS: dict[str, tuple[Callable[[], Request], grpc.StatusCode, str]] = {
    "empty text": (lambda: with_text(""), grpc.StatusCode.INVALID_ARGUMENT, "text"),
    "no prompt": (lambda: Request(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
    "no token ids": (lambda: token_request([], 4), grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
    "beyond the context": (
        lambda: token_request([1] * 40, 40),
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.max_tokens",
    ),
    "negative temperature": (
        lambda: with_sampling(temperature=-0.5),
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.temperature",
    ),
    "temperature that is no number": (
        lambda: with_sampling(temperature=float("nan")),
        grpc.StatusCode.INVALID_ARGUMENT,
        "sampling.temperature",
    ),
    "top_p of zero": (lambda: with_sampling(top_p=0.0), grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p"),
    "top_p above one": (lambda: with_sampling(top_p=1.5), grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p"),
    "unknown model": (lambda: with_fields(model="no-such-model"), grpc.StatusCode.NOT_FOUND, "model"),
    "token outside the vocabulary": (
        lambda: token_request([1, 99], 4),
        grpc.StatusCode.INVALID_ARGUMENT,
        "token_ids.ids[1]",
    ),
    "prompt of ten megabytes": (lambda: with_text("t1 " * 3_500_000), grpc.StatusCode.INVALID_ARGUMENT, "text"),
    "ten thousand stop strings": (
        lambda: with_fields(stopping=types_pb2.StoppingParams(stop=["x"] * 10_000)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "stopping.stop",
    ),
    "bytes that are not UTF-8": (lambda: with_bytes(b"t1 \xff\xfe"), grpc.StatusCode.INVALID_ARGUMENT, "text_bytes"),
    "what is not built yet": (
        lambda: with_sampling(typical_p=0.5),
        grpc.StatusCode.UNIMPLEMENTED,
        "sampling.typical_p",
    ),
    "unknown adapter": (lambda: with_fields(adapter_id="a"), grpc.StatusCode.NOT_FOUND, "adapter_id"),
    "too many choices": (lambda: with_fields(n=1000), grpc.StatusCode.INVALID_ARGUMENT, "n"),
    "larger than any executor": (
        lambda: token_request([1] * 30, 30),
        grpc.StatusCode.FAILED_PRECONDITION,
        "max_tokens",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_bad_request_is_refused_by_field_and_disturbs_no_other(redis_url: str, pool: str, name: str) -> None:
    make_request, code, field = BAD_REQUESTS[name]
    async with run_cluster(redis_url, pool, shape=ExecutorShape(num_blocks=13)) as cluster:
        router = cluster.routers[0]
        cluster.executors[0].brake.hold()
        bystander = asyncio.create_task(collect(router, token_request([3, 1], 30)))
        error = await refused(router, make_request())
        assert error.code() is code
        assert field in (error.details() or "")
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            fields = [violation.field for violation in bad_request_of(error).field_violations]
            assert any(field in name for name in fields), fields
        cluster.executors[0].brake.release()
        assert ids_of(await bystander) == expected_ids([3, 1], 30)


async def refused(router: RunningRouter, request: Request) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await collect(router, request)
    return error.value


def bad_request_of(error: grpc.aio.AioRpcError) -> error_details_pb2.BadRequest:
    trailing = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    bad_request = error_details_pb2.BadRequest()
    packed = [detail for detail in status.details if detail.Unpack(bad_request)]
    assert packed, "the status carries a BadRequest"
    return bad_request


async def test_bytes_that_are_no_message_are_an_invalid_argument(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        # Field 3 is `text`; its bytes are not UTF-8, which a string field may not hold.
        send: Any = channel.unary_stream("/inflight.v1.InferenceService/Generate")
        call = send(b"\x1a\x02\xff\xfe")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "UTF-8" in (error.value.details() or "")


async def test_unknown_method_is_unimplemented(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        send: Any = channel.unary_unary("/inflight.v1.InferenceService/Regenerate")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await send(b"")
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_tokenizer_with_added_tokens_beyond_the_model_is_served(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def larger_tokenizer() -> Any:
        tokenizer = tiny_tokenizer()
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
        return tokenizer

    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", larger_tokenizer)
    async with run_cluster(redis_url, pool) as cluster:
        router = cluster.routers[0]
        assert ids_of(await collect(router, with_text("t1 t2"))) == expected_ids([1, 2], 4)
        error = await refused(router, with_text("t1 <pad>"))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "text: token id 5 is outside the model's vocabulary of 5 ids (0 to 4)" in (error.details() or "")
        error = await refused(router, token_request([1, 5], 4))
        assert "token_ids.ids[1]: token id 5 is outside" in (error.details() or "")
    assert "the tokenizer has 6 ids, executor executor-0 5; prompts with an id from 5 on are refused" in caplog.text


async def test_executor_with_fewer_ids_than_the_vocabulary_itself_is_not_linked(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        pools = cluster.routers[0].pools
        link: Any = SimpleNamespace(description=executor_pb2.DescribeResponse(model=pool, vocabulary_size=4))
        assert pools.on_linked(link) == "its vocabulary of 4 is smaller than the tokenizer's of 5"
