"""Arbitrary frames from a router: the executor answers as documented and lives, and other routers' sequences are
unharmed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inflight.executor.serving.router_session import Session
from inflight.v1 import executor_pb2, types_pb2
from tests.fuzz.messages import bytes_of
from tests.fuzz.served import Loop, check_unharmed
from tests.fuzz.statuses import check_documented
from tests.integration.test_requests import collect, expected_ids, ids_of
from tests.support.stack.cluster import Cluster, ExecutorShape, run_cluster, token_request
from tests.unit.test_router_session import is_waiting, make_sequence, take
from tools.reference.statuses import Statuses, documented

pytestmark = [
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
    # As an error it would stand in the place of the failure that it comes with.
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]

SERVE = "/inflight.v1.ExecutorService/Serve"
P = "inflight.v1."
IDS = st.sampled_from(["x", "y", "bystander"])
HINTS = {
    f"{P}Submit.request_id": st.sampled_from(["x", "y"]),
    f"{P}Submit.attempt": st.integers(1, 3),
    f"{P}Submit.prompt_ids": st.lists(st.integers(0, 4), min_size=1, max_size=20),
    f"{P}Submit.prior_output_ids": st.just([]),
    f"{P}Submit.reserved_blocks": st.integers(4, 9),
    f"{P}Submit.num_choices": st.integers(0, 1),
    f"{P}Submit.num_top_logprobs": st.just(0),
    f"{P}Submit.deadline_ms": st.sampled_from([0, 1, 2**64 - 1]),
    f"{P}SamplingParams.temperature": st.just(0.0),
    f"{P}SamplingParams.top_p": st.just(1.0),
    f"{P}StoppingParams.max_tokens": st.sampled_from([1, 8, 44, 2**32 - 1]),
    f"{P}StoppingParams.stop_token_ids": st.just([]),
    f"{P}CancelSequence.request_id": IDS,
    f"{P}CancelSequence.attempt": st.integers(0, 3).map(lambda attempt: attempt + 10),
    f"{P}Attach.request_id": st.sampled_from(["x", "y", "unknown"]),
    f"{P}Hello.router_id": st.sampled_from(["hostile", ""]),
    f"{P}Hello.protocol_version": st.just(1),
    f"{P}Hello.generation": st.just(1),
}


def hello(**fields: Any) -> executor_pb2.ServeRequest:
    said = executor_pb2.Hello(router_id="hostile", protocol_version=1, generation=1)
    said.MergeFrom(executor_pb2.Hello(**fields))
    return executor_pb2.ServeRequest(hello=said)


def submit(request_id: str, **fields: Any) -> executor_pb2.Submit:
    """A sound submit of three blocks, with these fields changed."""
    sound = executor_pb2.Submit(
        request_id=request_id,
        attempt=1,
        prompt_ids=[1, 2],
        sampling=types_pb2.SamplingParams(temperature=0, top_p=1),
        stopping=types_pb2.StoppingParams(max_tokens=8, ignore_eos=True),
        reserved_blocks=3,
    )
    for name, value in fields.items():
        sound.ClearField(name)
        sound.MergeFrom(executor_pb2.Submit(**{name: value}))
    return sound


# Always answered, by an acceptance or a rejection.
BARRIER = executor_pb2.ServeRequest(submits=[submit("barrier")]).SerializeToString()


class HostileRouter:
    """Sends what it is told and notes what it is answered."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.rejected: list[executor_pb2.SequenceRejected] = []
        self.finished = 0
        self.error: grpc.aio.AioRpcError | None = None
        self._channel = channel

    async def send(self, frames: list[bytes]) -> None:
        """Sends all and reads until the last of it is answered, be it by a status."""
        stream: Any = self._channel.stream_stream(SERVE)
        call = stream(self._frames(frames))
        try:
            async for response in call:
                if self._take_in(executor_pb2.ServeResponse.FromString(response)):
                    return
        except grpc.aio.AioRpcError as error:
            # So says our own side where the other ended the stream while we wrote to it.
            self.error = None if error.details() == "Internal error from Core" else error
        finally:
            call.cancel()

    async def _frames(self, frames: list[bytes]) -> AsyncIterator[bytes]:
        for frame in frames:
            yield frame
        await asyncio.Event().wait()

    def _take_in(self, response: executor_pb2.ServeResponse) -> bool:
        """Whether the barrier is answered."""
        self.rejected += response.rejected
        self.finished += len(response.step.finished)
        answered = {one.request_id for one in response.accepted} | {one.request_id for one in response.rejected}
        return "barrier" in answered


def check_answers(router: HostileRouter, statuses: Statuses) -> None:
    for one in router.rejected:
        assert one.reason in executor_pb2.RejectReason.values()
        assert one.reason != executor_pb2.REJECT_REASON_UNSPECIFIED
        assert one.detail
    if router.error is not None:
        check_documented("ExecutorService", router.error, statuses)


async def attack(cluster: Cluster, channel: grpc.aio.Channel, frames: list[bytes]) -> HostileRouter:
    """Sends the frames while another router's request runs, which must notice nothing."""
    request = token_request([3, 1], 10, request_id="")
    bystander = asyncio.create_task(collect(cluster.routers[0], request))
    router = HostileRouter(channel)
    await router.send(frames)
    assert ids_of(await bystander) == expected_ids([3, 1], 10)
    return router


