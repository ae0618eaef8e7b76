"""The form of an answer that follows from a request, its model and its prompt."""

from __future__ import annotations

import json
from typing import Any

from inflight.router.api.prepare import (
    answer_constraint_of,
    answer_format_of,
    constraint_source,
    text_parameters,
)
from inflight.router.constraint.answer_grammar import answer_rules
from inflight.router.constraint.source import TOOLS
from inflight.router.request.ids import call_id
from inflight.router.text.tokenizer import TextModel
from inflight.router.tools.formats import AnswerFormat
from tests.support.text import chat_models
from tests.support.text.validated import requested
from tests.unit.test_tool_support import HERMES, templated

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": [{"text": "hi"}]}]}
FUNCTIONS = [{"name": "f", "parameters": '{"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}'}]


def smollm2() -> TextModel:
    return chat_models.chat_model(chat_models.smollm2)


def test_plain_request_has_no_form() -> None:
    request = requested(chat=CHAT)
    assert answer_format_of(request, templated(HERMES), []) == AnswerFormat()
    assert answer_constraint_of(request, templated(HERMES), AnswerFormat()) is None


def test_parts_of_a_model_without_reasoning_are_content_only() -> None:
    request = requested(chat=CHAT, output={"parts": True}, constraint={"json_object": True})
    answer = answer_format_of(request, smollm2(), [])
    assert answer == AnswerFormat(is_constrained=True)
    assert answer_constraint_of(request, smollm2(), answer) == constraint_source(request.constraint)


def test_constraint_follows_the_reasoning_only_if_that_is_divided_from_it() -> None:
    model = templated(HERMES)
    prompt = model.encode("<think>\n")
    request = requested(chat=CHAT, output={"parts": True}, constraint={"json_object": True})
    answer = answer_format_of(request, model, prompt)
    assert answer.in_reasoning
    source = answer_constraint_of(request, model, answer)
    assert source is not None
    assert (source.kind, bool(source.reasoning)) == ("json_object", True)
    raw = requested(chat=CHAT, constraint={"json_object": True})
    assert answer_constraint_of(raw, model, answer_format_of(raw, model, prompt)) == constraint_source(raw.constraint)


def test_functions_make_a_grammar_whose_text_does_not_depend_on_what_only_the_parser_needs() -> None:
    tokenizer = chat_models.copied(chat_models.qwen_3())
    tokenizer.chat_template = HERMES + "{# <function= <parameter= #}"
    model = TextModel(tokenizer)
    request = requested(chat={**CHAT, "functions": FUNCTIONS}, tool_choice={"mode": "MODE_REQUIRED", "parallel": False})
    answer = answer_format_of(request, model, [])
    assert answer.tools is not None
    assert answer.tools.name == "qwen3_coder"
    assert answer.texts == {"f": ("a",)}
    source = answer_constraint_of(request, model, answer)
    assert source is not None
    assert source.kind == TOOLS
    rules = answer_rules(source.texts[0])
    assert (rules.must_call, rules.may_repeat, dict(rules.answer.texts)) == (True, False, {})


def test_text_parameters_are_those_of_the_type_string() -> None:
    assert text_parameters("") == ()
    assert text_parameters("{}") == ()
    assert text_parameters(json.dumps({"properties": {"a": {"type": "string"}, "b": True, "c": {}}})) == ("a",)


def test_ids_of_calls_follow_from_the_request_and_their_index() -> None:
    ids = [call_id(request, index) for request in ("a", "a~1", "b") for index in range(3)]
    assert len(set(ids)) == len(ids)
    assert all(len(one) == 9 and one.isalnum() for one in ids)
    assert call_id("a", 0) == ids[0]


def test_budget_of_reasoning_constrains_an_answer_that_is_otherwise_free() -> None:
    model = templated(HERMES)
    for asked, default, expected in ((None, None, None), (None, 7, 7), (5, 7, 5), (0, None, 0), (-1, 7, None)):
        chat = CHAT if asked is None else {**CHAT, "thinking_token_budget": asked}
        request = requested(chat=chat, output={"parts": True})
        source = answer_constraint_of(request, model, answer_format_of(request, model, []), default)
        rules = None if source is None else answer_rules(source.texts[0])
        assert (rules and rules.most_reasoning) == expected
        called = requested(chat={**chat, "functions": FUNCTIONS}, output={"parts": True})
        source = answer_constraint_of(called, model, answer_format_of(called, model, []), default)
        assert source is not None
        assert answer_rules(source.texts[0]).most_reasoning == expected
    request = requested(chat=CHAT, output={"parts": True})
    assert answer_constraint_of(request, smollm2(), answer_format_of(request, smollm2(), []), 7) is None
