"""Streams of the asynchronous client that share calls: its guarantees are those of streams with a call of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any

import grpc
import pytest

from inflight import AsyncClient, aio_many
from inflight.aio_stream import AsyncStream
from inflight.common.errors import Reason
from inflight.errors import InflightError
from inflight.events import FinishReason
from inflight.router.api.generate_many import ManyCall
from inflight.router.settings import RouterSettings
from tests.fuzz.served import until_empty
from tests.integration.test_client_resumes import WAIT_S, addresses, serving
from tests.integration.test_generate_many import until_all_have_tokens
from tests.integration.test_hostile_clients import until
from tests.integration.test_requests import expected_ids
from tests.support.stack.cluster import Cluster, ExecutorShape, run_cluster
from tests.unit.scripted_router import WORDS, ScriptedRouter
from tests.unit.scripted_router import serving as serving_scripted

SHAPE = ExecutorShape(num_blocks=128, max_num_sequences=8)
OPTIONS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "want_token_ids": True}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[ManyCall]:
    """The shared calls that routers have served."""
    served: list[ManyCall] = []
    real = ManyCall.run

    async def run(call: ManyCall, messages: Any) -> None:
        served.append(call)
        await real(call, messages)

    monkeypatch.setattr(ManyCall, "run", run)
    return served


def start(client: AsyncClient, prompt: list[int], num_tokens: int = 20, **options: Any) -> AsyncStream:
    return client.generate(token_ids=prompt, max_tokens=num_tokens, **OPTIONS, **options)


async def check(stream: AsyncStream, prompt: list[int], num_tokens: int = 20) -> None:
    assert list((await stream.result()).token_ids) == expected_ids(prompt, num_tokens)


async def all_run(cluster: Cluster, num_streams: int) -> None:
    await until(lambda: sum(router.service._num_streams for router in cluster.routers) == num_streams)


async def test_streams_share_a_call_and_fail_alone(redis_url: str, pool: str, calls: list[ManyCall]) -> None:
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster, asyncio.timeout(WAIT_S):
        brake = cluster.executors[0].brake
        brake.hold()
        async with AsyncClient(*addresses(cluster), share_calls=True) as client:
            streams = {n: start(client, [1, n]) for n in range(5)}
            refused = start(client, [1], top_logprobs=99)
            cancelled = start(client, [2, 2])
            await all_run(cluster, 6)
            with pytest.raises(InflightError) as error:
                await refused.result()
            assert (error.value.code, error.value.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                Reason.INVALID_FIELD.value,
            )
            assert [field.field for field in error.value.fields] == ["output.top_logprobs"]
            cancelled.cancel()
            await all_run(cluster, 5)
            assert cancelled.finish_reason is FinishReason.CANCELLED
            brake.release()
            for n, stream in streams.items():
                await check(stream, [1, n])
                assert stream.num_resumes == 0
            assert len(calls) == 1
            # The call has ended with its last stream.
            await until(lambda: not calls[0]._streams and not client._connection.shared._calls)  # type: ignore[union-attr]
            await check(start(client, [3]), [3])
        assert len(calls) == 2
        await until_empty(cluster)


async def test_calls_have_few_streams_and_one_caller_each(
    redis_url: str, pool: str, calls: list[ManyCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_many, "MAX_STREAMS", 3)
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster, asyncio.timeout(WAIT_S):
        brake = cluster.executors[0].brake
        brake.hold()
        async with AsyncClient(*addresses(cluster), share_calls=True) as client:
            streams = [start(client, [n]) for n in range(4)]
            await all_run(cluster, 4)
            assert sorted(len(call._streams) for call in calls) == [1, 3]
            request = client.generate(token_ids=[4], max_tokens=20, **OPTIONS)._recovery.call(0.0).request
            other = client.send(request, metadata={"x-api-key": "another"})  # type: ignore[arg-type]
            await until(lambda: len(calls) == 3)
            other.cancel()
            brake.release()
            for n, stream in enumerate(streams):
                await check(stream, [n])


def has_more(unread: Collection[object], num_before: int) -> bool:
    return len(unread) > num_before


async def test_slow_reader_is_held_and_delays_no_other(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_many, "HOLD_EVENTS", 3)
    monkeypatch.setattr(aio_many, "GO_ON_EVENTS", 1)
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster, asyncio.timeout(WAIT_S):
        brake = cluster.executors[0].brake
        brake.hold()
        async with AsyncClient(*addresses(cluster), share_calls=True) as client:
            slow, quick = start(client, [1], 40), start(client, [2], 40)
            await until_all_have_tokens(cluster, 2)
            inbox = slow._call._inbox
            # The tokens of several steps may share an event.
            while not inbox.is_held:
                brake.permit(1)
                await until(partial(has_more, inbox.unread, len(inbox.unread)))
            reading = asyncio.create_task(quick.result())
            call = inbox.call
            await until(lambda: call._messages.empty())
            brake.release()
            assert list((await reading).token_ids) == expected_ids([2], 40)
            assert not inbox.has_ended
            assert len(inbox.unread) < 40, "its tokens collect in the router"
            await check(slow, [1], 40)
            assert slow.num_resumes == 0


@pytest.mark.parametrize("shares", [True, False])
async def test_client_can_do_without_shared_calls(
    redis_url: str, pool: str, calls: list[ManyCall], shares: bool
) -> None:
    async with run_cluster(redis_url, pool) as cluster, asyncio.timeout(WAIT_S):
        async with AsyncClient(*addresses(cluster), share_calls=shares) as client:
            await check(start(client, [1]), [1])
        assert len(calls) == shares


class OldRouter(ScriptedRouter):
    """A router that does not know the call."""

    num_asked = 0

    def GenerateMany(self, requests: Any, context: grpc.ServicerContext) -> Any:
        self.num_asked += 1
        return super().GenerateMany(requests, context)  # type: ignore[no-untyped-call]


async def test_router_without_the_call_gets_calls_of_generate() -> None:
    router = OldRouter()
    with serving_scripted(router) as address:
        async with AsyncClient(address, share_calls=True) as client, asyncio.timeout(WAIT_S):
            streams = [client.generate("hi") for _ in range(5)]
            assert [await stream.text() for stream in streams] == ["".join(WORDS)] * 5
            assert [stream.num_resumes for stream in streams] == [0] * 5
            assert await client.generate("hi").text() == "".join(WORDS)
    assert router.num_asked == 1
    assert router.requests.qsize() == 6


async def test_message_that_crosses_the_end_of_a_call_does_not_hide_its_status() -> None:
    router = OldRouter()
    with serving_scripted(router) as address:
        async with asyncio.timeout(WAIT_S):
            for _ in range(20):  # messages cross the end in most tries
                async with AsyncClient(address, share_calls=True, retries=False) as client:
                    streams = [client.generate("hi") for _ in range(3)]
                    assert [await stream.text() for stream in streams] == ["".join(WORDS)] * 3
    assert router.num_asked == 20


class ClosingRouter(ScriptedRouter):
    """A router that ends every shared call at once, with the status OK."""

    def GenerateMany(self, requests: Any, context: grpc.ServicerContext) -> Any:
        return iter(())


async def test_message_that_crosses_the_end_of_a_call_without_an_error_is_unavailable() -> None:
    with serving_scripted(ClosingRouter()) as address:
        async with asyncio.timeout(WAIT_S):
            for _ in range(20):
                async with AsyncClient(address, share_calls=True, retries=False) as client:
                    streams = [client.generate("hi") for _ in range(3)]
                    ends = await asyncio.gather(*(stream.text() for stream in streams), return_exceptions=True)
                codes = {end.code for end in ends if isinstance(end, InflightError)}
                assert codes == {grpc.StatusCode.UNAVAILABLE}
                assert len(ends) == 3


async def test_large_request_has_a_call_of_its_own(
    redis_url: str, pool: str, calls: list[ManyCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aio_many, "MAX_REQUEST_BYTES", 10)
    async with run_cluster(redis_url, pool) as cluster, asyncio.timeout(WAIT_S):
        async with AsyncClient(*addresses(cluster), share_calls=True) as client:
            await check(start(client, [1]), [1])
        assert not calls


async def test_streams_of_a_router_that_dies_continue_on_another(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2, shape=SHAPE) as cluster, asyncio.timeout(WAIT_S):
        brake = cluster.executors[0].brake
        brake.hold()
        async with AsyncClient(*addresses(cluster), share_calls=True) as client:
            streams = [start(client, [1, n], 50) for n in range(5)]
            events = [stream.events() for stream in streams]
            await until_all_have_tokens(cluster, 5)
            for stream, own in zip(streams, events, strict=True):
                while not stream.transcript.choices[0].num_tokens:
                    await anext(own)
            await serving(cluster, streams[0]).kill()
            brake.release()
            for own in events:
                async for _ in own:
                    pass
            for n, stream in enumerate(streams):
                assert list(stream.transcript.result().token_ids) == expected_ids([1, n], 50)
                assert stream.num_resumes == 1


async def test_deadline_ends_its_stream_alone(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster, asyncio.timeout(WAIT_S):
        brake = cluster.executors[0].brake
        brake.hold()
        async with AsyncClient(*addresses(cluster), share_calls=True) as client:
            late, other = start(client, [1], timeout=0.05), start(client, [2])
            with suppress(InflightError):  # or the router's event comes first
                assert (await late.result()).finish_reason is FinishReason.DEADLINE
            brake.release()
            await check(other, [2])
        await until_empty(cluster)


async def test_dropped_stream_is_cancelled(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster, asyncio.timeout(WAIT_S):
        brake = cluster.executors[0].brake
        brake.hold()
        async with AsyncClient(*addresses(cluster), share_calls=True) as client:
            dropped, other = start(client, [1]), start(client, [2])
            await all_run(cluster, 2)
            del dropped
            await all_run(cluster, 1)
            brake.release()
            await check(other, [2])


async def test_closing_the_client_ends_its_streams(redis_url: str, pool: str) -> None:
    settings = RouterSettings(no_executor_grace_s=WAIT_S)
    async with run_cluster(redis_url, pool, settings=settings) as cluster, asyncio.timeout(WAIT_S):
        cluster.executors[0].brake.hold()
        client = AsyncClient(*addresses(cluster), share_calls=True)
        reading = asyncio.create_task(start(client, [1]).result())
        await all_run(cluster, 1)
        await client.close()
        with pytest.raises(InflightError, match="the client was closed"):
            await reading
        cluster.executors[0].brake.release()
        await until_empty(cluster)