async def test_any_frame_is_answered_as_documented_without_harm(redis_url: str, pool: str) -> None:
    statuses, loop = documented(), Loop()
    frames = bytes_of(executor_pb2.ServeRequest, HINTS)
    first = st.one_of(st.just(hello().SerializeToString()), frames)
    async with run_cluster(redis_url, pool, shape=ExecutorShape(num_blocks=64, max_num_sequences=8)) as cluster:
        async with grpc.aio.insecure_channel(cluster.executors[0].address) as channel:

            @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
            @given(first=first, rest=st.lists(frames, max_size=4))
            def one(first: bytes, rest: list[bytes]) -> None:
                check_answers(loop.run(attack(cluster, channel, [first, *rest, BARRIER])), statuses)

            await asyncio.to_thread(one)
        await check_unharmed(cluster)


def frame(*submits: executor_pb2.Submit, **fields: Any) -> executor_pb2.ServeRequest:
    return executor_pb2.ServeRequest(submits=submits, **fields)


REJECTED: dict[str, tuple[Callable[[], executor_pb2.ServeRequest], set[int]]] = {
    "flood of submits": (
        lambda: frame(*(submit(f"f-{i}") for i in range(3000))),
        {executor_pb2.REJECT_REASON_NO_CAPACITY},
    ),
    "one id many times": (
        lambda: frame(*(submit("same", reserved_blocks=3) for _ in range(100))),
        {executor_pb2.REJECT_REASON_STALE_ATTEMPT},
    ),
    "older attempt": (
        lambda: frame(submit("old", attempt=5), submit("old", attempt=4)),
        {executor_pb2.REJECT_REASON_STALE_ATTEMPT},
    ),
    "all blocks reserved for one": (
        lambda: frame(submit("greedy", reserved_blocks=2**32 - 1)),
        {executor_pb2.REJECT_REASON_NO_CAPACITY},
    ),
    "no block reserved": (lambda: frame(submit("free", reserved_blocks=0)), {executor_pb2.REJECT_REASON_INVALID}),
    "prompt beyond the context": (
        lambda: frame(submit("long", prompt_ids=[1] * 500_000)),
        {executor_pb2.REJECT_REASON_INVALID},
    ),
    "token outside the vocabulary": (
        lambda: frame(submit("strange", prompt_ids=[2**32 - 1])),
        {executor_pb2.REJECT_REASON_INVALID},
    ),
    "huge id": (lambda: frame(submit("i" * 1_000_000)), {executor_pb2.REJECT_REASON_INVALID}),
    "no id": (lambda: frame(submit("")), {executor_pb2.REJECT_REASON_INVALID}),
    "id with a NUL": (lambda: frame(submit("a\0b")), {executor_pb2.REJECT_REASON_INVALID}),
    "no number for a temperature": (
        lambda: frame(submit("nan", sampling=types_pb2.SamplingParams(temperature=float("nan"), top_p=1))),
        {executor_pb2.REJECT_REASON_INVALID},
    ),
}


@pytest.mark.parametrize("name", REJECTED)
async def test_submit_that_cannot_run_is_rejected_with_the_reason(redis_url: str, pool: str, name: str) -> None:
    make_frame, reasons = REJECTED[name]
    async with run_cluster(redis_url, pool, shape=ExecutorShape(num_blocks=64, max_num_sequences=8)) as cluster:
        async with grpc.aio.insecure_channel(cluster.executors[0].address) as channel:
            sent = [hello().SerializeToString(), make_frame().SerializeToString(), BARRIER]
            router = await attack(cluster, channel, sent)
        assert {one.reason for one in router.rejected if one.request_id != "barrier"} == reasons
        assert router.error is None
        await check_unharmed(cluster)


@pytest.mark.parametrize(
    "frames",
    [
        [frame(submit("early"))],
        [hello(), hello()],
        [hello(router_id="r" * 1_000_000)],
        [hello(router_id="a\nb")],
        [hello(), b"\xff\xff\xff"],
    ],
    ids=["no hello", "two hellos", "huge router id", "router id of two lines", "no message"],
)
async def test_stream_that_is_no_routers_ends_with_a_status(redis_url: str, pool: str, frames: list[Any]) -> None:
    sent = [one if isinstance(one, bytes) else one.SerializeToString() for one in frames]
    async with run_cluster(redis_url, pool) as cluster:
        async with grpc.aio.insecure_channel(cluster.executors[0].address) as channel:
            router = await attack(cluster, channel, sent)
        assert router.error is not None
        assert router.error.code() is grpc.StatusCode.INVALID_ARGUMENT
        check_answers(router, documented())
        await check_unharmed(cluster)


async def test_acknowledging_what_was_never_sent_gives_no_credit() -> None:
    session = Session("router", 1, 1)
    sequence = make_sequence("a")
    session.accept(sequence)
    session.acknowledge(2**64 - 1)
    session.token(sequence, 0, 10)
    assert (await take(session)).step.frame == 1
    session.token(sequence, 1, 11)
    assert is_waiting(session)
