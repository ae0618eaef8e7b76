"""Log probabilities in OpenAI's forms: parts of characters, impossible and unknown values, text offsets."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from inflight.events import FinishReason, Logprob, PositionLogprobs, Usage
from inflight.gateway.answers import FinishedChoice, encoded, whole_answer
from inflight.gateway.conversion import ApiRequest
from inflight.gateway.event_ids import AnswerId
from inflight.gateway.logprobs import num_characters, of_chat, of_completion
from tests.unit.test_gateway import chat, completion

Position = PositionLogprobs | None


def token(text: str | bytes, logprob: float = -0.5, *, is_special: bool = False) -> Logprob:
    text_bytes = text if isinstance(text, bytes) else text.encode()
    return Logprob(len(text_bytes), logprob, text_bytes, is_special)


def alone(*texts: str | bytes) -> list[Position]:
    return [PositionLogprobs(token(text), ()) for text in texts]


def answered(api_request: ApiRequest, text: str, positions: list[Position]) -> Any:
    """The answer as its reader has it: JSON, and no constant that JSON does not know."""
    choice = FinishedChoice(text, FinishReason.LENGTH, positions)
    whole = encoded(whole_answer(api_request, AnswerId("a", 1), [choice], [Usage(1, 0, len(positions), 0)]))
    return json.loads(whole, parse_constant=pytest.fail)


def test_chats_tell_tokens_with_bytes_and_the_likeliest() -> None:
    first = PositionLogprobs(token("Hi", -0.25), (token("Hi", -0.25), token(b" \xf0\x9f", -2.0)))
    told = answered(chat(logprobs=True, top_logprobs=2), "Hi", [first])
    assert told["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "Hi",
                "logprob": -0.25,
                "bytes": [72, 105],
                "top_logprobs": [
                    {"token": "Hi", "logprob": -0.25, "bytes": [72, 105]},
                    {"token": " \\xf0\\x9f", "logprob": -2.0, "bytes": [32, 240, 159]},
                ],
            }
        ],
        "refusal": None,
    }
    assert ChatCompletion.model_validate(told).choices[0].logprobs is not None


def test_completions_tell_lists_side_by_side_and_always_the_token_produced() -> None:
    chosen, likelier = token("b", -3.0), token("a", -0.125)
    positions: list[Position] = [PositionLogprobs(chosen, (likelier,)), *alone("cd")]
    told = answered(completion(logprobs=1), "bcd", positions)
    assert told["choices"][0]["logprobs"] == {
        "tokens": ["b", "cd"],
        "token_logprobs": [-3.0, -0.5],
        "top_logprobs": [{"a": -0.125, "b": -3.0}, {"cd": -0.5}],
        "text_offset": [0, 1],
    }
    assert Completion.model_validate(told).choices[0].logprobs is not None


def test_without_being_asked_for_they_are_null() -> None:
    for api_request in (chat(), completion()):
        assert answered(api_request, "a", alone("a"))["choices"][0]["logprobs"] is None


def test_what_cannot_come_is_very_unlikely_and_what_is_not_known_says_so() -> None:
    never = PositionLogprobs(token("a", -math.inf), (token("b", -math.inf),))
    in_chat = answered(chat(logprobs=True), "a", [never, None])["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in in_chat] == [-9999.0, -9999.0]
    assert in_chat[1] == {"token": "", "logprob": -9999.0, "bytes": None, "top_logprobs": []}
    in_completion = answered(completion(logprobs=1), "a", [never, None])["choices"][0]["logprobs"]
    assert in_completion["token_logprobs"] == [-9999.0, None]
    assert in_completion["top_logprobs"] == [{"b": -9999.0, "a": -9999.0}, None]


def test_parts_of_a_character_are_told_apart_and_begin_where_it_does() -> None:
    positions = alone("é", "🦙".encode()[:2], "🦙".encode()[2:], "x")
    told = of_completion(positions, 10)
    assert told["tokens"] == ["é", "bytes:\\xf0\\x9f", "bytes:\\xa6\\x99", "x"]
    assert told["text_offset"] == [10, 11, 11, 12]
    assert [one["bytes"] for one in of_chat(positions)["content"]][1:3] == [[0xF0, 0x9F], [0xA6, 0x99]]


def test_special_tokens_have_a_name_and_take_no_place() -> None:
    end = PositionLogprobs(token("<|im_end|>", is_special=True), ())
    positions = [*alone("ab"), end, *alone("c")]
    told = of_completion(positions, 0)
    assert told["tokens"] == ["ab", "<|im_end|>", "c"]
    assert told["text_offset"] == [0, 2, 2]
    assert num_characters(positions) == 3


@given(st.text(max_size=12), st.lists(st.integers(0, 40), max_size=6), st.integers(0, 6))
def test_tokens_divided_anywhere_begin_at_their_character(text: str, cuts: list[int], first: int) -> None:
    raw = text.encode()
    ends = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    pieces = [raw[begin:end] for begin, end in itertools.pairwise(ends)]
    expected = [len(raw[:begin].decode(errors="ignore")) for begin in ends[:-1]]
    positions = alone(*pieces)
    assert of_completion(positions, 0)["text_offset"] == expected
    assert num_characters(positions) == len(text)
    # and in two parts, as a stream has them
    before, behind = positions[:first], positions[first:]
    parts = of_completion(before, 0), of_completion(behind, num_characters(before))
    assert [offset for part in parts for offset in part["text_offset"]] == expected


@pytest.mark.parametrize(
    ("api_request", "fields", "param"),
    [
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"logprobs": 2}, "logprobs"),
        (completion, {"logprobs": 6}, "logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"logprobs": -1}, "logprobs"),
        (completion, {"top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_what_openai_does_not_take_is_refused(api_request: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Exception, match=param) as refused:
        api_request(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)  # type: ignore[attr-defined]


def test_they_are_asked_of_the_router_as_the_client_asks() -> None:
    def asked(api_request: ApiRequest) -> tuple[bool, int]:
        output = api_request.requests[-1].output
        return output.logprobs, output.top_logprobs

    assert asked(chat(logprobs=True, top_logprobs=20, n=2)) == (True, 20)
    assert asked(chat(logprobs=True)) == asked(completion(logprobs=0)) == (True, 0)
    assert asked(completion(logprobs=5, prompt=["a", "b"])) == (True, 5)
    assert asked(chat(logprobs=False, top_logprobs=0)) == asked(completion()) == (False, 0)
