"""Generic tools against a router: health probes by service name, and clients that read descriptors."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.clients import health_probe
from tests.integration.test_requests import expected_ids
from tests.support.stack.cluster import run_cluster, run_router, until_ready

INFERENCE, KSERVE = "inflight.v1.InferenceService", "inference.GRPCInferenceService"


async def probe(*arguments: str) -> int:
    return await asyncio.to_thread(health_probe.main, list(arguments))


@pytest.mark.parametrize("service", ["", INFERENCE, KSERVE])
async def test_probe_is_told_of_each_service(redis_url: str, pool: str, service: str) -> None:
    async with run_router("alone", pool, redis_url, []) as router:
        assert await probe(router.address, service) == health_probe.EXIT_NOT_SERVING
        await router.server.set_serving(True)
        assert await probe(router.address, service) == health_probe.EXIT_SERVING


async def test_probe_of_a_service_or_a_server_that_is_not_there_fails(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_router("alone", pool, redis_url, []) as router:
        assert await probe(router.address, "unknown.Service") == health_probe.EXIT_RPC_FAILED
    monkeypatch.setattr(health_probe, "CONNECT_TIMEOUT_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # without listening
        assert await probe(f"127.0.0.1:{taken.getsockname()[1]}") == health_probe.EXIT_NO_CONNECTION
    assert await probe() == health_probe.EXIT_BAD_ARGUMENTS


class ReflectingClient:
    """Calls by JSON what it has never seen the code of, as grpcurl does."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._database = ProtoReflectionDescriptorDatabase(self._channel)
        self._pool = DescriptorPool(self._database)

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def services(self) -> set[str]:
        """The names of the services."""
        return set(self._database.get_services())

    def call(self, service: str, rpc: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Every answer to one request."""
        method: MethodDescriptor = self._pool.FindServiceByName(service).FindMethodByName(rpc)
        message = json_format.ParseDict(request, GetMessageClass(method.input_type)(), descriptor_pool=self._pool)
        parse = GetMessageClass(method.output_type).FromString
        path, serialized = f"/{service}/{rpc}", [message.SerializeToString()]
        # By the most general kind of call: on the wire they are all the same.
        stream: Any = self._channel.stream_stream(path, response_deserializer=parse)
        answers = stream(iter(serialized), timeout=60)
        return [
            json_format.MessageToDict(answer, preserving_proto_field_name=True, descriptor_pool=self._pool)
            for answer in answers
        ]


async def test_client_without_our_code_generates_by_reflection(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        await until_ready(cluster.routers[0], 1)
        client = ReflectingClient(cluster.routers[0].address)

        def drive() -> tuple[set[str], list[dict[str, Any]], list[dict[str, Any]]]:
            request = {
                "token_ids": {"ids": [3, 1]},
                "sampling": {"temperature": 0},
                "stopping": {"max_tokens": 4, "ignore_eos": True},
                "output": {"token_ids": True},
            }
            generated = client.call(INFERENCE, "Generate", request)
            inputs = [
                {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": ["dDMgdDE="]}},
                {"name": "max_tokens", "datatype": "INT32", "shape": [1], "contents": {"int_contents": [4]}},
                {"name": "temperature", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [0]}},
                {"name": "end_id", "datatype": "INT32", "shape": [1], "contents": {"int_contents": [-1]}},
            ]
            inferred = client.call(KSERVE, "ModelInfer", {"inputs": inputs, "outputs": [{"name": "sequence_length"}]})
            return client.services(), generated, inferred

        services, generated, inferred = await asyncio.to_thread(drive)
        client.close()
    assert {INFERENCE, KSERVE, "grpc.health.v1.Health"} <= services
    deltas = [answer["event"].get("delta", {}) for answer in generated]
    assert [one for delta in deltas for one in delta.get("token_ids", [])] == expected_ids([3, 1], 4)
    assert inferred[0]["outputs"] == [{"name": "sequence_length", "datatype": "INT32", "shape": ["1", "1"]}]
    assert inferred[0]["raw_output_contents"] == ["BAAAAA=="]
