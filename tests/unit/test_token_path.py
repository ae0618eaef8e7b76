"""The way of tokens from a frame of an executor to the events of its clients."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.router.api.service import writer
from inflight.router.executors.link import MAX_OUTPUT_DELAY_S, ExecutorLink, StepOutput
from inflight.router.request.delivery import Delivery
from inflight.router.stream.relay import Relay, TimedWriter
from inflight.router.stream.request_stream import RequestStream
from inflight.router.text.output import OutputText
from inflight.router.text.tokenizer import TextModel
from inflight.router.tools.formats import HERMES, THINK, AnswerFormat
from inflight.router.tools.parser import AnswerParser
from inflight.v1 import executor_pb2, inference_pb2, types_pb2
from tests.support.ledger.scripted_store import (
    ScriptedRouter,
    accepts,
    new_delivery,
    new_stream,
    place,
    placement,
    settled,
    steps,
)
from tests.support.stack.cluster import tiny_tokenizer
from tests.unit.test_text_output import Spelled

LENGTH = types_pb2.FINISH_REASON_LENGTH
NUM_STREAMS = 32


class Client:
    """A client that reads an event when the test says so, or at once."""

    def __init__(self, *, reads_at_once: bool = True) -> None:
        self.events: list[inference_pb2.StreamEvent] = []
        self.is_gone = False
        self._reads_at_once = reads_at_once
        self.unread: asyncio.Future[None] | None = None

    async def write(self, event: inference_pb2.StreamEvent) -> None:
        """Returns when the event is read, as gRPC's write does."""
        assert self.unread is None, "two writes at once"
        if self.is_gone:
            raise ConnectionError
        self.events.append(inference_pb2.StreamEvent.FromString(event.SerializeToString()))
        if not self._reads_at_once:
            self.unread = asyncio.get_running_loop().create_future()
            await self.unread

    async def read(self) -> None:
        """Reads the event that is under way."""
        unread, self.unread = self.unread, None
        assert unread is not None, "nothing is written"
        unread.set_result(None)
        await settled()

    def read_on(self) -> None:
        """Reads everything at once from now on."""
        self._reads_at_once = True

    @property
    def sizes(self) -> list[int]:
        """The number of tokens of each delta."""
        return [event.delta.num_tokens for event in self.events if event.HasField("delta")]

    @property
    def output(self) -> tuple[list[int], str]:
        """Ids and text, of deltas that leave no gap."""
        ids: list[int] = []
        text = ""
        for number, event in enumerate(self.events):
            assert event.seq == number
            if event.HasField("delta"):
                assert event.delta.offset == len(ids)
                ids += event.delta.token_ids
                text += event.delta.text
        return ids, text


def output_text(stops: tuple[str, ...] = ()) -> OutputText:
    return OutputText(TextModel(tiny_tokenizer()).detokenizer(), stops=stops)


def serve(
    link: ExecutorLink,
    number: int,
    client: Client,
    *,
    needs_task: bool = False,
    timeout_s: float = 60.0,
    stops: tuple[str, ...] = (),
    **fields: Any,
) -> tuple[RequestStream, asyncio.Task[None]]:
    """Lets a client read request `r<number>`, which the executor has in the slot of that number."""
    delivery = dataclasses.replace(new_delivery(**fields), new_text=lambda: output_text(stops))
    stream = new_stream(delivery=delivery, request_id=f"r{number}")
    link.submit(stream, place(stream, placement(request_id=f"r{number}")))
    link.receive(accepts(1, number, f"r{number}"))
    relay = Relay(stream, TimedWriter(client.write, timeout_s, needs_task=needs_task))
    return stream, asyncio.create_task(relay.run())


def step_of_all(offset: int) -> executor_pb2.ServeResponse:
    """A step with a token for each slot."""
    slots = list(range(NUM_STREAMS))
    frame = executor_pb2.StepFrame(frame=1, slots=slots, token_ids=[4] * NUM_STREAMS, offsets=[offset] * NUM_STREAMS)
    return executor_pb2.ServeResponse(step=frame)


