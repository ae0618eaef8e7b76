"""A router's link to an executor: how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from inflight.v1 import executor_pb2
from router.executors import link as links
from router.executors.link import ExecutorLink
from router.store.types import Lost
from tests.scripted_store import ScriptedRouter, accepts, new_stream, placement, settled, steps


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

    await asyncio.wait((serving,), timeout=60)
    assert serving.cancelled()


async def test_token_of_a_void_placement_is_dropped() -> None:
    router, stream = ScriptedRouter("m"), new_stream()
    first, second = router.link("e0", "m"), router.link("e1", "m")
    store = router.stores["m"]
    async with router.running():
        store.answers.append(placement())
        await router.pools.find("m").dispatcher.submit(stream)
        first.receive(accepts(1))
        first.receive(steps(3, 4, cached=0))
        # When the ledger has placed it on another executor, and the first one does not know that yet
        store.answers.append(placement(2, "e1"))
        store.tell(Lost("r", 1, "e0", 1))
        await settled()
        second.receive(accepts(2))
        first.receive(steps(0, offset=2))
        second.receive(steps(1, offset=2, cached=0))
        # Then only what the second one says counts
        assert stream.output_ids == [3, 4, 1]
