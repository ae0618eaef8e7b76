"""A client that stops reading: its call ends, its request continues for a while, and other clients are unaffected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import duration_pb2
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from inflight.router.api.service import InferenceService
from inflight.router.settings import RouterSettings
from inflight.router.stream import relay as patience
from inflight.router.stream.relay import Write
from inflight.v1 import inference_pb2, types_pb2
from tests.fuzz.served import HANG_S, until_empty
from tests.fuzz.statuses import status_of
from tests.integration.test_hostile_clients import NO_WINDOW, dispatcher_of, inference_stub, until
from tests.integration.test_requests import collect, expected_ids, ids_of, rest
from tests.support.device.fake_device import VOCABULARY_SIZE
from tests.support.stack import cluster as clusters
from tests.support.stack.cluster import PATIENCE_S, Cluster, run_cluster, token_request

PROMPT = [3, 1]
NUM_TOKENS = 40
# A token's text: 40 of them are much more than a connection holds unread.
WORD_BYTES = 20_000
OUTPUT = inference_pb2.OutputOptions(text=True, token_ids=True)


def wordy_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of long words."""
    words = {str(i) * WORD_BYTES: i for i in range(VOCABULARY_SIZE)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=next(iter(words))))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> RouterSettings:
    """A client may leave its stream unread for 0.3 s, but only the first one, and not before it has an event: a machine
    that stands still must end no other call."""
    monkeypatch.setattr(clusters, "tiny_tokenizer", wordy_tokenizer)
    monkeypatch.setattr(patience, "STALLED_GRACE_S", PATIENCE_S)
    writers: list[Any] = []
    real = InferenceService._patient

    def timed(service: InferenceService, write: Write) -> Write:
        async def write_and_lose_patience(event: inference_pb2.StreamEvent) -> None:
            await write(event)
            writers[0]._timeout_s = timeout_s

        writers.append(real(service, write if writers else write_and_lose_patience))
        timeout_s, writers[-1]._timeout_s = writers[-1]._timeout_s, PATIENCE_S
        return writers[-1]  # type: ignore[no-any-return]

    monkeypatch.setattr(InferenceService, "_patient", timed)
    return RouterSettings(no_executor_grace_s=PATIENCE_S, write_timeout_s=0.3)


class StalledClient:
    """Reads the first event of a stream and then nothing more."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = inference_stub(channel)
        self.events: list[inference_pb2.StreamEvent] = []

    async def begin(self, **fields: Any) -> None:
        request = token_request(PROMPT, NUM_TOKENS, **fields)
        request.output.CopyFrom(OUTPUT)
        self._call = self._stub.Generate(request)
        self.events.append((await self._call.read()).event)

    async def status(self) -> tuple[str, str]:
        """Reads what there is, up to the end of the call."""
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                self.events.append(response.event)
        except grpc.aio.AioRpcError as error:
            return status_of(error)
        return "OK", ""

    async def resume(self) -> list[inference_pb2.StreamEvent]:
        """Resumes from the next offset, to the end."""
        accepted = self.events[0].accepted
        request = inference_pb2.ResumeRequest(
            request_id=accepted.request_id, resume_token=accepted.resume_token, offsets=[len(ids_of(self.events))]
        )
        events = await rest(self._stub.Resume(request))
        self.events += [event for event in events if event.HasField("delta")]
        return events


@asynccontextmanager
async def scene(redis_url: str, pool: str, settings: RouterSettings) -> AsyncIterator[tuple[Cluster, StalledClient]]:
    async with (
        run_cluster(redis_url, pool, settings=settings) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address, options=NO_WINDOW) as channel,
    ):
        yield cluster, StalledClient(channel)


def check_whole(client: StalledClient, events: list[inference_pb2.StreamEvent]) -> None:
    assert ids_of(client.events) == expected_ids(PROMPT, NUM_TOKENS)
    text = "".join(event.delta.text for event in client.events if event.HasField("delta"))
    assert text == "".join(str(token_id) * WORD_BYTES for token_id in ids_of(client.events))
    assert events[-2].finished.reason == types_pb2.FINISH_REASON_LENGTH


def goes_on_unattended(cluster: Cluster) -> Callable[[], object]:
    """Whether a request whose client was given up goes on."""
    return lambda: dispatcher_of(cluster).streams and not cluster.routers[0].service._num_streams


async def step_until(cluster: Cluster, condition: Callable[[], object]) -> None:
    """Makes steps until the condition holds, and none of the request's last ten. Each waits until the router has the
    token of the one before, so that tokens are written one by one: a single message of any size can be written
    unread."""
    brake, (stream,) = cluster.executors[0].brake, dispatcher_of(cluster).streams
    for num_tokens in range(NUM_TOKENS - 10):
        await until(lambda num_tokens=num_tokens: condition() or len(stream.output_ids) >= num_tokens)
        if condition():
            return
        brake.permit(1)
    await until(condition)


async def test_stalled_stream_ends_and_resumes_while_its_request_goes_on(
    redis_url: str, pool: str, settings: RouterSettings
) -> None:
    async with scene(redis_url, pool, settings) as (cluster, client):
        # Given a stream that is not read, whose request is not at its end yet
        executor = cluster.executors[0]
        executor.brake.hold()
        await client.begin()
        await step_until(cluster, goes_on_unattended(cluster))
        # When another comes, it gets its tokens at the pace at which it would without
        executor.brake.release()
        assert ids_of(await collect(cluster.routers[0], token_request([2], 30), HANG_S)) == expected_ids([2], 30)
        assert executor.engine.num_steps <= NUM_TOKENS + 30 + 4
        # Then the first learns what happened when it reads again, and goes on where it was
        assert await client.status() == ("ABORTED", "STALLED")
        assert len(ids_of(client.events)) < NUM_TOKENS - 10
        check_whole(client, await client.resume())
        await until_empty(cluster)


async def test_stalled_stream_of_a_request_that_has_ended_resumes(
    redis_url: str, pool: str, settings: RouterSettings
) -> None:
    async with scene(redis_url, pool, settings) as (cluster, client):
        await client.begin()
        await until_empty(cluster)
        await asyncio.wait_for(cluster.routers[0].service._no_stream.wait(), HANG_S)
        assert await client.status() == ("ABORTED", "STALLED")
        check_whole(client, await client.resume())


@pytest.mark.parametrize("wants_none", [True, False])
async def test_request_that_no_client_resumes_ends(
    redis_url: str, pool: str, settings: RouterSettings, wants_none: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not wants_none:
        monkeypatch.setattr(patience, "STALLED_GRACE_S", 0.05)
    async with scene(redis_url, pool, settings) as (cluster, client):
        executor = cluster.executors[0]
        executor.brake.hold()
        wanted: dict[str, Any] = {"resume_ttl": duration_pb2.Duration()} if wants_none else {}
        await client.begin(**wanted)
        # The engine is told during a step, or before it plans the next one
        await step_until(cluster, lambda: not executor.engine._inbox.empty() or not executor.scheduler.num_held)
        executor.brake.release()
        await until_empty(cluster)
        assert executor.engine.num_steps < NUM_TOKENS
