"""A soak against a router that the test writes down: every request is sent, and memory is read as they go by."""

from __future__ import annotations

import os
from collections.abc import Iterator

import grpc
import pytest
from rich.progress import Progress as Bars

from bench.options import parse_options
from bench.soak.count import SHAPE, Soak, soak
from bench.targets.target import TargetError
from bench.workloads.generate import shaped_requests
from common.errors import Reason, RequestError
from inflight.aio import Client
from inflight.cli.outcome import CommandError
from inflight.v1 import inference_pb2
from tests.unit.scripted_router import ScriptedRouter, serving, speak

Events = Iterator[inference_pb2.StreamEvent]
REQUESTS = shaped_requests(SHAPE, "soak", 100, num_requests=20)


def answer(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
    yield from speak(["x"] * request.stopping.max_tokens)


async def test_every_request_is_sent_and_memory_is_read_for_each_process() -> None:
    router = ScriptedRouter(answer)
    with serving(router) as address:
        async with Client(address) as client:
            soaked = Soak(client, {"router-0": os.getpid()}, REQUESTS, Bars(disable=True))
            await soaked.run(concurrency=4)
    assert (soaked.num_done, soaked.num_failed, router.requests.qsize()) == (20, 0, 20)
    assert [reading.num_requests for reading in soaked.readings["router-0"]] == list(range(1, 21))
    assert all(reading.resident_bytes > 0 for reading in soaked.readings["router-0"])


async def test_failures_are_counted_and_the_soak_goes_on() -> None:
    def refuse(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        raise RequestError(Reason.QUEUE_FULL, "the queue is full")

    with serving(ScriptedRouter(refuse)) as address:
        async with Client(address) as client:
            soaked = Soak(client, {}, REQUESTS, Bars(disable=True))
            await soaked.run(concurrency=2)
    assert (soaked.num_done, soaked.num_failed) == (20, 20)
    assert "the queue is full" in (soaked.first_error or "")


async def test_process_that_ended_ends_the_soak() -> None:
    with serving(ScriptedRouter(answer)) as address:
        async with Client(address) as client:
            soaked = Soak(client, {"executor-0": 2**30}, REQUESTS, Bars(disable=True))
            with pytest.raises(TargetError, match="memory of executor-0"):
                await soaked.run(concurrency=2)


async def test_soak_of_a_router_elsewhere_is_refused() -> None:
    with pytest.raises(CommandError, match="--address"):
        await soak(parse_options(["--soak", "5", "--address", "somewhere:1"]), 5)
