"""Arbitrary messages of a client: each gets an answer or a documented status soon, and other clients are unaffected."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from inflight.v1 import inference_pb2
from tests.fuzz.messages import bytes_of
from tests.fuzz.served import Loop, Metadata, call, check_unharmed
from tests.fuzz.statuses import check_documented, status_of
from tests.support.stack.cluster import run_cluster, tiny_tokenizer, token_request
from tools.reference.statuses import documented

P = "inflight.v1."
REQUEST_IDS = st.sampled_from(["", "a", "b"])
TOKEN_IDS = st.lists(st.integers(0, 4), min_size=1, max_size=20)
# What gets a request past the first checks, so that the later ones are reached too.
HINTS = {
    f"{P}GenerateRequest.request_id": REQUEST_IDS,
    f"{P}GenerateRequest.model": st.just(""),
    f"{P}GenerateRequest.n": st.just(1),
    f"{P}GenerateRequest.best_of": st.just(0),
    f"{P}GenerateRequest.constraint": st.just({}),
    f"{P}GenerateRequest.adapter_id": st.just(""),
    f"{P}GenerateRequest.tenant": st.sampled_from(["", "acme"]),
    f"{P}GenerateRequest.idempotency_key": st.just(""),
    f"{P}GenerateRequest.metadata": st.just([]),
    f"{P}TokenIds.ids": TOKEN_IDS,
    f"{P}StoppingParams.max_tokens": st.integers(1, 12),
    f"{P}StoppingParams.min_tokens": st.just(0),
    f"{P}SamplingParams.temperature": st.sampled_from([0.0, 0.7]),
    f"{P}SamplingParams.top_p": st.just(1.0),
    f"{P}CancelRequest.request_id": REQUEST_IDS,
    f"{P}CancelRequest.model": st.just(""),
    f"{P}CancelRequest.resume_token": st.just(""),
    f"{P}GetRequestRequest.request_id": REQUEST_IDS,
    f"{P}GetRequestRequest.model": st.just(""),
    f"{P}GetRequestRequest.resume_token": st.just(""),
    f"{P}ResumeRequest.request_id": REQUEST_IDS,
    f"{P}TokenizeRequest.model": st.just(""),
    f"{P}DetokenizeRequest.model": st.just(""),
    f"{P}DetokenizeRequest.token_ids": TOKEN_IDS,
    f"{P}GetCapacityRequest.model": st.just(""),
    f"{P}GetStatsRequest.model": st.just(""),
    f"{P}GetStatsRequest.interval_ms": st.sampled_from([0, 49, 50, 1000, 60_000, 60_001, 2**32 - 1]),
}
REQUESTS: dict[str, type[Message]] = {
    "Generate": inference_pb2.GenerateRequest,
    "Resume": inference_pb2.ResumeRequest,
    "Cancel": inference_pb2.CancelRequest,
    "GetRequest": inference_pb2.GetRequestRequest,
    "Tokenize": inference_pb2.TokenizeRequest,
    "Detokenize": inference_pb2.DetokenizeRequest,
    "ListModels": inference_pb2.ListModelsRequest,
    "GetCapacity": inference_pb2.GetCapacityRequest,
    "GetStats": inference_pb2.GetStatsRequest,
}
SOUND = {
    "Generate": token_request([1, 2], 6).SerializeToString(),
    "Tokenize": inference_pb2.TokenizeRequest(text="t1 t2").SerializeToString(),
    "Detokenize": inference_pb2.DetokenizeRequest(token_ids=[1]).SerializeToString(),
    "Cancel": inference_pb2.CancelRequest(request_id="a").SerializeToString(),
    "GetRequest": inference_pb2.GetRequestRequest(request_id="a").SerializeToString(),
}
# The RPC's own examples in a run of the suite; HYPOTHESIS_PROFILE=explore makes as many times more.
NUM_EXAMPLES = {"Generate": 120, "Tokenize": 40, "Detokenize": 40, "Resume": 40, "Cancel": 30, "GetRequest": 30}
TEXT_VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(str.strip)
METADATA = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["authorization", "traceparent", "tracestate", "x-request-id", "x-tenant"]), TEXT_VALUES
        ),
        st.tuples(st.sampled_from(["x-bin", "grpc-trace-bin", "grpc-tags-bin"]), st.binary(max_size=30)),
    ),
    max_size=3,
)
FUZZING = settings(suppress_health_check=list(HealthCheck), deadline=None)


# The store's jitter draws from `random` in the loop's thread while Hypothesis draws in its own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
    # As an error it would stand in the place of the failure that it comes with.
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]


def is_exploring() -> bool:
    return not settings.default.derandomize if settings.default else False


def templated_tokenizer() -> PreTrainedTokenizerFast:
    """The cluster's, with a template that looks at whatever it is given."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.name }} {{ m.tool_calls }}{% endfor %}"
        "{{ tools | tojson }} {{ x }} {{ t1.a }}"
    )
    return tokenizer


def requests_of(rpc: str) -> st.SearchStrategy[bytes]:
    """Anything; more often than not something sound with a few fields changed."""
    sound = SOUND.get(rpc, b"")
    return st.tuples(st.sampled_from([sound, sound, b""]), bytes_of(REQUESTS[rpc], HINTS)).map(b"".join)


@pytest.mark.parametrize("rpc", REQUESTS)
async def test_any_request_is_answered_or_refused_as_documented(
    redis_url: str, pool: str, rpc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", templated_tokenizer)
    num_examples = NUM_EXAMPLES.get(rpc, 15) * (20 if is_exploring() else 1)
    statuses, loop = documented(), Loop()
    async with run_cluster(redis_url, pool) as cluster:
        async with grpc.aio.insecure_channel(cluster.routers[0].address) as channel:

            @settings(FUZZING, max_examples=num_examples)
            @given(request=requests_of(rpc), metadata=METADATA)
            def one(request: bytes, metadata: Metadata) -> None:
                try:
                    loop.run(call(channel, rpc, request, metadata))
                except grpc.aio.AioRpcError as error:
                    check_documented(rpc, error, statuses)

            await asyncio.to_thread(one)
        await check_unharmed(cluster)


@pytest.mark.parametrize("name", ["x" * 50_000, "\U0001f600" * 5_000], ids=["long", "wide"])
async def test_refusal_that_quotes_the_request_fits_into_what_grpc_carries(
    redis_url: str, pool: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", templated_tokenizer)
    request = inference_pb2.TokenizeRequest()
    request.chat.messages.add(role="user")
    for _ in range(20):
        request.chat.template_kwargs[f"{name}{len(request.chat.template_kwargs)}"] = float("nan")
    async with run_cluster(redis_url, pool) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await cluster.routers[0].stub.Tokenize(request)
    assert status_of(error.value) == ("INVALID_ARGUMENT", "INVALID_FIELD")
