"""Calls in any order, at any moment: requests started, cancelled, resumed, dropped and asked about.

However it goes, every stream ends with one end or a documented status, and when all is over nothing is left: no
sequence, no block, no reservation.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.v1 import inference_pb2
from tests.fuzz.served import Loop, check_unharmed, until_empty
from tests.fuzz.statuses import check_documented
from tests.integration.test_requests import expected_ids, ids_of
from tests.support.stack.cluster import Cluster, ExecutorShape, run_cluster, token_request
from tools.reference.statuses import Statuses, documented

pytestmark = [
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
    # As an error it would stand in the place of the failure that it comes with.
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]

IDS = st.sampled_from(["a", "b", "c"])
ROUTER = st.integers(0, 1)
OPERATIONS = st.one_of(
    st.tuples(st.just("generate"), ROUTER, IDS, st.integers(1, 20), st.booleans()),
    st.tuples(st.just("read"), st.integers(0, 9), st.integers(1, 4)),
    st.tuples(st.just("disconnect"), st.integers(0, 9)),
    st.tuples(st.just("cancel"), ROUTER, IDS, st.sampled_from(["", "t", "\0"])),
    st.tuples(
        st.just("resume"), ROUTER, IDS, st.text(max_size=4), st.sampled_from([[], [0], [5], [2**32 - 1], [1, 1]])
    ),
    st.tuples(st.just("look"), ROUTER, IDS, st.sampled_from(["", "t"])),
    st.tuples(st.just("step"), st.integers(1, 3)),
)


@dataclass(slots=True)
class Client:
    """One client with many calls under way."""

    cluster: Cluster
    statuses: Statuses
    streams: list[tuple[Any, str]] = field(default_factory=list)

    async def do(self, name: str, *args: Any) -> None:
        """One operation by its name. A refusal must be a documented one."""
        operations: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {
            "generate": self._generate,
            "read": self._read,
            "disconnect": self._disconnect,
            "cancel": self._cancel,
            "resume": self._resume,
            "look": self._look,
            "step": self._step,
        }
        await operations[name](*args)

    async def end(self) -> None:
        """Reads every stream to its end."""
        for executor in self.cluster.executors:
            executor.brake.release()
        for number in range(len(self.streams)):
            await self._read(number, None)

    async def _generate(self, router: int, request_id: str, max_tokens: int, wants_queue_events: bool) -> None:
        request = token_request([3, 1], max_tokens, request_id=request_id, want_queue_events=wants_queue_events)
        self.streams.append((self.cluster.routers[router].stub.Generate(request), "Generate"))

    async def _resume(self, router: int, request_id: str, token: str, offsets: list[int]) -> None:
        request = inference_pb2.ResumeRequest(request_id=request_id, resume_token=token, offsets=offsets)
        self.streams.append((self.cluster.routers[router].stub.Resume(request), "Resume"))

    async def _read(self, number: int, num_events: int | None) -> None:
        """So many events of a stream, or all that it has."""
        if not self.streams:
            return
        call, rpc = self.streams[number % len(self.streams)]
        while num_events is None or num_events > 0:
            num_events = None if num_events is None else num_events - 1
            try:
                if await call.read() is grpc.aio.EOF:
                    return
            except asyncio.CancelledError:
                assert call.cancelled()
                return
            except grpc.aio.AioRpcError as error:
                check_documented(rpc, error, self.statuses)
                return

    async def _disconnect(self, number: int) -> None:
        if self.streams:
            self.streams[number % len(self.streams)][0].cancel()

    async def _cancel(self, router: int, request_id: str, token: str) -> None:
        request = inference_pb2.CancelRequest(request_id=request_id, resume_token=token)
        await self._unary("Cancel", self.cluster.routers[router].stub.Cancel(request))

    async def _look(self, router: int, request_id: str, token: str) -> None:
        request = inference_pb2.GetRequestRequest(request_id=request_id, resume_token=token)
        await self._unary("GetRequest", self.cluster.routers[router].stub.GetRequest(request))

    async def _unary(self, rpc: str, call: Any) -> None:
        try:
            await call
        except grpc.aio.AioRpcError as error:
            check_documented(rpc, error, self.statuses)

    async def _step(self, num_turns: int) -> None:
        for _ in range(num_turns):
            await asyncio.sleep(0)


async def play(cluster: Cluster, statuses: Statuses, operations: list[tuple[Any, ...]]) -> None:
    client = Client(cluster, statuses)
    for operation in operations:
        await client.do(*operation)
    await client.end()
    await until_empty(cluster)


async def test_calls_in_any_order_leave_nothing_behind(redis_url: str, pool: str) -> None:
    statuses, loop = documented(), Loop()
    async with run_cluster(redis_url, pool, routers=2, shape=ExecutorShape(max_num_sequences=2)) as cluster:

        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.lists(OPERATIONS, max_size=15))
        def one(operations: list[tuple[Any, ...]]) -> None:
            loop.run(play(cluster, statuses, operations))

        await asyncio.to_thread(one)
        await check_unharmed(cluster)


async def one_of_the_storm(cluster: Cluster, statuses: Statuses, number: int, chance: random.Random) -> str:
    """Starts a request and leaves it at a random point; says how it ended."""
    router = cluster.routers[number % len(cluster.routers)]
    request_id, max_tokens = f"storm-{number}", chance.randrange(1, 24)
    request = token_request([number % 5, 1], max_tokens, request_id=request_id, want_queue_events=chance.random() < 0.5)
    how, num_events = chance.choice(["disconnect", "cancel", "end"]), chance.randrange(4)
    call: Any = router.stub.Generate(request)
    events: list[inference_pb2.StreamEvent] = []
    try:
        if how == "disconnect" and num_events == 0:
            for _ in range(chance.randrange(30)):
                await asyncio.sleep(0)
        while len(events) < num_events and (response := await call.read()) is not grpc.aio.EOF:
            events.append(response.event)
        if how == "disconnect":
            call.cancel()
            return "disconnected"
        if how == "cancel":
            other = chance.choice(cluster.routers)
            try:
                await other.stub.Cancel(inference_pb2.CancelRequest(request_id=request_id))
            except grpc.aio.AioRpcError as error:
                check_documented("Cancel", error, statuses)
        while (response := await call.read()) is not grpc.aio.EOF:
            events.append(response.event)
    except grpc.aio.AioRpcError as error:
        check_documented("Generate", error, statuses)
        return error.code().name
    ends = [event.finished.reason for event in events if event.HasField("finished")]
    assert len(ends) == 1, f"{request_id} has {len(ends)} ends"
    assert events[-1].HasField("done")
    assert ids_of(events) == expected_ids([number % 5, 1], max_tokens)[: len(ids_of(events))]
    return "ended"


async def test_cancel_storm_ends_every_request_once_and_leaves_nothing(redis_url: str, pool: str) -> None:
    chance, statuses = random.Random(5), documented()
    shape = ExecutorShape(max_num_sequences=4, num_standby_sequences=2)
    # So many at a time: a call that waits for 30 s before the server takes it is cancelled by gRPC.
    turns = asyncio.Semaphore(200)
    async with run_cluster(redis_url, pool, executors=2, routers=2, shape=shape) as cluster:

        async def one_in_turn(number: int) -> str:
            async with turns:
                return await one_of_the_storm(cluster, statuses, number, chance)

        ends = await asyncio.gather(*(one_in_turn(number) for number in range(1000)))
        # On busy cores the loop that all of this shares may be late with an executor's report or a reply of Redis.
        assert set(ends) <= {"ended", "disconnected", "UNAVAILABLE"}
        assert ends.count("UNAVAILABLE") < len(ends) / 2
        assert len(ends) == 1000
        await check_unharmed(cluster)
