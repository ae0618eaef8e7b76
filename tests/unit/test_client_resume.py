"""Both clients over real gRPC, with routers that break off, go away, come back and take over."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import aclosing

import grpc
import pytest

from inflight import aio, sync
from inflight.common.errors import Reason, RequestError, not_implemented
from inflight.errors import InflightError
from inflight.events import Event, FinishReason, Resumed
from inflight.v1 import inference_pb2
from tests.unit.scripted_router import WORDS, ScriptedRouter, accepted, delta, ending, serving, speak, started

Events = Iterator[inference_pb2.StreamEvent]

WAIT_S = 60.0
ANSWER = "".join(WORDS)


def breaks_after(num_words: int, error: RequestError | None = None) -> Callable[..., Events]:
    """A script that says so many words and breaks off."""

    def script(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield accepted()
        yield started()
        for offset in range(num_words):
            yield delta(WORDS[offset], offset)
        raise error or RequestError(Reason.DRAINING, "the router goes away")

    return script


def resumes(request: inference_pb2.ResumeRequest, context: grpc.ServicerContext) -> Events:
    """Says the words behind those that the client has."""
    offset = request.offsets[0]
    assert list(request.text_bytes) == [len("".join(WORDS[:offset]).encode())]
    yield accepted()
    yield started("executor-1")
    for behind in range(offset, len(WORDS)):
        yield delta(WORDS[behind], behind)
    yield from ending(len(WORDS))


def continues(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
    """Breaks off once, and continues a request that brings what it has."""
    has = len(request.prior_output.output_ids)
    if not has:
        yield from breaks_after(2)(request, context)
    yield accepted("r2")
    for behind in range(has, len(WORDS)):
        yield delta(WORDS[behind], behind)
    yield from ending(len(WORDS))


def asked(router: ScriptedRouter) -> list[str]:
    return [type(router.requests.get()).__name__ for _ in range(router.requests.qsize())]


def read_both(address: str, **options: bool | float) -> list[tuple[str, list[Event]]]:
    """What each client makes of it: the text and the events."""
    with sync.Client(address, **options) as client:  # type: ignore[arg-type]
        stream = client.generate("hi")
        found = [([*stream.events()], stream.transcript)]

    async def read() -> None:
        async with aio.AsyncClient(address, **options) as client:  # type: ignore[arg-type]
            stream = client.generate("hi")
            found.append(([event async for event in stream.events()], stream.transcript))

    asyncio.run(read())
    return [(transcript.choices[0].text, events) for events, transcript in found]


# --- going on


def test_a_stream_that_breaks_is_resumed_unseen() -> None:
    router = ScriptedRouter(breaks_after(2), resumes)
    with serving(router) as address:
        for text, events in read_both(address):
            assert text == ANSWER
            assert [event.number for event in events if isinstance(event, Resumed)] == [1]
    assert asked(router) == ["GenerateRequest", "ResumeRequest"] * 2


def test_lost_output_is_continued_from_the_clients_own_copy() -> None:
    router = ScriptedRouter(continues)
    with serving(router) as address:
        assert [text for text, _ in read_both(address)] == [ANSWER] * 2
    requests = [router.requests.get() for _ in range(router.requests.qsize())]
    first, resume, second = requests[:3]
    assert isinstance(resume, inference_pb2.ResumeRequest)
    assert second.idempotency_key == first.idempotency_key != requests[3].idempotency_key
    assert list(second.prior_output.output_ids) == [100, 101]


def test_a_router_that_knows_no_keys_is_asked_without() -> None:
    def script(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        if request.idempotency_key:
            raise not_implemented("idempotency_key", "recognizing a repeated submit is")
        yield from speak(WORDS)

    with serving(ScriptedRouter(script)) as address:
        assert [text for text, _ in read_both(address)] == [ANSWER] * 2


def test_another_reader_ends_the_stream_with_an_error() -> None:
    taken = RequestError(Reason.TAKEN_OVER, "another router serves it")
    router = ScriptedRouter(breaks_after(1, taken), resumes)
    with serving(router) as address, sync.Client(address) as client:
        stream = client.generate("hi")
        with pytest.raises(InflightError, match="one reader"):
            stream.text()
        assert stream.num_resumes == 0


def test_a_stream_that_ends_without_its_last_event_is_resumed() -> None:
    def stops(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield accepted()
        yield delta(WORDS[0], 0)

    with serving(ScriptedRouter(stops, resumes)) as address:
        assert [text for text, _ in read_both(address)] == [ANSWER] * 2


async def test_a_user_who_holds_a_token_resumes_from_where_he_was() -> None:
    router = ScriptedRouter(resume=resumes)
    begun = len("".join(WORDS[:2]))
    with serving(router) as address:
        async with aio.AsyncClient(address) as client:
            assert await client.resume("r1", "secret", offset=2, text_bytes=begun).text() == "is Paris."
        with sync.Client(address) as sync_client:
            stream = await asyncio.to_thread(sync_client.resume, "r1", "secret", offset=2, text_bytes=begun)
            assert await asyncio.to_thread(stream.text) == "is Paris."
            assert (stream.request_id, stream.resume_token) == ("r1", "secret")
    assert router.requests.get() == inference_pb2.ResumeRequest(
        request_id="r1", resume_token="secret", offsets=[2], text_bytes=[begun]
    )


# --- leaving while it is broken


def away(request: inference_pb2.ResumeRequest, context: grpc.ServicerContext) -> Events:
    """Asks for more patience than any test here has."""
    raise RequestError(Reason.STORE_UNAVAILABLE, "the store is away", retry_after_ms=30_000)


async def test_cancelling_while_it_waits_to_resume_ends_it_at_once() -> None:
    router = ScriptedRouter(breaks_after(1), away)
    with serving(router) as address:
        async with aio.AsyncClient(address, retries=False) as client, asyncio.timeout(WAIT_S):
            stream = client.generate("hi")
            reading = asyncio.create_task(stream.text())
            await asyncio.to_thread(_until_resumed, router)
            stream.cancel()
            assert await reading == WORDS[0]
            assert stream.finish_reason is FinishReason.CANCELLED


def test_another_thread_cancels_a_sync_stream_that_waits_to_resume() -> None:
    router = ScriptedRouter(breaks_after(1), away)
    with serving(router) as address, sync.Client(address, retries=False) as client:
        stream = client.generate("hi")

        def cancel() -> None:
            _until_resumed(router)
            stream.cancel()

        canceller = threading.Thread(target=cancel)
        canceller.start()
        assert stream.text() == WORDS[0]
        canceller.join(WAIT_S)
        assert stream.finish_reason is FinishReason.CANCELLED


async def test_cancelling_the_task_that_waits_to_resume_stays_a_cancellation() -> None:
    router = ScriptedRouter(breaks_after(1), away)
    with serving(router) as address:
        async with aio.AsyncClient(address, retries=False) as client, asyncio.timeout(WAIT_S):
            reading = asyncio.create_task(client.complete("hi"))
            await asyncio.to_thread(_until_resumed, router)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading


def test_it_gives_up_after_the_timeout_with_what_broke() -> None:
    router = ScriptedRouter(breaks_after(1), away)
    with serving(router) as address, sync.Client(address, retries=False, resume_timeout=20.0) as client:
        stream = client.generate("hi")
        with pytest.raises(InflightError, match="the store is away"):
            stream.text()
        assert stream.finish_reason is None


def test_the_deadline_holds_across_resumptions() -> None:
    router = ScriptedRouter(breaks_after(1), away)
    with (
        serving(router) as address,
        sync.Client(address, retries=False) as client,
        pytest.raises(InflightError) as caught,
    ):
        client.generate("hi", timeout=25.0).text()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the store is away" in caught.value.description


async def test_closing_the_client_ends_a_stream_that_would_resume() -> None:
    router = ScriptedRouter(breaks_after(1), resumes)
    with serving(router) as address:
        client = aio.AsyncClient(address)
        async with aclosing(client.generate("hi").events()) as events:
            await anext(events)
            await client.close()
            with pytest.raises(InflightError, match="the client was closed"):
                async for _ in events:
                    pass


def test_closing_the_sync_client_ends_a_stream_that_would_resume() -> None:
    held = threading.Event()

    def hangs(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield accepted()
        held.wait(WAIT_S)

    with serving(ScriptedRouter(hangs, resumes)) as address:
        client = sync.Client(address)
        events = client.generate("hi").events()
        next(events)
        client.close()
        with pytest.raises(InflightError, match="the client was closed"):
            list(events)
        held.set()


def _until_resumed(router: ScriptedRouter) -> None:
    """Returns when the router was asked for the rest."""
    while not isinstance(router.requests.get(timeout=WAIT_S), inference_pb2.ResumeRequest):
        pass
