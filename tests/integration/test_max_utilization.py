"""An executor under max_utilization, driven as by a router: real gRPC, real scheduler; the device is a hash."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from inflight.executor.scheduler.scheduler import SchedulerPolicy
from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from tests.integration.test_requests import DEFAULT_SALT, expected_ids
from tests.support.stack.cluster import BLOCK_SIZE, ExecutorShape, start_executor


@dataclass(slots=True)
class Wanted:
    """A request, and what came of it."""

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    attempt: int = 0
    output: list[int] = field(default_factory=list)
    reason: types_pb2.FinishReason = types_pb2.FINISH_REASON_UNSPECIFIED

    def submit(self) -> executor_pb2.Submit:
        """The next placement, with what it has so far as output and as little reserved as may be."""
        self.attempt += 1
        num_tokens = len(self.prompt_ids) + len(self.output)
        return executor_pb2.Submit(
            request_id=self.request_id,
            attempt=self.attempt,
            prompt_ids=self.prompt_ids,
            prior_output_ids=self.output,
            sampling=types_pb2.SamplingParams(temperature=0, top_p=1.0, top_k=0, seed=0),
            stopping=types_pb2.StoppingParams(max_tokens=self.max_tokens, ignore_eos=True),
            reserved_blocks=num_tokens // BLOCK_SIZE + 1,
            cache_salt=DEFAULT_SALT,
            num_choices=1,
        )


class GreedyRouter:
    """Places everything at once, again when refused or handed back, and notes what it is told."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = {request.request_id: request for request in wanted}
        self._slots: dict[int, Wanted] = {}
        self._refused: list[Wanted] = list(wanted)
        self._requests: asyncio.Queue[executor_pb2.ServeRequest] = asyncio.Queue()
        self.report = executor_pb2.Report()
        self.num_paused = 0

    @property
    def is_done(self) -> bool:
        """Whether everyone has ended for good."""
        return all(request.reason for request in self._wanted.values())

    async def run(self, address: str) -> None:
        """Until everyone has ended and the executor says that it is empty."""
        hello = executor_pb2.Hello(router_id="greedy", protocol_version=1, generation=1)
        self._requests.put_nowait(executor_pb2.ServeRequest(hello=hello))
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
            self._place()
            async for response in stub.Serve(self._outgoing()):
                self._take(response)
                if self.is_done and response.HasField("report") and not response.report.used_blocks:
                    return

    async def _outgoing(self) -> AsyncIterator[executor_pb2.ServeRequest]:
        while True:
            yield await self._requests.get()

    def _place(self) -> None:
        submits = [request.submit() for request in self._refused]
        self._refused = []
        if submits:
            self._requests.put_nowait(executor_pb2.ServeRequest(submits=submits))

    def _take(self, response: executor_pb2.ServeResponse) -> None:
        for accepted in response.accepted:
            self._slots[accepted.slots[0]] = self._wanted[accepted.request_id]
        for rejected in response.rejected:
            assert rejected.reason == executor_pb2.REJECT_REASON_NO_CAPACITY, rejected.detail
            self._refused.append(self._wanted[rejected.request_id])
        self._take_step(response.step)
        if response.HasField("report"):
            self.report = response.report
            self._place()

    def _take_step(self, step: executor_pb2.StepFrame) -> None:
        for slot, offset, token_id in zip(step.slots, step.offsets, step.token_ids, strict=True):
            assert offset == len(self._slots[slot].output)
            self._slots[slot].output.append(token_id)
        self.num_paused += len(step.paused)
        for finished in step.finished:
            request = self._slots.pop(finished.slot)
            if finished.reason == types_pb2.FINISH_REASON_PREEMPTED:
                self._refused.append(request)
            else:
                request.reason = finished.reason
        if step.frame:
            self._requests.put_nowait(executor_pb2.ServeRequest(ack=executor_pb2.Ack(frame=step.frame)))


