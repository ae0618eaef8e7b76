"""KServe v2 on a serving router: the same authentication, queue, drain and cancellation as for Generate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from inflight.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from inflight.router.ledger.types import DEFAULT_TENANT
from tests.fuzz.served import check_unharmed, until_empty
from tests.fuzz.statuses import status_of
from tests.integration.test_authorization import locked_cluster, output_of, shown
from tests.integration.test_hostile_clients import status, until
from tests.integration.test_requests import collect, expected_ids, ids_of
from tests.support.stack.cluster import Cluster, run_cluster, token_request
from tests.unit.test_kserve_translation import inference_request, one

Request = grpc_service_pb2.ModelInferRequest


def stub_of(channel: grpc.aio.Channel) -> Any:
    return grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)


def by_ids(prompt_ids: list[int], max_tokens: int, *, request_id: str = "", is_streamed: bool = False) -> Request:
    return inference_request(
        one("input_ids", "INT32", *prompt_ids),
        one("max_tokens", "INT32", max_tokens),
        one("end_id", "INT32", -1),
        one("temperature", "FP32", 0.0),
        one("stream", "BOOL", is_streamed),
        id=request_id,
    )


def output_ids(response: grpc_service_pb2.ModelInferResponse) -> list[int]:
    names = [output.name for output in response.outputs]
    return list(np.frombuffer(response.raw_output_contents[names.index("output_ids")], dtype="<i4"))


async def read_until_final(call: Any, num_requests: int) -> dict[str, list[int]]:
    """The output of each request by its id, until so many have ended."""
    outputs: dict[str, list[int]] = {}
    while num_requests:
        response = (await call.read()).infer_response
        outputs.setdefault(response.id, []).extend(output_ids(response))
        num_requests -= response.parameters["triton_final_response"].bool_param
    return outputs


def dispatcher_of(cluster: Cluster) -> Any:
    (pool,) = cluster.routers[0].pools.by_name.values()
    return pool.dispatcher


async def test_whole_and_streamed_output_is_that_of_generate(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        expected = ids_of(await collect(cluster.routers[0], token_request([3, 1], 9)))
        assert output_ids(await stub_of(channel).ModelInfer(by_ids([3, 1], 9))) == expected
        call = stub_of(channel).ModelStreamInfer()
        for request_id, prompt_ids in (("a", [3, 1]), ("b", [2]), ("a again", [3, 1])):
            await call.write(by_ids(prompt_ids, 9, request_id=request_id, is_streamed=True))
        outputs = await read_until_final(call, 3)
        assert outputs == {"a": expected, "b": expected_ids([2], 9), "a again": expected}
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_requests_of_a_stream_take_turns_with_each_other(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        executor = cluster.executors[0]
        executor.brake.hold()
        call = stub_of(channel).ModelStreamInfer()
        # Given a long request, and a short one behind it
        await call.write(by_ids([3, 1], 40, request_id="long", is_streamed=True))
        await until(lambda: executor.scheduler.num_held == 1)
        await call.write(by_ids([2], 2, request_id="short", is_streamed=True))
        await until(lambda: not executor.engine._inbox.empty())
        # Then the short one ends first
        executor.brake.permit(6)
        ended = False
        while not ended:
            response = (await call.read()).infer_response
            ended = response.parameters["triton_final_response"].bool_param
        assert response.id == "short"
        executor.brake.release()
        await read_until_final(call, 1)
        call.cancel()


@pytest.mark.parametrize("rpc", ["ModelStreamInfer", "ModelInfer"])
async def test_cancelled_call_frees_the_blocks_of_all_its_requests_within_two_steps(
    redis_url: str, pool: str, rpc: str
) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        executor = cluster.executors[0]
        executor.brake.hold()
        # Given requests in the middle of their output
        if rpc == "ModelInfer":
            call = stub_of(channel).ModelInfer(by_ids([3, 1], 40))
        else:
            call = stub_of(channel).ModelStreamInfer()
            await call.write(by_ids([3, 1], 40, request_id="a", is_streamed=True))
        await until(lambda: executor.scheduler.num_held == 1)
        if rpc == "ModelStreamInfer":
            await call.write(by_ids([2], 40, request_id="b", is_streamed=True))
            await until(lambda: not executor.engine._inbox.empty())
        executor.brake.permit(3)
        await until(lambda: executor.engine.num_steps == 3)
        num_requests = len(dispatcher_of(cluster).streams)
        assert executor.scheduler.num_held == num_requests
        assert executor.scheduler.pool.num_used > 0
        # When the call is cancelled
        call.cancel()
        await until(lambda: executor.engine._inbox.qsize() == num_requests)
        # Then two steps later nothing is held
        executor.brake.permit(2)
        await until(lambda: executor.scheduler.pool.num_used == 0)
        assert executor.engine.num_steps <= 5
        executor.brake.release()
        await check_unharmed(cluster)


async def test_refusal_keeps_its_details_and_names_the_tensor(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=r"inputs\[max_tokens\]: is 1000") as error:
            await stub_of(channel).ModelInfer(by_ids([1], 1000))
        assert status_of(error.value) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        # On a stream it is a message, and the stream goes on
        call = stub_of(channel).ModelStreamInfer()
        await call.write(by_ids([1], 1000, request_id="much"))
        refused = await call.read()
        assert "inputs[max_tokens]: is 1000" in refused.error_message
        assert refused.infer_response.id == "much"
        assert refused.infer_response.parameters["grpc_status"].string_param == "INVALID_ARGUMENT"
        await call.write(by_ids([1], 3, request_id="little"))
        assert await read_until_final(call, 1) == {"little": expected_ids([1], 3)}
        call.cancel()
        # Or its status, where that is asked for
        call = stub_of(channel).ModelStreamInfer(metadata=(("triton_grpc_error", "true"),))
        await call.write(by_ids([1], 1000))
        with pytest.raises(grpc.aio.AioRpcError, match="max_tokens") as error:
            await call.read()
        assert status_of(error.value) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        await until_empty(cluster)


async def test_bytes_that_are_no_request_end_the_stream(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        call: Any = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await call.write(b"\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert status_of(error.value) == ("INVALID_ARGUMENT", "INVALID_FIELD")


async def test_draining_router_is_not_ready_and_refuses(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        stub, executor = stub_of(channel), cluster.executors[0]
        assert (await stub.ServerReady(grpc_service_pb2.ServerReadyRequest())).ready
        executor.brake.hold()
        call = stub.ModelStreamInfer()
        await call.write(by_ids([1], 5, request_id="running"))
        await until(lambda: executor.scheduler.num_held == 1)
        # When the router drains
        draining = asyncio.create_task(cluster.routers[0].service.drain(60))
        await until(lambda: cluster.routers[0].service.is_draining)
        # Then nothing new is taken, and what runs comes to its end
        assert not (await stub.ServerReady(grpc_service_pb2.ServerReadyRequest())).ready
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ModelInfer(by_ids([1], 5))
        assert status_of(error.value) == ("UNAVAILABLE", "DRAINING")
        await call.write(by_ids([1], 5, request_id="late"))
        refused = await call.read()
        assert refused.infer_response.parameters["reason"].string_param == "DRAINING"
        assert refused.infer_response.parameters["retry_after_ms"].int64_param > 0
        executor.brake.release()
        assert await read_until_final(call, 1) == {"running": expected_ids([1], 5)}
        await draining
        call.cancel()


async def test_models_are_listed_and_ready_only_with_an_executor(redis_url: str, pool: str) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        stub = stub_of(channel)

        async def state() -> tuple[bool, bool, list[str]]:
            index = await stub.RepositoryIndex(grpc_service_pb2.RepositoryIndexRequest())
            ready = await stub.ServerReady(grpc_service_pb2.ServerReadyRequest())
            model = await stub.ModelReady(grpc_service_pb2.ModelReadyRequest(name=pool))
            return ready.ready, model.ready, [one_model.state for one_model in index.models]

        assert await state() == (True, True, ["READY"])
        config = (await stub.ModelConfig(grpc_service_pb2.ModelConfigRequest(name=pool))).config
        assert config.parameters["context_length"].string_value == "64"
        await cluster.executors[0].stop()
        await until(lambda: not cluster.routers[0].pools.by_name[pool].links)
        assert await state() == (False, False, ["UNAVAILABLE"])
        assert not (await stub.RepositoryIndex(grpc_service_pb2.RepositoryIndexRequest(ready=True))).models


async def test_door_tenant_class_and_models_hold(redis_url: str, pool: str, tmp_path: Path) -> None:
    async with (
        locked_cluster(redis_url, pool, tmp_path) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        stub = stub_of(channel)
        request = by_ids([1, 2], 3)
        # Who shows nothing sees no more than with health
        assert (await stub.ServerLive(grpc_service_pb2.ServerLiveRequest())).live
        assert (await stub.ServerReady(grpc_service_pb2.ServerReadyRequest())).ready
        refused = {
            "ModelInfer": stub.ModelInfer(request),
            "ModelReady": stub.ModelReady(grpc_service_pb2.ModelReadyRequest(name=pool)),
            "ModelMetadata": stub.ModelMetadata(grpc_service_pb2.ModelMetadataRequest(name=pool)),
            "ModelConfig": stub.ModelConfig(grpc_service_pb2.ModelConfigRequest(name=pool)),
            "ServerMetadata": stub.ServerMetadata(grpc_service_pb2.ServerMetadataRequest()),
            "RepositoryIndex": stub.RepositoryIndex(grpc_service_pb2.RepositoryIndexRequest()),
            "ModelStreamInfer": stub.ModelStreamInfer().read(),
        }
        for rpc, call in refused.items():
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED, rpc
        # A key's request is its tenant's
        assert output_ids(await stub.ModelInfer(request, metadata=shown("all"))) == output_of("acme")
        assert output_of("acme") != output_of(DEFAULT_TENANT)
        # A class and a model that are not the caller's
        request.parameters["priority"].uint64_param = 1
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.ModelInfer(request, metadata=shown("standard"))
        assert status_of(error.value) == ("PERMISSION_DENIED", "NOT_ALLOWED")
        ready = grpc_service_pb2.ModelReadyRequest(name=pool)
        assert (await stub.ModelReady(ready, metadata=shown("model"))).ready
        assert not (await stub.ModelReady(ready, metadata=shown("other"))).ready
        index = await stub.RepositoryIndex(grpc_service_pb2.RepositoryIndexRequest(), metadata=shown("other"))
        assert not index.models


async def test_stream_refuses_requests_from_when_its_credential_has_expired(
    redis_url: str, pool: str, tmp_path: Path
) -> None:
    async with (
        locked_cluster(redis_url, pool, tmp_path) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        call = stub_of(channel).ModelStreamInfer(metadata=shown("all"))
        await call.write(by_ids([1, 2], 3, request_id="a", is_streamed=True))
        assert await read_until_final(call, 1) == {"a": output_of("acme")}
        keys = cluster.routers[0].parts.authentication._keys
        assert keys is not None
        keys._content = ()
        await call.write(by_ids([1, 2], 3, request_id="b", is_streamed=True))
        assert "a valid credential is needed" in (await call.read()).error_message
        call.cancel()


async def test_stream_with_a_refused_request_and_bytes_that_are_no_message_behind_it_ends(
    redis_url: str, pool: str
) -> None:
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        send: Any = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=grpc_service_pb2.ModelStreamInferResponse.FromString,
        )
        call = send()
        await call.write(grpc_service_pb2.ModelInferRequest(model_version="2").SerializeToString())
        await call.write(b"12345678")
        await call.done_writing()
        async with asyncio.timeout(60):
            assert await status(call) == ("INVALID_ARGUMENT", "INVALID_FIELD")
