"""The client library on a whole cluster: routers die in mid-stream, and its user just sees the next token."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, Self

import pytest

from inflight import aio, sync
from inflight.events import Completion, Delta, Resumed
from tests.integration.test_requests import expected_ids
from tests.support.stack.cluster import Cluster, ExecutorShape, RunningRouter, run_cluster

# Of a cluster whose routers resume.
KILL: Any = getattr(RunningRouter, "kill", None)
pytestmark = pytest.mark.skipif(KILL is None, reason="the routers of this tree do not resume streams")

PROMPT = [1, 2, 3]
NUM_TOKENS = 20
OPTIONS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "want_token_ids": True}
WAIT_S = 60.0


def addresses(cluster: Cluster) -> list[str]:
    return [router.address for router in cluster.routers]


def check_whole(result: Completion) -> None:
    expected = expected_ids(PROMPT, NUM_TOKENS)
    assert list(result.token_ids) == expected
    assert result.text == "".join(f"t{token}" for token in expected)
    assert result.usage.output_tokens == NUM_TOKENS


def serving(cluster: Cluster, stream: aio.AsyncStream | sync.Stream) -> RunningRouter:
    """The router that serves a stream."""
    request_id = stream.request_id
    assert request_id is not None
    (router,) = [one for one in cluster.routers if one.pools.find("").dispatcher.stream_of(request_id)]
    return router


class Cut:
    """A TCP proxy to a router whose connections can be cut; a new connection gets through."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Resets every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, back]
        await asyncio.gather(_pump(reader, back), _pump(there, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while received := await reader.read(65536):
            writer.write(received)
    writer.close()


async def until_read(stream: aio.AsyncStream, num_tokens: int, events: Any) -> None:
    while stream.transcript.choices[0].num_tokens < num_tokens:
        await anext(events)


async def test_a_router_that_dies_in_mid_stream_is_not_noticed(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster, asyncio.timeout(WAIT_S):
        brake = cluster.executors[0].brake
        brake.hold()
        async with aio.AsyncClient(*addresses(cluster)) as client:
            stream = client.generate(token_ids=PROMPT, **OPTIONS)
            events = stream.events()
            brake.permit(6)
            await until_read(stream, 5, events)
            await KILL(serving(cluster, stream))
            brake.release()
            seen = [event async for event in events]
    assert [type(event) for event in seen].count(Resumed) == 1
    assert all(isinstance(event, Delta | Resumed) for event in seen[:-2])
    check_whole(stream.transcript.result())
    assert cluster.executors[0].device.boarded == [stream.request_id], "it ran once"


async def test_a_connection_cut_under_a_living_router_is_not_noticed(redis_url: str, pool: str) -> None:
    """To the router the client is gone: it cancels the request. The client goes on from its own copy."""
    async with run_cluster(redis_url, pool, routers=1) as cluster, asyncio.timeout(WAIT_S):
        brake = cluster.executors[0].brake
        brake.hold()
        async with Cut(cluster.routers[0].address) as way, aio.AsyncClient(way.address) as client:
            stream = client.generate(token_ids=PROMPT, **OPTIONS)
            events = stream.events()
            brake.permit(6)
            await until_read(stream, 5, events)
            way.cut()
            brake.release()
            async for _ in events:
                pass
    check_whole(stream.transcript.result())
    # The router may notice the cut only after the client has come back, and cancel the request then.
    assert stream.num_resumes >= 1


async def test_the_sync_client_outlives_its_router_too(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster, asyncio.timeout(WAIT_S):
        brake, loop = cluster.executors[0].brake, asyncio.get_running_loop()
        brake.hold()

        def read() -> sync.Stream:
            with sync.Client(*addresses(cluster)) as client:
                stream = client.generate(token_ids=PROMPT, **OPTIONS)
                deltas = iter(stream)
                while stream.transcript.choices[0].num_tokens < 5:
                    next(deltas)
                asyncio.run_coroutine_threadsafe(KILL(serving(cluster, stream)), loop).result(WAIT_S)
                brake.release()
                for _ in deltas:
                    pass
                return stream

        brake.permit(6)
        stream = await asyncio.to_thread(read)
    check_whole(stream.transcript.result())
    assert stream.num_resumes == 1


# --- several choices

SEED = 5


async def read_choices(cluster: Cluster) -> list[list[int]]:
    """The outputs of single requests with the seeds of the choices."""
    options = {**OPTIONS, "temperature": 1.0}
    async with aio.AsyncClient(*addresses(cluster)) as client:
        return [
            list((await client.complete(token_ids=PROMPT, seed=SEED + choice, **options)).token_ids)
            for choice in range(4)
        ]


def check_choices(result: Completion, expected: list[list[int]]) -> None:
    assert [choice.token_ids for choice in result.choices] == expected
    assert [choice.text for choice in result.choices] == ["".join(f"t{token}" for token in ids) for ids in expected]
    assert result.usage.output_tokens == 4 * NUM_TOKENS


@pytest.mark.parametrize(
    ("max_num_sequences", "is_cut"), [(4, False), (2, False), (8, True)], ids=["running", "waiting", "connection cut"]
)
async def test_choices_outlive_their_router_or_connection_whether_they_run_or_wait(
    redis_url: str, pool: str, max_num_sequences: int, is_cut: bool
) -> None:
    shape = ExecutorShape(num_blocks=64, max_num_sequences=max_num_sequences)
    async with run_cluster(redis_url, pool, routers=2, shape=shape) as cluster, asyncio.timeout(WAIT_S):
        brake = cluster.executors[0].brake
        async with (
            Cut(cluster.routers[0].address) as way,
            aio.AsyncClient(*([way.address] if is_cut else addresses(cluster))) as client,
        ):
            brake.hold()
            stream = client.generate(token_ids=PROMPT, n=4, **{**OPTIONS, "temperature": 1.0, "seed": SEED})
            events = stream.events()
            brake.permit(8)
            await until_read(stream, 5, events)
            if is_cut:
                way.cut()
            else:
                await KILL(serving(cluster, stream))
            brake.release()
            seen = [event async for event in events]
        expected = await read_choices(cluster)
    assert [type(event).__name__ for event in seen].count("Finished") == 4
    check_choices(stream.transcript.result(), expected)