def crowd(count: int) -> list[Wanted]:
    """Short prompts, long outputs: little is reserved, much is used."""
    chance = random.Random(11)
    return [
        Wanted(f"r{i}", [chance.randrange(5) for _ in range(chance.randint(1, 12))], chance.randint(8, 40))
        for i in range(count)
    ]


@pytest.mark.parametrize("overlap", [False, True])
async def test_everyone_gets_exactly_its_tokens_from_a_pool_that_holds_a_third_of_them(overlap: bool) -> None:
    shape = ExecutorShape(
        num_blocks=24,
        max_num_sequences=6,
        num_standby_sequences=2,
        policy=SchedulerPolicy.MAX_UTILIZATION,
        num_host_blocks=16,
        overlap=overlap,
    )
    wanted = crowd(40)
    router = GreedyRouter(wanted)
    executor = await start_executor("greedy", "model", shape)
    try:
        async with asyncio.timeout(60):
            await router.run(executor.address)
        executor.scheduler.check_when_idle()
    finally:
        await executor.stop()

    for request in wanted:
        assert request.output == expected_ids(request.prompt_ids, request.max_tokens)
        assert request.reason == types_pb2.FINISH_REASON_LENGTH
    report = router.report
    assert report.num_preemptions > 0
    assert router.num_paused > 0
    assert report.computed_tokens > report.recomputed_tokens
    assert 0.5 <= report.reserve_quantile <= 1.0
    assert sum(bound.num_steps for bound in report.bounds) > 0
    assert (report.used_host_blocks, report.num_preempted) == (0, 0)


async def test_router_can_preempt_a_sequence_and_is_told_so() -> None:
    executor = await start_executor("greedy", "model", ExecutorShape(policy=SchedulerPolicy.MAX_UTILIZATION))
    requests: asyncio.Queue[executor_pb2.ServeRequest] = asyncio.Queue()
    request = Wanted("r", [1], 40)
    hello = executor_pb2.Hello(router_id="priority", protocol_version=1, generation=1)
    requests.put_nowait(executor_pb2.ServeRequest(hello=hello))
    requests.put_nowait(executor_pb2.ServeRequest(submits=[request.submit()]))
    cancel = executor_pb2.CancelSequence(request_id="r", attempt=1, reason=types_pb2.FINISH_REASON_PREEMPTED)

    async def outgoing() -> AsyncIterator[executor_pb2.ServeRequest]:
        while True:
            yield await requests.get()

    executor.brake.hold()
    try:
        async with asyncio.timeout(60), grpc.aio.insecure_channel(executor.address) as channel:
            stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
            async for response in stub.Serve(outgoing()):
                if response.step.started:
                    requests.put_nowait(executor_pb2.ServeRequest(cancels=[cancel]))
                # One step for each frame, so that the cancel is there long before the last token.
                if response.HasField("step"):
                    executor.brake.permit(1)
                if response.step.finished:
                    break
        assert response.step.finished[0].reason == types_pb2.FINISH_REASON_PREEMPTED
    finally:
        await executor.stop()


async def test_sequence_past_its_deadline_ends_with_that_reason() -> None:
    executor = await start_executor("late", "model", ExecutorShape())
    submit = Wanted("r", [1], 40).submit()
    submit.reserved_blocks = 12
    submit.deadline_ms = 0
    hello = executor_pb2.Hello(router_id="late", protocol_version=1, generation=1)
    requests = [executor_pb2.ServeRequest(hello=hello), executor_pb2.ServeRequest(submits=[submit])]

    async def outgoing() -> AsyncIterator[executor_pb2.ServeRequest]:
        for request in requests:
            yield request
        await asyncio.Event().wait()

    try:
        async with asyncio.timeout(60), grpc.aio.insecure_channel(executor.address) as channel:
            stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
            async for response in stub.Serve(outgoing()):
                if response.step.finished:
                    break
        assert response.step.finished[0].reason == types_pb2.FINISH_REASON_DEADLINE
        assert len(response.step.token_ids) == 0
    finally:
        await executor.stop()
