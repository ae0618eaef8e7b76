"""A router's link to an executor: how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inflight.v1 import executor_pb2
from router.executors import link as links
from router.executors.link import ExecutorLink


class StillCall:
    """A stream that takes everything and says nothing."""

    async def write(self, request: executor_pb2.ServeRequest) -> None:
        await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        """Nothing to end."""

    def __aiter__(self) -> StillCall:
        return self

    async def __anext__(self) -> executor_pb2.ServeResponse:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("it has spoken")


class StillExecutor:
    """Describes itself and is silent from then on."""

    async def Describe(self, request: executor_pb2.DescribeRequest, timeout: float) -> executor_pb2.DescribeResponse:
        return executor_pb2.DescribeResponse(
            executor_id="e",
            generation=1,
            protocol_version=2,
            block_size=16,
            total_blocks=8,
            max_num_sequences=2,
            context_length=64,
            vocabulary_size=100,
        )

    def Serve(self) -> StillCall:
        return StillCall()


class OverSilence:
    """A silence that has just come to its end."""

    is_over = True

    def __init__(self, max_silent_s: int) -> None:
        self.max_silent_s = max_silent_s

    async def watch(self, end: Any) -> None:
        """It ends nothing here."""


async def test_link_that_is_stopped_while_its_executor_is_silent_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "LivenessTimer", OverSilence)
    observer: Any = None
    stub: Any = StillExecutor()
    serving = asyncio.create_task(ExecutorLink("e:1", "router", observer)._serve(stub))
    for _ in range(5):
        await asyncio.sleep(0)

    serving.cancel()

    await asyncio.wait((serving,), timeout=5)
    assert serving.cancelled()
