"""A detached request that waits for a seat is lost with its router: only that has its prompt. Its client is told so."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from inflight.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.test_requests import expected_ids, ids_of, rest
from tests.support.stack.cluster import ExecutorShape, run_cluster, token_request

ROOT = Path(__file__).parents[2]

ROUTER = """
import asyncio, sys
from tests.support.stack.cluster import run_router, until_ready

async def main(model, redis_url, executor):
    async with run_router("doomed", model, redis_url, [executor]) as router:
        await until_ready(router, 1)
        print(router.address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@contextmanager
def router_process(model: str, redis_url: str, executor: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A router that can be killed, and its address."""
    command = [sys.executable, "-c", ROUTER, model, redis_url, executor]
    path = {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=path) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


async def status_of(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return caught.value


@pytest.mark.slow
async def test_detached_request_that_waits_is_lost_with_its_router_and_its_client_is_told_to_repeat_it(
    redis_url: str, pool: str
) -> None:
    request = token_request([4], 6, idempotency_key="k", detach=True, want_queue_events=True)
    shape = ExecutorShape(max_num_sequences=1)
    with ExitStack() as opened:
        async with run_cluster(redis_url, pool, shape=shape) as cluster:
            survivor, executor = cluster.routers[0], cluster.executors[0]
            start = router_process(pool, redis_url, executor.address)
            address, process = await asyncio.to_thread(opened.enter_context, start)
            # Given a request that has the only seat, and a detached one that waits at another router without its client
            executor.brake.hold()
            running = survivor.stub.Generate(token_request([1, 2], 8))
            await running.read()
            async with grpc.aio.insecure_channel(address) as channel:
                call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
                queued = (await call.read()).event.queued
                call.cancel()
            named = {"request_id": queued.request_id, "resume_token": queued.resume_token}
            standing = await survivor.stub.GetRequest(inference_pb2.GetRequestRequest(**named))
            assert standing.state == inference_pb2.REQUEST_STATE_WAITING
            # When its router is killed
            process.kill()
            # Then another one cannot go on with it
            resume = inference_pb2.ResumeRequest(**named, offsets=[0], text_bytes=[0])
            waits = await status_of(survivor.stub.Resume(resume))
            assert waits.code() is grpc.StatusCode.DATA_LOSS
            assert "if that has stopped, send it again with the same idempotency_key" in (waits.details() or "")
            # And when the router's lease has lapsed, it is unknown
            gone = await until_unknown(survivor.stub, inference_pb2.GetRequestRequest(**named))
            for error in (gone, await status_of(survivor.stub.Resume(resume))):
                assert error.code() is grpc.StatusCode.NOT_FOUND
                assert "lost when its router stops: send it again with the same idempotency_key" in (
                    error.details() or ""
                )
            # A repeat with the same key runs it, once
            repeat = survivor.stub.Generate(request)
            assert (await repeat.read()).event.queued.request_id == queued.request_id
            executor.brake.release()
            assert ids_of(await rest(repeat)) == expected_ids([4], 6)
            assert ids_of(await rest(running)) == expected_ids([1, 2], 8)
            assert len(executor.device.boarded) == 2


async def until_unknown(
    stub: inference_pb2_grpc.InferenceServiceStub, request: inference_pb2.GetRequestRequest
) -> grpc.aio.AioRpcError:
    async with asyncio.timeout(60):
        while True:
            try:
                await stub.GetRequest(request)
            except grpc.aio.AioRpcError as error:
                return error
            await asyncio.sleep(0.1)
