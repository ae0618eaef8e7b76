"""A stream that is cut anywhere and read on says exactly what it would have said at once."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from inflight.router.ledger.types import Demand
from inflight.router.lifecycle.events import End
from inflight.router.request.delivery import Delivery, ReadPosition
from inflight.router.stream.relay import Relay, TimedWriter
from inflight.router.stream.request_stream import Reader, RequestStream
from inflight.router.text.output import OutputText
from inflight.router.tools.formats import AnswerFormat
from inflight.router.tools.parser import AnswerParser
from inflight.v1 import executor_pb2, inference_pb2, types_pb2
from tests.support.examples import examples
from tests.support.text import text_models
from tests.support.text.text_models import text_model

ENDING_ID = 2  # <|im_end|>
# Ids of single bytes, of common words, and special ones.
IDS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2000)), max_size=30)


class Stage:
    """One request whose output comes in pieces, and what its readers make of it."""

    def __init__(
        self,
        stops: list[str],
        include_stop: bool,
        min_tokens: int,
        ids: list[int],
        prompt_ids: Sequence[int] = (),
        interval: int = 1,
        needs_task: bool = True,
        answer: AnswerFormat | None = None,
    ) -> None:
        self.ids = ids
        self._needs_task = needs_task
        model = text_model(text_models.smollm2)
        delivery = Delivery(
            accepted=inference_pb2.Accepted(request_id="r", prompt_tokens=1, max_tokens=100),
            new_text=lambda: OutputText(
                model.detokenizer(), stops=stops, include_stop=include_stop, min_tokens=min_tokens
            ),
            name_token=lambda token: None,
            wants_text=True,
            wants_token_ids=True,
            prompt_ids=prompt_ids,
            echoes=bool(prompt_ids),
            stream_interval=interval,
            new_parser=None if answer is None else functools.partial(AnswerParser, answer),
            call_id="call{}".format,
        )
        self.stream = RequestStream(Demand("r", 2, 1), executor_pb2.Submit(), 0.0, delivery=delivery)
        self.stream.accept()

    async def read(
        self, ends: list[int], place: ReadPosition, num_events: int | None
    ) -> list[inference_pb2.StreamEvent]:
        """Lets a reader who knows so much read while the output comes up to these ends; a connection that breaks after
        `num_events`."""
        events: list[inference_pb2.StreamEvent] = []

        async def write(event: inference_pb2.StreamEvent) -> None:
            events.append(event)
            await one_turn()
            if len(events) == num_events:
                raise ConnectionError

        reader = Reader()
        self.stream.attend(reader)
        writer = TimedWriter(write, 60.0, needs_task=self._needs_task)
        relay = asyncio.create_task(Relay(self.stream, writer, place, reader).run())
        for end in ends:
            for offset in range(len(self.stream.output_ids), end):
                self.stream.tokens(offset, [self.ids[offset]])
            self.stream.publish_output()
            if end == len(self.ids):
                is_stop = bool(self.ids) and self.ids[-1] == ENDING_ID
                reason = types_pb2.FINISH_REASON_STOP_TOKEN if is_stop else types_pb2.FINISH_REASON_LENGTH
                self.stream.finish(End(reason, None))
            for _ in range(20):
                await asyncio.sleep(0)
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)
        return events


async def one_turn() -> None:
    """Waits as a write of gRPC does: for a future that a callback of the loop completes."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    loop.call_soon(future.set_result, None)
    await future


def told(events: list[inference_pb2.StreamEvent], ids: list[int]) -> str:
    """The text; appends the ids, after checking that their offsets leave no gap."""
    text = ""
    for event in events:
        if event.HasField("delta"):
            if event.delta.num_tokens:
                assert event.delta.offset == len(ids)
            ids.extend(event.delta.token_ids)
            text += event.delta.text
    return text


@settings(max_examples=examples(100), deadline=None)
@given(
    ids=IDS,
    text=st.text("ab \n🦙é", max_size=20),
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5)), max_size=3),
    cuts=st.lists(st.integers(0, 1000), max_size=6),
    num_events=st.lists(st.integers(1, 5), max_size=4),
    min_tokens=st.integers(0, 12),
    include_stop=st.booleans(),
    ends_by_token=st.booleans(),
    prompt_ids=st.just([]) | IDS,
    interval=st.integers(1, 6),
    needs_task=st.booleans(),
)
# The last letter is held back, because it may begin the stop text.
@example([], "ab a", [(0, 2)], [], [], 12, False, False, [], 1, True)
def test_text_and_tokens_do_not_depend_on_where_a_stream_was_cut(
    ids: list[int],
    text: str,
    spans: list[tuple[int, int]],
    cuts: list[int],
    num_events: list[int],
    min_tokens: int,
    include_stop: bool,
    ends_by_token: bool,
    prompt_ids: list[int],
    interval: int,
    needs_task: bool,
) -> None:
    """With an echoed prompt, too, with any number of tokens per event, with and without a task for each."""
    model = text_model(text_models.smollm2)
    ids = model.encode(text) + ids + ([ENDING_ID] if ends_by_token else [])
    whole = model.decode(ids)
    stops = [stop for start, length in spans if (stop := whole[start : start + length])]
    ends = [*sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]

    async def run() -> None:
        at_once = Stage(stops, include_stop, min_tokens, ids, prompt_ids)
        expected_ids: list[int] = []
        events = await at_once.read([len(ids)], ReadPosition(), None)
        expected_text = told(events, expected_ids)
        output = OutputText(model.detokenizer(), stops=stops, include_stop=include_stop, min_tokens=min_tokens)
        prompt_text = output.echo(prompt_ids)
        step = output.feed(0, ids, last_is_stop_token=bool(ids) and ids[-1] == ENDING_ID)
        assert expected_text == prompt_text + step.text + ("" if step.matched is not None else output.finish().text)

        cut = Stage(stops, include_stop, min_tokens, ids, prompt_ids, interval, needs_task)
        known_ids: list[int] = []
        known_text = ""
        ends_left = list(ends)
        for number in num_events:
            place = ReadPosition(len(known_ids), len(known_text.encode()))
            now, ends_left = ends_left[:2], ends_left[2:]
            known_text += told(await cut.read(now, place, number), known_ids)
        place = ReadPosition(len(known_ids), len(known_text.encode()))
        last = await cut.read([*ends_left, len(ids)], place, None)
        known_text += told(last, known_ids)

        assert (known_ids, known_text) == (expected_ids, expected_text)
        assert last[-2].finished == events[-2].finished
        assert last[-1].done.usage == events[-1].done.usage

    asyncio.run(run())


@settings(max_examples=examples(60), deadline=None)
@given(ids=IDS, spans=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 5)), max_size=3), cut=st.integers(0, 30))
def test_without_a_count_of_bytes_text_goes_on_behind_what_the_tokens_bring(
    ids: list[int], spans: list[tuple[int, int]], cut: int
) -> None:
    model = text_model(text_models.smollm2)
    whole = model.decode(ids)
    stops = [stop for start, length in spans if (stop := whole[start : start + length])]
    cut = min(cut, len(ids))

    async def run() -> None:
        stage = Stage(stops, False, 0, ids)
        whole_text = told(await stage.read([len(ids)], ReadPosition(), None), [])
        output = OutputText(model.detokenizer(), stops=stops)
        known = output.feed(0, ids[:cut])
        if known.matched is None:
            rest = told(await stage.read([len(ids)], ReadPosition(cut), None), ids[:cut])
            assert known.text + rest == whole_text

    asyncio.run(run())
