"""Arbitrary messages of a KServe client: each gets an answer or a documented status, and others are unaffected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.kserve import grpc_service_pb2
from inflight.router.kserve.models import INPUTS, OUTPUTS
from inflight.router.kserve.service import SERVICE_NAME
from tests.fuzz.messages import bytes_of
from tests.fuzz.served import Loop, check_unharmed
from tests.fuzz.statuses import check_documented
from tests.fuzz.test_client_api import FUZZING, is_exploring
from tests.integration.test_kserve import by_ids
from tests.support.stack.cluster import run_cluster
from tools.reference.statuses import documented

M = "inference.ModelInferRequest"
HINTS = {
    f"{M}.model_name": st.just(""),
    f"{M}.model_version": st.sampled_from(["", "1"]),
    f"{M}.InferInputTensor.name": st.sampled_from([kind.name for kind in INPUTS]),
    f"{M}.InferInputTensor.datatype": st.sampled_from(["BYTES", "BOOL", "INT32", "FP32", "FP16", "UINT64"]),
    f"{M}.InferInputTensor.shape": st.lists(st.integers(-1, 3), max_size=3),
    f"{M}.InferInputTensor.parameters": st.just([]),
    f"{M}.InferRequestedOutputTensor.name": st.sampled_from([kind.name for kind in OUTPUTS]),
    f"{M}.InferRequestedOutputTensor.parameters": st.just([]),
}
SOUND = [by_ids([1, 2], 6, is_streamed=is_streamed).SerializeToString() for is_streamed in (True, False)]
REQUESTS = st.tuples(st.sampled_from([*SOUND, *SOUND, b""]), bytes_of(grpc_service_pb2.ModelInferRequest, HINTS)).map(
    b"".join
)

# The store's jitter draws from `random` in the loop's thread while Hypothesis draws in its own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
    # As an error it would stand in the place of the failure that it comes with.
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]


async def infer(channel: grpc.aio.Channel, request: bytes) -> None:
    unary: Any = channel.unary_unary(f"/{SERVICE_NAME}/ModelInfer")
    await unary(request)


async def stream_infer(channel: grpc.aio.Channel, requests: Sequence[bytes]) -> int:
    """Sends all requests and reads to the end; returns how many responses said that a request had ended."""
    stream: Any = channel.stream_stream(
        f"/{SERVICE_NAME}/ModelStreamInfer",
        response_deserializer=grpc_service_pb2.ModelStreamInferResponse.FromString,
    )
    responses = stream()
    try:
        for request in requests:
            await responses.write(request)
        await responses.done_writing()
    except grpc.aio.AioRpcError as error:
        # Of a stream that the router has ended gRPC's client forgets the status where another write comes too late.
        if error.details() != "Internal error from Core":
            raise
        return len(requests)
    return sum([one.infer_response.parameters["triton_final_response"].bool_param async for one in responses])


async def test_any_inference_is_answered_or_refused_as_documented(redis_url: str, pool: str) -> None:
    statuses, loop = documented(), Loop()
    num_examples = 1000 if is_exploring() else 60
    async with run_cluster(redis_url, pool) as cluster:
        async with grpc.aio.insecure_channel(cluster.routers[0].address) as channel:

            @settings(FUZZING, max_examples=num_examples)
            @given(request=REQUESTS)
            def alone(request: bytes) -> None:
                try:
                    loop.run(infer(channel, request))
                except grpc.aio.AioRpcError as error:
                    check_documented("GRPCInferenceService", error, statuses)

            @settings(FUZZING, max_examples=num_examples)
            @given(requests=st.lists(REQUESTS, max_size=4))
            def together(requests: list[bytes]) -> None:
                try:
                    assert loop.run(stream_infer(channel, requests)) == len(requests)
                except grpc.aio.AioRpcError as error:
                    check_documented("GRPCInferenceService", error, statuses)

            await asyncio.to_thread(alone)
            await asyncio.to_thread(together)
        await check_unharmed(cluster)
