"""Streams that share calls, through real processes: a router is killed while it serves many of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inflight import AsyncClient
from inflight.aio_stream import AsyncStream
from inflight.local.options import StackOptions
from inflight.local.process import ChildProcess
from inflight.local.stack import LocalStack
from tests.support.stack.braked import ProcessBrake

NUM_STREAMS = 40  # more than a call carries
NUM_TOKENS = 150
OPTIONS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "want_token_ids": True}
EXECUTOR_ARGS = ("--dtype", "float32", "--max-num-sequences", str(NUM_STREAMS), "--num-threads", "1")


def start_all(client: AsyncClient) -> list[AsyncStream]:
    return [client.generate(f"{number}: once upon a time", **OPTIONS) for number in range(NUM_STREAMS)]


async def serving(stack: LocalStack, streams: Sequence[AsyncStream]) -> ChildProcess:
    """Returns the router of a stream that has not ended; that router alone knows its number of tokens."""
    for stream in streams:
        if stream.request_id is None:
            continue  # not accepted yet
        for router in stack.routers:
            async with AsyncClient(router.address) as client:
                if (await client.get_request(stream.request_id)).output_tokens:
                    return router
    raise AssertionError("no router serves a stream")


async def test_router_killed_under_shared_calls_costs_no_token(tmp_path: Path, tiny_model: Path) -> None:
    brake = ProcessBrake(tmp_path / "brake")
    options = StackOptions(
        model=str(tiny_model), routers=2, executor_args=EXECUTOR_ARGS, run_dir=tmp_path, program=brake.program(20)
    )
    async with LocalStack(options) as stack, asyncio.timeout(240):
        async with AsyncClient(*stack.router_addresses) as client:
            alone = [await stream.result() for stream in start_all(client)]
        async with AsyncClient(*stack.router_addresses, share_calls=True) as client:
            brake.hold()  # no stream ends before its router does
            streams = start_all(client)
            has_begun = asyncio.Event()

            async def read(stream: AsyncStream) -> None:
                async for _ in stream:
                    has_begun.set()

            async with asyncio.TaskGroup() as tasks:
                for stream in streams:
                    tasks.create_task(read(stream))
                await has_begun.wait()
                (await serving(stack, streams)).kill()
                brake.release()
    shared = [stream.transcript.result() for stream in streams]
    assert [one.token_ids for one in shared] == [one.token_ids for one in alone]
    assert [one.text for one in shared] == [one.text for one in alone]
    assert sum(stream.num_resumes for stream in streams) > 0, "the router served at least one"
