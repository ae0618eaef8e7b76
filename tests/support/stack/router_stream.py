"""A router's `Serve` stream that a test drives message by message: what was sent on it, slot by slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from tests.support.stack.cluster import BLOCK_SIZE

WAIT_S = 60
# Of the tenant "default", as `expected_ids` takes it.
DEFAULT_SALT = b"default\0"


@dataclass(slots=True)
class Slot:
    """What came for one placement while it had this slot."""

    request_id: str
    attempt: int
    tokens: list[tuple[int, int]] = field(default_factory=list)
    is_started: bool = False
    is_paused: bool = False
    is_detached: bool = False
    end: executor_pb2.SequenceFinished | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens, which must be without gap or repeat."""
        offsets = [offset for offset, _ in self.tokens]
        assert offsets == list(range(offsets[0], offsets[0] + len(offsets))) if offsets else True, offsets
        return [token_id for _, token_id in self.tokens]


class RouterStream:
    """One stream. Frames are acknowledged as they come, unless `acks` is false."""

    def __init__(self, *, protocol_version: int, generation: int, max_unacked_steps: int, acks: bool) -> None:
        self.slots: list[Slot] = []
        # The ids of what has ended, in this order.
        self.ended: list[str] = []
        self.rejected: list[executor_pb2.SequenceRejected] = []
        self.attached: list[executor_pb2.SequenceAttached] = []
        self.reports: list[executor_pb2.Report] = []
        self.is_over = False
        self._by_number: dict[int, Slot] = {}
        self._acks = acks
        self._changed = asyncio.Event()
        self._outgoing: asyncio.Queue[executor_pb2.ServeRequest | None] = asyncio.Queue()
        hello = executor_pb2.Hello(
            router_id="scripted",
            protocol_version=protocol_version,
            generation=generation,
            max_unacked_steps=max_unacked_steps,
        )
        self.send(hello=hello)

    def send(self, **fields: Any) -> None:
        """Sends a message."""
        self._outgoing.put_nowait(executor_pb2.ServeRequest(**fields))

    def attach(self, request_id: str, attempt: int, offset: int) -> None:
        """Asks to read a placement."""
        self.send(attaches=[executor_pb2.Attach(request_id=request_id, attempt=attempt, offset=offset)])

    def of(self, request_id: str, attempt: int = 1) -> list[Slot]:
        """The slots that a placement has had, oldest first."""
        return [slot for slot in self.slots if (slot.request_id, slot.attempt) == (request_id, attempt)]

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until something that came makes the condition true."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def read(self, call: Any) -> None:
        """Takes in what comes until the stream ends."""
        try:
            async for response in call:
                self._take(response)
                self._changed.set()
        finally:
            self.is_over = True
            self._changed.set()

    async def outgoing(self) -> AsyncIterator[executor_pb2.ServeRequest]:
        """What is sent."""
        while (request := await self._outgoing.get()) is not None:
            yield request

    def _take(self, response: executor_pb2.ServeResponse) -> None:
        for accepted in response.accepted:
            self._open(Slot(accepted.request_id, accepted.attempt), *accepted.slots)
        for attached in response.attached:
            self._open(Slot(attached.request_id, attached.attempt), *attached.slots)
        self.attached += response.attached
        self.rejected += response.rejected
        if response.HasField("report"):
            self.reports.append(response.report)
        if response.HasField("step"):
            self._take_step(response.step)

    def _open(self, slot: Slot, number: int) -> None:
        assert number not in self._by_number, f"slot {number} means two sequences"
        self._by_number[number] = slot
        self.slots.append(slot)

    def _take_step(self, step: executor_pb2.StepFrame) -> None:
        for started in step.started:
            self._by_number[started.slot].is_started = True
        for number, offset, token_id in zip(step.slots, step.offsets, step.token_ids, strict=True):
            self._by_number[number].tokens.append((offset, token_id))
        for number in step.paused:
            self._by_number[number].is_paused = True
        for finished in step.finished:
            slot = self._by_number.pop(finished.slot)
            slot.end = finished
            self.ended.append(slot.request_id)
        for number in step.detached:
            self._by_number.pop(number).is_detached = True
        if self._acks:
            self.send(ack=executor_pb2.Ack(frame=step.frame))


@asynccontextmanager
async def router_stream(
    address: str,
    *,
    protocol_version: int = 2,
    generation: int = 1,
    max_unacked_steps: int = 64,
    acks: bool = True,
) -> AsyncIterator[RouterStream]:
    """A stream to an executor; leaving it breaks the stream as the death of its router does."""
    router = RouterStream(
        protocol_version=protocol_version, generation=generation, max_unacked_steps=max_unacked_steps, acks=acks
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = executor_pb2_grpc.ExecutorServiceStub(channel)
        call = stub.Serve(router.outgoing(), wait_for_ready=True)
        reader = asyncio.create_task(router.read(call))
        try:
            await router.until(lambda: router.reports)
            yield router
        finally:
            call.cancel()
            with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await reader


def make_submit(request_id: str, prompt_ids: list[int], max_tokens: int, attempt: int = 1) -> executor_pb2.Submit:
    """A greedy placement reserved to its end."""
    return executor_pb2.Submit(
        request_id=request_id,
        attempt=attempt,
        prompt_ids=prompt_ids,
        sampling=types_pb2.SamplingParams(temperature=0, top_k=0, top_p=1, seed=0),
        stopping=types_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        reserved_blocks=-(-(len(prompt_ids) + max_tokens) // BLOCK_SIZE),
        cache_salt=DEFAULT_SALT,
        num_choices=1,
        router_context=b"context of " + request_id.encode(),
    )
