"""Both clients against a scripted router over real gRPC: streams, ends, cancelling, errors, retries."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from contextlib import aclosing

import grpc
import pytest

from inflight import aio, sync
from inflight.access import channel_target, client_options
from inflight.catalogue import RequestState
from inflight.common.errors import FieldViolation, Reason, RequestError, invalid
from inflight.errors import FieldError, InflightError
from inflight.events import Accepted, Delta, Done, Finished, FinishReason, Started
from inflight.v1 import inference_pb2
from tests.unit.scripted_router import WORDS, ScriptedRouter, accepted, delta, serving, speak, started

Events = Iterator[inference_pb2.StreamEvent]

WAIT_S = 60.0


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def address(router: ScriptedRouter) -> Iterator[str]:
    with serving(router) as served:
        yield served


def endless(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
    """Speaks until the client is gone."""
    yield accepted()
    yield started()
    for offset in itertools.count():
        if not context.is_active():
            return
        yield delta("x", offset)


def refuse(error: RequestError, *, times: int = 1_000) -> ScriptedRouter:
    """A router that refuses the first `times` requests and then answers."""
    left = itertools.count(times, -1)

    def script(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        if next(left) > 0:
            raise error
        yield from speak(WORDS)

    return ScriptedRouter(script)


# --- streams


async def test_deltas_arrive_in_order_and_the_end_is_known(address: str) -> None:
    async with aio.AsyncClient(address) as client:
        stream = client.generate("hi", want_token_ids=True)
        deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == "The capital is Paris."
    assert deltas[1] == Delta(text="capital ", token_ids=(101,), offset=1, num_tokens=1)
    assert stream.request_id == "r1"
    assert stream.finish_reason is FinishReason.STOP_TOKEN
    assert stream.usage is not None
    assert stream.usage.output_tokens == 5
    assert stream.timing is not None
    assert stream.timing.queue_s == 0.25


def test_the_sync_client_streams_the_same(address: str) -> None:
    with sync.Client(address) as client:
        stream = client.generate("hi")
        assert "".join(delta.text for delta in stream) == "The capital is Paris."
    assert stream.request_id == "r1"
    assert stream.finish_reason is FinishReason.STOP_TOKEN
    assert stream.usage is not None
    assert stream.timing is not None


async def test_events_bring_everything(address: str) -> None:
    async with aio.AsyncClient(address) as client:
        kinds = [type(event) async for event in client.generate("hi").events()]
    assert kinds == [Accepted, Started, *[Delta] * len(WORDS), Finished, Done]


async def test_complete_returns_the_whole_result(address: str, router: ScriptedRouter) -> None:
    async with aio.AsyncClient(address) as client:
        result = await client.complete(chat="hi", temperature=0, max_tokens=9)
    assert result.text == "The capital is Paris."
    request = router.requests.get()
    assert request.chat.messages[0].content[0].text == "hi"
    assert request.stopping.max_tokens == 9


def test_sync_complete_and_text_return_the_whole_text(address: str) -> None:
    with sync.Client(address) as client:
        assert client.complete("hi").text == client.generate("hi").text() == "The capital is Paris."


async def test_metadata_goes_with_every_call() -> None:
    seen: list[dict[str, str | bytes]] = []

    def script(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        seen.append(dict(context.invocation_metadata()))
        yield from speak(WORDS)

    with serving(ScriptedRouter(script)) as address:
        async with aio.AsyncClient(address, metadata={"authorization": "Bearer k"}) as client:
            await client.complete("hi")
    assert seen[0]["authorization"] == "Bearer k"


async def test_a_client_outlives_its_event_loop(address: str) -> None:
    client = aio.AsyncClient(address)

    async def once() -> str:
        async with client:
            return await client.generate("hi").text()

    assert await asyncio.to_thread(asyncio.run, once()) == await once()


# --- leaving early


async def test_breaking_out_of_the_loop_cancels_the_request() -> None:
    router = ScriptedRouter(endless)
    with serving(router) as address:
        async with aio.AsyncClient(address) as client:
            stream = client.generate("hi")
            async for _ in stream:
                break
            assert await asyncio.to_thread(router.ended.wait, WAIT_S)
            assert stream.finish_reason is FinishReason.CANCELLED


def test_breaking_out_of_the_sync_loop_cancels_the_request() -> None:
    router = ScriptedRouter(endless)
    with serving(router) as address, sync.Client(address) as client:
        stream = client.generate("hi")
        for _ in stream:
            break
        assert router.ended.wait(WAIT_S)
        assert stream.finish_reason is FinishReason.CANCELLED


async def test_cancelling_a_stream_ends_its_loop_without_an_error() -> None:
    router = ScriptedRouter(endless)
    with serving(router) as address:
        async with aio.AsyncClient(address) as client, client.generate("hi") as stream:
            num_deltas = 0
            async for _ in stream:
                num_deltas += 1
                if num_deltas == 3:
                    stream.cancel()
            assert stream.finish_reason is FinishReason.CANCELLED
            with pytest.raises(InflightError, match="CANCELLED"):
                stream.transcript.result()
        assert router.ended.wait(WAIT_S)


def test_a_sync_stream_is_cancelled_from_another_thread() -> None:
    with serving(ScriptedRouter(endless)) as address, sync.Client(address) as client:
        stream = client.generate("hi")
        loop = iter(stream)
        next(loop)
        canceller = threading.Thread(target=stream.cancel)
        canceller.start()
        for _ in loop:
            pass
        canceller.join()
        assert stream.finish_reason is FinishReason.CANCELLED


async def test_leaving_the_block_of_a_stream_that_was_never_read_cancels_it() -> None:
    router = ScriptedRouter(endless)
    with serving(router) as address:
        async with aio.AsyncClient(address) as client:
            async with client.generate("hi"):
                await asyncio.to_thread(router.requests.get)
            assert await asyncio.to_thread(router.ended.wait, WAIT_S)


async def test_cancelling_the_task_cancels_the_request_and_stays_a_cancellation() -> None:
    router = ScriptedRouter(endless)
    with serving(router) as address:
        async with aio.AsyncClient(address) as client:
            reading = asyncio.create_task(client.complete("hi"))
            await asyncio.to_thread(router.requests.get)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert await asyncio.to_thread(router.ended.wait, WAIT_S)


async def test_closing_the_client_ends_its_streams_with_an_error_and_not_a_cancellation() -> None:
    with serving(ScriptedRouter(endless)) as address:
        client = aio.AsyncClient(address)
        async with aclosing(client.generate("hi").events()) as events:
            await anext(events)
            await client.close()
            with pytest.raises(InflightError) as caught:
                async for _ in events:
                    pass
    assert caught.value.code is grpc.StatusCode.CANCELLED


# --- errors


async def test_an_error_names_the_fields_and_the_reason() -> None:
    violation = FieldViolation("sampling.temperature", "must be at least 0")
    with serving(refuse(invalid(violation))) as address:
        async with aio.AsyncClient(address) as client:
            with pytest.raises(InflightError) as caught:
                await client.complete("hi", temperature=-1)
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.reason == "INVALID_FIELD"
    assert error.fields == (FieldError("sampling.temperature", "must be at least 0"),)
    assert error.retry_after_s is None
    assert str(error) == "INVALID_ARGUMENT: sampling.temperature: must be at least 0"


def test_an_error_says_when_to_try_again_and_which_quota_it_was() -> None:
    refusal = RequestError(
        Reason.QUEUE_FULL, "too many wait", retry_after_ms=1500, quota="queue:m", context={"limit": "10"}
    )
    with serving(refuse(refusal)) as address, sync.Client(address) as client, pytest.raises(InflightError) as caught:
        client.generate("hi").text()
    error = caught.value
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
    assert (error.retry_after_s, error.quota, error.context) == (1.5, "queue:m", {"limit": "10"})
    assert str(error).endswith("(try again in 1.5 s)")


async def test_a_deadline_ends_the_stream_with_its_status() -> None:
    with serving(ScriptedRouter(endless)) as address:
        async with aio.AsyncClient(address) as client:
            with pytest.raises(InflightError) as caught:
                async for _ in client.generate("hi", timeout=0.2):
                    pass
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_stream_that_breaks_gives_unavailable_where_it_is_not_to_be_resumed() -> None:
    def dies(request: inference_pb2.GenerateRequest, context: grpc.ServicerContext) -> Events:
        yield accepted()
        yield delta("x", 0)
        raise RequestError(Reason.EXECUTOR_LOST, "the executor is gone")

    router = ScriptedRouter(dies)
    with serving(router) as address:
        async with aio.AsyncClient(address, resume=False) as client:
            stream = client.generate("hi")
            with pytest.raises(InflightError) as caught:
                await stream.text()
    assert router.requests.qsize() == 1
    assert caught.value.reason == "EXECUTOR_LOST"
    assert stream.transcript.choices[0].text == "x"


def test_address_without_a_router_gives_unavailable() -> None:
    with sync.Client("127.0.0.1:1", retries=False) as client, pytest.raises(InflightError) as caught:
        client.list_models()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


# --- retries


async def test_unavailable_before_the_first_event_is_retried_unseen() -> None:
    router = refuse(RequestError(Reason.NO_EXECUTOR, "none yet"), times=2)
    with serving(router) as address:
        async with aio.AsyncClient(address) as client:
            assert await client.generate("hi").text() == "The capital is Paris."
    assert router.requests.qsize() == 3


async def test_without_retries_the_first_refusal_is_the_answer() -> None:
    router = refuse(RequestError(Reason.NO_EXECUTOR, "none yet"), times=1)
    with serving(router) as address:
        async with aio.AsyncClient(address, retries=False) as client:
            with pytest.raises(InflightError, match="none yet"):
                await client.complete("hi")


async def test_several_routers_share_the_calls_and_a_dead_one_is_passed_over(router: ScriptedRouter) -> None:
    other = ScriptedRouter()
    with serving(router) as first, serving(other) as second:
        async with aio.AsyncClient(first, second, "localhost:1") as client:
            for _ in range(8):
                await client.complete("hi")
    assert router.requests.qsize() > 0
    assert other.requests.qsize() > 0
    assert router.requests.qsize() + other.requests.qsize() == 8


# --- the other calls


async def test_tokenize_and_detokenize_are_inverse_here(address: str) -> None:
    async with aio.AsyncClient(address) as client:
        token_ids = await client.tokenize("héllo")
        assert token_ids == tuple("héllo".encode())
        assert await client.detokenize(token_ids) == "héllo"


def test_sync_unary_calls_answer(address: str, router: ScriptedRouter) -> None:
    with sync.Client(address) as client:
        assert client.list_models()[0].name == "smol"
        assert client.detokenize(client.tokenize("abc")) == "abc"
        assert client.cancel("r1") is RequestState.PLACED
        assert client.capacity().executors == ()


async def test_both_clients_say_where_a_request_stands(address: str, router: ScriptedRouter) -> None:
    router.standing = inference_pb2.GetRequestResponse(
        state=inference_pb2.REQUEST_STATE_WAITING, wait_reason=inference_pb2.WAIT_REASON_HELD_LINE, times_passed=2
    )
    async with aio.AsyncClient(address) as client:
        standing = await client.get_request("r7", model="smol")
    assert (standing.request_id, standing.state, standing.wait_reason) == ("r7", RequestState.WAITING, "held_line")
    assert (standing.times_passed, standing.estimated_wait_s, standing.priority) == (2, None, "unspecified")
    with sync.Client(address) as sync_client:
        assert await asyncio.to_thread(sync_client.get_request, "r7", model="smol") == standing


async def test_cancel_names_the_request_and_says_where_it_was(address: str, router: ScriptedRouter) -> None:
    async with aio.AsyncClient(address) as client:
        assert await client.cancel("r7", resume_token="t", model="smol") is RequestState.PLACED
        assert (await client.list_models())[0].has_chat_template
        assert (await client.capacity()).num_queued == 0
    assert router.requests.get() == inference_pb2.CancelRequest(request_id="r7", resume_token="t", model="smol")


# --- targets


def test_one_target_is_passed_on_as_it_is() -> None:
    assert channel_target(["dns:///routers:50051"]) == "dns:///routers:50051"


def test_several_targets_become_one_list_of_addresses() -> None:
    assert channel_target(["127.0.0.1:1", "localhost:2"]) == "ipv4:127.0.0.1:1,127.0.0.1:2"
    assert channel_target(["[::1]:1", "[::1]:2"]) == "ipv6:[::1]:1,[::1]:2"


async def test_a_name_that_no_host_can_have_is_an_error_at_once_that_names_it() -> None:
    """No DNS server is asked for a name with an empty part."""
    named = r"the host name of 'no\.\.host:1' cannot be resolved"
    for shares_calls in (True, False):
        async with aio.AsyncClient("no..host:1", share_calls=shares_calls) as client:
            for call in (client.generate("hi").text(), client.list_models()):
                with pytest.raises(InflightError, match=named) as caught:
                    await call
                assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(ValueError, match=named):
        channel_target(["no..host:1", "localhost:2"])


@pytest.mark.parametrize("target", ["unix:/run/router", "ipv4:127.0.0.1:1,127.0.0.1:2", "[::1]:1", "dns:1", "xds:///r"])
def test_schemes_of_grpc_are_passed_on(target: str) -> None:
    assert channel_target([target]) == target


@pytest.mark.parametrize(
    "targets",
    [
        *([], [""], [" a:1"], ["127.0.0.1:1", "nowhere"], ["127.0.0.1:1", "[::1]:2"]),
        *(["localhost"], ["127.0.0.1:http"], ["127.0.0.1:65536"], ["localhost:0"], ["http://localhost:8000"]),
        *(["https://localhost:8000"], ["http://localhost:8000/v1"]),
    ],
)
def test_targets_that_are_no_addresses_are_refused(targets: list[str]) -> None:
    with pytest.raises(ValueError, match=r"address|mixed"):
        channel_target(targets)


@pytest.mark.parametrize(
    ("targets", "direct"),
    [
        *((["localhost:1"], True), (["127.0.0.1:1"], True), (["[::1]:1"], True), (["dns:///localhost:1"], True)),
        *((["dns:localhost:1"], True), (["ipv4:127.0.0.1:1"], True), (["ipv6:[::1]:1"], True), (["unix:/a"], True)),
        *((["ipv4:127.0.0.1:1,127.0.0.1:2"], True), (["unix-abstract:a"], True), (["router:1"], False)),
        *((["dns:///router:1"], False), (["ipv4:127.0.0.1:1,10.0.0.1:1"], False), (["10.0.0.1:1"], False)),
        (["10.0.0.1:1", "10.0.0.2:1"], True),
    ],
)
def test_proxy_is_used_only_for_a_single_router_on_another_machine(targets: list[str], direct: bool) -> None:
    options = dict(client_options(targets, retries=True))
    assert (options.get("grpc.enable_http_proxy") == 0) is direct
    assert dict(client_options(targets, retries=True, http_proxy=False))["grpc.enable_http_proxy"] == 0
