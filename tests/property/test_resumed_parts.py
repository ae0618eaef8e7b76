"""A stream with calls and reasoning that breaks anywhere and is read on has the parts of one that did not break."""

from __future__ import annotations

import asyncio
import random

import pytest

from inflight.events import Choice, ToolCall, decode_parts
from inflight.router.request.delivery import BEGINNING, ReadPosition
from inflight.router.tools.formats import AnswerFormat
from inflight.v1 import inference_pb2
from tests.property.test_resumed_text import ENDING_ID, Stage
from tests.support.text.text_models import smollm2
from tests.unit.test_tool_parser import random_answers, read

ANSWERS = [one[:2] for one in random_answers(25, seed=3)]


def add_up(choice: Choice, events: list[inference_pb2.StreamEvent], place: ReadPosition) -> ReadPosition | None:
    """Adds the parts of events to a choice. Returns the client's place after them; None if it has the end."""
    offset, num_bytes = place.offset, place.text_bytes or 0
    for event in events:
        match event.WhichOneof("event"):
            case "delta":
                choice.take_parts(decode_parts(event.delta.parts))
                offset = event.delta.offset + event.delta.num_tokens
                num_bytes += len(event.delta.text.encode())
            case "finished":
                choice.take_parts(decode_parts(event.finished.parts))
                assert event.finished.num_tool_calls == len(choice.tool_calls)
                return None
    return ReadPosition(offset, num_bytes)


@pytest.mark.parametrize("number", range(len(ANSWERS)))
def test_parts_of_a_broken_stream_are_those_of_a_whole_one(number: int) -> None:
    answer, text = ANSWERS[number]
    chance = random.Random(number)
    ids = [*smollm2()(text)["input_ids"], ENDING_ID]
    reasoning, content, calls = read(answer, [text])

    async def broken() -> Choice:
        stage = Stage(
            [], False, 0, ids, interval=chance.choice((1, 3)), needs_task=chance.random() < 0.5, answer=answer
        )
        choice, place = Choice(), BEGINNING
        ends = sorted(chance.sample(range(len(ids)), k=min(len(ids), chance.randrange(1, 30))))
        while True:
            left = [end for end in [*ends, len(ids)] if end >= len(stage.stream.output_ids)]
            events = await stage.read(left, place, chance.randrange(1, 12))
            following = add_up(choice, events, place)
            if following is None:
                return choice
            place = following

    choice = asyncio.run(broken())
    assert (choice.reasoning, choice.content) == (reasoning, content)
    assert choice.tool_calls == [ToolCall(f"call{i}", *call) for i, call in enumerate(calls)]


def test_tokens_of_reasoning_are_counted_with_their_tags() -> None:
    for text, in_reasoning in (("<think>\nI see.</think>\n\nYes", False), ("I see.</think>Yes", True), ("Yes", False)):
        whole = smollm2()(text)["input_ids"]
        answer = AnswerFormat(None, ANSWERS[0][0].reasoning, in_reasoning)
        end = text.find("</think>") + len("</think>")
        expected = (
            next((n for n in range(len(whole)) if len(smollm2().decode(whole[:n])) >= end), 0) if "<" in text else 0
        )

        async def usage(answer: AnswerFormat = answer, ids: tuple[int, ...] = tuple(whole)) -> int:
            events = await Stage([], False, 0, [*ids, ENDING_ID], answer=answer).read([len(ids) + 1], BEGINNING, None)
            return int(events[-1].done.usage.reasoning_tokens)

        assert asyncio.run(usage()) == expected
