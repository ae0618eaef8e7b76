"""Construction of requests from plain values: missing values stay unset, invalid ones are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight import requests
from inflight.common.parameters import PARAMETERS, Kind
from inflight.v1 import inference_pb2, types_pb2


def build(prompt: str | bytes | None = "hi", **options: Any) -> inference_pb2.GenerateRequest:
    return requests.generate_request(prompt, chat=None, token_ids=None, options=options)


def test_keywords_left_out_stay_unset() -> None:
    assert build() == inference_pb2.GenerateRequest(text="hi")


def test_a_zero_temperature_is_set_and_not_left_out() -> None:
    assert build(temperature=0).sampling.HasField("temperature")
    assert not build(temperature=None).sampling.HasField("temperature")


def test_an_empty_prompt_reaches_the_server_as_an_empty_text() -> None:
    assert build("").WhichOneof("prompt") == "text"
    empty_ids = requests.generate_request(None, chat=None, token_ids=[], options={})
    assert empty_ids.WhichOneof("prompt") == "token_ids"


def test_bytes_are_passed_on_unchecked() -> None:
    assert build(b"\xff").text_bytes == b"\xff"


def test_every_keyword_has_its_place_in_the_request() -> None:
    assert set(requests.GenerateOptions.__annotations__) == set(PARAMETERS)
    for keyword, parameter in PARAMETERS.items():
        owner: Any = inference_pb2.GenerateRequest()
        for name in parameter.field.split("."):
            assert name in owner.DESCRIPTOR.fields_by_name, f"{keyword}: {parameter.field}"
            owner = getattr(owner, name)


def test_every_number_has_the_type_of_its_field() -> None:
    kinds = {"TYPE_FLOAT": Kind.FLOAT, "TYPE_INT32": Kind.INT32, "TYPE_UINT32": Kind.UINT32, "TYPE_UINT64": Kind.UINT64}
    for parameter in PARAMETERS.values():
        *parents, name = parameter.field.split(".")
        message: Any = inference_pb2.GenerateRequest.DESCRIPTOR
        for parent in parents:
            message = message.fields_by_name[parent].message_type
        field = message.fields_by_name[name]
        kind = next((kind for name, kind in kinds.items() if getattr(field, name) == field.type), None)
        is_number = parameter.kind in kinds.values()
        assert is_number == (kind is not None and not field.is_repeated), parameter.name
        assert not is_number or parameter.kind is kind, parameter.name


def test_a_keyword_of_each_shape_lands_in_its_field() -> None:
    request = build(
        stop="END",
        stop_token_ids=(1, 2),
        logit_bias={5: -1.5},
        bad_words="no",
        bad_word_ids=[[1, 2], (3,)],
        allowed_token_ids=range(3),
        no_repeat_ngram_size=4,
        priority="batch",
        deadline_s=1.5,
        metadata={"trace": "t"},
        prior_output_ids=[9],
        want_text=False,
    )
    assert list(request.stopping.stop) == ["END"]
    assert list(request.stopping.stop_token_ids) == [1, 2]
    assert dict(request.sampling.logit_bias) == {5: -1.5}
    assert list(request.sampling.bad_words) == ["no"]
    assert [list(sequence.ids) for sequence in request.sampling.bad_word_ids] == [[1, 2], [3]]
    assert list(request.sampling.allowed_token_ids) == [0, 1, 2]
    assert request.sampling.no_repeat_ngram_size == 4
    assert request.priority == types_pb2.PRIORITY_CLASS_BATCH
    assert request.deadlines.total.ToMilliseconds() == 1500
    assert dict(request.metadata) == {"trace": "t"}
    assert list(request.prior_output.output_ids) == [9]
    assert request.output.HasField("text")


SCHEMA = {"type": "object", "properties": {"b": {"const": "é"}, "a": {}}}
SCHEMA_TEXT = '{"type": "object", "properties": {"b": {"const": "é"}, "a": {}}}'


class Described:
    """As pydantic's models are."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return SCHEMA


def test_a_json_schema_is_a_value_a_text_a_file_or_that_of_a_class(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(SCHEMA_TEXT, encoding="utf-8")
    for schema in (SCHEMA, SCHEMA_TEXT, file, Described):
        assert build(json_schema=schema).constraint == types_pb2.Constraint(json_schema=SCHEMA_TEXT)
    with pytest.raises(FileNotFoundError):
        build(json_schema=tmp_path / "none.json")


def test_other_constraints_land_in_their_fields() -> None:
    assert build(json_object=True, max_whitespace=0).constraint == types_pb2.Constraint(
        json_object=True, max_whitespace=0
    )
    assert not build(json_object=False, regex=None).HasField("constraint")
    assert build(regex="a+").constraint.regex == "a+"
    assert build(grammar="start: A").constraint.grammar == "start: A"
    assert list(build(choice=["a", "b"]).constraint.choice.choices) == ["a", "b"]
    assert build(choice=[]).constraint.WhichOneof("kind") == "choice"  # the server refuses it


def test_more_than_one_constraint_is_refused() -> None:
    with pytest.raises(TypeError, match="give one of json_schema and regex"):
        build(regex="a", json_schema={})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"json_schema": 3}, "json_schema"),
        ({"json_schema": {"const": object()}}, "json_schema"),
        ({"choice": "yes"}, "choice"),
        ({"choice": [1]}, "choice"),
        ({"json_object": "yes"}, "json_object"),
        ({"max_whitespace": -1}, "max_whitespace"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"seed": -1}, "seed"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_token_ids": [-5]}, "stop_token_ids"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {-1: 1}}, "logit_bias"),
        ({"logit_bias": {5: "much"}}, "logit_bias"),
        ({"bad_words": [1]}, "bad_words"),
        ({"bad_word_ids": 5}, "bad_word_ids"),
        ({"bad_word_ids": [5]}, "bad_word_ids"),
        ({"bad_word_ids": [[-5]]}, "bad_word_ids"),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"priority": "urgent"}, "priority"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_a_value_that_its_field_cannot_hold_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}: "):
        build(**options)


def test_an_unknown_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        build(temprature=1)


def test_not_exactly_one_prompt_is_refused() -> None:
    with pytest.raises(TypeError, match="exactly one"):
        build(None)
    with pytest.raises(TypeError, match="exactly one"):
        requests.generate_request("a", chat="b", token_ids=None, options={})


def test_a_plain_text_chat_is_one_message_of_the_user() -> None:
    assert requests.chat_prompt("hi") == requests.chat_prompt([{"role": "user", "content": "hi"}])
    assert requests.chat_prompt("hi").messages[0].content[0].text == "hi"


def test_chat_content_may_be_a_list_of_parts() -> None:
    chat = requests.chat_prompt([{"role": "system", "content": ["a", "b"]}])
    assert [part.text for part in chat.messages[0].content] == ["a", "b"]


def test_a_chat_message_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^chat: "):
        requests.chat_prompt([{"role": "user", "text": "hi"}])


def test_tokenize_takes_text_or_chat() -> None:
    assert requests.tokenize_request("hi", chat=None, model=None).text == "hi"
    assert requests.tokenize_request(None, chat="hi", model="m").chat.messages[0].role == "user"
    with pytest.raises(TypeError):
        requests.tokenize_request(None, chat=None, model=None)
