"""An executor that sends what cannot be true, over real gRPC: only its own link breaks, with the reason in the log.

Its requests go on at the honest executor, whose streams notice nothing, and the ledger is as it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from common.rpc.server import GrpcServer
from inflight.v1 import executor_pb2, executor_pb2_grpc
from tests.cluster import Cluster, ExecutorShape, run_router, start_executor, token_request, until_ready
from tests.fake_device import VOCABULARY_SIZE
from tests.fuzz.served import HANG_S, check_unharmed
from tests.fuzz.test_frames_to_a_router import HOSTILE_FRAMES
from tests.integration.test_requests import collect, expected_ids, ids_of

GENERATION = 1
# One of each kind; test_frames_to_a_router has them all.
KINDS = (
    "token of an unknown slot",
    "columns of different lengths",
    "token outside the vocabulary",
    "another generation",
    "speed that is no number",
    "huge list of held sequences",
)


class HostileExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """Takes what it is offered and answers it with the hostile frame, on its first stream; later ones it refuses."""

    def __init__(self, model: str, frame: executor_pb2.ServeResponse) -> None:
        self.description = executor_pb2.DescribeResponse(
            executor_id="hostile",
            generation=GENERATION,
            protocol_version=1,
            model=model,
            block_size=4,
            total_blocks=32,
            max_num_sequences=4,
            context_length=64,
            vocabulary_size=VOCABULARY_SIZE,
        )
        self.broken = asyncio.Event()
        self._frame = frame
        self._has_served = False

    async def Describe(
        self, request: executor_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> executor_pb2.DescribeResponse:
        return self.description

    async def Serve(
        self,
        request_iterator: AsyncIterator[executor_pb2.ServeRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        if self._has_served:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        self._has_served = True
        await context.write(self._report())
        async for request in request_iterator:
            for submit in request.submits:
                accepted = executor_pb2.ServeResponse(generation=GENERATION)
                accepted.accepted.add(request_id=submit.request_id, attempt=submit.attempt, slots=[0])
                await context.write(accepted)
                try:
                    await context.write(self._frame)
                    await asyncio.Event().wait()
                finally:
                    self.broken.set()  # the router has cancelled the stream

    def _report(self) -> executor_pb2.ServeResponse:
        report = executor_pb2.Report(seq=1, total_blocks=32, budget_blocks=32, budget_sequences=4)
        return executor_pb2.ServeResponse(generation=GENERATION, report=report)


@pytest.mark.parametrize("name", KINDS)
async def test_hostile_frame_breaks_that_link_and_nothing_else(
    redis_url: str, pool: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "router.executors.link")
    make_frame, why = HOSTILE_FRAMES[name]
    honest = await start_executor("honest", pool, ExecutorShape())
    hostile = HostileExecutor(pool, make_frame())
    server = GrpcServer(["inflight.v1.ExecutorService"])
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(hostile, server.grpc)
    addresses = [honest.address, await server.start("127.0.0.1:0")]
    try:
        async with run_router("router", pool, redis_url, addresses) as router:
            await until_ready(router, 2)
            honest.brake.hold()
            # Requests spread over the executors; one of them meets the hostile one
            requests = [token_request([i, 1], 20) for i in range(3)]
            streams = [asyncio.create_task(collect(router, request, HANG_S)) for request in requests]
            await asyncio.wait_for(hostile.broken.wait(), HANG_S)
            honest.brake.release()
            for i, stream in enumerate(streams):
                assert ids_of(await stream) == expected_ids([i, 1], 20)
            reasons = [record.getMessage() for record in caplog.records if "breaks the protocol" in record.message]
            # The text has another request's id than the unit test's
            assert any(why.split(" of r ")[0] in reason for reason in reasons), reasons
            await check_unharmed(Cluster([honest], [router]))
    finally:
        await server.stop(0)
        await honest.stop()
