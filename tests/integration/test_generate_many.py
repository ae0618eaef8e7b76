"""`GenerateMany`: many streams on one call, of which none affects another."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from google.rpc import status_pb2

from inflight.router.api import generate_many
from inflight.router.api.generate_many import StreamWriter
from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2, types_pb2
from tests.fuzz.served import check_unharmed, until_empty
from tests.integration.test_hostile_clients import dispatcher_of, inference_stub, until
from tests.integration.test_requests import expected_ids
from tests.support.stack.cluster import PATIENCE_S, Cluster, ExecutorShape, RunningRouter, run_cluster, token_request

Message = inference_pb2.GenerateManyRequest
OK, CANCELLED, INVALID_ARGUMENT, DEADLINE_EXCEEDED = 0, 1, 3, 4
RESOURCE_EXHAUSTED, ABORTED, UNAUTHENTICATED = 8, 10, 16


class Call:
    """A call, with the events and ends of its streams that were read."""

    def __init__(self, stub: Any, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._call = stub.GenerateMany(metadata=metadata)
        self.events: dict[int, list[inference_pb2.StreamEvent]] = {}
        self.ends: dict[int, list[status_pb2.Status]] = {}
        # The streams with an event in each message.
        self.messages: list[list[int]] = []

    async def send(self, number: int, **fields: Any) -> None:
        await self._call.write(Message(stream=number, **fields))

    async def send_bytes(self, serialized: bytes) -> None:
        await self._call.write(serialized)

    async def hold(self, number: int) -> None:
        """Holds a stream, and returns when the router has taken the message in: a later one has been answered."""
        marker = 1_000_000 + number
        await self.send(number, hold=True)
        await self.send(marker)
        await self.read_until_ended(marker)
        assert self.code(marker) == INVALID_ARGUMENT

    async def read(self) -> bool:
        """Reads a message. Returns whether there was one."""
        response = await asyncio.wait_for(self._call.read(), PATIENCE_S)
        if response is grpc.aio.EOF:
            return False
        self.messages.append([update.stream for update in response.updates if update.HasField("event")])
        for update in response.updates:
            assert update.stream not in self.ends, "nothing follows the end"
            if update.HasField("event"):
                self.events.setdefault(update.stream, []).append(update.event)
            else:
                self.ends[update.stream] = [status_pb2.Status.FromString(update.ended.status)]
        return True

    async def read_to_end(self) -> None:
        """Sends nothing more and reads everything."""
        await self._call.done_writing()
        while await self.read():
            pass

    async def read_until_ended(self, *numbers: int) -> None:
        while not set(numbers) <= self.ends.keys():
            assert await self.read()

    async def read_tokens(self, number: int, num_tokens: int) -> None:
        while len(self.ids(number)) < num_tokens:
            assert await self.read()

    def ids(self, number: int) -> list[int]:
        """The token ids that were read, after checking that offsets leave no gap."""
        deltas = [event.delta for event in self.events.get(number, []) if event.HasField("delta")]
        for before, after in itertools.pairwise(deltas):
            assert after.offset == before.offset + before.num_tokens
        return [token_id for delta in deltas for token_id in delta.token_ids]

    def code(self, number: int) -> int:
        return int(self.ends[number][0].code)

    def cancel(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def opened(router: RunningRouter, metadata: tuple[tuple[str, str], ...] = ()) -> AsyncIterator[Call]:
    async with grpc.aio.insecure_channel(router.address) as channel:
        yield Call(inference_stub(channel), metadata)


async def until_all_have_tokens(cluster: Cluster, num_streams: int) -> None:
    """Permits one step at a time until so many requests have a token each, since no step waits for a late request."""
    brake = cluster.executors[0].brake

    def have_tokens() -> bool:
        streams = [one for router in cluster.routers for one in router.pools.find("").dispatcher.streams]
        if len(streams) == num_streams and all(stream.output_ids for stream in streams):
            return True
        if brake.is_waited_for.is_set():
            brake.permit(1)
        return False

    await until(have_tokens)


def check_output(call: Call, number: int, prompt: list[int], num_tokens: int) -> None:
    assert call.ids(number) == expected_ids(prompt, num_tokens)
    assert [event.seq for event in call.events[number]] == list(range(len(call.events[number])))
    assert call.events[number][-1].HasField("done")
    assert call.code(number) == OK


async def test_streams_of_a_call_get_their_own_output_and_share_messages(redis_url: str, pool: str) -> None:
    shape = ExecutorShape(num_blocks=64, max_num_sequences=8)
    async with run_cluster(redis_url, pool, shape=shape) as cluster, opened(cluster.routers[0]) as call:
        executor = cluster.executors[0]
        executor.brake.hold()
        for number in range(8):
            await call.send(number, generate=token_request([1, number % 5], 20))
        # The first is in a step, and the engine takes the others in at its end
        await until(lambda: executor.scheduler.num_held + executor.engine._inbox.qsize() == 8)
        executor.brake.release()
        await call.read_to_end()
        for number in range(8):
            check_output(call, number, [1, number % 5], 20)
        assert max(map(len, call.messages)) >= 8, "a step's tokens leave together"
        await check_unharmed(cluster)


async def test_refused_streams_affect_no_other(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster, opened(cluster.routers[0]) as call:
        await call.send(1, generate=token_request([1, 2], 20))
        await call.send(2, generate=token_request([1, 2], 5, output=inference_pb2.OutputOptions(top_logprobs=99)))
        await call.send(3, resume=inference_pb2.ResumeRequest(request_id="r", resume_token="wrong"))
        await call.send(4)
        await call.send(5, generate=token_request([2], 5), metadata={"x-api-key": "another"})
        await call.send(6, generate=token_request([3], 20))
        await call.read_to_end()
        check_output(call, 1, [1, 2], 20)
        check_output(call, 6, [3], 20)
        codes = {number: call.code(number) for number in (2, 3, 4, 5)}
        assert codes == {2: INVALID_ARGUMENT, 3: 5, 4: INVALID_ARGUMENT, 5: INVALID_ARGUMENT}
        assert "top_logprobs" in call.ends[2][0].message
        assert "metadata" in call.ends[5][0].message


async def test_message_that_cannot_be_parsed_ends_its_stream_alone(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        async with grpc.aio.insecure_channel(cluster.routers[0].address) as channel:
            method = "/inflight.v1.InferenceService/GenerateMany"
            raw: Any = channel.stream_stream(
                method, response_deserializer=inference_pb2.GenerateManyResponse.FromString
            )

            class Raw:
                def GenerateMany(self, metadata: Any) -> Any:
                    return raw(metadata=metadata)

            call = Call(Raw())
            good = [Message(stream=n, generate=token_request([n % 99], 10)).SerializeToString() for n in (1, 300)]
            bad_text = Message(stream=200, generate=inference_pb2.GenerateRequest(model="?")).SerializeToString()
            await call.send_bytes(good[0])
            await call.send_bytes(bad_text.replace(b"?", b"\xff"))
            await call.send_bytes(good[1])
            await call.read_until_ended(1, 200, 300)
            check_output(call, 1, [1], 10)
            check_output(call, 300, [3], 10)
            assert call.code(200) == INVALID_ARGUMENT
            # Without a number that can be read, only the call can be answered.
            await call.send_bytes(b"\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.read()
            assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await check_unharmed(cluster)


async def test_number_in_use_ends_that_stream_and_no_other(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster, opened(cluster.routers[0]) as call:
        brake = cluster.executors[0].brake
        brake.hold()
        await call.send(1, generate=token_request([1], 20))
        await call.send(2, generate=token_request([2], 20))
        await until(lambda: len(dispatcher_of(cluster).streams) == 2)
        await call.send(1, generate=token_request([3], 20))
        await call.read_until_ended(1)
        assert call.code(1) == INVALID_ARGUMENT
        brake.release()
        # The number is free again.
        await call.send(1, cancel=inference_pb2.CancelStream())
        await call.read_until_ended(2)
        check_output(call, 2, [2], 20)
        await until_empty(cluster)


async def test_cancelled_stream_frees_its_blocks_and_others_go_on(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster, opened(cluster.routers[0]) as call:
        brake = cluster.executors[0].brake
        brake.hold()
        await call.send(1, generate=token_request([1], 40))
        await call.send(2, generate=token_request([2], 20))
        brake.permit(24)  # enough for both in turn: the second may begin first
        await call.read_tokens(1, 2)
        await call.send(1, cancel=inference_pb2.CancelStream())
        await call.read_until_ended(1)
        assert call.code(1) == CANCELLED
        brake.release()
        await call.read_to_end()
        check_output(call, 2, [2], 20)
        assert len(call.ids(1)) < 40
        await until_empty(cluster)


async def test_stream_cancelled_at_once_ends_once(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster, opened(cluster.routers[0]) as call:
        # No stream can come to its end before its cancellation is read
        cluster.executors[0].brake.hold()
        for number in range(20):
            await call.send(number, generate=token_request([1], 20))
            await call.send(number, cancel=inference_pb2.CancelStream())
        await call.read_until_ended(*range(20))
        cluster.executors[0].brake.release()
        await call.send(99, generate=token_request([2], 10))
        await call.read_to_end()
        check_output(call, 99, [2], 10)
        assert {call.code(number) for number in range(20)} == {CANCELLED}
        assert not cluster.routers[0].service._stream_limit._num_of
        await until_empty(cluster)


@pytest.mark.parametrize("is_detached", [False, True])
async def test_broken_call_ends_each_request_as_its_own_call_would(
    redis_url: str, pool: str, is_detached: bool
) -> None:
    async with run_cluster(redis_url, pool) as cluster, opened(cluster.routers[0]) as call:
        brake = cluster.executors[0].brake
        brake.hold()
        for number in (1, 2):
            await call.send(number, generate=token_request([number], 30, detach=is_detached))
        await until_all_have_tokens(cluster, 2)
        await call.read_tokens(1, 1)
        await call.read_tokens(2, 1)
        streams = list(dispatcher_of(cluster).streams)
        call.cancel()
        if is_detached:
            brake.release()
            await until(lambda: all(stream.is_complete for stream in streams))
        else:
            await until(lambda: all(stream.life.is_abandoned for stream in streams))
            brake.release()
        await until_empty(cluster)
        assert all(len(stream.output_ids) == 30 for stream in streams) is is_detached


async def test_resumed_stream_continues_after_what_was_read(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster, opened(cluster.routers[0]) as call:
        brake = cluster.executors[0].brake
        brake.hold()
        await call.send(1, generate=token_request([1], 20, resume_ttl=duration_pb2.Duration(seconds=60)))
        brake.permit(5)
        await call.read_tokens(1, 3)
        accepted, num_read = call.events[1][0].accepted, len(call.ids(1))
        resume = inference_pb2.ResumeRequest(
            request_id=accepted.request_id, resume_token=accepted.resume_token, offsets=[num_read]
        )
        await call.send(2, resume=resume)
        await call.read_until_ended(1)
        assert call.code(1) == ABORTED, "a request has one reader"
        brake.release()
        await call.read_to_end()
        assert call.ids(1)[:num_read] + call.ids(2) == expected_ids([1], 20)


async def test_held_stream_collects_its_tokens_and_delays_no_other(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster, opened(cluster.routers[0]) as call:
        brake = cluster.executors[0].brake
        brake.hold()
        await call.send(1, generate=token_request([1], 30))
        await until_all_have_tokens(cluster, 1)
        await call.read_tokens(1, 1)
        await call.hold(1)
        await call.send(2, generate=token_request([2], 30))
        brake.release()
        await call.read_until_ended(2)
        check_output(call, 2, [2], 30)
        num_before = len(call.events[1])
        assert len(call.ids(1)) < 30
        assert 1 not in call.ends
        await call.send(1, hold=False)
        await call.read_to_end()
        check_output(call, 1, [1], 30)
        # What came while it was held: an event that was under way, the tokens since, and the end.
        assert len(call.events[1]) - num_before <= 5


async def test_stream_that_is_held_too_long_ends_and_resumes(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only of streams that are held: a machine that stands still must not end the call.
    monkeypatch.setattr(generate_many, "StreamWriter", lambda outbox, number, _: StreamWriter(outbox, number, 0.2))
    async with run_cluster(redis_url, pool) as cluster, opened(cluster.routers[0]) as call:
        brake = cluster.executors[0].brake
        brake.hold()
        await call.send(1, generate=token_request([1], 30))
        await until_all_have_tokens(cluster, 1)
        await call.read_tokens(1, 1)
        await call.hold(1)
        await call.send(2, generate=token_request([2], 10))
        brake.release()
        await call.read_until_ended(1, 2)
        check_output(call, 2, [2], 10)
        assert call.code(1) == ABORTED
        assert "not read for 0.2 s" in call.ends[1][0].message
        accepted, num_read = call.events[1][0].accepted, len(call.ids(1))
        resume = inference_pb2.ResumeRequest(
            request_id=accepted.request_id, resume_token=accepted.resume_token, offsets=[num_read]
        )
        await call.send(3, resume=resume)
        await call.read_to_end()
        assert call.ids(1) + call.ids(3) == expected_ids([1], 30)


async def test_timeout_of_a_stream_is_its_deadline(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster, opened(cluster.routers[0]) as call:
        brake = cluster.executors[0].brake
        brake.hold()
        soon = duration_pb2.Duration(nanos=50_000_000)
        await call.send(1, generate=token_request([1], 30), timeout=soon)
        await call.send(2, generate=token_request([2], 10))
        await call.read_until_ended(1)
        finished = [event.finished for event in call.events[1] if event.HasField("finished")]
        assert [one.reason for one in finished] == [types_pb2.FINISH_REASON_DEADLINE]
        brake.release()
        await call.read_to_end()
        check_output(call, 2, [2], 10)


async def test_streams_count_towards_the_limit_of_the_connection(redis_url: str, pool: str) -> None:
    settings = RouterSettings(no_executor_grace_s=PATIENCE_S, max_streams_per_connection=2)
    async with run_cluster(redis_url, pool, settings=settings) as cluster, opened(cluster.routers[0]) as call:
        brake = cluster.executors[0].brake
        brake.hold()
        for number in (1, 2, 3):
            await call.send(number, generate=token_request([number], 10))
        await call.read_until_ended(3)
        assert call.code(3) == RESOURCE_EXHAUSTED
        brake.release()
        await call.read_until_ended(1, 2)
        await call.send(4, generate=token_request([4], 10))
        await call.read_to_end()
        for number in (1, 2, 4):
            check_output(call, number, [number], 10)


def numbers_of(cluster: Cluster) -> list[int]:
    return [router.service._num_streams for router in cluster.routers]


async def test_draining_router_refuses_streams_of_calls_that_are_open(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster, opened(cluster.routers[0]) as call:
        brake = cluster.executors[0].brake
        brake.hold()
        await call.send(1, generate=token_request([1], 10))
        brake.permit(2)
        await call.read_tokens(1, 1)
        draining = asyncio.create_task(cluster.routers[0].service.drain(PATIENCE_S))
        await until(lambda: cluster.routers[0].service.is_draining)
        await call.send(2, generate=token_request([2], 10))
        await call.read_until_ended(2)
        assert call.code(2) == 14
        brake.release()
        await call.read_to_end()
        check_output(call, 1, [1], 10)
        await draining
        assert numbers_of(cluster) == [0]
