"""Compatibility of routers and executors one version apart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from inflight.common.protocol import PROTOCOL_VERSION
from inflight.router.dispatch.ledger_writer import ledger_report
from inflight.router.executors.link import ExecutorLink
from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from tests.support.ledger.scripted_store import ScriptedRouter


class Call:
    """A Serve stream that sends one report and keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[executor_pb2.ServeRequest] = []
        self._is_told = asyncio.Event()

    async def write(self, request: executor_pb2.ServeRequest) -> None:
        self.told.append(request)
        self._is_told.set()

    async def __aiter__(self) -> AsyncIterator[executor_pb2.ServeResponse]:
        await self._is_told.wait()
        yield executor_pb2.ServeResponse(generation=1)

    def cancel(self) -> None:
        pass


class Stub:
    """An executor that speaks one version."""

    def __init__(self, version: int) -> None:
        self.call = Call()
        self._version = version

    async def Describe(self, request: Any, timeout: float) -> executor_pb2.DescribeResponse:
        return executor_pb2.DescribeResponse(
            executor_id="e0",
            generation=1,
            protocol_version=self._version,
            model="m",
            block_size=4,
            total_blocks=8,
            max_num_sequences=2,
            context_length=64,
            vocabulary_size=5,
        )

    def Serve(self) -> Call:
        return self.call


async def linked(version: int) -> tuple[ExecutorLink, Call]:
    link, stub = ExecutorLink("e0:1", "router", ScriptedRouter("m").pools), Stub(version)
    await link._serve(cast(executor_pb2_grpc.ExecutorServiceStub, stub))
    return link, stub.call


@pytest.mark.parametrize(("theirs", "spoken"), [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, PROTOCOL_VERSION)])
async def test_router_speaks_the_older_of_the_two_versions(theirs: int, spoken: int) -> None:
    link, call = await linked(theirs)
    assert link.is_up
    assert call.told[0].hello.protocol_version == spoken


@pytest.mark.parametrize(
    ("version", "fields", "ends"),
    [
        (4, {}, True),
        (3, {}, False),
        (4, {"batching": types_pb2.BATCHING_MODE_STATIC}, False),
        (4, {"scheduler_policy": types_pb2.SCHEDULER_POLICY_MAX_UTILIZATION}, False),
    ],
)
async def test_executor_gets_partial_reservations_if_it_ends_placements_there(
    version: int, fields: dict[str, Any], ends: bool
) -> None:
    link, _ = await linked(version)
    link.description.MergeFrom(executor_pb2.DescribeResponse(**fields))
    assert ledger_report(link, executor_pb2.Report(seq=1)).ends_at_reservation == ends


async def test_executor_of_no_known_version_is_not_used_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    link, call = await linked(0)
    assert not link.is_up
    assert call.told == []
    assert f"it speaks protocol version 0, this router 1 to {PROTOCOL_VERSION}" in caplog.text
