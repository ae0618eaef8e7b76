"""A whole system behind certificates: real processes, and an authority that is replaced under a stream."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from inflight.local.certificates import make_certificates
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.v1 import executor_pb2, executor_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from tests.stack.conftest import EXECUTOR_ARGS

REQUEST = inference_pb2.GenerateRequest(
    text="Once upon a time",
    sampling=types_pb2.SamplingParams(temperature=0),
    stopping=types_pb2.StoppingParams(max_tokens=200, ignore_eos=True),
    output=inference_pb2.OutputOptions(token_ids=True),
)


async def is_trusted(address: str, ca: bytes) -> bool:
    """Whether the router at `address` shows a certificate that this authority has signed."""
    async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca)) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
    return True


async def test_stack_with_certificates_serves_through_a_change_of_authority(tmp_path: Path, tiny_model: Path) -> None:
    options = StackOptions(model=str(tiny_model), executor_args=EXECUTOR_ARGS, run_dir=tmp_path, tls=True)
    async with LocalStack(options) as stack:
        made = stack.options.certificates
        assert made is not None
        old_ca = made.ca_file.read_bytes()
        # Given a stream
        async with grpc.aio.secure_channel(stack.address, grpc.ssl_channel_credentials(old_ca)) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            stream = stub.Generate(REQUEST)
            await stream.read()
            # When the authority and all certificates are replaced
            new = make_certificates(tmp_path / "new")
            for there, comes in zip(made.files, new.files, strict=True):
                comes.replace(there)
            new_ca = made.ca_file.read_bytes()
            async with asyncio.timeout(60):
                while not await is_trusted(stack.address, new_ca):
                    await asyncio.sleep(0.1)
            # Then new clients meet the new one only, and the stream goes on to its end
            assert not await is_trusted(stack.address, old_ca)
            tokens = 0
            while (response := await stream.read()) is not grpc.aio.EOF:
                tokens += len(response.event.delta.token_ids)
            assert tokens > 0
            assert await stream.code() is grpc.StatusCode.OK
        # And neither an executor nor a router can be reached in the clear
        for address in (stack.executors[0].address, stack.address):
            async with grpc.aio.insecure_channel(address) as channel:
                describe: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                    await describe.Describe(executor_pb2.DescribeRequest(), timeout=60)