class CountedStream:
    """A stream that counts its publications, in an entry of a list."""

    def __init__(self, counts: list[int], number: int) -> None:
        self._counts, self._number = counts, number
        self.on_output = self.publish_output

    def publish_output(self) -> None:
        self._counts[self._number] += 1


@pytest.fixture
def now_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of the event loop, which stands still: no step keeps it busy."""
    time_s = [100.0]
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda self: time_s[0])
    return time_s


@pytest.mark.usefixtures("now_s")
@pytest.mark.parametrize("stops", [(), ("never",)])
async def test_step_wakes_the_loop_once_for_all_streams(
    monkeypatch: pytest.MonkeyPatch, stops: tuple[str, ...]
) -> None:
    link = ScriptedRouter("m").link("e0", "m")
    clients = [Client() for _ in range(NUM_STREAMS)]
    tasks = [serve(link, number, client, stops=stops)[1] for number, client in enumerate(clients)]
    link.receive(step_of_all(0))
    await settled()
    num_events = sum(len(client.events) for client in clients)
    scheduled: list[object] = []
    loop = asyncio.get_running_loop()
    call_soon = loop.call_soon

    def count(callback: Any, *args: Any, **kwargs: Any) -> asyncio.Handle:
        scheduled.append(callback)
        return call_soon(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon", count)
    # When the executor sends a step with a token for every stream
    link.receive(step_of_all(1))
    # Then every client has its event, and only the link's own look at the loop was scheduled.
    assert sum(len(client.events) for client in clients) == num_events + NUM_STREAMS
    assert len(scheduled) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.usefixtures("now_s")
async def test_tokens_of_steps_during_a_write_leave_in_one_event() -> None:
    link = ScriptedRouter("m").link("e0", "m")
    client = Client(reads_at_once=False)
    _, task = serve(link, 0, client)
    await settled()
    await client.read()  # the acceptance
    link.receive(steps(4, offset=0))
    await settled()
    for offset in range(1, 6):  # while the first token is not read
        link.receive(steps(4, offset=offset))
    await client.read()
    for offset in range(6, 10):
        link.receive(steps(4, offset=offset))
    assert client.sizes == [1, 5]
    client.read_on()
    await client.read()
    link.receive(steps(4, offset=10, end=LENGTH))
    await task
    assert client.sizes == [1, 5, 4, 1]
    assert client.output[0] == [4] * 11


@pytest.mark.parametrize("busy_s", [0.01, 1.0])
async def test_steps_leave_together_while_the_loop_is_behind(now_s: list[float], busy_s: float) -> None:
    link = ScriptedRouter("m").link("e0", "m")
    clients = [Client() for _ in range(NUM_STREAMS)]
    tasks = [serve(link, number, client)[1] for number, client in enumerate(clients)]
    client, task = clients[0], tasks[0]
    link.receive(step_of_all(0))
    await settled()
    # When a step keeps the loop busy
    link.receive(step_of_all(1))
    now_s[0] += busy_s
    await settled()
    assert client.sizes == [1, 1]
    # Then the steps of as much time, within the bound, are sent together after it
    for offset in range(2, 5):
        link.receive(step_of_all(offset))
        await settled()
    assert client.sizes == [1, 1]
    now_s[0] += min(busy_s, MAX_OUTPUT_DELAY_S)
    await settled()
    assert client.sizes == [1, 1, 3]
    # And the end at once.
    link.receive(steps(4, offset=5, end=LENGTH))
    await task
    assert client.sizes == [1, 1, 3, 1]
    assert client.output[0] == [4] * 6
    for one in tasks:
        one.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize(("num_streams", "max_delay_s"), [(1, MAX_OUTPUT_DELAY_S), (NUM_STREAMS, 0.0)])
async def test_stream_alone_and_streams_without_delay_get_each_step_at_once(
    now_s: list[float], num_streams: int, max_delay_s: float
) -> None:
    output = StepOutput(max_delay_s)
    num_published = [0] * num_streams
    streams: list[Any] = [CountedStream(num_published, number) for number in range(num_streams)]
    for step in range(1, 4):
        output.add(streams)
        now_s[0] += 1.0  # busy
        await settled()
        assert num_published == [step] * num_streams


@pytest.mark.usefixtures("now_s")
@pytest.mark.parametrize("needs_task", [False, True])
@pytest.mark.parametrize("stops", [(), ("never",)])
@pytest.mark.parametrize("interval", [1, 2, 3, 8, 64])
async def test_output_is_the_same_with_any_interval(interval: int, stops: tuple[str, ...], needs_task: bool) -> None:
    link = ScriptedRouter("m").link("e0", "m")
    client = Client()
    _, task = serve(link, 0, client, needs_task=needs_task, stream_interval=interval, stops=stops)
    num_tokens = 21
    for offset in range(num_tokens - 1):
        link.receive(steps(4, offset=offset))
        await settled()
    link.receive(steps(4, offset=num_tokens - 1, end=LENGTH))
    await task
    expected = output_text().feed(0, [4] * num_tokens)
    assert client.output == ([4] * num_tokens, expected.text)
    # The first token leaves at once, then so many at a time, and at the end the rest.
    left = num_tokens - 1
    rest = [left % interval] if left % interval else []
    assert client.sizes == [1, *[interval] * (left // interval), *rest]


@pytest.mark.usefixtures("now_s")
@pytest.mark.parametrize("needs_task", [False, True])
@pytest.mark.parametrize("interval", [1, 3, 64])
async def test_stop_ends_the_output_before_an_interval_is_full(interval: int, needs_task: bool) -> None:
    link = ScriptedRouter("m").link("e0", "m")
    client = Client()
    _, task = serve(link, 0, client, needs_task=needs_task, stream_interval=interval, stops=("t3t2",))
    for offset, token_id in enumerate([4, 4, 3, 2, 4]):
        link.receive(steps(token_id, offset=offset))
        await settled()
    await task
    assert client.output == ([4, 4, 3, 2], "t4t4")
    assert client.events[-2].finished.stop == "t3t2"


@pytest.mark.usefixtures("now_s")
async def test_held_tokens_are_sent_before_a_deadline_ends_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    link = ScriptedRouter("m").link("e0", "m")
    client = Client()
    stream, task = serve(link, 0, client, stream_interval=8)
    for offset in range(4):
        link.receive(steps(4, offset=offset))
        await settled()
    assert client.sizes == [1]
    # When its deadline passes, which the relay sees at the next news
    monkeypatch.setattr(Delivery, "next_deadline", lambda self, has_first_token: 0.0)
    stream.wake()
    await task
    assert client.sizes == [1, 3]
    assert client.output[0] == [4] * 4
    assert client.events[-2].finished.reason == types_pb2.FINISH_REASON_DEADLINE


async def test_write_that_is_begun_and_not_read_ends_the_call(now_s: list[float]) -> None:
    link = ScriptedRouter("m").link("e0", "m")
    client = Client(reads_at_once=False)
    _, task = serve(link, 0, client, timeout_s=60.0)
    await settled()
    await client.read()
    link.receive(steps(4, offset=0))
    await settled()
    await client.read()
    link.receive(steps(4, offset=1))
    await settled()
    assert not task.done()
    now_s[0] += 61.0
    with pytest.raises(RequestError) as error:
        await task
    assert error.value.reason is Reason.STALLED


@pytest.mark.usefixtures("now_s")
@pytest.mark.parametrize("needs_task", [False, True])
async def test_write_that_fails_ends_the_call_with_its_error(needs_task: bool) -> None:
    link = ScriptedRouter("m").link("e0", "m")
    client = Client()
    _, task = serve(link, 0, client, needs_task=needs_task)
    link.receive(steps(4, offset=0))
    await settled()
    client.is_gone = True
    link.receive(steps(4, offset=1))
    with pytest.raises(ConnectionError):
        await task
    link.receive(steps(4, offset=2))  # reaches nothing


class KeptResponses:
    """The context of a call that keeps what is written."""

    def __init__(self) -> None:
        self.responses: list[bytes] = []

    async def write(self, response: bytes) -> None:
        self.responses.append(response)


@pytest.mark.usefixtures("now_s")
@pytest.mark.parametrize("needs_task", [False, True])
async def test_write_that_grpc_cancels_ends_the_call(needs_task: bool) -> None:
    link = ScriptedRouter("m").link("e0", "m")
    client = Client(reads_at_once=False)
    _, task = serve(link, 0, client, needs_task=needs_task)
    await settled()
    await client.read()
    link.receive(steps(4, offset=0))
    await settled()
    await client.read()
    link.receive(steps(4, offset=1))
    await settled()
    assert client.unread is not None
    client.unread.cancel()  # the call is over, and its task is not cancelled
    await settled()
    assert task.cancelled()
    assert task.cancelling() == 0


@pytest.mark.parametrize("num_characters", [0, 1, 100, 127, 128, 1000, 20_000, 3_000_000])
async def test_event_of_any_size_is_a_response_on_the_wire(num_characters: int) -> None:
    context: Any = KeptResponses()
    event = inference_pb2.StreamEvent(seq=7, delta=inference_pb2.Delta(offset=3, text="x" * num_characters))
    await writer(context)(event)
    (response,) = context.responses
    assert response == inference_pb2.GenerateResponse(event=event).SerializeToString()
    assert inference_pb2.ResumeResponse.FromString(response).event == event


@pytest.mark.usefixtures("now_s")
async def test_call_that_is_cancelled_does_not_wait_for_its_write() -> None:
    link = ScriptedRouter("m").link("e0", "m")
    client = Client(reads_at_once=False)
    stream, task = serve(link, 0, client)
    await settled()
    await client.read()
    link.receive(steps(4, offset=0))
    await settled()
    await client.read()
    link.receive(steps(4, offset=1))
    assert client.sizes == [1, 1]
    task.cancel()
    await settled()
    assert task.cancelled()
    await client.read()  # too late, and without effect
    link.receive(steps(4, offset=2))
    assert client.sizes == [1, 1]
    assert stream.output_ids == [4, 4, 4]


CALL = ("<tool_call>", '{"name": "f", "arguments": {"a": "', "STOP", '"}}', "</tool_call>")


@pytest.mark.parametrize(
    ("words", "answer", "is_unfinished"),
    [
        (CALL, AnswerFormat(HERMES), True),
        (("text ", "STOP"), AnswerFormat(HERMES), False),
        ((*CALL[:2], *CALL[3:], "STOP"), AnswerFormat(HERMES, must_call=True), False),
        (("<tool", "STOP"), AnswerFormat(HERMES, must_call=True), True),
        (('{"a": ', "STOP"), AnswerFormat(None, THINK, is_constrained=True), True),
        (("text", "STOP"), AnswerFormat(None, THINK), False),
        (('{"a": ', "STOP"), None, True),
    ],
)
async def test_output_that_a_stop_cuts_is_unfinished_where_a_call_or_a_form_is_cut(
    words: tuple[str, ...], answer: AnswerFormat | None, is_unfinished: bool
) -> None:
    delivery = new_delivery(is_constrained=True, new_parser=answer and (lambda: AnswerParser(answer)))
    delivery = dataclasses.replace(delivery, new_text=lambda: OutputText(Spelled(words), stops=["STOP"]))
    link, client = ScriptedRouter("m").link("e0", "m"), Client()
    stream = new_stream(delivery=delivery)
    link.submit(stream, place(stream, placement()))
    link.receive(accepts(1))
    link.receive(steps(*range(len(words))))
    await Relay(stream, client.write).run()
    (finished,) = [event.finished for event in client.events if event.HasField("finished")]
    assert (finished.stop, finished.constraint_unfinished) == ("STOP", is_unfinished)
